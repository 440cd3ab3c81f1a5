"""Group commit: terms, neighbours, repeats. What a batch says of calls, messages and decisions is in
`test_batches.py`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.core.calls import Decision, Gate, Result
from app.core.protocol import End, Progress, RefuseDecision
from app.store import tables
from app.store.batches import AttemptEnd, AttemptStart, Batch, ContradictionError, write
from app.store.leases import Lease, LeaseLostError, claim
from app.store.writer import Writer
from tests.store.batches import MINE, OTHER, a_call, a_tool, column, final, held_by_r1, partial
from tests.store.rows import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def writer(engine: AsyncEngine) -> AsyncIterator[Writer]:
    await held_by_r1(engine, MINE, OTHER)
    writer = Writer(engine, "r1")
    async with writer.running():
        yield writer


async def everything(engine: AsyncEngine) -> dict[str, list[dict[str, Any]]]:
    """All rows that batches write, without the times at which they were written."""
    found: dict[str, list[dict[str, Any]]] = {}
    async with engine.connect() as connection:
        for table in ("attachments", "calls", "decisions", "deliveries", "bodies", "messages"):
            times = {"updated_at", "finished_at", "last_event_at", "idle_deadline", "deadline_at"}
            rows = await connection.execute(tables.metadata.tables[table].select())
            plain = [{k: v for k, v in row.items() if k not in times} for row in rows.mappings()]
            found[table] = sorted(plain, key=lambda row: sorted(map(repr, row.items())))
    return found


def a_full_batch(lease: Lease) -> Batch:
    """A batch that has something of each kind."""
    held = a_call("c1", state="held", gate=Gate("upstream", "ask", "ask"), permission="ask")
    seen = Decision("allow", "accepted", "upstream", "stream")
    return Batch(
        lease,
        calls=[held, a_call("c2", state="posting", attempts=1, result=Result(b"[]", is_error=False))],
        decided=[a_call("c1", decision=seen)],
        refusals=[RefuseDecision("c3", "dec_3", "The call is over.")],
        bodies=[("c2", b"{}", None)],
        started=[AttemptStart("c2", 1, a_tool())],
        ended=[AttemptEnd("c2", 1, 200, None, b"{}")],
        messages=[final("m1"), partial("m2")],
        dropped=["m3"],
        progress=Progress("live", cursor_at=7.0, idle_id="i", flags=frozenset({"a", "b"}), missing=("x",)),
        idle_left_s=30.0,
        has_events=True,
        wish_seen=1,
    )


async def test_a_batch_of_a_lost_term_writes_nothing_while_its_neighbours_commit(
    writer: Writer, engine: AsyncEngine
) -> None:
    """D-021: every kind of row is fenced by the term."""
    before = await everything(engine)
    stale = [a_full_batch(Lease(MINE.tenant, MINE.session_id, term)) for term in (0, 2)]
    stale[0].end = End("terminated")
    good = Batch(OTHER, calls=[a_call("c9")])
    done = await asyncio.gather(
        *(writer.submit(batch) for batch in (stale[0], good, stale[1])), return_exceptions=True
    )
    assert [LeaseLostError, type(None), LeaseLostError] == [type(one) for one in done]
    after = await everything(engine)
    assert ["c9"] == [row["id"] for row in after.pop("calls")]
    before.pop("calls")
    assert before == after


async def test_a_term_of_another_replica_is_lost(engine: AsyncEngine, writer: Writer) -> None:
    """The right number in the wrong hands writes nothing either."""
    async with engine.begin() as connection:
        lost = await write(connection, "r2", [Batch(MINE, calls=[a_call("c1")])])
    assert {MINE} == lost
    assert [] == await column(engine, "calls", "id")


async def test_the_queue_is_one_commit(writer: Writer, engine: AsyncEngine) -> None:
    batches = [Batch(lease, calls=[a_call(f"c{n}")]) for n in range(40) for lease in (MINE, OTHER)]
    await asyncio.gather(*(writer.submit(batch) for batch in batches))
    assert 80 == len(await column(engine, "calls", "id"))
    assert 1 == len(set(await column(engine, "calls", "xmin::text")))


async def test_a_poisoned_batch_fails_alone(writer: Writer, engine: AsyncEngine) -> None:
    """A key that no index takes stands for whatever the database may refuse."""
    poison = Batch(MINE, calls=[a_call(secrets.token_hex(4_000))])
    batches = [Batch(OTHER, calls=[a_call("c1")]), poison, Batch(MINE, calls=[a_call("c2")])]
    done = await asyncio.gather(*(writer.submit(batch) for batch in batches), return_exceptions=True)
    assert [True, False, True] == [one is None for one in done]
    assert isinstance(done[1], DBAPIError)
    assert {"c1", "c2"} == set(await column(engine, "calls", "id"))


async def test_what_postgres_cannot_keep_is_replaced_and_not_refused(
    writer: Writer, engine: AsyncEngine
) -> None:
    odd = a_call("c1", tool="a\0b\ud800", detail="\0")
    await writer.submit(Batch(MINE, calls=[odd]))
    assert ["a\ufffdb?"] == await column(engine, "calls", "tool")
    assert ["\ufffd"] == await column(engine, "calls", "detail")


async def test_a_contradiction_fails_alone(writer: Writer, engine: AsyncEngine) -> None:
    await writer.submit(Batch(MINE, calls=[a_call("c1", state="posted", posted=True)]))
    batches = [
        Batch(MINE, calls=[a_call("c1", state="queued"), a_call("c2")]),
        Batch(OTHER, calls=[a_call("c3")]),
    ]
    done = await asyncio.gather(*(writer.submit(batch) for batch in batches), return_exceptions=True)
    assert isinstance(done[0], ContradictionError)
    assert done[1] is None
    assert {("c1", "posted"), ("c3", "queued")} == {
        (row["id"], row["state"]) for row in (await everything(engine))["calls"]
    }


async def test_writing_a_batch_again_changes_nothing(engine: AsyncEngine) -> None:
    """A commit whose outcome is unknown is simply run again."""
    await held_by_r1(engine, MINE)
    batch = a_full_batch(MINE)
    seen = []
    for _ in range(2):
        async with engine.begin() as connection:
            assert set() == await write(connection, "r1", [batch])
        seen.append(await everything(engine))
    assert seen[0] == seen[1]
    assert all(seen[0].values())


async def test_a_cancelled_waiter_does_not_cancel_its_batch(writer: Writer, engine: AsyncEngine) -> None:
    async with engine.begin() as blocking:
        await blocking.execute(text("select from attachments for update"))
        waiter = asyncio.create_task(writer.submit(Batch(MINE, calls=[a_call("c1")])))
        await until(lambda: _is_waiting(blocking))
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    async def is_written() -> bool:
        return await column(engine, "calls", "id") == ["c1"]

    await until(is_written)


async def test_a_connection_lost_in_the_middle_is_repaired(writer: Writer, engine: AsyncEngine) -> None:
    """The batch is tried again, and is written once."""
    async with engine.begin() as blocking:
        await blocking.execute(text("select from attachments for update"))
        waiter = asyncio.create_task(writer.submit(Batch(MINE, calls=[a_call("c1")], messages=[final("m")])))
        await until(lambda: _is_waiting(blocking))
        assert await blocking.scalar(
            text("select pg_terminate_backend(pid) from pg_stat_activity where wait_event_type = 'Lock'")
        )
    await asyncio.wait_for(waiter, 5)
    assert ["c1"] == await column(engine, "calls", "id")
    assert [1] == await column(engine, "messages", "seq")


async def test_a_claim_waits_for_a_commit_or_comes_after_it(writer: Writer, engine: AsyncEngine) -> None:
    """D-021: once the term has risen nothing of the old one is written any more."""
    async with engine.begin() as claiming:
        await claiming.execute(text("update attachments set replica_id = null"))
        taken = await claim(claiming, "r2", 10)
        waiter = asyncio.create_task(writer.submit(Batch(MINE, calls=[a_call("c1")])))
        await until(lambda: _is_waiting(claiming))
    assert 2 == len(taken)
    with pytest.raises(LeaseLostError):
        await waiter
    assert [] == await column(engine, "calls", "id")


async def test_what_is_queued_at_the_end_is_still_committed(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    writer = Writer(engine, "r1")
    async with writer.running():
        waiting = asyncio.gather(
            *(writer.submit(Batch(MINE, calls=[a_call(f"c{number}")])) for number in range(300))
        )
        await asyncio.sleep(0)
    await waiting
    assert 300 == len(await column(engine, "calls", "id"))


async def _is_waiting(connection: AsyncConnection) -> bool:
    # Not pg_stat_activity: a transaction sees that as it was when it first looked.
    found: int | None = await connection.scalar(text("select count(*) from pg_locks where not granted"))
    return bool(found)
