"""An upstream that answers as a test says, on loopback, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

HEAD_BYTES_MAX = 65_536
WAIT_S = 10.0
"""No fact that a test waits for takes longer."""

Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    query: list[tuple[str, str]]
    headers: Mapping[str, str]
    body: bytes
    peer: object


class Wire:
    """The server's side of a test: give answers with `on`, look at `seen`."""

    def __init__(self) -> None:
        self.url = ""
        self.seen: list[Seen] = []
        self.arrived = asyncio.Event()  # a request came
        self.gone = asyncio.Event()  # a client left while its answer was open
        self._scripts: dict[tuple[str, str], deque[Script]] = defaultdict(deque)

    def on(self, method: str, path: str, *scripts: Script) -> None:
        """Answer requests to this path one after the other; the last answer stays."""
        self._scripts[method, path].extend(scripts)

    def asked(self, path: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.path == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(
            Seen(
                request.method,
                request.path,
                list(request.query.items()),
                request.headers.copy(),
                await request.read(),
                request.transport.get_extra_info("peername") if request.transport else None,
            )
        )
        self.arrived.set()
        scripts = self._scripts[request.method, request.path]
        if not scripts:
            return web.json_response({"error": {"message": "the test has no answer"}}, status=404)
        script = scripts.popleft() if len(scripts) > 1 else scripts[0]
        try:
            return await script(request)
        except asyncio.CancelledError:
            self.gone.set()
            raise


def reply(status: int = 200, body: object = b"", headers: Mapping[str, str] | None = None) -> Script:
    """Answer with a body: bytes as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(
            status=status, body=data, headers={"content-type": "application/json", **(headers or {})}
        )

    return script


def events(
    *chunks: bytes | asyncio.Event, end: str = "eof", headers: Mapping[str, str] | None = None
) -> Script:
    """Answer with a stream of chunks; an `Event` among them is waited for.

    `end` is `eof`, `cut` (the connection is torn down) or `hold` (it stays open until the client goes).
    """

    async def script(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **(headers or {})})
        await response.prepare(request)
        for chunk in chunks:
            if isinstance(chunk, asyncio.Event):
                await chunk.wait()
            else:
                await response.write(chunk)
        if end == "hold":
            await asyncio.Event().wait()
        if end == "cut":
            assert request.transport is not None
            request.transport.close()  # the last chunk of the encoding never comes
            await asyncio.Event().wait()
        return response

    return script


async def hang(request: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


async def cut(request: web.Request) -> web.StreamResponse:
    """Tear the connection down in place of an answer."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError


@asynccontextmanager
async def serve() -> AsyncIterator[Wire]:
    wire = Wire()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", wire.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    wire.url = f"http://{host}:{port}"
    try:
        yield wire
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serve_bytes(
    answer: bytes, *, tls: ssl.SSLContext | None = None, closed: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """A server that answers any request with these bytes and hangs up; yields its authority.

    `closed` is set when it has hung up.
    """

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            if closed is not None:
                closed.set()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=HEAD_BYTES_MAX, ssl=tls)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"{host}:{port}"


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def frame(event: Mapping[str, object], name: str | None = None) -> bytes:
    """An event as upstream writes it to a stream."""
    return f"event: {name or event['type']}\ndata: {json.dumps(event)}\n\n".encode()
