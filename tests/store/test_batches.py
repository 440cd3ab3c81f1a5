"""What batches make of messages, decisions and calls that are over."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import insert, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.calls import END_STATES, Decision, Gate, Result
from app.core.protocol import RefuseDecision, Snapshot
from app.store import tables
from app.store.batches import Batch, ContradictionError, write
from app.store.leases import Lease
from app.store.writer import Writer
from tests.store.batches import MINE, OTHER, a_call, column, final, held_by_r1, partial
from tests.store.rows import add_call

pytestmark = pytest.mark.anyio


@pytest.fixture
async def writer(engine: AsyncEngine) -> AsyncIterator[Writer]:
    await held_by_r1(engine, MINE, OTHER)
    writer = Writer(engine, "r1")
    async with writer.running():
        yield writer


async def messages(
    engine: AsyncEngine, session_id: str = MINE.session_id
) -> list[tuple[str, str, int | None]]:
    async with engine.connect() as connection:
        rows = await connection.execute(
            text("select id, state, seq from messages where session_id = :id order by seq, position"),
            {"id": session_id},
        )
        return [(row.id, row.state, row.seq) for row in rows]


async def add_decision(engine: AsyncEngine, decision_id: str, call_id: str = "c1", **values: str) -> None:
    row = {"result": "allow", "status": "sending", "decided_by": "ann", "via": "api"}
    key = {"tenant": MINE.tenant, "session_id": MINE.session_id, "call_id": call_id, "id": decision_id}
    async with engine.begin() as connection:
        await connection.execute(insert(tables.decisions).values(**key, **(row | values)))


async def decisions(engine: AsyncEngine) -> dict[str, tuple[str, str | None]]:
    async with engine.connect() as connection:
        rows = await connection.execute(text("select id, status, refusal from decisions"))
        return {row.id: (row.status, row.refusal) for row in rows}


# ---- messages


async def test_finals_are_numbered_without_gaps_in_the_order_of_their_commits(
    writer: Writer, engine: AsyncEngine
) -> None:
    """Per session, across batches of one commit and of many, with another session in between."""
    draw = random.Random(5)
    expected: dict[str, list[str]] = {MINE.session_id: [], OTHER.session_id: []}
    numbers = itertools.count()
    for _ in range(25):
        batches = []
        for _ in range(draw.randint(1, 5)):
            lease = draw.choice([MINE, OTHER])
            ids = [f"m{next(numbers)}" for _ in range(draw.randint(0, 3))]
            expected[lease.session_id] += ids
            batches.append(Batch(lease, calls=[a_call("c1")], messages=[final(id_) for id_ in ids]))
        await asyncio.gather(*(writer.submit(batch) for batch in batches))
    for session_id, ids in expected.items():
        told = [(id_, "final", number) for number, id_ in enumerate(ids, start=1)]
        assert told == await messages(engine, session_id)


async def test_a_final_told_again_keeps_its_number_and_takes_none(
    writer: Writer, engine: AsyncEngine
) -> None:
    await writer.submit(Batch(MINE, messages=[final("m1"), final("m2")]))
    await writer.submit(Batch(MINE, messages=[final("m1", "other"), final("m3")]))
    assert [("m1", "final", 1), ("m2", "final", 2), ("m3", "final", 3)] == await messages(engine)


async def test_a_final_told_twice_in_one_commit_is_one(writer: Writer, engine: AsyncEngine) -> None:
    batches = [Batch(MINE, messages=[final("m1")]), Batch(MINE, messages=[final("m1"), final("m2")])]
    await asyncio.gather(*(writer.submit(batch) for batch in batches))
    assert [("m1", "final", 1), ("m2", "final", 2)] == await messages(engine)


async def test_a_partial_becomes_final_and_never_the_other_way_round(
    writer: Writer, engine: AsyncEngine
) -> None:
    await writer.submit(Batch(MINE, messages=[partial("m1")]))
    assert [("m1", "partial", None)] == await messages(engine)
    await writer.submit(Batch(MINE, messages=[final("m1")]))
    await writer.submit(Batch(MINE, messages=[partial("m1", "late")], dropped=["m1"]))
    assert [("m1", "final", 1)] == await messages(engine)
    assert ["done" in content for content in await column(engine, "messages", "content")] == [True]


async def test_a_partial_and_its_final_in_one_commit_are_the_final(
    writer: Writer, engine: AsyncEngine
) -> None:
    batches = [Batch(MINE, messages=[one]) for one in (partial("m1"), final("m1"))]
    await asyncio.gather(*(writer.submit(batch) for batch in batches))
    assert [("m1", "final", 1)] == await messages(engine)


async def test_dropped_partials_vanish_and_nothing_else(writer: Writer, engine: AsyncEngine) -> None:
    for lease in (MINE, OTHER):
        await writer.submit(Batch(lease, messages=[partial("p1"), partial("p2"), final("m1")]))
    await writer.submit(Batch(MINE, dropped=["p1", "m1", "unknown"]))
    assert {"p2", "m1"} == {id_ for id_, _, _ in await messages(engine)}
    assert {"p1", "p2", "m1"} == {id_ for id_, _, _ in await messages(engine, OTHER.session_id)}


async def test_a_messages_bytes_are_kept(writer: Writer, engine: AsyncEngine) -> None:
    content = rb'[{"type":"text","text":"\u0000 \ud83d \\u0000","x":1E400,"x":1.10}]'
    await writer.submit(Batch(MINE, messages=[Snapshot("m1", "final", content)]))
    assert [content.decode()] == await column(engine, "messages", "content")


# ---- decisions


async def test_a_decision_on_its_way_is_accepted(writer: Writer, engine: AsyncEngine) -> None:
    await add_decision(engine, "dec_1")
    accepted = Decision("allow", "accepted", "ann", "api", id="dec_1")
    await writer.submit(Batch(MINE, decided=[a_call("c1", decision=accepted)]))
    assert {"dec_1": ("accepted", None)} == await decisions(engine)


async def test_a_refused_decision_keeps_upstreams_words_and_makes_room(
    writer: Writer, engine: AsyncEngine
) -> None:
    await add_decision(engine, "dec_1")
    refused = Decision("allow", "refused", "ann", "api", id="dec_1", refusal="no such call")
    await writer.submit(Batch(MINE, decided=[a_call("c1", decision=refused)]))
    assert {"dec_1": ("refused", "no such call")} == await decisions(engine)
    await add_decision(engine, "dec_2")
    await writer.submit(Batch(MINE, refusals=[RefuseDecision("c1", "dec_2", "The call is posted.")]))
    assert ("refused", "The call is posted.") == (await decisions(engine))["dec_2"]


async def test_only_one_decision_stands(writer: Writer, engine: AsyncEngine) -> None:
    await add_decision(engine, "dec_1")
    with pytest.raises(IntegrityError):
        await add_decision(engine, "dec_2", status="accepted")


async def test_a_verdict_seen_upstream_takes_the_place_of_one_on_its_way(
    writer: Writer, engine: AsyncEngine
) -> None:
    """Somebody else decided first; the second telling of it changes nothing."""
    await add_decision(engine, "dec_1")
    seen = Decision("deny", "accepted", "upstream", "stream", deny_message="no")
    for _ in range(2):
        await writer.submit(Batch(MINE, decided=[a_call("c1", decision=seen)]))
    found = await decisions(engine)
    assert ("refused", "Somebody else decided first.") == found.pop("dec_1")
    assert [("accepted", None)] == list(found.values())


async def test_verdicts_seen_in_two_sessions_are_two(writer: Writer, engine: AsyncEngine) -> None:
    """Ids are free text: where one ends and the next begins must not be guessed."""
    a, b = Lease("default", "s_1", 1), Lease("default", "s", 1)
    await held_by_r1(engine, a, b)
    seen = Decision("deny", "accepted", "upstream", "stream")
    await writer.submit(Batch(a, decided=[a_call("c", decision=seen)]))
    await writer.submit(Batch(b, decided=[a_call("1_c", decision=seen)]))
    assert 2 == len(await decisions(engine))


async def test_a_spent_decision_makes_room_for_the_next(writer: Writer, engine: AsyncEngine) -> None:
    """The outcome is unknown: to deliver once more is another question."""
    await add_decision(engine, "dec_1", status="accepted")
    await add_decision(engine, "dec_2", call_id="c2", status="accepted")
    gate = Gate("tool", None, "outcome_unknown")
    held = a_call("c1", state="held", gate=gate, attempts=1, outcome_unknown=True)
    await writer.submit(Batch(MINE, calls=[held], reopened=["c1"]))
    assert {"dec_1": ("spent", None), "dec_2": ("accepted", None)} == await decisions(engine)
    await add_decision(engine, "dec_3", status="accepted")


# ---- calls


@pytest.mark.parametrize("state", sorted(END_STATES - {"interrupted"}))
async def test_a_call_that_is_over_stays_over(engine: AsyncEngine, state: str) -> None:
    """A.2-4: memory that thinks it open is wrong, and its run must start afresh."""
    await held_by_r1(engine, MINE)
    async with engine.begin() as connection:
        await add_call(connection, "c1", state=state, detail="as it was")
    for other in ("held", "queued", "dispatched", "posting", "posted", "denied"):
        if other == state:
            continue
        with pytest.raises(ContradictionError):
            async with engine.begin() as connection:
                await write(connection, "r1", [Batch(MINE, calls=[a_call("c1", state=other)])])
    assert [state] == await column(engine, "calls", "state")
    assert ["as it was"] == await column(engine, "calls", "detail")


async def test_a_fact_may_be_added_to_a_call_that_is_over(writer: Writer, engine: AsyncEngine) -> None:
    await writer.submit(Batch(MINE, calls=[a_call("c1", state="thread_terminated", attempts=1)]))
    late = a_call("c1", state="thread_terminated", attempts=2, result=Result(b"[]", is_error=True))
    await writer.submit(Batch(MINE, calls=[late]))
    assert ["[]"] == await column(engine, "calls", "result")
    assert [2] == await column(engine, "calls", "attempts")


async def test_an_interrupted_call_may_be_revived(writer: Writer, engine: AsyncEngine) -> None:
    """R-316: the one exception."""
    await writer.submit(Batch(MINE, calls=[a_call("c1", state="interrupted")]))
    await writer.submit(Batch(MINE, calls=[a_call("c1", state="queued")]))
    assert ["queued"] == await column(engine, "calls", "state")


async def test_what_a_call_is_does_not_change_with_what_becomes_of_it(
    writer: Writer, engine: AsyncEngine
) -> None:
    """The input that a person saw is the one that runs."""
    await writer.submit(Batch(MINE, calls=[a_call("c1", input=b'{"rm":"-rf"}', permission="ask")]))
    await writer.submit(Batch(MINE, calls=[a_call("c1", input=b"{}", tool="x", state="dispatched")]))
    assert ['{"rm":"-rf"}'] == await column(engine, "calls", "input")
    assert ["lookup"] == await column(engine, "calls", "tool")
    assert ["dispatched"] == await column(engine, "calls", "state")
