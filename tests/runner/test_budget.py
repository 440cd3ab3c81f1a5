"""Who goes next, within one replica; what the database grants is in tests/store/test_budgets.py."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.protocol import Failure
from app.runner.budget import UNLIMITED, Budget, Budgets
from app.settings import SettingsError, read_settings
from app.store.budgets import Priority
from app.store.database import create_engine
from app.upstream.failures import UpstreamError

pytestmark = pytest.mark.anyio

ANSWER, RECONNECT, SWEEP = Priority
LIMIT = 60
CAPACITY = 6
PER_S = 0.9


class Hours:
    """A clock that only moves when somebody sleeps; the bucket's own time moves with it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.now = 0.0
        self._engine = engine

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        moved = "updated_at = updated_at - make_interval(secs => :s),"
        moved += " paused_until = paused_until - make_interval(secs => :s)"
        async with self._engine.begin() as connection:
            await connection.execute(text(f"update budgets set {moved}"), {"s": seconds})


class Statements:
    """Counts the draws on an engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.draws = 0
        event.listen(engine.sync_engine, "before_cursor_execute", self._note)

    def _note(self, *arguments: object) -> None:
        self.draws += "update budgets b" in str(arguments[2])


@pytest.fixture
def hours(engine: AsyncEngine) -> Hours:
    return Hours(engine)


@pytest.fixture
def statements(engine: AsyncEngine) -> Statements:
    return Statements(engine)


@contextlib.asynccontextmanager
async def budgeting(engine: AsyncEngine, hours: Hours, limit: int = LIMIT) -> AsyncIterator[Budget]:
    budget = Budget(engine, "default", "default", limit, clock=hours.clock, sleep=hours.sleep)
    try:
        yield budget
    finally:
        await budget.close()


@pytest.fixture
async def budget(engine: AsyncEngine, hours: Hours) -> AsyncIterator[Budget]:
    async with budgeting(engine, hours) as budget:
        yield budget


async def emptied_bucket(engine: AsyncEngine, tokens: float = 0.0, limit: int = LIMIT) -> None:
    async with engine.begin() as connection:
        await connection.execute(
            text("insert into budgets (tenant, credential, tokens, rate_per_min) values"
                 " ('default', 'default', :t, :r)"),
            {"t": tokens, "r": limit},
        )  # fmt: skip


async def level(engine: AsyncEngine) -> float:
    async with engine.connect() as connection:
        return float(await connection.scalar(text("select tokens from budgets")) or 0)


def queueing(
    budget: Budget, order: list[str], names: str, priority: Priority, then: Callable[[], None] = lambda: None
) -> list[asyncio.Task[None]]:
    """Have each of these wait for a turn, in this order; `order` becomes the order of the turns."""

    async def take(name: str) -> None:
        await budget.take(priority)
        order.append(name)
        then()

    return [asyncio.create_task(take(name), name=name) for name in names]


async def at_once(budget: Budget, hours: Hours) -> int:
    """How many answers go without waiting for the bucket to refill."""
    took_at: list[float] = []
    now = hours.now
    tasks = queueing(budget, [], "x" * 2 * CAPACITY, ANSWER, then=lambda: took_at.append(hours.now))
    await asyncio.gather(*tasks)
    return took_at.count(now)


async def test_turns_go_by_priority_then_in_order_of_asking(engine: AsyncEngine, budget: Budget) -> None:
    await emptied_bucket(engine)
    order: list[str] = []
    tasks = queueing(budget, order, "xyz", SWEEP)
    tasks += queueing(budget, order, "rst", RECONNECT)
    tasks += queueing(budget, order, "abc", ANSWER)
    await asyncio.gather(*tasks)
    assert "abcrstxyz" == "".join(order)


async def test_an_answer_that_comes_late_passes_those_who_wait(engine: AsyncEngine, budget: Budget) -> None:
    """It also ends their rest: what is below their floor is enough for it."""
    await emptied_bucket(engine, tokens=1.4)
    order: list[str] = []
    late: list[asyncio.Task[None]] = []

    def answer() -> None:
        if not late:
            late.extend(queueing(budget, order, "abc", ANSWER))

    tasks = queueing(budget, order, "rstu", RECONNECT, then=answer)
    await asyncio.gather(*tasks)
    await asyncio.gather(*late)
    assert "rabcstu" == "".join(order)


async def test_turns_go_at_the_pace_of_the_budget(engine: AsyncEngine, budget: Budget, hours: Hours) -> None:
    began = time.monotonic()
    await asyncio.gather(*queueing(budget, [], "x" * 60, ANSWER))
    real_s = time.monotonic() - began  # the bucket refills in these too
    nominal_s = (60 - CAPACITY) / PER_S
    assert nominal_s - real_s - 1 <= hours.now <= nominal_s + 3


async def test_those_who_are_cancelled_take_nothing(
    engine: AsyncEngine, budget: Budget, hours: Hours
) -> None:
    await emptied_bucket(engine)
    order: list[str] = []
    given_up = queueing(budget, order, "x" * 1_000, ANSWER)
    patient = queueing(budget, order, "ab", ANSWER)
    await asyncio.sleep(0)
    for task in given_up:
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    await asyncio.gather(*patient)
    assert ["a", "b"] == order
    assert hours.now < 5
    assert 0 == engine.pool.checkedout()  # type: ignore[attr-defined]


async def test_a_turn_that_comes_to_somebody_who_just_left_goes_back(budget: Budget, hours: Hours) -> None:
    tasks: list[asyncio.Task[None]] = []

    async def first() -> None:
        await budget.take(ANSWER)
        tasks[1].cancel()  # it has its turn too, and does not know yet

    async def second() -> None:
        await budget.take(ANSWER)
        raise AssertionError("it was cancelled")

    tasks += [asyncio.create_task(first()), asyncio.create_task(second())]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tasks[1].cancelled()
    assert CAPACITY - 1 == await at_once(budget, hours)


async def test_busy_times_cost_about_a_statement_a_second(
    engine: AsyncEngine, hours: Hours, statements: Statements
) -> None:
    """5 answers a second, of 10 that are allowed."""
    await emptied_bucket(engine, tokens=60, limit=600)
    async with budgeting(engine, hours, 600) as budget:
        for _ in range(100):
            await budget.take(ANSWER)
            await hours.sleep(0.2)
        assert statements.draws <= 30
        assert 60 - 10 <= await level(engine)


async def test_quiet_times_draw_nothing_in_advance(
    engine: AsyncEngine, hours: Hours, statements: Statements
) -> None:
    await emptied_bucket(engine, tokens=60, limit=600)
    async with budgeting(engine, hours, 600) as budget:
        for _ in range(5):
            await hours.sleep(10)
            await budget.take(ANSWER)
        assert 5 == statements.draws
        assert 59 == pytest.approx(await level(engine), abs=0.1)


async def test_a_turn_of_two_requests_pays_for_both(budget: Budget, hours: Hours) -> None:
    async with budget.turn(RECONNECT, 2):
        pass
    assert CAPACITY - 2 == await at_once(budget, hours)


async def test_a_429_is_learnt_and_holds_its_priority_but_not_answers(
    engine: AsyncEngine, budget: Budget, hours: Hours
) -> None:
    failure = Failure("unsent", 429, "slow down", retry_after_s=20)
    with pytest.raises(UpstreamError):
        async with budget.turn(RECONNECT):
            raise UpstreamError(failure)
    order: list[str] = []
    waiting = queueing(budget, order, "r", RECONNECT)
    answered_at: list[float] = []
    waiting += queueing(budget, order, "a", ANSWER, then=lambda: answered_at.append(hours.now))
    await asyncio.gather(*waiting)
    assert ["a", "r"] == order
    assert [0.0] == answered_at
    assert 20 == pytest.approx(hours.now, abs=2)
    async with engine.connect() as connection:
        assert 42 == pytest.approx(await connection.scalar(text("select rate_per_min from budgets")))


async def test_other_failures_are_not_learnt_from(engine: AsyncEngine, budget: Budget) -> None:
    for status in (None, 400, 500, 529):
        with pytest.raises(UpstreamError):
            async with budget.turn(ANSWER):
                raise UpstreamError(Failure("unknown", status))
    await budget.take(ANSWER)
    async with engine.connect() as connection:
        assert LIMIT == await connection.scalar(text("select rate_per_min from budgets"))


async def test_without_a_database_answers_go_and_the_others_one_by_one(hours: Hours) -> None:
    """Nobody waits for ever, and answers never behind others."""
    nowhere = create_engine("postgresql://nobody@127.0.0.1:1/none", connections_max=2)
    rests_s: list[float] = []

    async def sleep(seconds: float) -> None:
        rests_s.append(seconds)

    budget = Budget(nowhere, "default", "default", LIMIT, clock=hours.clock, sleep=sleep)
    order: list[str] = []
    tasks = queueing(budget, order, "rst", RECONNECT) + queueing(budget, order, "abc", ANSWER)
    await asyncio.gather(*tasks)
    await budget.close()
    await nowhere.dispose()
    assert "abcrst" == "".join(order)
    assert [1.0, 1.0] == rests_s


async def test_a_database_that_does_not_answer_keeps_no_answer_waiting(
    engine: AsyncEngine, budget: Budget
) -> None:
    """What went unpaid is taken off when it answers again."""
    await emptied_bucket(engine, tokens=5.0)
    order: list[str] = []
    async with engine.connect() as locking:
        await locking.execute(text("select 1 from budgets for update"))
        async with asyncio.timeout(3):
            await asyncio.gather(*queueing(budget, order, "abc", ANSWER))
        await locking.rollback()
    await budget.take(ANSWER)
    await budget.take(ANSWER)
    assert await level(engine) < 1.5


async def test_close_ends_the_serving_and_leaves_no_connection(engine: AsyncEngine, hours: Hours) -> None:
    forever = asyncio.Event()

    async def sleep(seconds: float) -> None:
        forever.set()
        await asyncio.Event().wait()

    await emptied_bucket(engine)
    budget = Budget(engine, "default", "default", LIMIT, clock=hours.clock, sleep=sleep)
    (task,) = queueing(budget, [], "a", ANSWER)
    await forever.wait()
    await budget.close()
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert 0 == engine.pool.checkedout()  # type: ignore[attr-defined]


async def test_runs_of_one_credential_share_one_budget(engine: AsyncEngine) -> None:
    budgets = Budgets(engine)
    assert budgets.of("t", "a", 600) is budgets.of("t", "a", 600)
    assert budgets.of("t", "a", 600) is not budgets.of("t", "b", 600)
    assert budgets.of("t", "a", 600) is not budgets.of("u", "a", 600)
    await budgets.close()


async def test_no_limit_asks_nothing_of_anybody(engine: AsyncEngine, statements: Statements) -> None:
    budget = Budgets(engine).of("t", "a", 0)
    assert UNLIMITED is budget
    async with budget.turn(SWEEP, 2):
        await budget.take(SWEEP)
    budget.refused(30)
    await budget.take(SWEEP)
    assert 0 == statements.draws


@pytest.mark.parametrize(
    ("environ", "limit"),
    [
        ({}, 600),
        ({"BASCULE_UPSTREAM_URL": "https://API.anthropic.com/"}, 600),
        ({"BASCULE_UPSTREAM_URL": "http://127.0.0.1:9000"}, 0),
        ({"BASCULE_UPSTREAM_URL": "http://127.0.0.1:9000", "BASCULE_UPSTREAM_REQUESTS_PER_MIN": "60"}, 60),
        ({"BASCULE_UPSTREAM_REQUESTS_PER_MIN": "0"}, 0),
    ],
)
async def test_the_public_api_has_a_limit_unless_the_setting_says_otherwise(
    environ: dict[str, str], limit: int
) -> None:
    assert limit == read_settings(environ).upstream_limit_per_min


@pytest.mark.parametrize("value", ["9", "-1", "1000001", "many"])
async def test_a_limit_that_cannot_be_kept_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="BASCULE_UPSTREAM_REQUESTS_PER_MIN"):
        read_settings({"BASCULE_UPSTREAM_REQUESTS_PER_MIN": value})
