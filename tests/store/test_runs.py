from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.calls import END_STATES, STATES, Call, Decision, Gate, Result
from app.core.protocol import Progress
from app.store import runs, tables
from app.store.batches import AttemptEnd, Batch, write
from app.store.leases import Lease
from tests.store.batches import MINE, a_call, column, held_by_r1, partial
from tests.store.rows import SECRETS, add_call

pytestmark = pytest.mark.anyio

RAW = [
    rb'{"a":"\u0000"}',
    rb'{"a":"\ud83d","b":"\uDC00x"}',
    b'{"n":1E400,"m":-0.0,"k":12345678901234567890123}',
    b'{"a":1,"a":2,"a":{"a":null}}',
    '{"ключ": "é\u2028"}'.encode(),
    b"null",
    b' [1 ,\t"\\/"] ',
]
words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
maybe_words = st.none() | words
results = st.builds(Result, st.sampled_from([b"[]", *RAW]), st.booleans())
decisions = st.builds(
    Decision,
    st.sampled_from(["allow", "deny"]),
    st.just("accepted"),
    words,
    st.sampled_from(["stream", "policy"]),
    st.none(),
    maybe_words,
)
ids = (f"call_{number}" for number in itertools.count())


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Any call that the core may hold. A gate's permission is its call's."""
    permission = draw(st.none() | st.sampled_from(["allow", "ask", "deny"]) | words)
    sources, reasons = st.sampled_from(["upstream", "tool", "rule"]), st.sampled_from(["ask", "tool_asks"])
    return Call(
        id=next(ids),
        kind=draw(st.sampled_from(["custom", "builtin", "mcp"])),
        tool=draw(words),
        input=draw(st.sampled_from(RAW)),
        state=draw(st.sampled_from(sorted(STATES))),
        thread_id=draw(maybe_words),
        processed_at=draw(maybe_words),
        permission=permission,
        gate=draw(st.none() | st.builds(Gate, sources, st.just(permission), reasons)),
        decision=draw(st.none() | decisions),
        attempts=draw(st.integers(0, 1_000)),
        outcome_unknown=draw(st.booleans()),
        result=draw(st.none() | results),
        posted=draw(st.booleans()),
        detail=draw(maybe_words),
    )


def undated(call: Call) -> Call:
    """The call without what the store adds to a decision: its id and its time."""
    return call if call.decision is None else replace(call, decision=replace(call.decision, id=None, at=None))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(calls(), min_size=1, max_size=5))
async def test_a_call_comes_back_as_it_was_written(engine: AsyncEngine, written: list[Call]) -> None:
    """Every field, byte for byte, through one batch and back; a run starts with the open ones."""
    async with engine.begin() as connection:
        await connection.execute(text("truncate attachments, calls, decisions"))
    await held_by_r1(engine, MINE)
    async with engine.begin() as connection:
        await write(connection, "r1", [Batch(MINE, calls=written, decided=written)])
        found = await runs.recall(connection, MINE, [call.id for call in written])
        start = await runs.load(connection, SECRETS, MINE)
    assert start is not None
    assert {call.id: call for call in written} == {id_: undated(call) for id_, call in found.items()}
    assert [call.id for call in written if call.state not in END_STATES] == [c.id for c in start.calls]
    assert [call.id for call in written if call.state in END_STATES] == [c.id for c in start.over]
    assert {call.input for call in written} == {call.input for call in (*start.calls, *start.over)}


@pytest.mark.parametrize("left_s", [30.0, 0.25, -4.0, None])
async def test_a_countdown_goes_on_where_it_was(engine: AsyncEngine, left_s: float | None) -> None:
    """R-230, K-18: the rest of it travels, by the database's clock; one that is over stays over."""
    await held_by_r1(engine, MINE)
    progress = Progress(
        "live", 1_700_000_000.123456, 3, "i1", 99.0 if left_s else None, frozenset({"history_degraded"}),
        ("a", "b"), "sthr_1", "cloud",
    )  # fmt: skip
    async with engine.begin() as connection:
        await write(connection, "r1", [Batch(MINE, progress=progress, idle_left_s=left_s)])
        start = await runs.load(connection, SECRETS, MINE)
    assert start is not None
    assert replace(progress, idle_deadline=None) == start.progress
    assert left_s == (None if start.idle_left_s is None else pytest.approx(start.idle_left_s))


