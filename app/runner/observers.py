"""Passes what upstream streams to those who follow it raw. They cannot hurt: nothing waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from app.core.events import AnyEvent, PreviewDelta, PreviewStart
from app.core.ledger import Remembered
from app.logs import logger
from app.runner.tasks import Tasks
from app.store import observers

BUFFER_MAX: Final = 5_000
"""So many events wait to be stored; then the oldest are lost, and those who follow are told."""
FLUSH_S: Final = 0.05
LOST: Final = '{"type":"bascule.events_lost"}'

log = logger(__name__)


class Observers:
    """The raw feed of one run. `take` gets what its streams bring; `watch` says how long it is wanted."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._until = 0.0
        self._buffer: deque[str] = deque(maxlen=BUFFER_MAX)
        self._has_lost = self._is_flushing = False
        self._seen: Remembered[None] = Remembered()
        self._running: dict[str, asyncio.Task[None]] = {}

    def watch(self, left_s: float) -> None:
        self._until = asyncio.get_running_loop().time() + left_s

    def take(self, event: AnyEvent, data: bytes) -> None:
        """Keep an event, unless nobody follows, or it came before: a stream may repeat what another told."""
        if asyncio.get_running_loop().time() >= self._until:
            return
        if not isinstance(event, PreviewStart | PreviewDelta) and event.id:
            if event.id in self._seen:
                return
            self._seen.keep(event.id, None)
        self._has_lost |= len(self._buffer) == BUFFER_MAX
        self._buffer.append(data.decode("utf-8", "replace"))
        if not self._is_flushing:
            self._is_flushing = True
            self._tasks.start(self._running, "feed", self._flush())

    async def leave(self) -> None:
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _flush(self) -> None:
        while self._buffer:
            await asyncio.sleep(FLUSH_S)
            events = ([LOST] if self._has_lost else []) + list(self._buffer)
            self._buffer.clear()
            self._has_lost = False
            try:
                async with self._tasks.parts.engine.begin() as connection:
                    await observers.keep(connection, self._tasks.lease, events)
            except Exception as error:
                # A feed is not worth a run.
                self._has_lost = True
                log.warning("feed_lost", session_id=self._tasks.lease.session_id, error=repr(error))
        self._is_flushing = False  # with the last look at the buffer: an event between them would be late
