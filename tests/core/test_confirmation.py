"""Decisions through the service on upstream's gate: sent, taken, refused, and never twice."""

from __future__ import annotations

from typing import Any

import pytest

from app.core import protocol as p
from tests.core.life import (
    Life,
    custom,
    refused,
    unknown,
    unsent,
    use,
    user_result,
    verdict,
)


def held(call_id: str = "tu1", **more: Any) -> Life:
    """A session with one call that upstream asks about."""
    life = Life().connect()
    life.receive(use(call_id, "gated", permission="ask", **more))
    return life


def test_a_decision_is_stored_before_it_is_sent() -> None:
    """R-141: the call stays held, its decision on the way."""
    life = held()
    effects = life.decide("tu1", "allow")
    assert [p.SaveCall, p.Send] == [type(effect) for effect in effects]
    assert ("held", "sending") == (
        life.state("tu1"),
        life.calls["tu1"].decision and life.calls["tu1"].decision.status,
    )


def test_an_allow_is_sent_as_a_confirmation() -> None:
    """R-141: its bytes name the call and the verdict, nothing else."""
    life = held()
    life.decide("tu1", "allow")
    assert [{"type": "user.tool_confirmation", "tool_use_id": "tu1", "result": "allow"}] == life.sends


def test_an_accepted_allow_releases_the_call() -> None:
    """R-141: the answer to the send comes first."""
    life = held()
    life.decide("tu1", "allow")
    life.sent("tu1")
    assert ["tu1"] == life.deliveries


def test_the_echo_of_an_allow_releases_the_call() -> None:
    """R-141: the echo comes first, and the decision stays that of the person who made it."""
    life = held()
    life.decide("tu1", "allow")
    life.receive(verdict("tu1", "allow"))
    decision = life.calls["tu1"].decision
    assert (["tu1"], "ana", "accepted") == (
        life.deliveries,
        decision and decision.by,
        decision and decision.status,
    )


@pytest.mark.parametrize("is_echo_first", [True, False])
def test_an_allow_seen_twice_releases_once(is_echo_first: bool) -> None:
    """R-141: one delivery, whatever comes first."""
    life = held()
    life.decide("tu1", "allow")
    if is_echo_first:
        life.receive(verdict("tu1", "allow"))
        life.sent("tu1")
    else:
        life.sent("tu1")
        life.receive(verdict("tu1", "allow"))
    assert (["tu1"], 1) == (life.deliveries, len(life.sends))


def test_the_echo_of_a_sent_allow_stops_its_repetition() -> None:
    """R-141, R-142: the verdict landed although its answer was lost."""
    life = held()
    life.decide("tu1", "allow")
    life.sent("tu1", unknown(503))
    life.receive(verdict("tu1", "allow"))
    life.looked("tu1")
    assert (["tu1"], 1) == (life.deliveries, len(life.sends))


def test_a_call_stays_held_until_upstream_took_the_allow() -> None:
    """R-142: 503, 503, 200; each failure is looked into before the next try."""
    life = held()
    life.decide("tu1", "allow")
    for _ in range(2):
        life.sent("tu1", unknown(503))
        life.looked("tu1")
        assert "held" == life.state("tu1")
    life.sent("tu1")
    assert ["tu1"] == life.deliveries


def test_an_allow_that_failed_is_sent_again_with_growing_waits() -> None:
    """R-142, K-26."""
    life = held()
    life.decide("tu1", "allow")
    for _ in range(3):
        life.sent("tu1", unsent(429))
    assert [0.0, 1.0, 2.0, 4.0] == [send.after_s for send in life.of(p.Send)]


@pytest.mark.parametrize("result", ["allow", "deny"])
def test_a_refused_verdict_is_looked_for(result: str) -> None:
    """R-143: history is read before the decision is dropped."""
    life = held()
    life.decide("tu1", result)
    life.sent("tu1", refused(400))
    assert ("held", 1) == (life.state("tu1"), len(life.of(p.Look)))


def test_a_refused_verdict_is_dropped_when_history_shows_none() -> None:
    """R-143: the call is still held, and upstream's words are kept for whoever decided."""
    life = held()
    life.decide("tu1", "allow")
    life.sent("tu1", refused(400, "not now"))
    life.looked("tu1")
    decision = life.calls["tu1"].decision
    assert ("held", "refused", "not now") == (
        life.state("tu1"), decision and decision.status, decision and decision.refusal
    )  # fmt: skip
    assert (None, []) == (life.calls["tu1"].confirmation, life.deliveries)


@pytest.mark.parametrize(("theirs", "state"), [("allow", "dispatched"), ("deny", "denied")])
def test_the_verdict_that_history_shows_replaces_a_refused_one(theirs: str, state: str) -> None:
    """R-143: somebody decided before us."""
    life = held()
    life.decide("tu1", "allow")
    life.sent("tu1", refused(400))
    life.looked("tu1", p.Findings(verdicts=(verdict("tu1", theirs),)))
    assert state == life.state("tu1")


def test_a_deny_in_history_beats_an_allow_in_it() -> None:
    """R-143, R-137: deny is sticky."""
    life = held()
    life.decide("tu1", "allow")
    life.sent("tu1", refused(400))
    life.looked("tu1", p.Findings(verdicts=(verdict("tu1", "allow"), verdict("tu1", "deny"))))
    assert ("denied", []) == (life.state("tu1"), life.deliveries)