async def test_a_batch_without_progress_leaves_the_countdown_alone(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    async with engine.begin() as connection:
        await write(connection, "r1", [Batch(MINE, progress=Progress(idle_deadline=1.0), idle_left_s=30.0)])
        await write(connection, "r1", [Batch(MINE, wish_seen=1)])
        start = await runs.load(connection, SECRETS, MINE)
    assert start is not None
    assert 30.0 == start.idle_left_s


async def test_a_term_that_is_over_has_nothing_to_start_from(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    async with engine.connect() as connection:
        assert await runs.load(connection, SECRETS, Lease(MINE.tenant, MINE.session_id, 2)) is None
        assert await runs.load(connection, SECRETS, Lease("other", MINE.session_id, 1)) is None


async def test_a_run_remembers_the_calls_that_ended_last(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "insert into calls (tenant, session_id, id, kind, tool, input, state)"
                " select 'default', 'sesn_1', 'c' || n, 'custom', 't', '{}', 'posted'"
                " from generate_series(1, :n) n"
            ),
            {"n": runs.OVER_MAX + 10},
        )
        start = await runs.load(connection, SECRETS, MINE)
    assert start is not None
    assert [f"c{number}" for number in range(11, runs.OVER_MAX + 11)] == [call.id for call in start.over]


async def test_a_run_starts_with_the_previews_that_an_earlier_one_left(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    async with engine.begin() as connection:
        await write(connection, "r1", [Batch(MINE, messages=[partial("m1")])])
        start = await runs.load(connection, SECRETS, MINE)
    assert start is not None
    assert ("m1",) == start.open_messages


@pytest.mark.parametrize("gate_by", ["upstream", "tool"])
async def test_a_decision_is_told_until_its_call_is_held_no_more(engine: AsyncEngine, gate_by: str) -> None:
    await held_by_r1(engine, MINE)
    async with engine.begin() as connection:
        for call_id in ("c1", "c2"):
            state = "held" if call_id == "c1" else "queued"
            await add_call(connection, call_id, gate_by=gate_by, state=state)
            await connection.execute(
                insert(tables.decisions).values(
                    tenant="default",
                    session_id="sesn_1",
                    call_id=call_id,
                    id=f"dec_{call_id}",
                    result="allow",
                    status="accepted",
                    decided_by="ann",
                    via="api",
                )
            )
        start = await runs.load(connection, SECRETS, MINE)
    assert start is not None
    assert [("c1", "dec_c1")] == [(call_id, decision.id) for call_id, decision in start.decided]


# ---- deliveries of an earlier run


async def add_delivery(engine: AsyncEngine, call_id: str, *, left_s: float = 60, **values: Any) -> None:
    row: dict[str, Any] = {"attempt": 1, "replica_id": "alive", "tool": "lookup"}
    deadline = text(f"now() + interval '{left_s} s'")
    async with engine.begin() as connection:
        await connection.execute(
            insert(tables.deliveries).values(
                tenant="default", session_id="sesn_1", call_id=call_id, deadline_at=deadline, **(row | values)
            )
        )


async def add_replicas(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "insert into replicas (id, expires_at) values ('alive', now() + interval '5 s'),"
                " ('dead', now() - interval '1 s')"
            )
        )


async def test_a_delivery_may_report_while_its_time_and_its_replica_last(engine: AsyncEngine) -> None:
    """After that nobody is left who could."""
    await held_by_r1(engine, MINE)
    await add_replicas(engine)
    kinds: dict[str, dict[str, Any]] = {
        "under_way": {},
        "late": {"left_s": -1},
        "between_attempts": {"finished_at": text("now()"), "code": "connect_failed"},
        "abandoned": {"finished_at": text("now()"), "code": "abandoned"},
        "of_dead": {"replica_id": "dead"},
        "of_nobody": {"replica_id": "gone"},
        "promised": {"replica_id": "dead", "finished_at": text("now()"), "callback_s": 60, "left_s": 90},
        "broken": {"finished_at": text("now()"), "callback_s": 60, "left_s": -1},
    }
    async with engine.begin() as connection:
        for call_id in (*kinds, "without", "answered"):
            state = "answered" if call_id == "answered" else "dispatched"
            await add_call(connection, call_id, state=state, attempts=1)
    for call_id, values in kinds.items():
        await add_delivery(engine, call_id, **values)
    async with engine.connect() as connection:
        found = await runs.orphans(connection, MINE, [*kinds, "without", "answered", "unknown"])
    left_s = found.pop("promised")
    assert left_s is not None and 80 < left_s <= 90
    hopeful = {"under_way": 0.0, "between_attempts": 0.0}
    assert {**dict.fromkeys({*kinds, "without"} - {"promised"}), **hopeful} == found


async def test_a_result_is_left_for_just_the_call_that_waits_for_it(engine: AsyncEngine) -> None:
    """Fenced by the dispatch: the term may have moved on, the call may not have.

    One that was interrupted meanwhile keeps it too: upstream may ask for that call again.
    """
    await held_by_r1(engine, Lease("default", "sesn_1", 9))
    states = {
        "waits": ("dispatched", 1), "repeated": ("dispatched", 2), "over": ("interrupted", 1),
        "taken": ("answered_elsewhere", 1),
    }  # fmt: skip
    async with engine.begin() as connection:
        for call_id, (state, attempts) in states.items():
            await add_call(connection, call_id, state=state, attempts=attempts)
        for call_id in states:
            for content in (b'["first"]', b'["second"]'):
                result = Result(content, is_error=False)
                await runs.leave_result(connection, MINE, call_id, 1, result, dispatched=1, unknown=False)
    rows = await column(engine, "calls", "array[id, state, result]")
    assert [
        ["over", "interrupted", '["first"]'],
        ["repeated", "dispatched", None],
        ["taken", "answered_elsewhere", None],
        ["waits", "answered", '["first"]'],
    ] == rows


async def test_a_left_result_outlives_what_its_successor_writes_unaware(engine: AsyncEngine) -> None:
    """Promise 2: an interrupt and its revival, seen by a run that began before the result was left."""
    await held_by_r1(engine, MINE)
    left = Result(b'["left"]', is_error=False)
    rows = []
    async with engine.begin() as connection:
        for call_id in ("c1", "c2"):
            await add_call(connection, call_id, state="dispatched", attempts=1)
            await runs.leave_result(connection, MINE, call_id, 3, left, dispatched=1, unknown=False)
    for state in ("interrupted", "dispatched"):
        async with engine.begin() as connection:
            await write(connection, "r1", [Batch(MINE, calls=[a_call("c1", state=state, attempts=1)])])
        rows += (await column(engine, "calls", "array[id, state, attempts::text, result]"))[:1]
    assert [["c1", "interrupted", "3", '["left"]'], ["c1", "answered", "3", '["left"]']] == rows


async def test_a_new_delivery_takes_the_place_of_a_left_result(engine: AsyncEngine) -> None:
    """A person allowed one more delivery of a call whose outcome was unknown: the old one is void."""
    await held_by_r1(engine, MINE)
    async with engine.begin() as connection:
        await add_call(connection, "c1", state="dispatched", attempts=1)
        left = Result(b'["may have run"]', is_error=True)
        await runs.leave_result(connection, MINE, "c1", 1, left, dispatched=1, unknown=True)
        await write(connection, "r1", [Batch(MINE, calls=[a_call("c1", state="dispatched", attempts=2)])])
    assert [["c1", "dispatched", None]] == await column(engine, "calls", "array[id, state, result]")


async def test_the_last_attempts_of_a_run_are_over(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    await add_replicas(engine)
    for call_id, replica_id in (("c1", "alive"), ("c2", "alive"), ("c3", "alive"), ("c4", "dead")):
        await add_delivery(engine, call_id, replica_id=replica_id)
    ended = [AttemptEnd("c1", 1, 200, None, b"\0ok")]
    async with engine.begin() as connection:
        await runs.leave_attempts(connection, "alive", MINE, ended, ["c2", "c4"])
    rows = await column(engine, "deliveries", "array[call_id, (finished_at is null)::text, code]")
    assert [
        ["c1", "false", None],
        ["c2", "false", "abandoned"],
        ["c3", "true", None],
        ["c4", "true", None],
    ] == rows


async def test_a_body_is_kept_as_it_was_first(engine: AsyncEngine) -> None:
    """Promise 4: every delivery of a call sends the same bytes."""
    await held_by_r1(engine, MINE)
    async with engine.begin() as connection:
        assert (None, None) == await runs.body(connection, MINE, "c1")
        for body in (b"\xff\x00{}", b"other"):
            await write(connection, "r1", [Batch(MINE, calls=[a_call("c1")], bodies=[("c1", body, "k1")])])
        assert (b"\xff\x00{}", "k1") == await runs.body(connection, MINE, "c1")


async def test_wishes_are_those_that_nobody_acted_on(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE, Lease("default", "sesn_2", 1))
    async with engine.begin() as connection:
        await write(connection, "r1", [Batch(MINE, wish_seen=1)])
        await connection.execute(text("update attachments set wanted = '{x}', detach_requested = true"))
        found = await runs.wishes(connection, "r1")
        assert [("sesn_2", 1, True, ("x",))] == [
            (wish.session_id, wish.wish, wish.is_detach_requested, wish.wanted) for wish in found
        ]
        assert [] == await runs.wishes(connection, "r2")
        await write(connection, "r1", [Batch(Lease("default", "sesn_2", 1), wish_seen=0)])
        assert 1 == len(await runs.wishes(connection, "r1"))


async def test_what_was_wanted_is_forgotten_once_it_was_looked_for(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    async with engine.begin() as connection:
        await connection.execute(text("update attachments set wanted = '{x}', wish = 3"))
        await write(connection, "r1", [Batch(MINE, wish_seen=2)])
    assert [["x"]] == await column(engine, "attachments", "wanted")
    async with engine.begin() as connection:
        await write(connection, "r1", [Batch(MINE, wish_seen=3)])
    assert [[]] == await column(engine, "attachments", "wanted")


async def test_a_run_learns_who_got_the_deliveries_of_a_call(engine: AsyncEngine) -> None:
    """A call that went to the catch-all is of no use to a registration of its own name."""
    await held_by_r1(engine, MINE)
    async with engine.begin() as connection:
        await add_call(connection, "went", kind="custom", tool="foo", state="dispatched")
        await add_call(connection, "stopped", kind="custom", tool="foo", state="interrupted")
        await add_call(connection, "waits", kind="custom", tool="foo", state="queued")
    await add_delivery(engine, "went", tool="*")
    await add_delivery(engine, "stopped", tool="*")
    async with engine.connect() as connection:
        start = await runs.load(connection, SECRETS, MINE)
    assert start is not None
    served_by = {call.id: call.served_by for call in (*start.calls, *start.over)}
    assert {"went": "*", "stopped": "*", "waits": None} == served_by
