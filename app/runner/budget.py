"""Turns at upstream: who of this replica may send a request next, within a budget shared by all replicas.

Waiters are served by priority, then first come first served. Tokens come from the database in batches: as
many as wait, and in busy times as many more as the next second will likely use. Nothing is held while
somebody waits, neither a connection nor a lock.

While the database is away all answers go within a second, and of the others one a second, unpaid.
An answer was committed before it came here, so there are few, and a lease is trusted for ten seconds at
most; what the others would read could not be stored. What went unpaid is taken off the bucket afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from app.logs import logger
from app.store import budgets
from app.store.budgets import Grant, Priority
from app.upstream.failures import UpstreamError

WAITERS_MAX: Final = 10_000
"""How many may wait per priority; more wait outside."""
SPARE_S: Final = 1.0
"""How long a token drawn in advance is good, and for how long requests are expected to go on as they do."""
DRAW_EVERY_S: Final = 0.1
"""How often the database is asked at most while it has nothing for those who wait."""
AWAY_EVERY_S: Final = 1.0
"""How long a draw may take until the database counts as away, and how often waiters are let go then."""
TOO_MANY: Final = 429

log = logger(__name__)


class Unlimited:
    """The budget of an upstream that has none."""

    async def take(self, priority: Priority) -> None:
        """Return at once."""

    def turn(self, priority: Priority, requests: int = 1) -> AbstractAsyncContextManager[None]:  # noqa: ARG002 - as Budget has it
        """Return what waits for nothing."""
        return _AT_ONCE

    def refused(self, retry_after_s: float | None, priority: Priority = Priority.ANSWER) -> None:
        """Do nothing: each request honours `Retry-After` by itself."""


_AT_ONCE: Final = contextlib.nullcontext()
UNLIMITED: Final = Unlimited()


@dataclass(frozen=True, slots=True)
class _Refusal:
    priority: Priority
    retry_after_s: float | None


class Budget:
    """One replica's part in the budget of one credential.

    `clock` is monotonic, in seconds; `sleep` waits for that many.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tenant: str,
        credential: str,
        limit_per_min: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._engine = engine
        self._key = (tenant, credential)
        self._limit_per_min = limit_per_min
        self._clock = clock
        self._sleep = sleep
        self._queues = tuple(OrderedDict[asyncio.Future[None], None]() for _ in Priority)
        self._rooms = tuple(asyncio.Semaphore(WAITERS_MAX) for _ in Priority)
        self._spare = 0
        self._spare_until = 0.0
        self._put_back = 0
        self._taken = 0
        self._drawn_at = clock()
        self._refusal: _Refusal | None = None
        self._serving: asyncio.Task[None] | None = None
        self._rest: asyncio.Future[None] | None = None
        self._rests_for = Priority.SWEEP

    async def take(self, priority: Priority) -> None:
        """Wait for one request's turn. A waiter that is cancelled takes nothing."""
        if self._spare and self._first is None and self._clock() < self._spare_until:
            self._spare -= 1
            self._taken += 1
            return
        async with self._rooms[priority]:
            turn = asyncio.get_running_loop().create_future()
            self._queues[priority][turn] = None
            self._serve(priority)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._put_back += 1
                raise
            finally:
                self._queues[priority].pop(turn, None)

    @contextlib.asynccontextmanager
    async def turn(self, priority: Priority, requests: int = 1) -> AsyncIterator[None]:
        """Wait for a turn, then make a request in the block, whose 429 is learnt from.

        `requests` is how many it makes at most; those after the first wait for nothing and are paid later.
        """
        await self.take(priority)
        self._put_back -= requests - 1
        try:
            yield
        except UpstreamError as error:
            if error.failure.status == TOO_MANY:
                self.refused(error.failure.retry_after_s, priority)
            raise

    def refused(self, retry_after_s: float | None, priority: Priority = Priority.ANSWER) -> None:
        """Upstream answered 429 to a request of this priority: slow down, here and in every replica."""
        before = self._refusal
        if before is not None:
            priority = min(priority, before.priority)
            retry_after_s = max(retry_after_s or 0.0, before.retry_after_s or 0.0)
        self._refusal = _Refusal(priority, retry_after_s)
        self._return_spare()
        self._serve(Priority.SWEEP)

    async def close(self) -> None:
        """Serve nobody any more."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    # ---- serving those who wait

    @property
    def _first(self) -> Priority | None:
        """The highest priority that somebody waits with."""
        return next((priority for priority in Priority if self._queues[priority]), None)

    def _serve(self, priority: Priority) -> None:
        """See to it that waiters are served; a higher priority does not wait for what lower ones need."""
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve_all(), name="budget")
        elif self._rest is not None and priority < self._rests_for:
            self._rest.cancel()

    async def _serve_all(self) -> None:
        while self._first is not None or self._refusal is not None:
            grant = await self._ask()
            self._keep(self._hand_out(grant.granted))
            if (first := self._first) is not None and (wait_s := grant.waits_s[first]) > 0:
                await self._rest_for(first, max(wait_s, DRAW_EVERY_S))

    async def _rest_for(self, first: Priority, wait_s: float) -> None:
        self._rests_for = first
        self._rest = asyncio.ensure_future(self._sleep(wait_s))
        try:
            await asyncio.wait([self._rest])
        finally:
            self._rest.cancel()
            self._rest = None

    async def _ask(self) -> Grant:
        """Draw for those who wait. A slow statement is let run, for its outcome; nobody waits for it."""
        drawing = asyncio.create_task(self._draw())
        try:
            while not drawing.done():
                await asyncio.wait([drawing], timeout=AWAY_EVERY_S)
                if not drawing.done():
                    self._let_go("no answer")
            return drawing.result()
        finally:
            if not drawing.done():
                drawing.cancel()
                await asyncio.wait([drawing], timeout=AWAY_EVERY_S)

    async def _draw(self) -> Grant:
        answers, reconnects, sweeps = (len(queue) for queue in self._queues)
        expected = self._expected(answers + reconnects + sweeps)
        self._return_spare()
        put_back, self._put_back = self._put_back, 0
        refusal, self._refusal = self._refusal, None
        (tenant, credential), limit_per_min = self._key, self._limit_per_min
        try:
            async with self._engine.begin() as connection:
                if refusal is not None:
                    priority, retry_after_s = refusal.priority, refusal.retry_after_s
                    log.warning("upstream_refused", tenant=tenant, credential=credential,
                                priority=priority.name, retry_after_s=retry_after_s)  # fmt: skip
                    await budgets.refuse(connection, tenant, credential, limit_per_min=limit_per_min,
                                         priority=priority, retry_after_s=retry_after_s)  # fmt: skip
                return await budgets.draw(connection, tenant, credential, limit_per_min=limit_per_min,
                                          wanted=(answers, reconnects, sweeps + expected),
                                          put_back=put_back)  # fmt: skip
        except Exception as error:
            # What may have been put back is not put back again; what is owed stays owed.
            self._put_back += min(0, put_back)
            self._let_go(repr(error))
            return Grant((0, 0, 0), (AWAY_EVERY_S,) * 3)

    def _expected(self, waiting: int) -> int:
        """How many requests beyond those that wait are likely to come while a token is good."""
        now = self._clock()
        elapsed_s = max(now - self._drawn_at, SPARE_S)
        taken, self._taken, self._drawn_at = self._taken + waiting, 0, now
        return int(min(taken / elapsed_s, self._limit_per_min / 60) * SPARE_S)

    def _let_go(self, reason: str) -> None:
        log.warning("budget_away", tenant=self._key[0], credential=self._key[1], reason=reason)
        granted = (len(self._queues[Priority.ANSWER]), 0, 1)
        self._put_back -= sum(granted) - sum(self._hand_out(granted))

    def _hand_out(self, granted: Sequence[int]) -> list[int]:
        """Serve with these tokens; return what is left. What lower priorities may have, higher ones may."""
        left = list(granted)
        for priority, queue in enumerate(self._queues):
            for level in range(priority, len(left)):
                while left[level] and queue:
                    turn, _ = queue.popitem(last=False)
                    if not turn.done():
                        turn.set_result(None)
                        left[level] -= 1
        return left

    def _keep(self, left: Sequence[int]) -> None:
        """Keep what everybody may use for a moment; the rest goes back with the next draw."""
        *others, self._spare = left
        self._put_back += sum(others)
        self._spare_until = self._clock() + SPARE_S

    def _return_spare(self) -> None:
        self._put_back += self._spare
        self._spare = 0


class Budgets:
    """The budgets of one replica: one for each credential that it has used."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._engine = engine
        self._sleep = sleep
        self._budgets: dict[tuple[str, str, int], Budget] = {}

    def of(self, tenant: str, credential: str, limit_per_min: int) -> Budget | Unlimited:
        """The budget of a tenant's credential, the same one each time; a limit of 0 is none."""
        if not limit_per_min:
            return UNLIMITED
        key = (tenant, credential, limit_per_min)
        if key not in self._budgets:
            self._budgets[key] = Budget(self._engine, tenant, credential, limit_per_min, sleep=self._sleep)
        return self._budgets[key]

    async def close(self) -> None:
        """To be called when nobody takes turns any more."""
        for budget in self._budgets.values():
            await budget.close()
