"""Sends notifications: takes from the queue what is due, makes one attempt each, notes how it went.

Any replica sends for any tenant. What the database is asked goes through one task, so that however many are
under way they use one connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.retry import backoff_s, wait_s
from app.logs import logger
from app.store import notifications, outbox
from app.store.notifications import Claimed, Ended
from app.store.secrets import Secrets
from app.store.wakeups import Wakeups
from app.webhooks import notification
from app.webhooks.attempt import Door
from app.webhooks.notification import Answered

POLL_S: Final = 1.0
"""How often the queue is looked at, whether or not a wake-up came."""
AT_ONCE_MAX: Final = 64
"""How many one replica sends at a time."""
TEND_EVERY_S: Final = 10.0
"""How often what is too old or too much is dropped."""
RETRY_START_S: Final = 5.0
RETRY_CAP_S: Final = 3_600.0
"""The waits of one notification."""
PAUSE_START_S: Final = 1.0
PAUSE_CAP_S: Final = 60.0
"""The pauses of a subscription whose endpoint fails."""
STOP_S: Final = 2.0
"""How long what is under way may go on once the process is to end; the rest is sent again by others."""

log = logger(__name__)


class Notifier:
    """The sender of one replica. `base_url` is where people reach the console, `version` the user agent's."""

    def __init__(
        self,
        replica_id: str,
        engine: AsyncEngine,
        secrets: Secrets,
        wakeups: Wakeups,
        door: Door,
        *,
        base_url: str,
        version: str,
        draw: Callable[[], float] = random.random,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._secrets = secrets
        self._wakeups = wakeups
        self._door = door
        self._base_url = base_url
        self._version = version
        self._draw = draw
        self._wall = wall
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: list[Ended] = []
        self._tend_at = 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send until the block ends."""
        task = asyncio.create_task(self._run(), name="notifications")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._stop()
            await self._door.close()

    async def _run(self) -> None:
        with self._wakeups.listen(outbox.KEY) as signal:
            while True:
                try:
                    await self._turn(lambda: signal.wake((outbox.KEY,)))
                except Exception as error:
                    log.warning("notifications_delayed", replica_id=self._replica_id, error=repr(error))
                await signal.wait(POLL_S)
                signal.take()

    async def _turn(self, wake: Callable[[], None]) -> None:
        """Store what has ended and take what is due."""
        await self._store_ended()
        if (room := AT_ONCE_MAX - len(self._tasks)) > 0:
            async with self._engine.begin() as connection:
                claimed = await notifications.claim(connection, self._secrets, self._replica_id, room)
            for one in claimed:
                task = asyncio.create_task(self._send(one), name=f"notification {one.id}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(lambda _: wake())
        now = asyncio.get_running_loop().time()
        if now >= self._tend_at:
            self._tend_at = now + TEND_EVERY_S
            async with self._engine.begin() as connection:
                dropped = await notifications.tend(connection)
            if dropped:
                log.warning("notifications_dropped", count=dropped)

    async def _store_ended(self) -> None:
        ended, self._ended = self._ended, []
        if not ended:
            return
        try:
            async with self._engine.begin() as connection:
                await notifications.finish(connection, self._replica_id, ended, self._pause_s)
        except BaseException:  # the end of the process too: `_stop` tries once more
            self._ended = ended + self._ended
            raise

    def _pause_s(self, failures: int) -> float:
        nominal_s = backoff_s(failures, start_s=PAUSE_START_S, cap_s=PAUSE_CAP_S)
        return wait_s(nominal_s, floor_s=None, draw=self._draw())

    async def _send(self, one: Claimed) -> None:
        try:
            answered = await self._attempt(one)
        except Exception as error:
            log.exception("notification_defect", notification_id=one.id)
            answered = Answered(f"internal_error {type(error).__name__}")
        nominal_s = backoff_s(one.attempt, start_s=RETRY_START_S, cap_s=RETRY_CAP_S)
        pause_s = wait_s(nominal_s, floor_s=answered.floor_s, draw=self._draw())
        self._ended.append(Ended(one, answered.error, answered.is_gone, pause_s))
        if answered.error is not None:
            log.warning(
                "notification_failed", tenant=one.tenant, subscription=one.subscription,
                notification_id=one.id, attempt=one.attempt, code=answered.error,
            )  # fmt: skip

    async def _attempt(self, one: Claimed) -> Answered:
        if one.key is None:
            return Answered("unreadable_secret")
        body = notification.build_body(one.type, one.created_at, one.data, one.age_s, self._base_url)
        return await notification.send(
            self._door, one.url, one.key, one.headers, body,
            webhook_id=one.id, attempt=one.attempt, version=self._version, wall=self._wall,
        )  # fmt: skip

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._store_ended()
        except Exception as error:
            log.warning("notifications_delayed", replica_id=self._replica_id, error=repr(error))
