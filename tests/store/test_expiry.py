from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.core.calls import Gate
from app.core.notifications import EVENTS
from app.store import audit, calls, decisions, subscriptions
from app.store.batches import Batch, write
from tests.store.batches import MINE, a_call, column, held_by_r1
from tests.store.rows import SECRETS, add_attachment, add_call

pytestmark = pytest.mark.anyio


async def held(engine: AsyncEngine, call_id: str = "tu1", *, left_s: float = -1.0, **values: Any) -> None:
    """Add a call that expires in so many seconds."""
    async with engine.begin() as connection:
        if not (await connection.execute(text("select 1 from attachments"))).all():
            await add_attachment(connection)
        await add_call(connection, call_id, **({"gate_by": "tool", "gate_on_expiry": "deny"} | values))
        await connection.execute(
            text("update calls set gate_expires_at = now() + make_interval(secs => :left) where id = :id"),
            {"left": left_s, "id": call_id},
        )


async def decide(connection: AsyncConnection, result: Any = "allow") -> Any:
    given = {"deny_message": None, "by": "key_1", "via": "api"}
    return await decisions.decide(connection, "default", "sesn_1", "tu1", result=result, **given)


async def expire(connection: AsyncConnection, call_id: str = "tu1") -> bool:
    return await decisions.expire(connection, "default", "sesn_1", call_id)


async def due(engine: AsyncEngine, replica_id: str = "r1", limit: int = 10) -> list[str]:
    async with engine.connect() as connection:
        return [call_id for _, _, call_id in await decisions.due(connection, replica_id, limit)]


async def save(engine: AsyncEngine, state: Any, expires_in_s: float | None, on_expiry: Any = "deny") -> str:
    """Save a call; return what is stored of its expiry, in whole seconds from its creation."""
    call = a_call("c1", state=state, gate=Gate("tool", None, "tool_asks", expires_in_s, on_expiry))
    async with engine.begin() as connection:
        assert await write(connection, "r1", [Batch(MINE, calls=[call])]) == set()
    shown = "coalesce(gate_on_expiry, '-') || ' ' || coalesce(round(extract(epoch from"
    shown += " gate_expires_at - created_at))::text, '-')"
    (found,) = await column(engine, "calls", shown)
    return str(found)


async def test_the_moment_is_set_when_the_call_comes_to_be_held_and_then_stays(engine: AsyncEngine) -> None:
    """Neither a restart nor a refused decision grants more time, nor does a changed registration."""
    await held_by_r1(engine, MINE)
    assert await save(engine, "held", 600) == "deny 600"
    assert await save(engine, "held", 50, "keep") == "deny 600"
    assert await save(engine, "held", None) == "deny 600"
    assert await save(engine, "dispatched", 600) == "deny 600"
    assert await save(engine, "held", 9_000, "keep") == "keep 9000"
    assert await save(engine, "queued", None) == "keep 9000"
    assert await save(engine, "held", None) == "- -"


async def test_what_is_due_is_held_past_its_time_undecided_and_served_here(engine: AsyncEngine) -> None:
    await held(engine, "tu1")
    await held(engine, "older", left_s=-5)
    await held(engine, "later", left_s=60)
    await held(engine, "kept", gate_on_expiry="keep")
    await held(engine, "never", gate_on_expiry=None)
    await held(engine, "moved", state="queued")
    assert await due(engine) == ["older", "tu1"]
    assert await due(engine, limit=1) == ["older"]
    assert await due(engine, "r2") == []
    async with engine.begin() as connection:
        assert await expire(connection, "older")
    assert await due(engine) == ["tu1"]
    async with engine.begin() as connection:
        await connection.execute(text("update attachments set status = 'detached'"))
    assert await due(engine) == []
    async with engine.begin() as connection:
        assert not await expire(connection)


