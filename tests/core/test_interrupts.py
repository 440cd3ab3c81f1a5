"""Interrupts: what they settle, in which scope, and how a call comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core import protocol as p
from app.core.calls import Call
from app.core.session import Stored
from tests.core.life import (
    ECHO,
    T0,
    Life,
    custom,
    event,
    idle,
    mcp,
    refused,
    stamp,
    text,
    unknown,
    unsent,
    use,
    verdict,
)


def interrupt(at: float | str | None = "next", thread: str | None = None, event_id: str | None = None) -> Any:
    return event("user.interrupt", event_id, at=at, session_thread_id=thread)


def ask(call_id: str = "tu1", **more: Any) -> Any:
    return use(call_id, "gated", permission="ask", **more)


def test_an_interrupt_settles_held_and_waiting_calls() -> None:
    """R-310: no delivery, nothing posted."""
    life = Life(concurrency=1).connect()
    life.receive(use("tu0"), ask("tu1"), use("tu2"), interrupt())
    life.deliver("tu0")
    assert ("interrupted", "interrupted") == (life.state("tu1"), life.state("tu2"))
    assert (["tu0"], []) == (life.deliveries, life.sends)


def test_an_interrupt_empties_the_blocker_set() -> None:
    """R-310: the countdown may start."""
    life = Life(max_idle_s=60).connect()
    life.receive(ask(), idle(), interrupt())
    life.at(60)
    assert p.End("idle") == life.end


def test_a_decision_on_an_interrupted_call_is_refused() -> None:
    """R-310: confirmations are closed."""
    life = Life().connect()
    life.receive(ask(), interrupt())
    life.decide("tu1", "allow")
    assert ([], ["dec_1"]) == (life.sends, [effect.decision_id for effect in life.of(p.RefuseDecision)])


def test_a_call_in_flight_finishes_and_is_not_posted() -> None:
    """R-311: its result is kept."""
    life = Life().connect()
    life.receive(use("tu1"), interrupt())
    life.deliver("tu1", "late")
    log = life.log("tu1")
    assert ("interrupted", True, False, text("late")) == (
        log["outcome"], log["executed"], log["posted"], log["result"]
    )  # fmt: skip
    assert [] == life.sends


def test_a_post_that_fails_stops_with_an_interrupt() -> None:
    """R-312: what waits is withdrawn."""
    life = Life().connect(use("tu1"))
    life.deliver("tu1")
    life.sent("tu1", unsent())
    life.receive(interrupt())
    assert ("interrupted", [p.Withdraw("tu1")]) == (life.state("tu1"), life.of(p.Withdraw))


def test_the_answer_decides_of_a_post_that_was_under_way() -> None:
    """R-312: upstream took it before it stopped."""
    life = Life().connect(use("tu1"))
    life.deliver("tu1")
    life.receive(interrupt())
    life.sent("tu1")
    assert ("posted", True) == (life.state("tu1"), life.log("tu1")["posted"])


def test_a_post_under_way_that_was_not_sent_is_not_repeated_after_an_interrupt() -> None:
    """R-312."""
    life = Life().connect(use("tu1"))
    life.deliver("tu1")
    life.receive(interrupt())
    life.sent("tu1", unsent())
    assert ("interrupted", 1) == (life.state("tu1"), len(life.sends))


def test_a_queued_interrupt_settles_nothing() -> None:
    """R-313."""
    life = Life().connect()
    life.receive(ask(), interrupt(at=None))
    assert "held" == life.state("tu1")


def test_a_queued_interrupt_counts_once_it_is_processed() -> None:
    """R-313: it comes again, with its time."""
    life = Life().connect()
    life.receive(ask(), interrupt(at=None, event_id="n1"), interrupt(event_id="n1"))
    assert "interrupted" == life.state("tu1")


def test_an_interrupt_of_a_thread_settles_only_its_calls() -> None:
    """R-314."""
    life = Life().connect()
    life.receive(ask("a", thread="th1"), ask("b", thread="th2"), ask("c"), interrupt(thread="th1"))
    assert ("interrupted", "held", "held") == (life.state("a"), life.state("b"), life.state("c"))


def primary_known() -> Life:
    """A session whose log names its primary thread first."""
    return Life().connect(event("session.thread_status_running", session_thread_id="th0"))


def test_an_interrupt_of_the_primary_thread_settles_calls_without_a_thread() -> None:
    """R-314: its id is known from a complete read."""
    life = primary_known()
    life.receive(ask("a"), ask("b", thread="th1"), interrupt(thread="th0"))
    assert ("interrupted", "held") == (life.state("a"), life.state("b"))


def test_an_interrupt_of_an_unknown_thread_settles_nothing_without_a_thread() -> None:
    """R-314: it may be another thread's."""
    life = Life().connect()
    life.receive(ask("a"), interrupt(thread="th0"))
    assert "held" == life.state("a")


