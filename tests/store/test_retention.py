"""What retention removes, and what it leaves. How much at a time: `test_retention_bounds.py`."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.core.calls import STATES
from app.store import attachments, audit, tool_tests
from app.store.attachments import Accepted, Settings
from app.store.audit import Entry
from app.store.batches import Batch, write
from app.store.leases import Lease, claim, renew
from app.store.messages import finals
from app.store.retention import prune
from tests.store.batches import a_call, column, final, partial
from tests.store.ended import AGES, TABLES, add_delivered, add_session, age, rows
from tests.store.rows import SECRETS, add_attachment, add_message, until

pytestmark = pytest.mark.anyio

OPEN = ("held", "queued", "dispatched", "answered", "posting", "unowned")


async def test_a_session_goes_with_its_data_so_long_after_its_end(engine: AsyncEngine) -> None:
    """The decision stays, as what the audit is made of."""
    async with engine.begin() as connection:
        await add_session(connection, "old")
        await add_session(connection, "young")
    await age(engine, 91, "session_id = 'old'")
    await age(engine, 89, "session_id = 'young'")
    pruned = await prune(engine, sessions_days=90, deliveries_days=0)
    removed = {name: count for name, count in pruned.counts.items() if count}
    held = {"attachments": 1, "calls": 1, "messages": 2, "deliveries": 2, "bodies": 1, "callbacks": 1}
    assert held == removed
    assert pruned.is_complete
    for table in TABLES[:-1]:
        assert {"young"} == set(await column(engine, table, "session_id"))
    assert ["old", "young"] == await column(engine, "decisions", "session_id")


async def test_test_calls_of_tools_go_with_the_age_of_deliveries(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        for tool in ("old", "young"):
            await tool_tests.wish(connection, "default", tool, "{}", timeout_s=1.0)
        await connection.execute(
            text("update tool_tests set requested_at = now() - interval '31 days' where tool = 'old'")
        )
    assert 1 == (await prune(engine, sessions_days=0, deliveries_days=30)).tool_tests
    assert ["young"] == await column(engine, "tool_tests", "tool")


async def test_the_audit_of_what_goes_stays(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_session(connection, status="ended", end_reason="terminated")
        entry = Entry("default", "decision.recorded", "key_1", "api", "sesn_1", "tu1")
        await audit.append(connection, [entry])
    await age(engine, 4000)
    assert 1 == (await prune(engine, **AGES)).attachments
    async with engine.connect() as connection:
        assert (await audit.verify(connection, "default")).rows == 1


async def test_a_detached_session_goes_as_an_ended_one(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_session(connection, status="detached", end_reason="detached")
    await age(engine, 91)
    assert 1 == (await prune(engine, **AGES)).attachments


@pytest.mark.parametrize("status", ["attaching", "live", "reconnecting", "detaching"])
async def test_of_a_session_that_is_served_only_deliveries_of_finished_calls_go(
    engine: AsyncEngine, status: str
) -> None:
    """D-087: ids, states, inputs and results of its calls stay, and so do its messages and its position."""
    async with engine.begin() as connection:
        await add_session(connection, status=status, end_reason=None, replica_id="r1", cursor_at=7.0)
        for state in sorted(STATES):
            await add_delivered(connection, state, state=state, result="[]")
    await age(engine, 4000)
    kept = [await column(engine, table, f"{table}::text") for table in ("attachments", "calls", "messages")]
    await prune(engine, **AGES)
    assert kept == [
        await column(engine, table, f"{table}::text") for table in ("attachments", "calls", "messages")
    ]
    assert sorted(OPEN * 2) == sorted(await column(engine, "deliveries", "call_id"))
    assert sorted(OPEN) == await column(engine, "bodies", "call_id")


async def test_a_delivery_goes_only_when_both_it_and_the_end_of_its_call_are_old(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_attachment(connection, session_id="s")
        await add_delivered(connection, "just-over")
        await add_delivered(connection, "young")
    await age(engine, 29)
    async with engine.begin() as connection:
        await connection.execute(
            text("update deliveries set started_at = now() - interval '31 days' where call_id = 'just-over'")
        )
    assert not any((await prune(engine, **AGES)).counts.values())
    await age(engine, 31, "session_id = 's'")
    assert 4 == (await prune(engine, **AGES)).deliveries


@pytest.mark.parametrize("state", OPEN)
async def test_an_open_call_keeps_its_session_and_what_it_sends(engine: AsyncEngine, state: str) -> None:
    """D-087: a session may go on after years; a known result is then not computed again."""
    async with engine.begin() as connection:
        await add_session(connection)
        await add_delivered(connection, "open", state=state, result="[]")
    await age(engine, 4000)
    await prune(engine, **AGES)
    assert ["open"] == await column(engine, "calls", "id")
    assert ["open"] == await column(engine, "bodies", "call_id")
    assert {"attachments": 1, "messages": 0, "deliveries": 2}.items() <= (await rows(engine)).items()


async def test_a_rejected_call_stays_while_its_session_may_go_on(engine: AsyncEngine) -> None:
    """History shows it unanswered: without its row the tool would be called again."""
    async with engine.begin() as connection:
        for session_id, reason in (("may", "idle"), ("over", "terminated")):
            await add_attachment(connection, session_id=session_id, status="ended", end_reason=reason)
            await add_delivered(connection, "c1", session_id, state="rejected")
    await age(engine, 91)
    await prune(engine, **AGES)
    assert ["may"] == await column(engine, "attachments", "session_id")
    assert ["may"] == await column(engine, "calls", "session_id")


async def test_an_old_final_of_a_live_session_still_turns_a_straggler_away(engine: AsyncEngine) -> None:
    """A-065: however old, it is there for a preview to meet; the numbers of finals go on."""
    lease = Lease("default", "s", 1)
    async with engine.begin() as connection:
        await add_attachment(connection, session_id="s", message_seq=1)
        await add_message(connection, "m1", ["done"], session_id="s", seq=1)
    await age(engine, 4000)
    await prune(engine, **AGES)
    async with engine.begin() as connection:
        assert set() == await write(connection, "r1", [Batch(lease, messages=[partial("m1"), final("m2")])])
        page = await finals(connection, "default", "s", after_seq=0, limit=10)
    assert [("m1", 1, "done"), ("m2", 2, "done")] == [(one.id, one.seq, one.text) for one in page.items]


async def test_a_session_whose_data_went_begins_anew(engine: AsyncEngine) -> None:
    """A-065: nothing of it comes back but what its history tells."""
    async with engine.begin() as connection:
        await add_session(connection, cursor_at=7.0, term=3)
    await age(engine, 91)
    await prune(engine, **AGES)
    async with engine.begin() as connection:
        assert await attachments.get(connection, "default", "s") is None
        again = await attachments.attach(connection, SECRETS, "default", "s", Settings(), {})
        assert isinstance(again, Accepted)
        assert again.is_new
        assert (None, {}) == (again.attachment.cursor_at, again.attachment.calls)
        await renew(connection, "r1")
        (lease,) = await claim(connection, "r1", 10)
        await write(connection, "r1", [Batch(lease, calls=[a_call("c1")], messages=[final("m1")])])
    assert [1] == await column(engine, "messages", "seq")


async def test_attaching_while_the_session_is_removed_attaches_it_anew(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_session(connection)
    async with engine.connect() as removing:
        await removing.execute(text("delete from attachments"))

        async def attach() -> attachments.Accepted | attachments.Refused:
            async with engine.begin() as connection:
                return await attachments.attach(connection, SECRETS, "default", "s", Settings(), {})

        waiter = asyncio.create_task(attach())
        await until(lambda: _is_anybody_waiting(removing))
        await removing.commit()
    accepted = await waiter
    assert isinstance(accepted, Accepted)
    assert accepted.is_new


async def test_a_session_that_is_attached_again_meanwhile_is_left_alone(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_session(connection)
    await age(engine, 91)
    async with engine.begin() as connection:
        await attachments.attach(connection, SECRETS, "default", "s", Settings(), {})
        assert not (await prune(engine, sessions_days=90, deliveries_days=0)).attachments
    assert not (await prune(engine, sessions_days=90, deliveries_days=0)).attachments
    assert {"attachments": 1, "calls": 1, "messages": 2}.items() <= (await rows(engine)).items()


async def test_an_age_of_zero_keeps_for_ever(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_session(connection)
    await age(engine, 4000)
    before = await rows(engine)
    assert not any((await prune(engine, sessions_days=0, deliveries_days=0)).counts.values())
    assert before == await rows(engine)


async def _is_anybody_waiting(connection: AsyncConnection) -> bool:
    return bool(await connection.scalar(text("select count(*) from pg_locks where not granted")))
