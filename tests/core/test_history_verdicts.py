"""Verdicts that a history read shows: each counts once, wherever it is listed."""

from __future__ import annotations

import pytest

from app.core import protocol as p
from tests.core.life import Life, idle, refused, use, user_result, verdict


def test_a_verdict_inside_the_window_releases_a_held_call_outside_it() -> None:
    """R-072: once; one delivery, one post."""
    life = Life().connect()
    life.receive(use("tu1", "gated", permission="ask"))
    life.reconnect(verdict("tu1", "allow"))
    life.answer("tu1")
    assert (life.deliveries, len(life.sends)) == (["tu1"], 1)


def test_the_log_names_a_verdict_that_only_history_showed() -> None:
    """R-072: `confirmation` is allow."""
    life = Life().connect()
    life.receive(use("tu1", "gated", permission="ask"))
    life.reconnect(verdict("tu1", "allow"))
    assert life.log("tu1")["confirmation"] == "allow"


def test_a_verdict_releases_a_call_that_an_earlier_run_held() -> None:
    """R-072: held in the store, allowed while nobody served the session."""
    first = Life().connect(use("tu1", "gated", permission="ask"))
    second = Life(stored=first.store()).connect(verdict("tu1", "allow"))
    assert second.deliveries == ["tu1"]


def test_a_deny_inside_the_window_closes_a_held_call_outside_it() -> None:
    """R-073: nothing runs and nothing is sent."""
    life = Life(max_idle_s=0.05).connect()
    life.receive(use("tu1", "gated", permission="ask"))
    life.reconnect(verdict("tu1", "deny"), idle())
    assert (life.state("tu1"), life.deliveries, life.sends) == ("denied", [], [])


def test_after_a_deny_inside_the_window_the_run_ends_by_itself() -> None:
    """R-073: the denied call blocks no longer."""
    life = Life(max_idle_s=0.05).connect()
    life.receive(use("tu1", "gated", permission="ask"))
    life.reconnect(verdict("tu1", "deny"), idle())
    life.at(0.05)
    assert life.end == p.End("idle")


@pytest.mark.parametrize("is_first", [True, False])
def test_a_verdict_counts_wherever_it_is_listed(is_first: bool) -> None:
    """R-084: before its call or after it."""
    call, allow = use("tu1", "gated", permission="ask"), verdict("tu1", "allow")
    life = Life().connect(*((allow, call) if is_first else (call, allow)))
    assert (life.deliveries, life.log("tu1")["confirmation"]) == (["tu1"], "allow")


def test_a_verdict_for_an_answered_call_dispatches_nothing() -> None:
    """R-085: now or at later reads."""
    listed = (use("tu1", "gated", permission="ask"), verdict("tu1", "allow"), user_result("tu1"))
    life = Life().connect(*listed).reconnect(*listed).reconnect(*listed[1:])
    assert life.deliveries == []


def test_a_verdict_for_an_answered_call_does_not_release_its_live_repeat() -> None:
    """R-085: the repeat is as settled as the original."""
    call = use("tu1", "gated", permission="ask")
    life = Life().connect(call, verdict("tu1", "allow"), user_result("tu1"))
    life.receive(call)
    assert life.deliveries == []


def test_a_verdict_that_is_listed_with_its_call_releases_the_held_copy_once() -> None:
    """R-086: the read shows both the call that is held and its verdict."""
    call, allow = use("tu1", "gated", permission="ask"), verdict("tu1", "allow")
    life = Life().connect()
    life.receive(call)
    life.reconnect(call, allow)
    life.deliver("tu1")
    life.sent("tu1", refused(400))
    life.looked("tu1")
    life.reconnect(call, allow)
    assert (life.deliveries, len(life.of(p.Send)), life.state("tu1")) == (["tu1"], 1, "rejected")


def test_a_held_call_that_is_listed_again_is_held_once() -> None:
    """R-087: three reconnects make no three holds."""
    call = use("tu1", "gated", permission="ask")
    life = Life().connect(call).reconnect(call).reconnect(call).reconnect(call)
    assert [saved.call.state for saved in life.of(p.SaveCall)] == ["held"]


def test_one_deny_frees_a_run_that_listed_its_held_call_often() -> None:
    """R-087: the blockers are empty then."""
    call = use("tu1", "gated", permission="ask")
    life = Life(max_idle_s=60).connect(call).reconnect(call).reconnect(call).reconnect(call, idle())
    life.receive(verdict("tu1", "deny"))
    life.at(60)
    assert life.end == p.End("idle")


def test_a_verdict_that_is_not_processed_yet_counts() -> None:
    """R-089: its time is not looked at."""
    call = use("tu1", "gated", permission="ask")
    life = Life().connect(call).reconnect(verdict("tu1", "allow", at=None))
    assert life.deliveries == ["tu1"]
