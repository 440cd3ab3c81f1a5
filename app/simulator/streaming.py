"""One open stream: frames as bytes, pings in between, and every way in which a stream can end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from app.simulator.endpoints import Asked, subscribe
from app.simulator.journal import dump
from app.simulator.log import Frame, FrameKind, Subscription
from app.simulator.refusal import Refused, error_body
from app.simulator.switches import STREAM_FAULTS, Fault, Switches
from app.simulator.world import World

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]

NEWLINES = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}
_SAMPLE = b'{"type":"agent.message","id":"sevt_011C'
_PING = Frame("event", "ping", b'{"type":"ping"}')


class Streams:
    """The streams that are open, so that a server can end them all."""

    def __init__(self) -> None:
        self._open: set[Subscription] = set()

    async def serve(
        self,
        world: World,
        asked: Asked,
        *,
        fault: Fault | None,
        headers: list[tuple[bytes, bytes]],
        send: Send,
        receive: Receive,
        hang_up: Callable[[], None],
    ) -> None:
        """Write a stream until it ends or the client goes.

        Raises:
            Refused: it cannot be opened; nothing has been written.
        """
        ready = asyncio.Event()
        subscription = subscribe(world, asked, ready.set)
        self._open.add(subscription)
        gone = asyncio.ensure_future(_until_gone(receive, ready))
        try:
            stream_headers = [
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-cache"),
                *headers,
            ]
            await send({"type": "http.response.start", "status": 200, "headers": stream_headers})
            # The head leaves before the first event does, so that clients know that the stream is open.
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            world.changed()
            writer = _Writer(world, asked.session_id, fault, send, hang_up)
            while not gone.done() and not await writer.write(subscription.drain()):
                if await _quiet(ready, writer.switches.ping_interval_s):
                    subscription.frames.append(_PING)
                ready.clear()
        finally:
            self._open.discard(subscription)
            subscription.is_closed = True
            gone.cancel()

    def end(self) -> None:
        """End every open stream."""
        for each in list(self._open):
            each.push(Frame("eof", "", b""))

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)


class _Writer:
    def __init__(
        self, world: World, session_id: str, fault: Fault | None, send: Send, hang_up: Callable[[], None]
    ) -> None:
        self._world = world
        self._session_id = session_id
        self._fault = fault if fault is not None and fault.kind in STREAM_FAULTS else None
        self._left = fault.after_events if fault is not None else 0
        self._send = send
        self._hang_up = hang_up

    @property
    def switches(self) -> Switches:
        """The switches that hold now; a stream outlives their changes."""
        return self._world.switches_of(self._session_id)

    async def write(self, frames: list[Frame]) -> bool:
        """Write what is due and say whether the stream has ended."""
        out = bytearray()
        for frame in frames:
            if frame.kind not in ("event", "verbatim"):
                return await self._end(out, frame)
            if self._fault is not None and self._left <= 0 and frame is not _PING:
                return await self._end(out, Frame(_ending(self._fault), frame.name, frame.data))
            if frame is not _PING or not self.switches.silent:
                out += self._bytes_of(frame)
            self._left -= frame is not _PING
        if self._fault is not None and self._left <= 0 and self._fault.kind in ("eof", "error_frame"):
            return await self._end(out, Frame(_ending(self._fault), "", b""))
        if out:
            await self._body(bytes(out), more=True)
        return False

    async def _end(self, out: bytearray, frame: Frame) -> bool:
        if frame.kind == "error_frame":
            out += self._bytes_of(Frame("event", "error", self._error(frame.data)))
        elif frame.kind in ("cut", "truncate"):
            whole = self._bytes_of(Frame("event", frame.name or "agent.message", frame.data or _SAMPLE))
            out += whole[: len(whole) * 2 // 3]
        await self._body(bytes(out), more=frame.kind == "cut")
        if frame.kind == "cut":
            self._hang_up()
        return True

    def _error(self, data: bytes) -> bytes:
        if data and self._fault is None:
            return data
        fault = self._fault or Fault("error_frame", status=529)
        refused = Refused(
            fault.status, fault.message or "The stream has failed.", error_type=fault.error_type
        )
        return dump(error_body(refused, "req_011Csimulated"))

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _bytes_of(self, frame: Frame) -> bytes:
        if frame.kind == "verbatim":
            return frame.data
        newline = NEWLINES[self.switches.newline]
        head = b"event: " + frame.name.encode() + newline if self.switches.frame_names and frame.name else b""
        return head + b"data: " + frame.data + newline + newline


def _ending(fault: Fault) -> FrameKind:
    assert fault.kind in STREAM_FAULTS
    return cast("FrameKind", fault.kind)


async def _quiet(ready: asyncio.Event, limit_s: float | None) -> bool:
    """Wait until something happens, and say whether nothing did."""
    try:
        await asyncio.wait_for(ready.wait(), limit_s)
    except TimeoutError:
        return True
    return False


async def _until_gone(receive: Receive, ready: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ready.set()
