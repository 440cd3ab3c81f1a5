"""A tool for Bascule with FastAPI, after `pip install fastapi uvicorn standardwebhooks`:
TOOL_SECRET=whsec_… python3 examples/tool_fastapi.py
"""

import os
import sys

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from standardwebhooks import Webhook, WebhookVerificationError

app = FastAPI()


@app.post("/")
async def lookup_order(request: Request):
    try:
        message = webhook.verify(await request.body(), dict(request.headers))
    except (WebhookVerificationError, ValueError):  # the latter for an entry that is not even base64
        return PlainTextResponse("bad signature: is TOOL_SECRET the signing_secret of this tool?\n", 401)
    match message:  # data holds call_id, session_id, tool and more besides
        case {"data": {"input": {"order_id": str(order_id)}}}:
            return {"content": f"order {order_id} has shipped"}
    return {"content": "order_id must be a text such as A-1042", "is_error": True}


try:
    webhook = Webhook(os.environ["TOOL_SECRET"])
except Exception:
    sys.exit("usage: TOOL_SECRET=whsec_… python3 examples/tool_fastapi.py   (the signing_secret of the tool)")
if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("PORT", "9000")))
