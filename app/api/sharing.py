"""Reads that many wait for at once are made once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

GATHER_S: Final = 0.005
"""A read waits so long for others who want the same."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(slots=True)
class _Read(Generic[T]):
    """`has_begun`: it may miss what has changed since, so whoever comes now needs another one."""

    task: asyncio.Task[T]
    has_begun: bool = False


class Shared(Generic[K, T]):
    """Makes one read for all who ask for the same key within `GATHER_S`."""

    def __init__(self) -> None:
        self._reads: dict[K, _Read[T]] = {}

    async def get(self, key: K, read: Callable[[], Awaitable[T]]) -> T:
        """Return what `read` returns, or what that of another one does which begins after this call.

        Raises:
            Exception: what that read has raised.
        """
        shared = self._reads.get(key)
        if shared is None or shared.has_begun:
            shared = self._reads[key] = _Read(asyncio.create_task(self._make(key, read)))
            # Nobody may be left who hears how it ended.
            shared.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(shared.task)

    async def _make(self, key: K, read: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(GATHER_S)
        shared = self._reads[key]
        shared.has_begun = True
        try:
            return await read()
        finally:
            if self._reads.get(key) is shared:
                del self._reads[key]
