"""When keys were used: gathered in memory, and written about once a minute, off the way of requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from app.logs import logger
from app.store import keys

WRITE_EVERY_S: Final = 60.0
WRITE_LIMIT_S: Final = 5.0
NOTED_MAX: Final = 10_000
"""Keys of one minute; further ones are noted in the next."""

log = logger(__name__)


class KeyUses:
    """Which keys this replica saw since it last wrote that down."""

    def __init__(self) -> None:
        self._noted: set[tuple[str, str]] = set()

    def note(self, tenant: str, key_id: str) -> None:
        if len(self._noted) < NOTED_MAX:
            self._noted.add((tenant, key_id))

    async def write(self, engine: AsyncEngine) -> None:
        """Write down what was noted; what cannot be written stays noted."""
        noted, self._noted = self._noted, set()
        if not noted:
            return
        try:
            async with asyncio.timeout(WRITE_LIMIT_S), engine.begin() as connection:
                await keys.used(connection, noted)
        except Exception as error:
            self._noted |= noted
            log.warning("key_uses_not_written", error=repr(error))

    @contextlib.asynccontextmanager
    async def running(self, engine: AsyncEngine) -> AsyncIterator[None]:
        """Write every minute, and once more at the end."""
        writing = asyncio.create_task(self._every_minute(engine), name="key uses")
        try:
            yield
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await self.write(engine)

    async def _every_minute(self, engine: AsyncEngine) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await self.write(engine)
