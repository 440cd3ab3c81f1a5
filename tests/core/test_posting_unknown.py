"""Sends of which nobody knows whether they landed: look first, and repeat the same bytes."""

from __future__ import annotations

import pytest

from app.core import protocol as p
from app.core.calls import Call
from app.core.session import Stored
from tests.core.life import (
    Life,
    custom,
    custom_result,
    event,
    refused,
    result,
    stamp,
    unknown,
    unsent,
    use,
    user_result,
)


def posting(value: str = "ok") -> Life:
    """A session whose only call is being posted."""
    life = Life().connect(use("tu1"))
    life.deliver("tu1", value)
    return life


def ours(value: str = "ok") -> p.Findings:
    return p.Findings(answers=(user_result("tu1", value),))


def rejected() -> Life:
    life = posting()
    life.sent("tu1", refused(400, "no such thing"))
    life.looked("tu1")
    return life


@pytest.mark.parametrize("status", [None, 408, 500, 502, 503, 504, 529])
def test_nothing_is_sent_again_before_a_look(status: int | None) -> None:
    """R-209, R-211, R-217: one request, then two lists."""
    life = posting()
    life.sent("tu1", unknown(status))
    assert (1, [2]) == (len(life.sends), [look.rounds for look in life.of(p.Look)])


def test_an_unknown_outcome_that_landed_is_posted() -> None:
    """R-209: exactly one result exists upstream."""
    life = posting()
    life.sent("tu1", unknown())
    life.looked("tu1", ours())
    assert ("posted", 1) == (life.state("tu1"), len(life.sends))


def test_an_unknown_outcome_that_did_not_land_is_sent_again_as_the_same_bytes() -> None:
    """R-210."""
    life = posting()
    life.sent("tu1", unknown())
    life.looked("tu1")
    first, second = life.of(p.Send)
    assert first.event == second.event


@pytest.mark.parametrize("status", [None, 429])
def test_what_was_not_sent_is_sent_again_without_a_look(status: int | None) -> None:
    """R-211: refused at connect, or too many requests."""
    life = posting()
    life.sent("tu1", unsent(status))
    assert (2, []) == (len(life.sends), life.of(p.Look))


def test_a_conflict_is_looked_for_with_the_session() -> None:
    """R-211: 409 takes LIST and RETRIEVE."""
    life = posting()
    life.sent("tu1", unknown(409))
    assert [True] == [look.retrieve for look in life.of(p.Look)]


def test_a_second_conflict_rejects_the_call() -> None:
    """R-211: with the session alive and no result listed."""
    life = posting()
    for _ in range(2):
        life.sent("tu1", unknown(409))
        life.looked("tu1", p.Findings(session=p.SessionFacts(is_over=False)))
    assert ("rejected", 2) == (life.state("tu1"), len(life.sends))


def test_nothing_is_sent_until_a_look_succeeds() -> None:
    """R-212."""
    life = posting()
    life.sent("tu1", unknown())
    for _ in range(5):
        life.looked("tu1", failed=True)
    assert 1 == len(life.sends)
    life.looked("tu1")
    assert 2 == len(life.sends)


RACE = "tool_use_id tu1 does not match any tool use"


def test_a_call_that_upstream_does_not_know_yet_is_tried_again() -> None:
    """R-213: two such answers, then 200."""
    life = posting()
    for _ in range(2):
        life.sent("tu1", refused(400, RACE))
    life.sent("tu1")
    assert ([0.0, 0.5, 1.0], "posted") == ([send.after_s for send in life.of(p.Send)], life.state("tu1"))


def test_a_call_that_upstream_never_knows_is_tried_eight_times() -> None:
    """R-213: then it is a refusal like any other."""
    life = posting()
    for _ in range(8):
        life.sent("tu1", refused(400, RACE))
    assert (8, 1) == (len(life.sends), len(life.of(p.Look)))
    life.looked("tu1")
    assert "rejected" == life.state("tu1")


