"""Calls that wait for a person, in a Slack channel; standard library only:
SUBSCRIPTION_SECRET=whsec_… SLACK_URL=https://hooks.slack.com/services/… python3 examples/slack.py"""

import base64
import contextlib
import hmac
import json
import os
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

posted = {}  # ids of notifications that are in the channel already: one may come twice


class Forwarder(BaseHTTPRequestHandler):
    def do_POST(self):
        length = self.headers["content-length"] or ""
        body = self.rfile.read(int(length) if length.isdecimal() and len(length) < 8 else 0)
        if not is_signed(self.headers, body):
            self.answer(401)
            return
        notice, id_ = json.loads(body), self.headers["webhook-id"]
        if notice["type"] in ("confirmation.requested", "confirmation.reminded") and id_ not in posted:
            try:
                post(notice["data"])
            except OSError:
                self.answer(502)  # the service sends it again
                return
            posted[id_] = True
            if len(posted) > 1000:
                del posted[next(iter(posted))]
        self.answer(204)

    def answer(self, status):
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()


def post(call):
    """Plain text, so that no name of a tool can mark up the message; the button only opens the page."""
    text = f"The agent wants to use {call['tool']} ({call['gate']['reason']}, session {call['session_id']})."
    if "reminders" in call:
        text = f"Still waiting after {call['age_s'] / 60:.0f} min, reminder {call['reminders']}. {text}"
    section = {"type": "section", "text": {"type": "plain_text", "text": text[:3000], "emoji": False}}
    look = {"type": "button", "text": {"type": "plain_text", "text": "Look and decide"}, "url": call["url"]}
    message = {
        "text": "A call waits for a person",
        "blocks": [section, {"type": "actions", "elements": [look]}],
    }
    request = urllib.request.Request(
        SLACK_URL, json.dumps(message).encode(), {"content-type": "application/json"}, method="POST"
    )
    urllib.request.urlopen(request, timeout=8).close()


def is_signed(headers, body):
    sent_at = headers["webhook-timestamp"] or ""
    expected = hmac.digest(SECRET, f"{headers['webhook-id']}.{sent_at}.".encode() + body, "sha256")
    entries = (headers["webhook-signature"] or "").encode().split()
    is_ours = any(hmac.compare_digest(b"v1," + base64.b64encode(expected), entry) for entry in entries)
    return is_ours and abs(time.time() - int(sent_at)) < 300


try:
    SECRET = base64.b64decode(os.environ.get("SUBSCRIPTION_SECRET", "").removeprefix("whsec_"))
except ValueError:
    SECRET = b""
SLACK_URL = os.environ.get("SLACK_URL", "")
if len(SECRET) < 24 or not SLACK_URL.startswith(("https://", "http://127.0.0.1:")):
    sys.exit(__doc__)
with contextlib.suppress(KeyboardInterrupt):
    ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "9001"))), Forwarder).serve_forever()
