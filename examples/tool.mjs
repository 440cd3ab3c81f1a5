// A tool for Bascule, Node 20 and no packages: TOOL_SECRET=whsec_… node examples/tool.mjs
import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

const secret = Buffer.from((process.env.TOOL_SECRET ?? "").replace(/^whsec_/, ""), "base64");
if (secret.length < 24) {
  console.error("usage: TOOL_SECRET=whsec_… node examples/tool.mjs   (the signing_secret of the tool)");
  process.exit(1);
}

function isSigned(headers, body) {
  const sentAt = headers["webhook-timestamp"];
  const hmac = createHmac("sha256", secret).update(`${headers["webhook-id"]}.${sentAt}.`).update(body);
  const expected = Buffer.from("v1," + hmac.digest("base64"));
  const entries = (headers["webhook-signature"] ?? "").split(" ").map((entry) => Buffer.from(entry));
  const isOurs = entries.some((entry) => entry.length === expected.length && timingSafeEqual(entry, expected));
  return isOurs && Math.abs(Date.now() / 1000 - Number(sentAt)) < 300;
}

createServer((request, response) => {
  const chunks = [];
  request.on("data", (chunk) => chunks.push(chunk)).on("end", () => {
    const body = Buffer.concat(chunks);
    if (!isSigned(request.headers, body)) {
      response.writeHead(401, { "content-type": "text/plain" });
      response.end("bad signature: is TOOL_SECRET the signing_secret of this tool?\n");
      return;
    }
    const call = JSON.parse(body).data; // call_id, session_id, tool, input …
    const orderId = call.input?.order_id;
    response.writeHead(200, { "content-type": "application/json" });
    response.end(
      JSON.stringify(
        typeof orderId === "string"
          ? { content: `order ${orderId} has shipped` }
          : { content: "order_id must be a text such as A-1042", is_error: true },
      ),
    );
  });
}).listen(Number(process.env.PORT ?? 9000), "127.0.0.1");
