"""Slots: how many deliveries run at once, in which order, and when one is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core import protocol as p
from tests.core.life import ECHO, Life, custom, event, result, unknown, use


@pytest.mark.parametrize("is_error", [True, False])
@pytest.mark.parametrize("call", [use("c1"), custom("c1")], ids=["builtin", "custom"])
def test_is_error_is_always_explicit(call: object, is_error: bool) -> None:
    """R-177: a boolean, never null or absent."""
    life = Life().connect(call)
    life.deliver("c1", result("x", is_error=is_error))
    assert is_error is life.sends[0]["is_error"]


def test_calls_are_delivered_in_parallel() -> None:
    """R-178: up to eight at once without being asked for it."""
    life = Life().connect()
    life.receive(*(use(f"tu{i}") for i in range(10)))
    assert [f"tu{i}" for i in range(8)] == life.deliveries


def test_each_result_leaves_as_soon_as_it_is_ready() -> None:
    """R-178: in a send of its own, in the order of the answers."""
    life = Life().connect(use("a"), use("b"), use("c"))
    life.deliver("c")
    life.deliver("a")
    assert ["c", "a"] == [sent["tool_use_id"] for sent in life.sends]


def test_a_slot_freed_is_taken_by_the_oldest_waiting_call() -> None:
    """R-178, R-031: at most the configured number run at once."""
    life = Life(concurrency=2).connect(use("a"), use("b"), use("c"), use("d"))
    life.deliver("b")
    assert ["a", "b", "c"] == life.deliveries


def test_with_one_slot_the_next_delivery_waits_for_the_post() -> None:
    """R-179: delivery, post, then the next."""
    life = Life(concurrency=1).connect(use("a"), use("b"), use("c"))
    life.deliver("a")
    assert ["a"] == life.deliveries
    life.sent("a")
    assert ["a", "b"] == life.deliveries


def test_with_one_slot_the_next_delivery_waits_for_an_attempt_only() -> None:
    """R-179: a post that fails was attempted."""
    life = Life(concurrency=1).connect(use("a"), use("b"))
    life.deliver("a")
    life.sent("a", unknown(503))
    assert ["a", "b"] == life.deliveries


def test_with_one_slot_calls_run_in_order() -> None:
    """R-179."""
    life = Life(concurrency=1).connect(use("a"), use("b"), use("c"))
    for call_id in ("a", "b", "c"):
        life.answer(call_id)
    assert ["a", "b", "c"] == [sent["tool_use_id"] for sent in life.sends]


def test_a_slot_is_taken_when_the_call_is_routed() -> None:
    """R-180: the call stands as dispatched before the next event is looked at."""
    life = Life().connect()
    life.receive(use("tu1"))
    assert "dispatched" == life.state("tu1")


def test_a_call_routed_before_the_end_of_the_session_is_posted() -> None:
    """R-180: with the terminal event in the same read."""
    life = Life().connect()
    life.receive(use("tu1"), event("session.status_terminated"))
    life.answer("tu1")
    assert (["tu1"], "posted") == (life.deliveries, life.state("tu1"))


def test_a_dispatched_call_is_stored_before_its_delivery_leaves() -> None:
    """Save before acting."""
    life = Life().connect()
    effects = life.receive(use("tu1"))
    stored = [e.call.state for e in effects if isinstance(e, p.SaveCall)]
    assert (["queued", "dispatched"], p.Deliver) == (stored, type(effects[-1]))


def test_a_result_is_stored_before_it_is_posted() -> None:
    """Save before acting: with the intent to post."""
    life = Life().connect(use("tu1"))
    effects = life.deliver("tu1")
    assert [p.SaveCall, p.Send] == [type(effect) for effect in effects]


def test_a_slow_post_takes_no_slot() -> None:
    """A slot is a delivery; with several of them, posting holds none."""
    life = Life(concurrency=2).connect(use("a"), use("b"), use("c"))
    life.deliver("a")
    assert ["a", "b", "c"] == life.deliveries


def test_a_call_that_ends_while_it_runs_keeps_its_slot_until_the_webhook_answers() -> None:
    """Its delivery is still under way."""
    life = Life(concurrency=2).connect(use("a"), use("b"), use("c"))
    life.receive(event("user.tool_result", tool_use_id="a", content=[]))
    assert ["a", "b"] == life.deliveries
    life.deliver("a")
    assert ["a", "b", "c"] == life.deliveries


def test_more_slots_are_used_as_soon_as_they_are_granted() -> None:
    """The attachment's concurrency can be changed while it is live."""
    life = Life(concurrency=1).connect(use("a"), use("b"), use("c"))
    life.notice(p.SettingsChanged(p.Settings(max_idle_s=None, concurrency=3)))
    assert ["a", "b", "c"] == life.deliveries


def test_deliveries_taken_over_from_an_earlier_run_keep_to_the_slots() -> None:
    """A takeover does not start more at once than the attachment allows."""
    tool = replace(ECHO, retry="safe")
    first = Life(tools=(tool,), concurrency=3).connect(use("a"), use("b"), use("c"))
    life = Life(tools=(tool,), concurrency=2, stored=first.store()).connect()
    for call_id in ("a", "b", "c"):
        life.notice(p.Orphaned(call_id))
    assert ["a", "b"] == life.deliveries
    life.deliver("a")
    assert ["a", "b", "c"] == life.deliveries
