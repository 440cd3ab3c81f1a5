from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.core.retry import RETRY_AFTER_S_MAX
from app.store import budgets
from app.store.budgets import CUT, Grant, Priority
from app.store.database import create_engine

pytestmark = pytest.mark.anyio

LIMIT = 600
CAPACITY = 60
PER_S = 9.0
ALL = 10_000
"""More than any bucket here holds."""


@pytest.fixture
async def other(migrated_url: str) -> AsyncIterator[AsyncEngine]:
    """Another replica's connections."""
    engine = create_engine(migrated_url, connections_max=4)
    yield engine
    await engine.dispose()


class Bucket:
    """A credential's bucket, for which only that time passes that a test lets pass."""

    def __init__(self, engine: AsyncEngine, *, limit: int = LIMIT, credential: str = "default") -> None:
        self.limit = limit
        self._engine = engine
        self._credential = credential
        self._passed_s = 0.0

    def let_pass(self, seconds: float) -> None:
        self._passed_s += seconds

    async def draw(self, answers: int = 0, reconnects: int = 0, sweeps: int = 0, put_back: int = 0) -> Grant:
        async with self._at_its_time() as connection:
            return await budgets.draw(
                connection, "default", self._credential, limit_per_min=self.limit,
                wanted=(answers, reconnects, sweeps), put_back=put_back,
            )  # fmt: skip

    async def refuse(self, priority: Priority, retry_after_s: float | None = None) -> None:
        async with self._at_its_time() as connection:
            await budgets.refuse(
                connection, "default", self._credential, limit_per_min=self.limit,
                priority=priority, retry_after_s=retry_after_s,
            )  # fmt: skip

    @contextlib.asynccontextmanager
    async def _at_its_time(self) -> AsyncIterator[AsyncConnection]:
        """A transaction whose now() is exactly as long after the last one's as was let pass."""
        columns = ("updated_at", "refused_at", "paused_until")
        shift = "(now() - updated_at - make_interval(secs => :passed))"
        moved = ", ".join(f"{name} = {name} + {shift}" for name in columns)
        async with self._engine.begin() as connection:
            await connection.execute(text(f"update budgets set {moved}"), {"passed": self._passed_s})
            self._passed_s = 0.0
            yield connection

    async def column(self, name: str) -> float:
        async with self._engine.connect() as connection:
            return float(await connection.scalar(text(f"select {name} from budgets")) or 0)


@pytest.fixture
def bucket(engine: AsyncEngine) -> Bucket:
    return Bucket(engine)


async def test_a_fresh_bucket_is_full_and_gives_no_more_than_it_holds(bucket: Bucket) -> None:
    assert (CAPACITY, 0, 0) == (await bucket.draw(ALL)).granted
    assert (0, 0, 0) == (await bucket.draw(ALL, ALL, ALL)).granted


async def test_each_credential_has_a_bucket_of_its_own(engine: AsyncEngine, bucket: Bucket) -> None:
    await bucket.draw(ALL)
    assert (CAPACITY, 0, 0) == (await Bucket(engine, credential="other").draw(ALL)).granted


async def test_it_refills_by_the_databases_time_up_to_its_capacity(bucket: Bucket) -> None:
    """Bucket and refill together make the minute's limit."""
    await bucket.draw(ALL)
    bucket.let_pass(2)
    assert (2 * PER_S, 0, 0) == (await bucket.draw(ALL)).granted
    bucket.let_pass(3600)
    assert (CAPACITY, 0, 0) == (await bucket.draw(ALL)).granted
    assert LIMIT == CAPACITY + 60 * PER_S


async def test_time_that_runs_backwards_gives_nothing_and_takes_nothing(
    engine: AsyncEngine, bucket: Bucket
) -> None:
    """A replica's transaction may have begun before the one that drew last."""
    await bucket.draw(CAPACITY - 5)
    async with engine.begin() as connection:
        await connection.execute(text("update budgets set updated_at = now() + interval '1 h'"))
        grant = await budgets.draw(connection, "default", "default", limit_per_min=LIMIT, wanted=(ALL, 0, 0))
        ahead = await connection.scalar(text("select updated_at = now() + interval '1 h' from budgets"))
    assert (5, 0, 0) == grant.granted
    assert ahead


