"""Reminders of held calls: when they are due, how many there are, and who is left in peace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.core.calls import Gate
from app.store import decisions, reminders, subscriptions
from app.store.batches import Batch, write
from app.store.reminders import REMINDERS_MAX
from tests.store.batches import MINE, a_call, column, held_by_r1
from tests.store.rows import SECRETS, add_attachment, add_call

pytestmark = pytest.mark.anyio

TOLD = "data::json->>'call_id' || ' ' || (data::json->>'reminders')"


@pytest.fixture(autouse=True)
async def subscribed(engine: AsyncEngine) -> None:
    given = {"url": "https://hooks.example/", "headers": {}, "enabled": True}
    async with engine.begin() as connection:
        for name, events in {"one": ["confirmation.reminded"], "other": ["call.failed"]}.items():
            await subscriptions.put(connection, SECRETS, "default", name, events=events, **given)


async def held(engine: AsyncEngine, *ids: str, due_s: float = -1.0, **values: Any) -> None:
    """Add calls whose next reminder is due in so many seconds, and whose pause is a minute."""
    async with engine.begin() as connection:
        if not (await connection.execute(text("select 1 from attachments"))).all():
            await add_attachment(connection)
        for id_ in ids:
            await add_call(connection, id_, **({"gate_by": "tool", "gate_remind_after_s": 60.0} | values))
            moment = "update calls set gate_remind_at = now() + make_interval(secs => :due) where id = :id"
            await connection.execute(text(moment), {"due": due_s, "id": id_})


async def remind(engine: AsyncEngine, replica_id: str = "r1", limit: int = 10) -> int:
    async with engine.begin() as connection:
        return await reminders.remind(connection, replica_id, limit)


async def pass_time(engine: AsyncEngine, seconds: float) -> None:
    async with engine.begin() as connection:
        moment = "update calls set gate_remind_at = gate_remind_at - make_interval(secs => :s)"
        await connection.execute(text(moment), {"s": seconds})


async def decide(connection: AsyncConnection, call_id: str = "tu1") -> None:
    given: dict[str, Any] = {"result": "allow", "deny_message": None, "by": "key_1", "via": "api"}
    assert isinstance(
        await decisions.decide(connection, "default", "sesn_1", call_id, **given), decisions.Recorded
    )


async def save(engine: AsyncEngine, state: Any, remind_after_s: float | None) -> str:
    """Save a call; return after how many seconds it is reminded of, and how often it was."""
    gate = Gate("tool", None, "tool_asks", remind_after_s=remind_after_s)
    async with engine.begin() as connection:
        await write(connection, "r1", [Batch(MINE, calls=[a_call("c1", state=state, gate=gate)])])
    left = "coalesce(round(extract(epoch from gate_remind_at - now()))::text, '-')"
    (found,) = await column(engine, "calls", f"{left} || ' ' || gate_reminders")
    return str(found)


async def test_the_moment_is_set_when_the_call_comes_to_be_held_and_then_stays(engine: AsyncEngine) -> None:
    """A restart or a refused decision begins nothing anew; another question does."""
    await held_by_r1(engine, MINE)
    assert await save(engine, "held", 600) == "600 0"
    await pass_time(engine, 601)
    assert await remind(engine) == 1
    assert await save(engine, "held", 50) == "600 1"
    assert await save(engine, "queued", None) == "600 1"
    assert await save(engine, "held", 50) == "50 0"
    assert await save(engine, "queued", None) == "50 0"
    assert await save(engine, "held", None) == "- 0"


async def test_what_is_due_is_held_undecided_in_time_and_served_here(engine: AsyncEngine) -> None:
    await held(engine, "later", due_s=60)
    await held(engine, "moved", state="queued")
    await held(engine, "over", gate_on_expiry="deny", gate_expires_at=text("now() - interval '1 s'"))
    await held(engine, "tu1", "due")
    await held(engine, "overdue", gate_on_expiry="keep", gate_expires_at=text("now() - interval '1 s'"))
    async with engine.begin() as connection:
        await decide(connection)
    assert await remind(engine, "r2") == 0
    assert await remind(engine) == 2
    assert await column(engine, "notifications", TOLD) == ["due 1", "overdue 1"]


async def test_a_session_that_is_not_served_is_left_in_peace(engine: AsyncEngine) -> None:
    await held(engine, "tu1")
    async with engine.begin() as connection:
        await connection.execute(text("update attachments set status = 'detached'"))
    assert await remind(engine) == 0


async def test_the_pause_doubles_until_the_last_one(engine: AsyncEngine) -> None:
    await held(engine, "tu1")
    pauses = []
    for _ in range(REMINDERS_MAX + 2):
        await remind(engine)
        left = "extract(epoch from gate_remind_at - now())"
        pauses += [None if s is None else round(s / 60) for s in await column(engine, "calls", left)]
        await pass_time(engine, 60 * 64)
    assert pauses == [1, 2, 4, 8, None, None, None]
    assert await column(engine, "notifications", TOLD) == [f"tu1 {n + 1}" for n in range(REMINDERS_MAX)]


async def test_reminders_that_nobody_sent_in_time_become_one(engine: AsyncEngine) -> None:
    await held(engine, "tu1", due_s=-86_400)
    assert [await remind(engine), await remind(engine)] == [1, 0]


async def test_the_longest_due_come_first(engine: AsyncEngine) -> None:
    await held(engine, "second")
    await held(engine, "first", due_s=-5)
    assert await remind(engine, limit=1) == 1
    assert await column(engine, "notifications", TOLD) == ["first 1"]


async def test_of_replicas_that_remind_at_once_one_does(engine: AsyncEngine) -> None:
    await held(engine, *(f"tu{n}" for n in range(20)))
    done = await asyncio.gather(*(remind(engine, limit=20) for _ in range(8)))
    assert sum(done) == 20
    assert len(await column(engine, "notifications", TOLD)) == 20


async def test_a_call_that_is_being_decided_is_passed_over_and_then_done(engine: AsyncEngine) -> None:
    await held(engine, "tu1", "tu2")
    async with engine.begin() as connection:
        await decide(connection)
        assert await remind(engine) == 1
    assert await remind(engine) == 0
    assert await column(engine, "notifications", TOLD) == ["tu2 1"]


async def test_a_decision_that_the_look_did_not_see_stops_the_reminder_under_its_lock(
    engine: AsyncEngine,
) -> None:
    """The second statement looks for itself: the first one's snapshot may be older than the decision."""
    await held(engine, "tu1")
    async with engine.begin() as connection:
        await decide(connection)
    async with engine.begin() as connection:
        found = {"tenants": ["default"], "session_ids": ["sesn_1"], "ids": ["tu1"], "most": REMINDERS_MAX}
        assert (await connection.execute(reminders._COUNT, found)).all() == []


async def test_a_reminder_carries_the_age_and_decides_nothing(engine: AsyncEngine) -> None:
    await held(engine, "tu1", created_at=text("now() - interval '1 h'"))
    before = await column(engine, "calls", "updated_at")
    await remind(engine)
    assert await column(engine, "notifications", "round(age_s)::int") == [3600]
    assert await column(engine, "notifications", "subscription || ' ' || type") == [
        "one confirmation.reminded"
    ]
    assert await column(engine, "decisions", "id") == []
    assert await column(engine, "calls", "updated_at") == before