def test_a_window_that_reaches_back_to_the_sessions_beginning_names_it_too() -> None:
    """R-314: and what an interrupt of that name had left open is settled then."""
    life = Life()
    life.facts = replace(life.facts, created_at=T0)
    life.connect()
    running = event("session.thread_status_running", session_thread_id="th0", at=1.0)
    life.receive(ask("a", at=2.0), interrupt(thread="th0", at=3.0))
    assert "held" == life.state("a")
    life.reconnect(running)
    assert "interrupted" == life.state("a")


def test_the_primary_thread_is_remembered_across_restarts() -> None:
    """R-314: a bounded read does not name it again."""
    first = primary_known()
    first.receive(ask("a"))
    life = Life(stored=first.store()).connect()
    life.receive(interrupt(thread="th0"))
    assert "interrupted" == life.state("a")


def test_the_order_of_a_history_does_not_matter() -> None:
    """R-315: times decide."""
    life = Life().connect(interrupt(at=5.0), use("tu1", at=3.0), use("tu2", at=9.0))
    assert ("interrupted", ["tu2"]) == (life.state("tu1"), life.deliveries)


def test_a_call_of_the_same_moment_is_settled() -> None:
    """R-315: not later means settled."""
    life = Life().connect(use("tu1", at=5.0), interrupt(at=5.0))
    assert "interrupted" == life.state("tu1")


def test_a_held_call_comes_back_held() -> None:
    """R-316: upstream asks for it again."""
    life = Life().connect()
    life.receive(ask(), interrupt(), idle("requires_action", "tu1"))
    assert ("held", []) == (life.state("tu1"), life.deliveries)


def test_a_waiting_call_comes_back_queued() -> None:
    """R-316: and runs once a slot is free."""
    life = Life(concurrency=1).connect()
    life.receive(use("tu0"), use("tu1"), interrupt(), idle("requires_action", "tu1"))
    assert "queued" == life.state("tu1")
    life.deliver("tu0")
    assert ["tu0", "tu1"] == life.deliveries


def test_a_call_with_a_result_comes_back_as_a_post() -> None:
    """R-316: without a new delivery, whether or not the core looks first."""
    life = Life().connect()
    life.receive(use("tu1"), interrupt())
    life.deliver("tu1", "late")
    life.receive(idle("requires_action", "tu1"))
    life.looked("tu1")
    assert (["tu1"], [text("late")]) == (life.deliveries, [sent["content"] for sent in life.sends])


def test_a_call_in_flight_comes_back_and_is_posted_when_it_answers() -> None:
    """R-316: its delivery never stopped."""
    life = Life().connect()
    life.receive(use("tu1"), interrupt(), idle("requires_action", "tu1"))
    life.answer("tu1")
    assert (["tu1"], "posted") == (life.deliveries, life.state("tu1"))


def revived() -> Life:
    """A call that was interrupted, asked for again, and is being posted."""
    life = Life().connect()
    life.receive(use("tu1"), interrupt(), idle("requires_action", "tu1"))
    life.deliver("tu1")
    return life


def test_a_revived_call_whose_post_fails_is_posted_again() -> None:
    """R-316, R-211: the old interrupt is no reason to give up; upstream waits for the answer."""
    life = revived()
    life.sent("tu1", unsent(429))
    assert ("posting", 2) == (life.state("tu1"), len(life.sends))


def test_a_revived_call_is_not_settled_by_the_old_interrupt_in_a_look() -> None:
    """R-316, R-209: nor is it when history is read for it."""
    life = Life().connect()
    stop = interrupt()
    life.receive(use("tu1", at=1.0), stop, idle("requires_action", "tu1"))
    life.deliver("tu1")
    life.sent("tu1", unknown())
    life.looked("tu1", p.Findings(interrupts=(stop,)))
    assert ("posting", 2) == (life.state("tu1"), len(life.sends))


def test_the_delivery_of_a_revived_call_may_still_report() -> None:
    """R-316: an earlier run began it, so nobody here knows; it is watched before it is given up."""
    call = Call("ctu1", "custom", "echo", b"{}", "dispatched", attempts=1, episodes=1, processed_at=stamp(0))
    life = Life(stored=Stored((call,)))
    life.connect(interrupt(at=1), idle("requires_action", "ctu1", at=2))
    assert [p.Watch("ctu1")] == life.of(p.Watch)
    assert ("dispatched", []) == (life.state("ctu1"), life.sends)
    life.deliver("ctu1", "kept")
    assert ["kept"] == [sent["content"][0]["text"] for sent in life.sends]


def test_a_revived_call_is_not_released_by_a_decision_that_upstream_never_took() -> None:
    """R-316, R-144: its confirmation was still on its way when it was interrupted."""
    life = Life().connect()
    life.receive(ask())
    life.decide("tu1", "allow")
    life.receive(interrupt(), idle("requires_action", "tu1"))
    assert ("held", []) == (life.state("tu1"), life.deliveries)


