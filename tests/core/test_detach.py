"""Detaching: what is under way may finish, the rest stays for the next attach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core import protocol as p
from tests.core.life import (
    ECHO,
    Life,
    custom,
    event,
    refused,
    unknown,
    use,
    user_result,
    verdict,
)


def ask(call_id: str = "tu1", **more: Any) -> Any:
    return use(call_id, "gated", permission="ask", **more)


def test_a_detach_lets_a_running_call_finish() -> None:
    """R-320: posted, then detached."""
    life = Life().connect(use("tu1"))
    life.at(1)
    life.notice(p.DetachRequested())
    assert "detaching" == life.machine.progress.status
    life.at(10)
    life.answer("tu1")
    assert ("posted", p.End("detached")) == (life.state("tu1"), life.end)


def test_a_detach_starts_no_new_call() -> None:
    """R-320, R-322: what waits stays queued."""
    life = Life(concurrency=1).connect(use("tu1"), use("tu2"))
    life.notice(p.DetachRequested())
    life.receive(use("tu3"))
    life.answer("tu1")
    assert (["tu1"], "queued", False) == (life.deliveries, life.state("tu2"), "tu3" in life.calls)


def test_a_detach_repeats_no_delivery_of_an_earlier_run() -> None:
    """R-320, D-078: an orphan that turns up while draining stays for the next attach."""
    tool = replace(ECHO, retry="safe")
    first = Life(tools=(tool,)).connect(use("tu1"))
    life = Life(tools=(tool,), stored=first.store()).connect(use("tu2"))
    life.notice(p.DetachRequested())
    life.notice(p.Orphaned("tu1"))
    assert ["tu2"] == life.deliveries


def test_a_detach_waits_thirty_seconds() -> None:
    """R-321: the call stays dispatched."""
    life = Life().connect(use("tu1"))
    life.notice(p.DetachRequested())
    life.at(29.9)
    assert None is life.end
    life.at(30)
    assert (p.End("detached"), "dispatched") == (life.end, life.state("tu1"))


def test_a_call_left_dispatched_is_delivered_again_by_the_next_attach() -> None:
    """R-321: where the tool recognises it; the attempt counts on."""
    tool = replace(ECHO, retry="safe")
    first = Life(tools=(tool,)).connect(use("tu1"))
    first.notice(p.DetachRequested())
    first.at(30)
    life = Life(tools=(tool,), stored=first.store()).connect()
    life.notice(p.Orphaned("tu1"))
    assert (["tu1"], 2) == (life.deliveries, life.calls["tu1"].attempts)


def left_queued() -> Life:
    life = Life(concurrency=1).connect(use("tu1"), use("tu2"))
    life.notice(p.DetachRequested())
    life.answer("tu1")
    return life


def test_a_call_left_queued_runs_after_the_next_attach() -> None:
    """R-322: once history was read."""
    life = Life(stored=left_queued().store())
    life.retrieved()
    life.opened()
    assert [] == life.deliveries
    life.read()
    assert ["tu2"] == life.deliveries


@pytest.mark.parametrize(
    ("what", "state"), [("answer", "answered_elsewhere"), ("interrupt", "interrupted"), ("deny", "denied")]
)
def test_a_call_left_queued_that_was_settled_meanwhile_does_not_run(what: str, state: str) -> None:
    """R-322."""
    settled = left_queued()
    later = {
        "answer": user_result("tu2"),
        "interrupt": event("user.interrupt"),
        "deny": verdict("tu2", "deny"),
    }
    life = Life(stored=settled.store()).connect(later[what])
    assert (state, []) == (life.state("tu2"), life.deliveries)


def test_a_held_call_outlives_a_detach() -> None:
    """D-070: nothing is sent for it, and the next attach has it again."""
    held = ask()
    first = Life().connect(held)
    first.notice(p.DetachRequested())
    life = Life(stored=first.store()).connect(held)
    life.receive(verdict("tu1", "allow"))
    assert ([], ["tu1"]) == (first.sends, life.deliveries)


def test_a_second_detach_changes_nothing() -> None:
    """R-326: neither while draining nor after."""
    life = Life().connect(use("tu1"))
    life.notice(p.DetachRequested())
    life.at(20)
    assert [] == life.notice(p.DetachRequested())
    life.at(30)
    assert (p.End("detached"), []) == (life.end, life.notice(p.DetachRequested()))


def test_a_detach_before_anything_ends_at_once() -> None:
    """R-327, R-013: nothing waits for an event."""
    life = Life()
    life.notice(p.DetachRequested())
    assert (p.End("detached"), []) == (life.end, life.of(p.OpenStream))


def test_a_detach_during_the_backoff_ends_at_once() -> None:
    """R-327, R-050."""
    life = Life().connect()
    life.closed(unknown())
    life.notice(p.DetachRequested())
    assert p.End("detached") == life.end


def test_a_page_that_arrives_after_a_detach_dispatches_nothing() -> None:
    """R-327: the read is forgotten, also while a call is draining."""
    life = Life().connect(use("tu1"))
    life.closed()
    life.opened()
    life.notice(p.DetachRequested())
    life.page(use("tu2"))
    life.read()
    assert ["tu1"] == life.deliveries


def test_a_decision_on_our_gate_after_the_credential_was_refused_is_kept() -> None:
    """R-206: while a delivery drains, a deny is stored as the answer to post later."""
    life = Life(tools=(replace(ECHO, gate="ask", name="asks"), ECHO)).connect(
        custom("c1", "asks"), use("tu1")
    )
    life.closed(refused(401))
    life.decide("c1", "deny")
    assert ("answered", []) == (life.state("c1"), life.sends)


def test_a_refused_credential_does_not_hold_up_a_detach() -> None:
    """R-320: nothing more can be sent, so there is nothing to wait for."""
    life = Life().connect(use("tu1"))
    life.notice(p.DetachRequested())
    life.deliver("tu1")
    life.sent("tu1", refused(401))
    assert (p.End("detached"), "answered") == (life.end, life.state("tu1"))
