// A tool for Bascule with the package standardwebhooks, after `npm --prefix examples ci`:
// TOOL_SECRET=whsec_… npm --prefix examples start
import { createServer } from "node:http";
import { buffer } from "node:stream/consumers";
import { Webhook } from "standardwebhooks";

interface ToolCall {
  type: "tool.call";
  data: { call_id: string; session_id: string; thread_id: string | null; tool: string; kind: string; input: any };
}

type Reply = { content: string; is_error?: boolean };

function lookUpOrder(input: any): Reply {
  if (typeof input?.order_id !== "string") {
    return { content: "order_id must be a text such as A-1042", is_error: true };
  }
  return { content: `order ${input.order_id} has shipped` };
}

let webhook: Webhook;
try {
  webhook = new Webhook(process.env.TOOL_SECRET ?? "");
} catch {
  console.error("usage: TOOL_SECRET=whsec_… npm --prefix examples start   (the signing_secret of the tool)");
  process.exit(1);
}

createServer(async (request, response) => {
  let call: ToolCall;
  try {
    call = webhook.verify(await buffer(request), request.headers as Record<string, string>) as ToolCall;
  } catch {
    response.writeHead(401, { "content-type": "text/plain" });
    response.end("bad signature: is TOOL_SECRET the signing_secret of this tool?\n");
    return;
  }
  response.writeHead(200, { "content-type": "application/json" });
  response.end(JSON.stringify(lookUpOrder(call.data.input)));
}).listen(Number(process.env.PORT ?? 9000), "127.0.0.1");
