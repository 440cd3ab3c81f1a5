"""What the tests of webhooks share: a scriptable receiver, a clock that only moves when asked, a log."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.core.calls import Call
from app.core.tools import SigningSecret, Tool
from app.webhooks.attempt import KEEPALIVE_S
from app.webhooks.delivery import AttemptReport, Deliverer, DeliveryRequest
from app.webhooks.egress import Egress
from app.webhooks.health import Health
from app.webhooks.wire import build_body

SECRET = b"0123456789abcdef0123456789abcdef"
TRUST = ssl.create_default_context()
"""Shared: reading the system's authorities takes longer than most of these tests."""
LOOPBACK = Egress(allow=["127.0.0.0/8"])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Request:
    """A request as the receiver read it."""

    line: str
    headers: dict[str, str]
    body: bytes
    peer: Any


Step = bytes | Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Receiver:
    """A webhook on loopback that plays one step per request; the last step repeats.

    A step is the bytes to answer, or a coroutine function that does as it likes with the connection.
    """

    steps: list[Step]
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    port: int = 0
    server: asyncio.Server | None = None
    open_connections: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def open(self) -> None:
        """Listen, on the port of the last time if there was one."""
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self.server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        """Close the port and every connection."""
        if self.server is not None:
            self.server.close()
            await self.server.wait_closed()
            self.server = None
        for writer in list(self.open_connections):
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                step = self.steps[min(len(self.requests), len(self.steps) - 1)]
                async with self.arrived:
                    peer = writer.get_extra_info("peername")
                    self.requests.append(Request(lines[0], headers, body, peer))
                    self.arrived.notify_all()
                if isinstance(step, bytes):
                    writer.write(step)
                    await writer.drain()
                else:
                    await step(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            async with self.arrived:
                self.open_connections.discard(writer)
                self.arrived.notify_all()

    async def wait_for(self, requests: int) -> None:
        """Wait until so many requests arrived."""
        async with self.arrived, asyncio.timeout(5):
            await self.arrived.wait_for(lambda: len(self.requests) >= requests)

    async def wait_for_close(self) -> None:
        """Wait until the caller has hung up on every connection, sooner than it drops idle ones."""
        async with self.arrived, asyncio.timeout(KEEPALIVE_S / 2):
            await self.arrived.wait_for(lambda: not self.open_connections)


@asynccontextmanager
async def receiving(*steps: Step, tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """Serve the steps on a free loopback port."""
    receiver = Receiver(list(steps), tls)
    await receiver.open()
    try:
        yield receiver
    finally:
        await receiver.shut()


def reply(status: int = 200, body: bytes = b"", *headers: str, kind: str = "application/json") -> bytes:
    """The bytes of an HTTP/1.1 reply."""
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers]
    if kind:
        lines.append(f"content-type: {kind}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Never answer; end when the caller hangs up."""
    await reader.read()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close without a word."""
    writer.close()


def saying(*parts: bytes, then: Step = silence) -> Step:
    """Write the parts, then do the step."""

    async def step(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if not isinstance(then, bytes):
            await then(reader, writer)

    return step


@dataclass
class Time:
    """A clock that stands still except in `sleep`."""

    now: float = 1000.0
    waits: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_793_282_404.0 + self.now - 1000.0

    async def sleep(self, seconds: float) -> None:
        self.waits.append(round(seconds, 6))
        self.now += seconds
        await asyncio.sleep(0)


@dataclass
class Log:
    """Keeps what an `AttemptLog` is told."""

    begun: list[int] = field(default_factory=list)
    reports: list[AttemptReport] = field(default_factory=list)
    healths: list[Health] = field(default_factory=list)

    def current(self) -> None:
        return None

    async def health_changed(self, health: Health) -> bool:
        self.healths.append(health)
        return True

    async def started(self, attempt: int) -> None:
        self.begun.append(attempt)

    async def finished(self, report: AttemptReport) -> None:
        self.reports.append(report)

    @property
    def codes(self) -> list[str | None]:
        return [report.code for report in self.reports]


@asynccontextmanager
async def delivering(egress: Egress = LOOPBACK, **changes: Any) -> AsyncIterator[Deliverer]:
    """A deliverer that draws the full wait each time, closed at the end."""
    deliverer = Deliverer(egress, version="1.2.3", **({"draw": lambda: 1.0, "tls": TRUST} | changes))
    try:
        yield deliverer
    finally:
        await deliverer.close()


def a_tool(url: str, **changes: Any) -> Tool:
    """A tool that may not call back."""
    given = {"name": "echo", "url": url, "secrets": (SigningSecret(SECRET),), "timeout_s": 5.0}
    return Tool(**(given | {"callback_timeout_s": 0.0} | changes))


def a_call(input_: bytes = b"{}", **changes: Any) -> Call:
    known = {"id": "sevt_1", "kind": "custom", "tool": "echo", "state": "dispatched"}
    return Call(**(known | {"input": input_, "processed_at": "2026-10-29T14:00:04.377Z"} | changes))


def a_request(tool: Tool, call: Call | None = None, **changes: Any) -> DeliveryRequest:
    call = call or a_call()
    body = build_body(call, "sesn_1")
    known = {"tenant": "default", "session_id": "sesn_1", "call": call, "tool": tool, "body": body}
    return DeliveryRequest(**(known | changes))


@pytest.fixture
def log() -> Iterator[Log]:
    yield Log()
