"""Verdicts seen upstream: repeated, in any order, late, and across restarts."""

from __future__ import annotations

from typing import Any

import pytest

from app.core import protocol as p
from tests.core.life import Life, custom, event, idle, use, user_result, verdict


def ask(call_id: str = "tu1", **more: Any) -> Any:
    return use(call_id, "gated", permission="ask", **more)


def test_a_restart_keeps_one_hold() -> None:
    """R-134: the call listed again is not stored again, so its creation time stays."""
    held = ask()
    first = Life().connect(held)
    life = Life(stored=first.store()).connect(held)
    assert ([], []) == (life.of(p.SaveCall), life.deliveries)


def test_an_allow_releases_a_call_held_by_an_earlier_run() -> None:
    """R-134: the hold outlives its process."""
    held = ask()
    first = Life().connect(held)
    life = Life(stored=first.store()).connect(held)
    life.receive(verdict("tu1", "allow"))
    assert ["tu1"] == life.deliveries


@pytest.mark.parametrize("is_call_listed", [True, False])
def test_a_verdict_given_while_nobody_served_the_session_releases_the_call_once(is_call_listed: bool) -> None:
    """R-135: whether or not the window still lists the call."""
    held = ask()
    first = Life().connect(held)
    allow = verdict("tu1", "allow")
    history = (held, allow) if is_call_listed else (allow,)
    life = Life(stored=first.store()).connect(*history)
    life.reconnect(*history)
    assert ["tu1"] == life.deliveries


def test_a_repeated_allow_releases_once() -> None:
    """R-136: two confirmations, one delivery."""
    life = Life().connect()
    life.receive(ask(), verdict("tu1", "allow", id="c1"), verdict("tu1", "allow", id="c2"))
    assert ["tu1"] == life.deliveries


def test_an_allow_after_a_deny_releases_nothing() -> None:
    """R-137: deny is sticky, live."""
    life = Life().connect()
    life.receive(ask(), verdict("tu1", "deny"), verdict("tu1", "allow"))
    assert ("denied", []) == (life.state("tu1"), life.deliveries)


@pytest.mark.parametrize("order", [("deny", "allow"), ("allow", "deny")])
def test_a_deny_in_history_wins_in_any_order(order: tuple[str, str]) -> None:
    """R-137: and so it does in one read, for a call that the read lists."""
    life = Life().connect(ask(), *(verdict("tu1", result) for result in order))
    assert ("denied", []) == (life.state("tu1"), life.deliveries)


@pytest.mark.parametrize("order", [("deny", "allow"), ("allow", "deny")])
def test_a_deny_in_history_wins_for_a_call_held_before(order: tuple[str, str]) -> None:
    """R-137: the call was held live, both verdicts came while the stream was down."""
    life = Life().connect()
    life.receive(ask())
    life.reconnect(*(verdict("tu1", result) for result in order))
    assert ("denied", []) == (life.state("tu1"), life.deliveries)


def test_a_deny_before_the_call_is_not_undone_by_an_allow_before_it() -> None:
    """R-137: deny is sticky before the call is known, too."""
    life = Life().connect()
    life.receive(verdict("tu1", "deny"), verdict("tu1", "allow"), ask())
    assert ("denied", []) == (life.state("tu1"), life.deliveries)


def test_a_deny_ends_an_allowed_call_that_waits_for_a_slot() -> None:
    """R-138: the delivery had not started."""
    life = Life(concurrency=1).connect()
    life.receive(use("tu0"), ask(), verdict("tu1", "allow"), verdict("tu1", "deny"))
    life.answer("tu0")
    assert (["tu0"], "denied") == (life.deliveries, life.state("tu1"))


def denied_late() -> Life:
    life = Life().connect()
    life.receive(ask(), verdict("tu1", "allow"), verdict("tu1", "deny"))
    life.answer("tu1")
    return life


def test_a_deny_after_the_delivery_started_does_not_stop_the_post() -> None:
    """R-139: it ran, and its result is posted."""
    assert ("posted", 1) == (denied_late().state("tu1"), len(denied_late().sends))


def test_a_deny_after_the_delivery_started_is_noted() -> None:
    """R-139: whoever reads the record sees that somebody wanted to stop it."""
    assert "den" in (denied_late().calls["tu1"].detail or "")


def test_the_record_names_the_verdict_that_released_the_call() -> None:
    """R-140: never deny for a call that ran."""
    assert "allow" == denied_late().log("tu1")["confirmation"]


def test_a_verdict_moves_only_its_own_call() -> None:
    """R-149: the other one stays held."""
    life = Life().connect()
    life.receive(ask("tu1"), ask("tu2"), verdict("tu2", "allow"))
    assert ("held", ["tu2"]) == (life.state("tu1"), life.deliveries)


@pytest.mark.parametrize("type_", ["user.tool_result", "agent.tool_result"])
def test_an_answer_from_elsewhere_ends_a_hold(type_: str) -> None:
    """R-147: somebody else saw to it."""
    life = Life().connect()
    life.receive(ask(), event(type_, tool_use_id="tu1"))
    assert "answered_elsewhere" == life.state("tu1")


def test_an_allow_after_an_answer_from_elsewhere_releases_nothing() -> None:
    """R-147: a later allow does nothing."""
    life = Life().connect()
    life.receive(ask(), user_result("tu1"), verdict("tu1", "allow"))
    assert ("answered_elsewhere", []) == (life.state("tu1"), life.deliveries)


def test_a_hold_answered_elsewhere_lets_the_countdown_start() -> None:
    """R-147: it does not keep the run alive."""
    life = Life(max_idle_s=60).connect()
    life.receive(ask())
    life.reconnect(user_result("tu1"), idle())
    life.at(60)
    assert p.End("idle") == life.end


def test_a_custom_call_needs_no_policy() -> None:
    """Promise 1: upstream never gates a custom call."""
    life = Life(agent_tools=None).connect()
    life.receive(custom("ctu1"))
    assert ["ctu1"] == life.deliveries
