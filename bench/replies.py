"""What the agent gets for each kind of reply: `python -m bench.replies` prints it as a table.

Each row is a delivery over a socket, by the service's own deliverer, to a receiver that says just these
bytes, as `nc` would. Nothing is looked up in a table of answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from ipaddress import ip_network
from typing import Final

from app.core.calls import Call
from app.core.tools import SigningSecret, Tool
from app.webhooks.delivery import AttemptReport, Deliverer, DeliveryRequest
from app.webhooks.egress import Egress
from app.webhooks.health import Health
from app.webhooks.wire import build_body

TOOL: Final = Tool(
    "lookup_order", "", (SigningSecret(os.urandom(32)),), timeout_s=1.0, retry="never", reply_bytes_max=1024,
    result_chars_max=100,
)  # fmt: skip
CHARS_MAX: Final = 150
"""How much of what the agent gets one row shows."""


def said(status: str, body: str = "", *headers: str) -> bytes:
    """A reply of this status line, body and headers."""
    fields = "".join(f"{header}\r\n" for header in (*headers, f"content-length: {len(body.encode())}"))
    return f"HTTP/1.1 {status}\r\n{fields}\r\n{body}".encode()


JSON: Final = "content-type: application/json"
REPLIES: Final[dict[str, bytes | None]] = {
    "200 JSON, `content` a string": said("200 OK", '{"content": "9 days late"}', JSON),
    "200 JSON, `content` blocks": said("200 OK", '{"content": [{"type": "text", "text": "late"}]}', JSON),
    "200 JSON, `is_error`": said("200 OK", '{"content": "no such order", "is_error": true}', JSON),
    "200 JSON string": said("200 OK", '"9 days late"', JSON),
    "200 other JSON": said("200 OK", '{"days": 9}', JSON),
    "200 text/plain, latin-1": b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=latin-1\r\n"
    b"content-length: 4\r\n\r\ncaf\xe9",
    "204": said("204 No Content"),
    "202": said("202 Accepted"),
    "200 empty": said("200 OK", "", JSON),
    "200 HTML": said("200 OK", "<p>late</p>", "content-type: text/html"),
    "200 octets": said("200 OK", "x", "content-type: application/octet-stream"),
    "200 JSON, broken": said("200 OK", '{"content":', JSON),
    "404 with a page": said("404 Not Found", "<h1>no such order</h1>", "content-type: text/html"),
    "410": said("410 Gone"),
    "429": said("429 Too Many Requests"),
    "500 with text": said("500 Oops", "out of memory", "content-type: text/plain"),
    "503 with Retry-After": said("503 Busy", "", "retry-after: 1"),
    "302": said("302 Found", "", "location: http://127.0.0.1/"),
    "over `reply_bytes_max`": said("200 OK", '"' + "x" * 2000 + '"', JSON),
    "over `result_chars_max`": said("200 OK", '"' + "x" * 500 + '"', JSON),
    "compressed": said("200 OK", "x", JSON, "content-encoding: gzip"),
    "cut in the middle": said("200 OK", '{"content": "9 days late"}', JSON)[:-5],
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "hangs up": b"",
    "silent until `timeout_s`": None,
}


class Unheard:
    """An attempt log that keeps nothing."""

    def current(self) -> None:
        return None

    async def started(self, attempt: int) -> None:
        pass

    async def finished(self, report: AttemptReport) -> None:
        pass

    async def health_changed(self, health: Health) -> bool:  # noqa: ARG002 - the protocol names it
        return True


async def got(reply: bytes | None) -> str:
    """Deliver a call to a receiver that says this; return what the agent gets of it."""

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if reply is None:
            with contextlib.suppress(asyncio.CancelledError):  # the table ends before it hears of the end
                await reader.read()
        else:
            writer.write(reply)
        writer.close()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    call = Call("sevt_1", "custom", TOOL.name, b'{"order_id":"A-1042"}', "dispatched", attempts=1)
    tool = Tool(
        **{name: getattr(TOOL, name) for name in TOOL.__slots__} | {"url": f"http://127.0.0.1:{port}/"}
    )
    deliverer = Deliverer(Egress([ip_network("127.0.0.0/8")]), version="0")
    async with server:
        request = DeliveryRequest("default", "sesn_1", call, tool, build_body(call, "sesn_1"))
        outcome = await deliverer.deliver(request, Unheard())
        await deliverer.close()
    if outcome.result is None:
        return "nothing yet: the call waits for its callback"
    text = "".join(block.get("text", f"[{block['type']}]") for block in json.loads(outcome.result.content))
    shown = text if len(text) <= CHARS_MAX else text[:CHARS_MAX] + "…"
    return ("error: " if outcome.result.is_error else "") + shown.replace("\n", " ⏎ ")


async def main() -> None:
    sys.stdout.write("| reply | the agent gets |\n|---|---|\n")
    for name, reply in REPLIES.items():
        sys.stdout.write(f"| {name} | {await got(reply)} |\n")


if __name__ == "__main__":
    asyncio.run(main())