def test_the_answer_that_history_shows_ends_a_call_whose_verdict_was_refused() -> None:
    """R-143: the call was answered elsewhere."""
    life = held()
    life.decide("tu1", "allow")
    life.sent("tu1", refused(400))
    life.looked("tu1", p.Findings(answers=(user_result("tu1"),)))
    assert "answered_elsewhere" == life.state("tu1")


def test_a_call_can_be_decided_again_after_a_refusal() -> None:
    """R-143: it is held as before."""
    life = held()
    life.decide("tu1", "allow", id="dec_1")
    life.sent("tu1", refused(400))
    life.looked("tu1")
    life.decide("tu1", "deny", id="dec_2")
    life.sent("tu1")
    assert ("denied", "dec_2") == (
        life.state("tu1"),
        life.calls["tu1"].decision and life.calls["tu1"].decision.id,
    )


def test_a_refused_allow_suffices_where_upstream_never_asked() -> None:
    """R-143, promise 1: the hold was ours, for want of a policy."""
    life = Life(agent_tools=None).connect(use("tu1"))
    life.decide("tu1", "allow")
    life.sent("tu1", refused(400))
    life.looked("tu1")
    assert ["tu1"] == life.deliveries


def test_no_result_leaves_before_the_allow_was_accepted() -> None:
    """R-144: upstream refuses one."""
    life = held()
    life.decide("tu1", "allow")
    life.sent("tu1", unknown(503))
    life.looked("tu1")
    assert ["user.tool_confirmation"] * 2 == [sent["type"] for sent in life.sends]


def test_a_deny_message_is_sent() -> None:
    """R-145."""
    life = held()
    life.decide("tu1", "deny", message="no")
    assert ("deny", "no") == (life.sends[0]["result"], life.sends[0]["deny_message"])


def test_an_accepted_deny_is_final() -> None:
    """R-146: no result is posted, and the echo changes nothing."""
    life = held()
    life.decide("tu1", "deny")
    life.sent("tu1")
    before = life.calls["tu1"]
    life.receive(verdict("tu1", "deny"), verdict("tu1", "allow"))
    assert ("denied", before, 1) == (before.state, life.calls["tu1"], len(life.sends))


def test_a_confirmation_names_the_thread_only_when_upstream_asks_for_it() -> None:
    """R-148: left out first, sent once more with it."""
    life = held(thread="th1")
    life.decide("tu1", "allow")
    life.sent("tu1", refused(400, "session_thread_id is required"))
    assert [None, "th1"] == [sent.get("session_thread_id") for sent in life.sends]


def test_a_confirmation_is_not_sent_a_third_time_for_its_thread() -> None:
    """R-148: once more, and then it is a refusal like any other."""
    life = held(thread="th1")
    life.decide("tu1", "allow")
    life.sent("tu1", refused(400, "session_thread_id is required"))
    life.sent("tu1", refused(400, "session_thread_id is unknown"))
    assert (2, 1) == (len(life.sends), len(life.of(p.Look)))


def test_a_result_names_the_thread_only_when_upstream_asks_for_it() -> None:
    """R-148: the same for a result."""
    life = Life().connect(custom("ctu1", thread="th1"))
    life.deliver("ctu1")
    life.sent("ctu1", refused(400, "session_thread_id is required"))
    assert [None, "th1"] == [sent.get("session_thread_id") for sent in life.sends]


def test_a_decision_of_an_earlier_run_is_looked_for_before_it_is_sent() -> None:
    """D-010 b: no verdict there, so exactly one confirmation leaves."""
    first = held()
    first.decide("tu1", "allow")
    life = Life(stored=first.store()).connect()
    assert ([], 1) == (life.sends, len(life.of(p.Look)))
    life.looked("tu1")
    assert 1 == len(life.sends)


def test_a_decision_that_an_earlier_run_sent_is_not_sent_again() -> None:
    """D-010 c: the look shows the verdict."""
    first = held()
    first.decide("tu1", "allow")
    life = Life(stored=first.store()).connect()
    life.looked("tu1", p.Findings(verdicts=(verdict("tu1", "allow"),)))
    assert ([], ["tu1"]) == (life.sends, life.deliveries)


def test_a_decision_on_a_call_that_is_over_is_refused() -> None:
    """D-053: with what became of it."""
    life = held()
    life.receive(user_result("tu1"))
    life.decide("tu1", "allow")
    assert [p.RefuseDecision("tu1", "dec_1", "The call is answered_elsewhere.")] == life.of(p.RefuseDecision)


def test_a_decision_fed_twice_is_sent_once() -> None:
    """D-050: the runner may tell of the same decision again."""
    life = held()
    life.decide("tu1", "allow")
    life.decide("tu1", "allow")
    assert 1 == len(life.sends)


def test_a_second_decision_does_not_overtake_the_first() -> None:
    """D-051: the first one is on its way."""
    life = held()
    life.decide("tu1", "allow", id="dec_1")
    life.decide("tu1", "deny", id="dec_2")
    assert (1, ["dec_2"]) == (len(life.sends), [e.decision_id for e in life.of(p.RefuseDecision)])


def test_a_decision_on_a_call_that_needs_none_is_refused() -> None:
    """D-057: nothing is sent."""
    life = Life().connect(custom("ctu1"))
    life.decide("ctu1", "deny")
    assert ([], ["dec_1"]) == (life.sends, [e.decision_id for e in life.of(p.RefuseDecision)])
