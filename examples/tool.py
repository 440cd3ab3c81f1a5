"""A tool for Bascule, standard library only: TOOL_SECRET=whsec_… python3 examples/tool.py"""

import base64
import hmac
import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = base64.b64decode(os.environ["TOOL_SECRET"].removeprefix("whsec_"))


class Tool(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        sent_at = self.headers["webhook-timestamp"]
        signed = f"{self.headers['webhook-id']}.{sent_at}.".encode() + body
        expected = "v1," + base64.b64encode(hmac.digest(SECRET, signed, "sha256")).decode()
        is_ours = any(hmac.compare_digest(expected, s) for s in self.headers["webhook-signature"].split())
        if not is_ours or abs(time.time() - int(sent_at)) > 300:
            self.send_error(401)
            return

        call = json.loads(body)["data"]  # session_id, call_id, tool, input …
        print("called:", call["tool"], call["input"], flush=True)
        reply = json.dumps({"content": f"{call['tool']} says: {call['input']} has shipped"}).encode()

        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "9000"))), Tool).serve_forever()
