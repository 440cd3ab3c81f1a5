"""A tool for Bascule, standard library only: TOOL_SECRET=whsec_… python3 examples/tool.py"""

import base64
import contextlib
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Tool(BaseHTTPRequestHandler):
    def do_POST(self):
        length = self.headers["content-length"] or ""
        body = self.rfile.read(int(length) if length.isdecimal() and len(length) < 8 else 0)
        if not is_signed(self.headers, body):
            self.answer(401, "text/plain", "bad signature: is TOOL_SECRET the signing_secret of this tool?\n")
            return
        match json.loads(body):  # data holds call_id, session_id, tool and more besides
            case {"data": {"input": {"order_id": str(order_id)}}}:
                reply = {"content": f"order {order_id} has shipped"}
            case _:
                reply = {"content": "order_id must be a text such as A-1042", "is_error": True}
        self.answer(200, "application/json", json.dumps(reply))

    def answer(self, status, media_type, text):
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def is_signed(headers, body):
    sent_at = headers["webhook-timestamp"] or ""
    expected = hmac.digest(SECRET, f"{headers['webhook-id']}.{sent_at}.".encode() + body, "sha256")
    entries = (headers["webhook-signature"] or "").encode().split()
    is_ours = any(hmac.compare_digest(b"v1," + base64.b64encode(expected), entry) for entry in entries)
    return is_ours and abs(time.time() - int(sent_at)) < 300


try:
    SECRET = base64.b64decode(os.environ.get("TOOL_SECRET", "").removeprefix("whsec_"))
except ValueError:
    SECRET = b""
if len(SECRET) < 24:
    sys.exit("usage: TOOL_SECRET=whsec_… python3 examples/tool.py   (the signing_secret of the tool)")
with contextlib.suppress(KeyboardInterrupt):
    ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "9000"))), Tool).serve_forever()
