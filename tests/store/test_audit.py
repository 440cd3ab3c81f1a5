from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.core.calls import Decision, Gate, digest
from app.core.protocol import RefuseDecision
from app.store import audit, decisions, tools
from app.store.audit import FIRST, Entry, Verified
from app.store.batches import Batch, write
from tests.store.batches import MINE, a_call, held_by_r1
from tests.store.rows import SECRETS, add_attachment, add_call

pytestmark = pytest.mark.anyio


async def append(engine: AsyncEngine, count: int, tenant: str = "default") -> None:
    async with engine.begin() as connection:
        entries = [Entry(tenant, "key.created", "admin", "api", subject=f"key_{n}") for n in range(count)]
        await audit.append(connection, entries)


async def verified(engine: AsyncEngine, tenant: str = "default") -> Verified:
    async with engine.connect() as connection:
        return await audit.verify(connection, tenant)


async def rows(engine: AsyncEngine, tenant: str = "default") -> list[audit.Chained]:
    async with engine.connect() as connection:
        return await audit.page(connection, tenant, after=None, limit=1_000)


async def by_force(connection: AsyncConnection, statement: str) -> None:
    """Do what an owner of the database could: without the triggers."""
    await connection.execute(text("set local session_replication_role = replica"))
    await connection.execute(text(statement))


async def test_rows_are_numbered_from_one_and_name_the_hash_before(engine: AsyncEngine) -> None:
    await append(engine, 2)
    await append(engine, 1)
    chain = await rows(engine)
    assert [row.sequence for row in chain] == [1, 2, 3]
    assert [row.previous for row in chain] == [FIRST, chain[0].hash, chain[1].hash]
    assert await verified(engine) == Verified("default", 3, chain[-1].hash)


def test_the_hash_of_a_row_can_be_made_by_hand() -> None:
    """The form that docs/audit.md describes: it must never change for rows that are stored."""
    at = datetime(2026, 11, 30, 12, tzinfo=UTC)
    entry = Entry("acme", "decision.recorded", "key_1", "api", "sesn_1", "tu1", "böse", "sha256:0", "dec_1")
    row = audit.Chained(entry, 7, at, FIRST, b"")
    hashed = (
        '["bascule-audit-1","acme",7,"2026-11-30T12:00:00.000000+00:00","decision.recorded","key_1","api",'
        '"sesn_1","tu1","böse","sha256:0","dec_1",null,null,null,"' + 64 * "0" + '"]'
    )
    assert row.computed() == hashlib.sha256(hashed.encode()).digest()


async def test_chains_of_tenants_are_their_own(engine: AsyncEngine) -> None:
    await append(engine, 2, "a")
    await append(engine, 1, "b")
    assert [row.sequence for row in await rows(engine, "b")] == [1]
    async with engine.connect() as connection:
        assert await audit.tenants(connection) == ["a", "b"]


async def test_a_hundred_appends_at_once_make_one_chain(engine: AsyncEngine) -> None:
    await asyncio.gather(*(append(engine, 1) for _ in range(100)))
    found = await verified(engine)
    assert (found.rows, found.fault) == (100, None)


