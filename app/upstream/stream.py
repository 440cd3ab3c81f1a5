"""How an open event stream is read: frames into events, and when a stream counts as broken."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import aiohttp

from app.core.events import AnyEvent, Malformed, Other, parse
from app.core.protocol import Failure
from app.upstream.failures import FAULTS, Failures, UpstreamError
from app.upstream.sse import Decoder, Frame
from app.upstream.transport import Timeouts

_PING: Final = "ping"
_ERROR: Final = "error"


Tap = Callable[[AnyEvent, bytes], None]
"""Is shown every event with the bytes that it came as."""


class EventStream:
    """The events of one session, as they come; an iterator for one reader.

    Iteration ends where the stream ends cleanly. What cannot be read comes as `Malformed`; pings and
    comments do not come. Everything that arrived before a failure comes before it is raised.

    Attributes:
        last_byte_at: when the last byte came, or the stream was opened, by the event loop's clock in seconds.
        is_pinging: whether this stream has shown a ping or a comment.

    Raises:
        UpstreamError: while iterating. The connection was cut, upstream sent an error frame, or no byte came
            for too long (`is_silence`); only the time that the reader waited counts as silence.
    """

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        failures: Failures,
        timeouts: Timeouts,
        decoder: Decoder,
        tap: Tap | None = None,
    ) -> None:
        self.last_byte_at = asyncio.get_running_loop().time()
        self.is_pinging = False
        self._response = response
        self._failures = failures
        self._timeouts = timeouts
        self._decoder = decoder
        self._tap = tap
        self._dropped = 0
        self._items: deque[AnyEvent | Malformed] = deque()
        self._failure: Failure | None = None
        self._is_over = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> AnyEvent | Malformed:
        while not self._items:
            if self._failure is not None:
                raise UpstreamError(self._failure)
            if self._is_over:
                raise StopAsyncIteration
            await self._read()
        return self._items.popleft()

    async def read(self) -> list[AnyEvent | Malformed]:
        """Return all events that are there, waiting for the first; an empty list where the stream ends.

        Raises:
            UpstreamError: as in iteration.
        """
        try:
            items = [await anext(self)]
        except StopAsyncIteration:
            return []
        items += self._items
        self._items.clear()
        return items

    async def _read(self) -> None:
        """Wait for the next bytes and take them apart."""
        limit_s = self._timeouts.silence_pinged_s if self.is_pinging else self._timeouts.silence_s
        failure: Failure | None = None
        timer = asyncio.timeout(limit_s)
        try:
            async with timer:
                chunk = await self._response.content.readany()
        except FAULTS as fault:
            if timer.expired():
                self._end(Failure("unknown", message=f"no byte came for {limit_s:g} s", is_silence=True))
                return
            failure = self._failures.of_fault(fault)
            chunk = self._arrived_before_the_cut()
        self.last_byte_at = asyncio.get_running_loop().time()
        self._take(self._decoder.feed(chunk), is_whole=True)
        if failure is not None or not chunk:
            self._take(self._decoder.finish(), is_whole=False)
            self._end(failure)

    def _arrived_before_the_cut(self) -> bytes:
        """What was received before the connection was lost.

        aiohttp raises the loss first and would keep these bytes for ever, unless its error is taken back.
        """
        content = self._response.content
        content.set_exception(None)  # type: ignore[arg-type]
        return content.read_nowait()

    def _end(self, failure: Failure | None) -> None:
        self._is_over = True
        self._failure = self._failure or failure
        self._response.close()

    def _take(self, frames: list[Frame], *, is_whole: bool) -> None:
        """Queue the frames' events, up to an error frame. What was not `is_whole` counts only if it reads."""
        for frame in frames:
            if self._failure is not None:
                return
            if frame.event == b"ping":
                self.is_pinging = True
            elif frame.event == b"error" and is_whole:
                self._end(self._failures.of_frame(frame.data))
            elif frame.data:
                self._take_event(frame.data, is_whole=is_whole)
        if self._decoder.comments:
            self.is_pinging = True
        while self._dropped < self._decoder.frames_dropped:
            self._dropped += 1
            self._items.append(Malformed("frame is too long"))

    def _take_event(self, data: bytes, *, is_whole: bool) -> None:
        event = parse(data)
        if isinstance(event, Malformed):
            if is_whole:
                self._items.append(event)
        elif isinstance(event, Other) and event.type == _PING:
            self.is_pinging = True
        elif isinstance(event, Other) and event.type == _ERROR:
            self._end(self._failures.of_frame(data))
        else:
            self._items.append(event)
            if self._tap is not None:
                self._tap(event, data)