async def test_lower_priorities_leave_what_higher_ones_may_need(bucket: Bucket) -> None:
    assert (0, 0, CAPACITY // 2) == (await bucket.draw(sweeps=ALL)).granted
    assert (0, CAPACITY // 4, 0) == (await bucket.draw(reconnects=ALL, sweeps=ALL)).granted
    assert (CAPACITY // 4, 0, 0) == (await bucket.draw(ALL, ALL, ALL)).granted


async def test_one_draw_serves_higher_priorities_first(bucket: Bucket) -> None:
    assert (20, 9, 1) == (await bucket.draw(20, 9, ALL)).granted
    assert (5, 10, 0) == (await bucket.draw(5, ALL, ALL)).granted


async def test_it_says_when_each_priority_can_draw_another(bucket: Bucket) -> None:
    await bucket.draw(ALL)
    waits_s = (await bucket.draw()).waits_s
    assert (1 / PER_S, (CAPACITY / 4 + 1) / PER_S, (CAPACITY / 2 + 1) / PER_S) == pytest.approx(waits_s)
    bucket.let_pass(waits_s[Priority.RECONNECT] - 0.01)
    assert (0, 0, 0) == (await bucket.draw(reconnects=1)).granted
    bucket.let_pass(0.02)
    assert (0, 1, 0) == (await bucket.draw(reconnects=1)).granted
    assert 0.0 == (await bucket.draw()).waits_s[Priority.ANSWER]


async def test_unused_tokens_come_back_and_unpaid_requests_are_paid(bucket: Bucket) -> None:
    await bucket.draw(ALL)
    assert (7, 0, 0) == (await bucket.draw(ALL, put_back=7)).granted
    assert (0, 0, 0) == (await bucket.draw(put_back=-9)).granted
    bucket.let_pass(1.5)
    assert (4, 0, 0) == (await bucket.draw(ALL)).granted
    bucket.let_pass(3600)
    assert (CAPACITY, 0, 0) == (await bucket.draw(ALL, put_back=50)).granted


async def test_debts_are_bounded(bucket: Bucket) -> None:
    """However many went unpaid, the time that fills a bucket pays for them."""
    await bucket.draw(put_back=-ALL)
    bucket.let_pass(CAPACITY / PER_S + 0.2)
    assert (1, 0, 0) == (await bucket.draw(ALL)).granted


@pytest.mark.parametrize("limit", [10, 17, 60, 600, 100_000])
async def test_any_limit_lets_every_priority_go_on(engine: AsyncEngine, limit: int) -> None:
    """Also when refusals have taken the rate as far down as it goes."""
    bucket = Bucket(engine, limit=limit)
    for _ in range(12):
        await bucket.refuse(Priority.ANSWER)
        bucket.let_pass(11)
    await bucket.draw(put_back=-ALL)
    for priority in Priority:
        wait_s = (await bucket.draw()).waits_s[priority]
        assert wait_s < 240
        bucket.let_pass(wait_s * 1.2 + 0.01)  # a rate that recovers widens the bucket meanwhile
        wanted = [1 if each is priority else 0 for each in Priority]
        assert wanted == list((await bucket.draw(*wanted)).granted)


async def test_replicas_that_draw_at_once_never_exceed_the_rate(
    engine: AsyncEngine, other: AsyncEngine
) -> None:
    """In real time: 600 at once, then 90 a second."""

    async def draw(replica: AsyncEngine, wanted: tuple[int, int, int]) -> int:
        async with replica.begin() as connection:
            grant = await budgets.draw(
                connection, "default", "default", limit_per_min=6_000, wanted=wanted
            )  # fmt: skip
        return sum(grant.granted)

    async def hammer(replica: AsyncEngine, wanted: tuple[int, int, int]) -> int:
        return sum([await draw(replica, wanted) for _ in range(50)])

    kinds = ((9, 0, 0), (0, 9, 0), (3, 3, 3), (1, 0, 0))
    began = time.monotonic()
    drawn = await asyncio.gather(*(hammer(each, wanted) for each in (engine, other) for wanted in kinds))
    elapsed_s = time.monotonic() - began
    assert 600 <= sum(drawn) <= 600 + elapsed_s * 90


async def test_reconnects_of_one_replica_leave_room_for_answers_of_another(
    bucket: Bucket, other: AsyncEngine
) -> None:
    for _ in range(20):
        await bucket.draw(reconnects=ALL, sweeps=ALL)
    assert (CAPACITY // 4, 0, 0) == (await Bucket(other).draw(ALL)).granted


async def test_a_refusal_lowers_the_rate_once_per_volley_and_time_brings_it_back(
    bucket: Bucket,
) -> None:
    await bucket.draw()
    for _ in range(5):
        await bucket.refuse(Priority.RECONNECT)
    assert CUT * LIMIT == pytest.approx(await bucket.column("rate_per_min"), rel=0.01)
    bucket.let_pass(11)
    await bucket.refuse(Priority.RECONNECT)
    assert (CUT * LIMIT + 5.5) * CUT == pytest.approx(await bucket.column("rate_per_min"), rel=0.01)
    for _ in range(20):
        bucket.let_pass(11)
        await bucket.refuse(Priority.RECONNECT)
    assert LIMIT / 10 == pytest.approx(await bucket.column("rate_per_min"), rel=0.5)
    bucket.let_pass(60)
    await bucket.draw(ALL)
    assert (await bucket.draw(ALL)).granted == (0, 0, 0)
    bucket.let_pass(3600)
    assert (CAPACITY, 0, 0) == (await bucket.draw(ALL)).granted


async def test_a_refusal_leaves_what_refilled_before_it_to_higher_priorities_only(
    bucket: Bucket,
) -> None:
    await bucket.draw(ALL)
    bucket.let_pass(3600)
    await bucket.refuse(Priority.RECONNECT)
    assert (0, 0, 0) == (await bucket.draw(reconnects=ALL, sweeps=ALL)).granted
    assert (int(CAPACITY * CUT / 4), 0, 0) == (await bucket.draw(ALL)).granted
    bucket.let_pass(3600)
    await bucket.refuse(Priority.ANSWER)
    assert (0, 0, 0) == (await bucket.draw(ALL, ALL, ALL)).granted


async def test_a_refused_priority_and_those_below_wait_as_long_as_upstream_said(bucket: Bucket) -> None:
    await bucket.draw()
    await bucket.refuse(Priority.RECONNECT, 20)
    bucket.let_pass(15)
    grant = await bucket.draw(1, 1, 1)
    assert (1, 0, 0) == grant.granted
    assert 5 == pytest.approx(grant.waits_s[Priority.RECONNECT], abs=0.5)
    bucket.let_pass(5)
    assert (1, 1, 1) == (await bucket.draw(1, 1, 1)).granted


async def test_an_answers_refusal_holds_everybody_but_not_for_longer_than_a_minute(
    bucket: Bucket,
) -> None:
    await bucket.draw()
    await bucket.refuse(Priority.SWEEP, 3)
    await bucket.refuse(Priority.ANSWER, 4_000)
    bucket.let_pass(RETRY_AFTER_S_MAX - 2)
    grant = await bucket.draw(1, 1, 1)
    assert (0, 0, 0) == grant.granted
    assert 2 == pytest.approx(grant.waits_s[Priority.ANSWER], abs=0.5)
    bucket.let_pass(2)
    assert (1, 1, 1) == (await bucket.draw(1, 1, 1)).granted