async def test_an_append_of_one_tenant_does_not_wait_for_another(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await audit.append(connection, [Entry("a", "key.created", "admin", "api")])
        await asyncio.wait_for(append(engine, 1, "b"), 5)


async def test_what_is_rolled_back_leaves_no_gap(engine: AsyncEngine) -> None:
    await append(engine, 1)
    async with engine.connect() as connection:
        await audit.append(connection, [Entry("default", "key.created", "admin", "api")])
        await connection.rollback()
    await append(engine, 1)
    assert (await verified(engine)).rows == 2


@pytest.mark.parametrize(
    "statement",
    ["update audit set actor = 'x'", "delete from audit", "truncate audit"],
)
async def test_the_database_refuses_to_change_rows(engine: AsyncEngine, statement: str) -> None:
    await append(engine, 1)
    with pytest.raises(DBAPIError, match="never changed or removed"):
        async with engine.begin() as connection:
            await connection.execute(text(statement))
    assert (await verified(engine)).rows == 1


@pytest.mark.parametrize(
    ("statement", "rows_sound", "fault"),
    [
        ("update audit set actor = 'x' where sequence = 3", 2, "row 3 was changed"),
        ("update audit set at = at + interval '1us' where sequence = 3", 2, "row 3 was changed"),
        ("update audit set tenant = 'other' where sequence = 3", 2, "row 3 is missing"),
        ("delete from audit where sequence = 1", 0, "row 1 is missing"),
        ("delete from audit where sequence = 3", 2, "row 3 is missing"),
        ("delete from audit where sequence > 4", 4, "row 5 is missing"),
        ("delete from audit", 0, "row 1 is missing"),
        ("delete from audit_heads", 5, "the record of its last row is missing"),
        (
            "update audit_heads set sequence = 4",
            5,
            "row 4 is not the one that was recorded as the last",
        ),
        (
            "update audit set sequence = 5 - sequence where sequence in (2, 3)",
            1,
            "row 2 was changed",
        ),
    ],
)
async def test_a_row_that_was_changed_removed_or_moved_is_found(
    engine: AsyncEngine, statement: str, rows_sound: int, fault: str
) -> None:
    await append(engine, 5)
    async with engine.begin() as connection:
        if "5 - sequence" in statement:
            await by_force(connection, "alter table audit drop constraint pk_audit")
        await by_force(connection, statement)
        found = await audit.verify(connection, "default")
        await connection.rollback()
    assert (found.rows, found.fault) == (rows_sound, fault)


async def test_a_row_that_was_made_anew_does_not_follow(engine: AsyncEngine) -> None:
    await append(engine, 3)
    forged = audit.Chained(
        Entry("default", "key.created", "eve", "api"), 2, (await rows(engine))[1].at, FIRST, b""
    )
    async with engine.begin() as connection:
        await by_force(
            connection,
            "update audit set actor = 'eve', subject = null, previous = decode(repeat('00', 32), 'hex'),"
            f" hash = decode('{forged.computed().hex()}', 'hex') where sequence = 2",
        )
    assert (await verified(engine)).fault == "row 2 does not follow the row before it"


async def attempt(engine: AsyncEngine, result: Any = "allow", **values: Any) -> Any:
    async with engine.begin() as connection:
        given = {"deny_message": None, "by": "key_1", "via": "api", **values}
        return await decisions.decide(connection, "default", "sesn_1", "tu1", result=result, **given)


async def test_each_attempt_to_decide_is_a_row(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu1", gate_by="tool")
    await attempt(engine, input_digest=digest(b"other"))
    recorded = await attempt(engine, shown_ms=1_500)
    await attempt(engine, by="key_2")
    await attempt(engine, "deny", by="key_3", deny_message="my secret")
    chain = [row.entry for row in await rows(engine)]
    assert [(one.kind, one.actor, one.result, one.detail) for one in chain] == [
        ("decision.rejected", "key_1", "allow", "input_changed"),
        ("decision.recorded", "key_1", "allow", None),
        ("decision.repeated", "key_2", "allow", None),
        ("decision.contrary", "key_3", "deny", None),
    ]
    assert {one.decision_id for one in chain[1:]} == {recorded.decision_id}
    assert {(one.session_id, one.call_id, one.subject) for one in chain} == {("sesn_1", "tu1", "bash")}
    assert {one.input_digest for one in chain} == {digest(b'{"command": "ls"}')}
    assert [one.shown_ms for one in chain] == [None, 1_500, None, None]


async def test_an_attempt_that_is_rolled_back_is_no_row(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu1", gate_by="tool")
    async with engine.connect() as connection:
        await decisions.decide(
            connection, "default", "sesn_1", "tu1", result="allow", deny_message=None, by="k", via="api"
        )
        await connection.rollback()
    assert await rows(engine) == []


async def test_an_attempt_on_what_does_not_exist_is_no_row(engine: AsyncEngine) -> None:
    assert (await attempt(engine)).code == "session_not_found"
    async with engine.begin() as connection:
        await add_attachment(connection)
    assert (await attempt(engine)).code == "call_not_found"
    assert await rows(engine) == []


async def saved(engine: AsyncEngine, batch: Batch) -> list[tuple[str, str, str | None, str | None]]:
    """Write the batch twice, as after a commit whose outcome was unknown; return the rows that it made."""
    before = len(await rows(engine))
    for _ in range(2):
        async with engine.begin() as connection:
            assert await write(connection, "r1", [batch]) == set()
    made = [row.entry for row in (await rows(engine))[before:]]
    assert all(one.input_digest == digest(b'{"a":1}') for one in made)
    return [(one.kind, one.actor, one.result, one.detail) for one in made]


async def held(engine: AsyncEngine, **values: Any) -> Any:
    await held_by_r1(engine, MINE)
    async with engine.begin() as connection:
        await add_call(connection, "tu1", input='{"a":1}', tool="lookup", **values)
    return a_call("tu1", kind="builtin", state="held", gate=Gate("upstream", "ask", "ask"), permission="ask")


async def test_a_verdict_seen_upstream_is_one_row_and_displaces_ours(engine: AsyncEngine) -> None:
    call = await held(engine)
    await attempt(engine)
    seen = Decision("deny", "accepted", "upstream", "stream")
    denied = call.step("denied", decision=seen)
    batch = Batch(MINE, calls=[denied], decided=[denied], moved=[denied])
    assert await saved(engine, batch) == [
        ("decision.refused", "key_1", "allow", "moved_on"),
        ("decision.seen", "upstream", "deny", None),
    ]


async def test_a_decision_that_upstream_refuses_is_a_row(engine: AsyncEngine) -> None:
    call = await held(engine)
    recorded = await attempt(engine)
    sending = Decision("allow", "sending", "key_1", "api", id=recorded.decision_id)
    on_its_way = call.step("held", decision=sending)
    assert await saved(engine, Batch(MINE, calls=[on_its_way], decided=[on_its_way])) == []
    refused = Decision("allow", "refused", "key_1", "api", id=recorded.decision_id, refusal="no such call")
    held_again = call.step("held", decision=refused)
    assert await saved(engine, Batch(MINE, calls=[held_again], decided=[held_again])) == [
        ("decision.refused", "key_1", "allow", None)
    ]


async def test_a_decision_that_came_too_late_is_a_row(engine: AsyncEngine) -> None:
    await held(engine)
    recorded = await attempt(engine)
    batch = Batch(MINE, refusals=[RefuseDecision("tu1", recorded.decision_id, "The call is posted.")])
    assert await saved(engine, batch) == [("decision.refused", "key_1", "allow", None)]


async def test_a_decision_that_released_a_lost_delivery_is_spent(engine: AsyncEngine) -> None:
    call = await held(engine, gate_by="tool")
    recorded = await attempt(engine)
    accepted = Decision("allow", "accepted", "key_1", "api", id=recorded.decision_id)
    queued = call.step("queued", decision=accepted)
    assert await saved(engine, Batch(MINE, calls=[queued], decided=[queued], moved=[queued])) == []
    asks = queued.step("held", decision=None, gate=Gate("tool", None, "outcome_unknown"))
    assert await saved(engine, Batch(MINE, calls=[asks], reopened=["tu1"])) == [
        ("decision.spent", "key_1", "allow", None)
    ]


async def test_a_tool_that_the_service_disables_is_a_row(engine: AsyncEngine) -> None:
    policy = {"enabled": True}
    async with engine.begin() as connection:
        given = {"url": "https://tool.example", "description": None, "policy": policy, "headers": {}}
        await tools.put(connection, SECRETS, "default", "lookup", **given)
        tool = await tools.load(connection, SECRETS, "default", "lookup")
        assert tool is not None
        assert await tools.disable_gone(connection, "default", tool)
    (row,) = [row.entry for row in await rows(engine)]
    assert (row.kind, row.actor, row.subject, row.detail) == ("tool.changed", "service", "lookup", "gone")
