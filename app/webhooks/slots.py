"""How many deliveries of one tool, and of one tenant, run at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Slots:
    """A limit per key, first come first served. A key that is not in use costs nothing.

    Who waits is bounded by the callers: one per call that is to be delivered.
    """

    def __init__(self) -> None:
        self._busy: dict[Hashable, int] = {}
        self._queues: dict[Hashable, deque[tuple[int, asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def slot(self, key: Hashable, limit: int) -> AsyncIterator[None]:
        """Hold one of `limit` slots, after waiting for it. The limit may differ between callers."""
        await self._take(key, limit)
        try:
            yield
        finally:
            self._release(key)

    def busy(self, key: Hashable) -> int:
        """How many slots of the key are held."""
        return self._busy.get(key, 0)

    async def _take(self, key: Hashable, limit: int) -> None:
        if key not in self._queues and self.busy(key) < limit:
            self._busy[key] = self.busy(key) + 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (limit, turn)
        self._queues.setdefault(key, deque()).append(waiter)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(key)  # the slot was given away in the same moment
            elif waiter in self._queues.get(key, ()):
                self._queues[key].remove(waiter)
                self._wake(key)
            raise

    def _release(self, key: Hashable) -> None:
        self._busy[key] -= 1
        self._wake(key)

    def _wake(self, key: Hashable) -> None:
        queue = self._queues.get(key, deque())
        while queue and (queue[0][1].done() or self.busy(key) < queue[0][0]):
            _, turn = queue.popleft()
            if not turn.done():
                self._busy[key] = self.busy(key) + 1
                turn.set_result(None)
        if not queue:
            self._queues.pop(key, None)
        if not self._busy.get(key, 1):
            del self._busy[key]