@pytest.mark.parametrize("result", ["allow", "deny"])
async def test_a_decision_after_the_moment_is_refused_before_and_after_the_expiry_is_recorded(
    engine: AsyncEngine, result: str
) -> None:
    """A deny too: the agent is told that nobody decided in time."""
    await held(engine)
    for _ in range(2):
        async with engine.begin() as connection:
            assert (await decide(connection, result)).code == "expired"
            await expire(connection)
    assert await column(engine, "decisions", "via") == ["expiry"]


async def test_a_decision_before_the_moment_is_not_overtaken_by_it(engine: AsyncEngine) -> None:
    """Not even when its runner acts only after it."""
    await held(engine, left_s=60)
    async with engine.begin() as connection:
        assert (await decide(connection)).is_new
        await connection.execute(text("update calls set gate_expires_at = now() - interval '1 s'"))
    async with engine.begin() as connection:
        assert not await expire(connection)
    assert await due(engine) == []


async def test_at_the_very_moment_the_call_expires(engine: AsyncEngine) -> None:
    """One transaction, so that it is the same microsecond for both."""
    await held(engine)
    async with engine.begin() as connection:
        await connection.execute(text("update calls set gate_expires_at = now()"))
        assert (await decide(connection)).code == "expired"
        assert await expire(connection)


async def test_one_that_is_kept_can_be_decided_when_it_is_overdue(engine: AsyncEngine) -> None:
    await held(engine, gate_on_expiry="keep")
    async with engine.begin() as connection:
        assert not await expire(connection)
        (shown,) = (await calls.waiting(connection, "default", after=0, limit=10)).items
        assert shown.gate is not None
        assert (shown.gate.is_overdue, shown.gate.on_expiry) == (True, "keep")
        assert (await decide(connection)).is_new


async def test_an_expiry_is_a_wish_and_one_row_of_the_audit(engine: AsyncEngine) -> None:
    await held(engine, gate_by="upstream")
    for expected in (True, False):
        async with engine.begin() as connection:
            assert await expire(connection) is expected
    assert await column(engine, "attachments", "wish") == [2]
    assert await column(engine, "decisions", "result || ' ' || status || ' ' || via") == [
        "deny sending expiry"
    ]
    async with engine.connect() as connection:
        (row,) = await audit.page(connection, "default", after=None, limit=10)
    assert (row.entry.kind, row.entry.actor, row.entry.via) == ("decision.expired", "expiry", "expiry")


async def test_an_expiry_that_upstream_refused_is_tried_again_later(engine: AsyncEngine) -> None:
    """And until then nobody allows the call."""
    await held(engine, gate_by="upstream")
    async with engine.begin() as connection:
        await expire(connection)
        await connection.execute(text("update decisions set status = 'refused', refusal = 'no'"))
    assert await due(engine) == []
    async with engine.begin() as connection:
        assert (await decide(connection)).code == "expired"
        await connection.execute(
            text("update decisions set decided_at = decided_at - make_interval(secs => :s)"),
            {"s": decisions.EXPIRY_AGAIN_S},
        )
    assert await due(engine) == ["tu1"]


async def test_two_replicas_that_let_one_call_expire_record_it_once(engine: AsyncEngine) -> None:
    await held(engine)

    async def once() -> bool:
        async with engine.begin() as connection:
            return await expire(connection)

    assert sorted(await asyncio.gather(*(once() for _ in range(8)))) == [False] * 7 + [True]


async def test_a_call_that_expires_is_told_as_that_and_as_nothing_else(engine: AsyncEngine) -> None:
    await held(engine)
    async with engine.begin() as connection:
        given = {"url": "https://hooks.example/", "headers": {}, "enabled": True, "events": EVENTS}
        await subscriptions.put(connection, SECRETS, "default", "all", **given)
        assert await expire(connection)
    rows = await column(engine, "notifications", "array[type, data::json->'decision'->>'via']")
    assert [["confirmation.expired", "expiry"]] == rows