def test_a_rejected_call_listed_again_is_left_alone() -> None:
    """R-214: neither run nor posted again."""
    tu1 = use("tu1")
    life = Life().connect(tu1)
    life.deliver("tu1")
    life.sent("tu1", refused(400))
    life.looked("tu1")
    life.reconnect(tu1)
    assert (["tu1"], 1) == (life.deliveries, len(life.sends))


def test_a_rejected_call_listed_to_the_next_run_is_left_alone() -> None:
    """R-214: across a restart."""
    tu1 = use("tu1")
    life = Life(stored=rejected().store()).connect(tu1)
    assert ([], []) == (life.deliveries, life.sends)


def test_a_post_that_keeps_failing_is_not_delivered_again_after_a_reconnect() -> None:
    """R-214: one eventual post."""
    tu1 = use("tu1")
    life = Life().connect(tu1)
    life.deliver("tu1")
    life.sent("tu1", unknown(503))
    life.reconnect(tu1)
    life.looked("tu1")
    life.sent("tu1")
    assert (["tu1"], "posted") == (life.deliveries, life.state("tu1"))


def test_a_stuck_post_does_not_hold_up_others() -> None:
    """R-215."""
    life = posting()
    life.sent("tu1", unknown(503))
    life.receive(use("tu2"))
    life.answer("tu2")
    assert ("posting", "posted") == (life.state("tu1"), life.state("tu2"))


def test_an_answer_of_another_client_stops_the_retries() -> None:
    """R-216."""
    life = posting()
    life.sent("tu1", unsent())
    life.receive(user_result("tu1", "theirs"))
    log = life.log("tu1")
    assert ("answered_elsewhere", True, False) == (log["outcome"], log["executed"], log["posted"])
    assert [p.Withdraw("tu1")] == life.of(p.Withdraw)


def test_the_echo_of_our_own_result_is_not_another_clients() -> None:
    """R-209: seen while the send is under way, and while it is retried."""
    life = posting()
    life.receive(user_result("tu1", "ok"))
    life.sent("tu1", unknown())
    assert ("posted", 1) == (life.state("tu1"), len(life.sends))


def test_a_result_of_an_earlier_run_is_looked_for_before_it_is_sent() -> None:
    """D-007: its intent was stored, so it may have left."""
    life = Life(stored=posting().store()).connect()
    assert ([], [2]) == (life.sends, [look.rounds for look in life.of(p.Look)])


def test_a_result_of_an_earlier_run_that_landed_is_not_sent_again() -> None:
    """D-008: the first read of history shows it."""
    life = Life(stored=posting().store()).connect(user_result("tu1", "ok"))
    assert ("posted", []) == (life.state("tu1"), life.sends)


def test_a_custom_result_that_landed_is_recognised() -> None:
    """R-209: whatever the order of its members."""
    life = Life().connect(custom("ctu1"))
    life.deliver("ctu1", result("ok"))
    life.sent("ctu1", unknown())
    life.looked("ctu1", p.Findings(answers=(custom_result("ctu1", "ok"),)))
    assert "posted" == life.state("ctu1")


def test_an_answer_of_the_platform_is_not_ours() -> None:
    """R-203: an interrupt or a refusal of the platform's own."""
    life = posting()
    life.sent("tu1", unknown())
    life.looked("tu1", p.Findings(answers=(event("agent.tool_result", tool_use_id="tu1"),)))
    assert ("answered_elsewhere", False) == (life.state("tu1"), life.calls["tu1"].posted)


@pytest.mark.parametrize(("value", "state"), [("kept", "posted"), ("theirs", "answered_elsewhere")])
def test_a_result_that_upstream_holds_already_is_not_sent_again(value: str, state: str) -> None:
    """R-209, D-009: an earlier run's send was taken, and that run ended before it heard so."""
    call = Call(
        "ctu1", "custom", "echo", b"{}", "answered", attempts=1, result=result("kept"), processed_at=stamp(0)
    )
    life = Life(stored=Stored((call,))).connect(custom_result("ctu1", value))
    assert (state, []) == (life.state("ctu1"), life.sends)
