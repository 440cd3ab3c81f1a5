"""A call's life, cut at every point: what the store held then, and what a successor makes of it.

Each row is repeated for every `retry`: only a tool that recognises the `webhook-id` is ever called again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from app.core import protocol as p
from app.core.calls import Call, Decision, Gate, State
from app.core.routing import EPISODES_MAX
from app.core.session import Stored
from app.core.tools import Tool
from tests.core.life import (
    ECHO,
    Life,
    custom,
    custom_result,
    idle,
    result,
    stamp,
    unknown,
    unsent,
    use,
    verdict,
)

KEPT = result("kept")
RETRIES = ("never", "connect_only", "safe")


def tool(retry: str, **values: object) -> Tool:
    return replace(ECHO, retry=retry, **values)  # type: ignore[arg-type]


def stored(id: str, state: State, **values: object) -> Call:
    """A call as the store holds it."""
    values = {"attempts": int(state not in ("queued", "held")), **values}
    values["episodes"] = int(state == "dispatched")
    if state in ("answered", "posting", "posted"):
        values["result"] = KEPT
    if state == "posted":
        values["posted"] = True
    return Call(id, "custom", "echo", b"{}", state, processed_at=stamp(0), **values)  # type: ignore[arg-type]


def left_by(life: Life, before: Stored) -> Stored:
    """What the store holds after a run over `before`."""
    calls = {call.id: call for call in (*before.calls, *before.over)} | life.calls
    open_ = tuple(call for call in calls.values() if not call.is_over)
    over = tuple(call for call in calls.values() if call.is_over)
    return Stored(open_, over, life.machine.progress)


def settle(life: Life, *, is_refusing: frozenset[str] = frozenset()) -> Life:
    """Webhooks answer, looks find nothing, and upstream takes every send, until nothing more is done."""
    done = 0
    while done < len(life.effects):
        effect = life.effects[done]
        done += 1
        match effect:
            case p.Deliver():
                life.deliver(effect.call.id, "again")
            case p.Look():
                life.looked(effect.call_id)
            case p.Send() if effect.call_id in is_refusing:
                if effect.after_s < 8:
                    life.sent(effect.call_id, unsent(503))
            case p.Send():
                life.sent(effect.call_id)
            case _:
                pass
    return life


def sent_for(life: Life, call_id: str) -> list[p.Send]:
    return [send for send in life.of(p.Send) if send.call_id == call_id]


def recover(retry: str, call: Call | None, *, is_answered: bool = False) -> Life:
    """Start a run over the stored call; nobody is left who could report a delivery of it."""
    over = (call,) if call is not None and call.is_over else ()
    open_ = (call,) if call is not None and not call.is_over else ()
    life = Life(tools=(tool(retry),), stored=Stored(open_, over))
    history = [custom("ctu1"), custom_result("ctu1", "kept")][: 1 + is_answered]
    life.connect(*history)
    if call is not None and call.state == "dispatched":
        life.notice(p.Orphaned("ctu1"))
    return settle(life)


@dataclass(frozen=True)
class Row:
    """What was stored at the kill, and what is to happen after it with a tool that recognises its calls."""

    call: Call | None
    deliveries: int
    sends: int
    looks: int = 0
    is_answered: bool = False
    is_in_doubt: bool = False
    """Whether a delivery may have reached the tool without its outcome being known."""


ROWS = {
    "D-001 nothing recorded": Row(None, 1, 1),
    "D-002 queued": Row(stored("ctu1", "queued"), 1, 1),
    "D-003, D-004, D-005 dispatched": Row(stored("ctu1", "dispatched"), 1, 1, is_in_doubt=True),
    "D-006 answered": Row(stored("ctu1", "answered"), 0, 1),
    "D-007 posting, and nothing there": Row(stored("ctu1", "posting"), 0, 1, looks=1),
    "D-008 posting, and it landed": Row(stored("ctu1", "posting"), 0, 0, is_answered=True),
    "D-009 posted": Row(stored("ctu1", "posted"), 0, 0, is_answered=True),
}


@pytest.mark.parametrize("retry", RETRIES)
@pytest.mark.parametrize("name", ROWS)
def test_a_kill_at_any_point_loses_nothing_and_repeats_nothing_unasked(name: str, retry: str) -> None:
    """D-001, D-002, D-003, D-004, D-005, D-006, D-007, D-008, D-009, for each `retry`."""
    row = ROWS[name]
    life = recover(retry, row.call, is_answered=row.is_answered)
    is_told = row.is_in_doubt and retry != "safe"
    assert (0 if is_told else row.deliveries) == len(life.deliveries)
    assert (row.sends, row.looks) == (len(life.sends), len(life.of(p.Look)))
    if row.call is None or not row.call.is_over:
        assert ("posted", is_told) == (life.state("ctu1"), life.calls["ctu1"].outcome_unknown)
    else:
        assert {} == life.calls  # one record, written before the kill, and never again
    if row.sends:
        text = "may have run" if is_told else ("kept" if row.call and row.call.result else "again")
        assert (is_told, True) == (life.sends[0]["is_error"], text in life.sends[0]["content"][0]["text"])
    if life.deliveries and row.is_in_doubt:
        assert 2 == life.of(p.Deliver)[0].call.attempts


@pytest.mark.parametrize("retry", RETRIES)
def test_at_most_one_delivery_reaches_a_tool_that_does_not_recognise_its_calls(retry: str) -> None:
    """D-003, D-004, D-005, five kills in a row: the second run settles it, the others find it over."""
    kept, delivered = Stored(), 0
    for _ in range(6):
        life = Life(tools=(tool(retry),), stored=kept).connect(custom("ctu1"))
        life.notice(p.Orphaned("ctu1"))
        delivered += len(life.deliveries)
        for send in life.of(p.Send):
            life.sent(send.call_id)
        kept = left_by(life, kept)
    assert ["posted"] == [call.state for call in kept.over]
    assert (EPISODES_MAX if retry == "safe" else 1) == delivered


GATE = Gate("upstream", "ask", "ask")
ALLOW = Decision("allow", "sending", "ana", "api", None, None, "dec_1")


def gated(state: State = "held", decision: Decision | None = None) -> Call:
    call = Call("tu1", "builtin", "echo", b"{}", state, processed_at=stamp(0), permission="ask", gate=GATE)
    return replace(call, decision=decision)


def test_a_kill_after_the_hold_leaves_the_call_pending() -> None:
    """D-010 a: still held, and nothing is sent."""
    life = settle(Life(stored=Stored((gated(),))).connect(use("tu1", permission="ask")))
    assert ([], [], {}) == (life.sends, life.deliveries, life.calls)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_kill_around_the_confirmation_leaves_upstream_with_one(is_there: bool) -> None:
    """D-010 b, c: history is looked at before a confirmation is sent, and one delivery follows."""
    history = [use("tu1", permission="ask"), verdict("tu1", "allow")][: 1 + is_there]
    life = settle(Life(stored=Stored((gated(decision=ALLOW),))).connect(*history))
    verdicts = [sent for sent in life.sends if sent["type"] == "user.tool_confirmation"]
    assert (1 - is_there, ["tu1"], "posted") == (len(verdicts), life.deliveries, life.state("tu1"))


def test_a_kill_after_the_confirmation_was_recorded_delivers_once() -> None:
    """D-010 d: allowed and queued; no second confirmation."""
    call = gated("queued", replace(ALLOW, status="accepted"))
    history = (use("tu1", permission="ask"), verdict("tu1", "allow"))
    life = settle(Life(stored=Stored((call,))).connect(*history))
    assert (["tu1"], ["user.tool_result"]) == (life.deliveries, [sent["type"] for sent in life.sends])


# ---- position


def test_the_position_moves_only_with_a_history_that_was_read() -> None:
    """D-011: a stream loses events without a word, so what came live moves nothing."""
    calls = [custom(f"ctu{n}") for n in range(20)]
    life = Life().connect(calls[0])
    life.receive(*calls[1:])
    assert calls[0].at == life.machine.progress.cursor_at
    assert {call.id for call in calls} == set(life.calls)


def test_what_a_stream_lost_long_ago_is_found_by_the_next_read() -> None:
    """D-011, R-091: the lost call is older than the overlap when history is read again."""
    first, lost, *later = (custom(f"ctu{n}", at=1000.0 * n) for n in range(1, 5))
    life = Life().connect(first)
    life.receive(*later)
    life.closed(unknown())
    read = next(effect for effect in life.opened() if isinstance(effect, p.ReadHistory))
    assert read.since is not None
    life.page(*(one for one in (first, lost, *later) if one.at >= read.since))
    life.read()
    assert {"ctu1", "ctu2", "ctu3", "ctu4"} == set(life.calls)


def test_an_event_that_was_handled_twice_changes_nothing() -> None:
    """D-011: the position was not stored, the call was."""
    first = Life(tools=(tool("safe"),)).connect(custom("ctu1"))
    before = first.store(cursor_at=None)
    life = Life(tools=(tool("safe"),), stored=before).connect(custom("ctu1"))
    life.receive(custom("ctu1"))
    assert ([], [], {}) == (life.deliveries, life.sends, life.calls)


def test_a_kill_during_a_read_of_history_leaves_nothing_begun() -> None:
    """D-012: two pages of five; the next run reads from the same bound and finds what the rest holds."""
    pages = [[custom(f"ctu{n}")] for n in range(4)] + [[custom_result("ctu0")]]
    first = Life()
    first.retrieved()
    first.opened()
    for page in pages[:2]:
        first.page(*page)
    assert ([], {}) == (first.deliveries, first.calls)
    life = Life(stored=first.store())
    life.retrieved()
    life.opened()
    assert [read.since for read in first.of(p.ReadHistory)] == [read.since for read in life.of(p.ReadHistory)]
    for page in pages:
        life.page(*page)
    assert [] == life.deliveries
    life.read()
    assert ["ctu1", "ctu2", "ctu3"] == life.deliveries


# ---- the idle end


def test_a_kill_while_the_idle_end_is_committed_keeps_the_deadline() -> None:
    """D-013: the end was not stored, so the next run counts on to the same deadline, and ends there."""
    trailing = idle(at=0, id="i1")
    first = Life(max_idle_s=60).connect(trailing)
    deadline = first.machine.progress.idle_deadline
    before = first.store()
    first.at(60)
    assert p.End("idle") == first.end
    life = Life(max_idle_s=60, stored=before)
    life.now = 50
    life.connect(trailing)
    assert deadline == life.machine.progress.idle_deadline
    life.at(59.9)
    assert None is life.end
    life.at(60)
    assert p.End("idle") == life.end


def test_a_call_recorded_before_the_idle_end_keeps_the_session_from_ending() -> None:
    """D-013: never ended with an unserved call."""
    trailing = idle(at=0, id="i1")
    first = Life(max_idle_s=60).connect(trailing)
    first.receive(custom("ctu1", at=1))
    life = Life(max_idle_s=60, tools=(tool("safe"),), stored=first.store()).connect(
        trailing, custom("ctu1", at=1)
    )
    life.at(3_600)
    assert None is life.end
    life.notice(p.Orphaned("ctu1"))
    assert ["ctu1"] == life.deliveries


# ---- a call that takes its process down


def lives(retry: str, kills: int, **values: object) -> Life:
    """A call whose process dies each time before the answer is stored; the run after the last kill."""
    kept, tools = Stored(), (tool(retry, **values),)
    for _ in range(1 + kills):
        life = Life(tools=tools, stored=kept).connect(custom("ctu1"))
        life.notice(p.Orphaned("ctu1"))
        kept = left_by(life, kept)
    return life


def test_a_poisonous_call_is_given_up_after_three_episodes() -> None:
    """D-014: one error result says so, and the session goes on."""
    life = lives("safe", kills=3)
    assert ([], 1, True) == (life.deliveries, len(life.sends), life.sends[0]["is_error"])
    assert "could not be completed" in life.sends[0]["content"][0]["text"]
    life.sent("ctu1")
    assert ("posted", True) == (life.state("ctu1"), life.calls["ctu1"].outcome_unknown)
    life.receive(custom("ctu2"))
    assert ["ctu2"] == life.deliveries


def test_a_call_that_is_no_poison_is_delivered_up_to_three_times() -> None:
    """D-014: two kills are bad luck."""
    life = lives("safe", kills=2)
    assert (["ctu1"], 3) == (life.deliveries, life.calls["ctu1"].attempts)


def test_a_poisonous_call_goes_to_a_person_where_the_tool_says_ask() -> None:
    """D-014: and to allow it delivers it once more."""
    life = lives("safe", kills=3, on_unknown="ask")
    assert ("held", []) == (life.state("ctu1"), life.sends)
    life.decide("ctu1", "allow")
    assert ["ctu1"] == life.deliveries


def test_retries_within_one_episode_are_no_episodes() -> None:
    """D-014: a tool that was unwell for ten attempts is not a call that kills us."""
    call = replace(stored("ctu1", "dispatched"), attempts=10)
    life = Life(tools=(tool("safe"),), stored=Stored((call,))).connect(custom("ctu1"))
    life.notice(p.Orphaned("ctu1"))
    assert (["ctu1"], 11) == (life.deliveries, life.calls["ctu1"].attempts)


# ---- twice, and many


@pytest.mark.parametrize("order", ["lost landed", "landed", "lost lost landed"])
def test_sends_of_unknown_outcome_in_a_row_leave_one_result_upstream(order: str) -> None:
    """D-016: each kill is before (D-007) or after (D-008) upstream took the send."""
    kept, history = Stored((stored("ctu1", "answered"),)), [custom("ctu1")]
    for outcome in order.split():
        life = Life(stored=kept).connect(*history)
        if life.of(p.Look):
            assert [] == life.sends
            life.looked("ctu1")
        assert 1 == len(life.sends)
        if outcome == "landed":
            history.append(custom_result("ctu1", "kept"))
        kept = left_by(life, kept)
        assert ["posting"] == [call.state for call in kept.calls]
    life = settle(Life(stored=kept).connect(*history))
    assert ("posted", [], []) == (life.state("ctu1"), life.sends, life.deliveries)


@pytest.mark.parametrize("retry", RETRIES)
def test_each_of_many_calls_meets_its_own_row(retry: str) -> None:
    """D-017: 40 calls in all states; one whose post is refused each time keeps none of the others back."""
    states: tuple[State, ...] = ("queued", "dispatched", "answered", "posting", "posted")
    calls = [stored(f"ctu{n}", states[n % 5]) for n in range(40)]
    open_ = tuple(call for call in calls if not call.is_over)
    over = tuple(call for call in calls if call.is_over)
    landed = {call.id for call in calls if call.state == "posted"} | {"ctu3", "ctu8"}
    stuck = frozenset({"ctu2", "ctu35"})
    history = [custom(call.id) for call in calls] + [custom_result(id_, "kept") for id_ in landed]
    life = Life(tools=(tool(retry),), stored=Stored(open_, over), concurrency=32).connect(*history)
    for call in open_:
        if call.state == "dispatched":
            life.notice(p.Orphaned(call.id))
    settle(life, is_refusing=stuck)
    for call in calls:
        is_repeated = call.state == "queued" or (call.state == "dispatched" and retry == "safe")
        assert is_repeated == (call.id in life.deliveries), call
        if call.id in landed:
            assert [] == sent_for(life, call.id), call
        elif call.id not in stuck:
            assert 1 == len(sent_for(life, call.id)), call
        if not call.is_over:
            assert ("posting" if call.id in stuck else "posted") == life.state(call.id), call
    assert len(life.deliveries) == len(set(life.deliveries))


def test_a_call_that_waited_for_days_over_many_restarts_is_released_once() -> None:
    """D-059: three days, twenty restarts and as many reconnects, and upstream still lists it unanswered."""
    held = use("tu1", permission="ask", at=0)
    kept, sends = Stored(), 0
    for day in range(20):
        life = Life(stored=kept)
        life.now = day * 3 * 86_400 / 20
        life.connect(held).reconnect(held)
        sends += len(life.sends)
        kept = left_by(life, kept)
        assert (["held"], []) == ([call.state for call in kept.calls], life.deliveries)
    life = Life(stored=kept).connect(held)
    life.decide("tu1", "allow")
    settle(life)
    life.reconnect(held, verdict("tu1", "allow"))
    assert (0, ["tu1"], "posted") == (sends, life.deliveries, life.state("tu1"))
    assert ["user.tool_confirmation", "user.tool_result"] == [sent["type"] for sent in life.sends]