def test_a_verdict_that_landed_after_the_interrupt_counts_once_revived() -> None:
    """R-316: its sender is gone, and upstream must get no second one."""
    call = Call("tu1", "builtin", "gated", b"{}", "interrupted", permission="ask", processed_at=stamp(0))
    life = Life(stored=Stored((), (call,)))
    life.connect(interrupt(at=1), verdict("tu1", "allow", at=2), idle("requires_action", "tu1", at=3))
    assert (["tu1"], []) == (life.deliveries, life.sends)


@pytest.mark.parametrize("result", ["allow", "deny"])
def test_a_decision_on_its_way_is_taken_up_when_its_call_is_revived(result: str) -> None:
    """R-316: it stands, so nobody else can decide; it must be sent or dropped, never forgotten."""
    life = Life().connect()
    life.receive(ask())
    life.decide("tu1", result)
    life.receive(interrupt())
    life.clear()
    life.receive(idle("requires_action", "tu1"))
    assert 1 == len([effect for effect in life.effects if isinstance(effect, p.Look | p.Send)])


def test_a_revived_mcp_call_is_held_again() -> None:
    """R-316: whatever was decided on the way."""
    life = Life().connect()
    life.receive(mcp("m1", permission="ask"))
    life.decide("m1", "allow")
    life.receive(interrupt(), idle("requires_action", "m1"))
    assert "held" == life.state("m1")


def test_an_allowed_call_comes_back_allowed() -> None:
    """R-316: a decision that upstream took stands."""
    life = Life(concurrency=1).connect()
    life.receive(use("tu0"), ask(), verdict("tu1", "allow"), interrupt(), idle("requires_action", "tu1"))
    life.deliver("tu0")
    assert ["tu0", "tu1"] == life.deliveries


def test_only_upstream_revives() -> None:
    """R-316: a person who asks for the call by id does not."""
    life = Life().connect()
    life.receive(ask(), interrupt())
    life.notice(p.Wanted(("tu1",)))
    assert "interrupted" == life.state("tu1")


def test_an_interrupted_call_in_history_is_not_run() -> None:
    """R-317: and the countdown arms."""
    life = Life(max_idle_s=60).connect(use("tu1"), interrupt(), idle())
    life.at(60)
    assert ([], p.End("idle")) == (life.deliveries, life.end)


def test_an_idle_alone_interrupts_nothing() -> None:
    """R-317: without the interrupt the call runs."""
    life = Life(max_idle_s=60).connect(use("tu1"), idle())
    assert ["tu1"] == life.deliveries


def test_a_revival_in_history_is_understood() -> None:
    """R-316, R-317: interrupt, then the request, in one read."""
    life = Life().connect(use("tu1"), interrupt(), idle("requires_action", "tu1"))
    assert ["tu1"] == life.deliveries


def test_a_restart_that_lists_a_revival_delivers_once() -> None:
    """R-316: the delivery of the earlier run is given up by its deadline, not by the read."""
    tool = replace(ECHO, retry="safe")
    history = [use("tu1"), interrupt(), idle("requires_action", "tu1")]
    first = Life(tools=(tool,)).connect(*history)
    life = Life(tools=(tool,), stored=first.store()).connect(*history)
    assert ([], []) == (life.deliveries, life.sends)


def test_work_after_an_interrupt_runs() -> None:
    """R-318."""
    life = Life().connect()
    life.receive(use("tu1"), interrupt(), use("tu3"))
    assert ["tu1", "tu3"] == life.deliveries


def test_an_interrupt_seen_live_settles_a_call_that_shows_up_late() -> None:
    """R-315, live: the call is older than the interrupt."""
    life = Life().connect()
    life.receive(interrupt(at=5.0), use("tu1", at=3.0))
    assert ("interrupted", []) == (life.state("tu1"), life.deliveries)


@pytest.mark.parametrize("message", ["no such call", "content: bad"])
def test_a_post_refused_because_of_an_interrupt_brings_no_substitute(message: str) -> None:
    """R-319."""
    life = Life().connect(use("tu1"))
    life.deliver("tu1")
    life.sent("tu1", refused(400, message))
    life.looked("tu1", p.Findings(interrupts=(interrupt(),)))
    assert ("interrupted", 1) == (life.state("tu1"), len(life.sends))


def test_a_post_refused_because_the_primary_thread_was_interrupted_brings_no_substitute() -> None:
    """R-319, R-314: the look knows the primary thread as well."""
    life = primary_known()
    life.receive(custom("ctu1"))
    life.deliver("ctu1")
    life.sent("ctu1", refused(400, "content: bad"))
    life.looked("ctu1", p.Findings(interrupts=(interrupt(thread="th0"),)))
    assert ("interrupted", 1) == (life.state("ctu1"), len(life.sends))


def test_an_interrupt_before_the_call_does_not_explain_a_refusal() -> None:
    """R-319: it must cover the call."""
    stop = interrupt()
    life = Life().connect(use("tu1"))
    life.deliver("tu1")
    life.sent("tu1", refused(400))
    life.looked("tu1", p.Findings(interrupts=(stop,)))
    assert "rejected" == life.state("tu1")
