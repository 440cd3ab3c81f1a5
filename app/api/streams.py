"""Streams: server-sent events, as bytes that are ready, at the reader's own pace.

A stream looks at the store when it is woken, or by the clock, and sends what has changed since. It keeps
nothing for a reader who is slow: such a one gets what is true when it reads on, and one that reads nothing is
dropped. While it waits it holds no database connection.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Send

from app.api.access import Caller, caller_of
from app.api.bridge import STREAMS_MAX, Bridge
from app.api.polls import woken
from app.api.problems import Problem
from app.logs import logger
from app.store.database import is_unavailable

MEDIA_TYPE: Final = "text/event-stream"
PING_S: Final = 15.0
"""How long a stream is silent before it shows that it lives; the key is looked at again then."""
SEND_LIMIT_S: Final = 30.0
"""A reader that takes nothing for so long is dropped."""
AWAY_S_MAX: Final = 30.0
"""A stream outlasts the loss of the database for so long."""
AGAIN_S: Final = 1.0
STREAM_S_MAX: Final = 3_600.0
"""Then a stream ends, and its reader opens another one."""
RETRY_MS: Final = 1_000
"""After how long a reader comes again."""
PAUSE_S: Final = 0.05

_BREAK: Final = re.compile(rb"\r\n|\r|\n")
_PING: Final = b": ping\n\n"

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Looked:
    """What a look found: frames to send, and in how many seconds to look again without a wake-up."""

    frames: Sequence[bytes]
    again_s: float


@dataclass(frozen=True, slots=True)
class _Waits:
    key: str | None
    pause_s: float


Look = Callable[[], Awaitable[Looked]]


def frame(event: str, data: bytes, id_: int | None = None) -> bytes:
    """Return an event; line breaks between the values of JSON become lines of data."""
    lines = b"".join(b"data: " + line + b"\n" for line in _BREAK.split(data))
    head = b"event: " + event.encode() + b"\n"
    return head + (b"" if id_ is None else b"id: %d\n" % id_) + lines + b"\n"


def is_asked_for(request: Request) -> bool:
    """Whether the client accepts a stream."""
    accepted = request.headers.get("accept", "").split(",")
    return any(one.partition(";")[0].strip().lower() == MEDIA_TYPE for one in accepted)


class StreamOver(Exception):
    """A stream has to end, and says why by a code of its own."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code)
        self.code, self.detail = code, detail


class EventStream(StreamingResponse):
    """A response that never waits for its reader without a limit."""

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        # Proxies must neither keep nor gather what is sent.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(frames, media_type=MEDIA_TYPE, headers=headers)

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self.body_iterator:
                async with asyncio.timeout(SEND_LIMIT_S):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            log.warning("slow_reader_dropped", limit_s=SEND_LIMIT_S)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def follow(request: Request, key: str | None, look: Look, *, pause_s: float = PAUSE_S) -> EventStream:
    """Answer with what `look` finds, whenever a wake-up of the key comes, and by the clock.

    None listens to every key. After a wake-up the stream pauses: others follow, and one look serves them all.

    Raises:
        Problem: the replica has as many streams as it may.
    """
    bridge: Bridge = request.app.state.bridge
    if bridge.streams.locked():
        raise Problem(
            "too_many_streams",
            f"This replica has {STREAMS_MAX} streams open; poll with wait_s meanwhile, or try again.",
            headers={"retry-after": "5"},
        )
    return EventStream(_frames(request, bridge, _Waits(key, pause_s), look))


async def _frames(request: Request, bridge: Bridge, waits: _Waits, look: Look) -> AsyncIterator[bytes]:
    async with bridge.streams:
        yield b"retry: %d\n\n" % RETRY_MS
        try:
            async for one in _found(request, bridge, waits, look):
                yield one
        except (Problem, StreamOver) as over:
            yield _end(over.code, over.detail)
        except Exception as error:
            if not is_unavailable(error):
                raise
            yield _end("database_unavailable", "The database cannot be reached; come again.")


async def _found(request: Request, bridge: Bridge, waits: _Waits, look: Look) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    begun = clock()
    look_at = spoke = reached = begun
    with bridge.wakeups.listen(waits.key) as signal:
        while (now := clock()) < begun + STREAM_S_MAX:
            if now >= look_at:
                try:
                    looked = await look()
                except Exception as error:
                    if not is_unavailable(error) or clock() >= reached + AWAY_S_MAX:
                        raise
                    looked = Looked((), AGAIN_S)
                else:
                    reached = clock()
                for one in looked.frames:
                    yield one
                    spoke = clock()
                look_at = clock() + looked.again_s
            if clock() >= spoke + PING_S:
                await _look_at_key(request, bridge)
                yield _PING
                spoke = clock()
            wait_s = min(look_at, spoke + PING_S) - clock()
            if wait_s > 0 and await woken(signal.wait(wait_s), bridge.stopping):
                await asyncio.sleep(waits.pause_s)
            if signal.take() != frozenset():  # also one that came while nobody waited for it
                look_at = clock()
            if bridge.stopping.is_set():
                yield _end("stopping", "This replica stops; another one goes on.")
                return
    yield _end("renew", "A stream lives for an hour; open another one.")


async def _look_at_key(request: Request, bridge: Bridge) -> None:
    """End the stream of a key that was revoked, or has expired, meanwhile."""
    caller: Caller = request.state.caller
    text = request.headers["authorization"].strip().partition(" ")[2].strip()
    found = await caller_of(bridge, text)
    if isinstance(found, Problem):
        raise found
    if found != caller:
        raise Problem("unauthenticated", "The scopes of this key have changed.")


def _end(code: str, detail: str) -> bytes:
    return frame("end", msgspec.json.encode({"code": code, "detail": detail}))


def object_frame(event: str, body: Any, id_: int | None = None) -> bytes:
    """Return an event that carries an object, whose `msgspec.Raw` members go out byte for byte."""
    return frame(event, msgspec.json.encode(body), id_)
