"""Wakes those who read a session that is talking: previews are saved without a wake-up of their own.

One look for the whole replica, at open previews alone, takes the place of one for each reader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from app.logs import logger
from app.store import messages
from app.store.wakeups import Wakeups, session_key

EVERY_S: Final = 0.25
"""As often as a run saves its previews."""
AGAIN_S: Final = 2.0
"""After a look that failed."""

log = logger(__name__)


class Previews:
    """The look of one replica. It rests while nobody reads."""

    def __init__(self, engine: AsyncEngine, wakeups: Wakeups) -> None:
        self._engine, self._wakeups = engine, wakeups
        self._seen: dict[tuple[str, str], datetime] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look until the block ends."""
        task = asyncio.create_task(self._run(), name="previews")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            if not self._wakeups.is_heard:
                self._seen = {}
                continue
            try:
                await self._look()
            except Exception as error:
                log.warning("previews_not_seen", error=type(error).__name__)
                await asyncio.sleep(AGAIN_S)

    async def _look(self) -> None:
        async with self._engine.connect() as connection:
            now = await messages.previews(connection)
        changed = {key for key, _ in now.items() ^ self._seen.items()}
        self._seen = now
        if changed:
            self._wakeups.wake(session_key(*key) for key in changed)
