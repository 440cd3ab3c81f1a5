"""What a history read does with the calls it shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core import protocol as p
from app.core.calls import Call
from app.core.session import Stored
from tests.core.life import (
    Life,
    custom,
    custom_result,
    event,
    result,
    stamp,
    text,
    unknown,
    unsent,
    use,
    user_result,
    verdict,
)

# ---- which calls run


def test_a_call_missed_while_disconnected_runs_once() -> None:
    """R-060: history shows it after the reconnect."""
    life = Life().connect().reconnect(use("tu1"), failure=unknown())
    assert life.deliveries == ["tu1"]


def test_a_call_missed_while_disconnected_is_answered_once() -> None:
    """R-060: later reads that still list it change nothing."""
    tu1 = use("tu1")
    life = Life().connect().reconnect(tu1)
    life.answer("tu1")
    life.reconnect(tu1)
    assert len(life.sends) == 1


def test_a_call_answered_later_in_the_list_leaves_no_trace() -> None:
    """R-061: no delivery, no post, no record."""
    life = Life().connect(use("tu1"), user_result("tu1"))
    assert (life.deliveries, life.sends, life.calls) == ([], [], {})


def test_a_live_repeat_of_an_answered_call_leaves_no_trace() -> None:
    """R-061: the stream's buffer may still hold it."""
    tu1 = use("tu1")
    life = Life().connect(tu1, user_result("tu1"))
    life.clear()
    assert life.receive(tu1) == []


def test_a_live_repeat_without_a_time_is_not_delivered() -> None:
    """R-061: an answered call is known by its id, even where the server tells no time."""
    tu1 = use("tu1", at=None)
    life = Life().connect(tu1, user_result("tu1", at=None))
    life.receive(tu1)
    assert life.deliveries == []


def test_a_call_answered_earlier_in_the_list_is_not_delivered() -> None:
    """R-062: list order plays no part."""
    life = Life().connect(custom_result("ctu1"), custom("ctu1"))
    assert life.deliveries == []


def test_a_call_answered_on_another_page_is_not_delivered() -> None:
    """R-063: the first page alone decides nothing."""
    life = Life()
    life.retrieved()
    life.opened()
    life.page(custom("ctu1"))
    life.page(*(event("user.message") for _ in range(998)))
    life.page(custom_result("ctu1"))
    life.read()
    assert life.deliveries == []


def test_nothing_is_dispatched_before_the_last_page() -> None:
    """R-063: the next page may show the answer."""
    life = Life()
    life.retrieved()
    life.opened()
    life.page(custom("ctu1"))
    before = life.deliveries
    life.read()
    assert (before, life.deliveries) == ([], ["ctu1"])


# ---- calls that are known already


def test_a_queued_call_that_is_listed_again_stays_one() -> None:
    """R-069: it keeps its place and runs once."""
    tu1, tu2 = use("tu1"), use("tu2")
    life = Life(concurrency=1).connect()
    life.receive(tu1, tu2)
    life.reconnect(tu1, tu2, failure=unknown())
    life.answer("tu1")
    life.answer("tu2")
    assert life.deliveries == ["tu1", "tu2"]


def test_a_queued_call_of_an_earlier_run_runs_once() -> None:
    """R-069: the store and the history both have it."""
    tu1, tu2 = use("tu1"), use("tu2")
    first = Life(concurrency=1).connect(tu1, tu2)
    first.answer("tu1")
    stored = Life(concurrency=1).connect(tu1, tu2).store()
    second = Life(stored=stored).connect(tu1, user_result("tu1"), tu2)
    assert second.deliveries == ["tu2"]


def test_an_answered_call_that_is_listed_again_is_not_run_again() -> None:
    """R-070: its result is stored, and only the post is retried."""
    tu1 = use("tu1")
    life = Life().connect(tu1)
    life.deliver("tu1")
    life.sent("tu1", unsent(429))
    life.reconnect(tu1, failure=unknown())
    assert life.deliveries == ["tu1"]


def test_the_stored_result_is_posted_after_a_reconnect() -> None:
    """R-070: with the bytes it had before."""
    tu1 = use("tu1")
    life = Life().connect(tu1)
    life.deliver("tu1")
    life.sent("tu1", unknown())
    life.reconnect(tu1, failure=unknown())
    life.looked("tu1")
    first, second = life.of(p.Send)
    assert first.event == second.event


def test_a_reconnect_does_not_send_what_is_already_on_its_way() -> None:
    """R-070: history cannot show yet what the send under way will come to."""
    tu1 = use("tu1")
    life = Life().connect(tu1)
    life.deliver("tu1")
    life.reconnect(tu1, failure=unknown())
    assert len(life.sends) == 1


@pytest.mark.parametrize("state", ["answered", "posting"])
def test_a_result_of_an_earlier_run_is_never_computed_again(state: str) -> None:
    """R-070: not after a restart either, wherever the post was cut."""
    tu1 = use("tu1")
    first = Life().connect(tu1)
    first.deliver("tu1")
    first.calls["tu1"] = first.calls["tu1"].step(state)  # type: ignore[arg-type]
    second = Life(stored=first.store()).connect(tu1)
    second.looked("tu1")
    assert (second.deliveries, [s["content"] for s in second.sends]) == ([], [text("ok")])


def test_our_own_result_in_the_history_settles_a_post_that_was_cut() -> None:
    """R-070: the send before the crash arrived, so it is not repeated."""
    tu1 = use("tu1")
    first = Life().connect(tu1)
    first.deliver("tu1")
    second = Life(stored=first.store()).connect(tu1, user_result("tu1", "ok"))
    assert (second.state("tu1"), second.sends) == ("posted", [])


def test_results_equal_to_what_was_posted_are_ours() -> None:
    """R-070: content is compared as JSON, not as bytes."""
    tu1 = use("tu1")
    first = Life().connect(tu1)
    first.deliver("tu1", result("ok"))
    second = Life(stored=first.store()).connect(user_result("tu1", "ok"))
    assert second.log("tu1")["posted"] is True


def test_a_call_that_is_listed_twice_is_delivered_once() -> None:
    """R-071: pages shift while they are read."""
    tu1 = use("tu1")
    life = Life()
    life.retrieved()
    life.opened()
    life.page(tu1)
    life.page(tu1)
    life.read()
    assert life.deliveries == ["tu1"]


def test_a_call_that_is_listed_again_after_its_answer_is_not_delivered() -> None:
    """R-071, R-062: the answer counts wherever it stands."""
    tu1 = use("tu1")
    life = Life()
    life.retrieved()
    life.opened()
    life.page(tu1, user_result("tu1"))
    life.page(tu1)
    life.read()
    assert life.deliveries == []


def test_a_call_that_ended_before_the_restart_is_recalled() -> None:
    """R-061, R-070: the machine asks the store for listed calls that it does not hold."""
    tu1 = use("tu1")
    life = Life()
    life.retrieved()
    life.opened()
    life.page(tu1)
    assert life.machine.to_recall == ("tu1",)


def test_a_call_that_the_store_knows_as_over_is_not_delivered_again() -> None:
    """R-061: a result that upstream does not list yet is still a result."""
    tu1 = use("tu1")
    first = Life().connect(tu1)
    first.answer("tu1")
    second = Life()
    second.retrieved()
    second.opened()
    second.page(tu1)
    second.read(first.calls["tu1"])
    assert second.deliveries == []


# ---- order


def test_listed_calls_run_in_list_order_and_before_live_ones() -> None:
    """R-088: one at a time."""
    life = Life(concurrency=1).connect(use("a"), use("b"), use("c"))
    life.receive(use("d"))
    for id_ in ("a", "b", "c", "d"):
        life.answer(id_)
    assert life.deliveries == ["a", "b", "c", "d"]


def test_calls_of_an_earlier_run_come_before_newly_listed_ones() -> None:
    """R-088: they have waited longest."""
    b, c = use("b"), use("c")
    waiting = Call(id="b", kind="builtin", tool="echo", input=b"{}", state="queued")
    life = Life(concurrency=1, stored=Stored(calls=(waiting,))).connect(c, b)
    life.answer("b")
    assert life.deliveries == ["b", "c"]


def test_a_delivery_of_an_earlier_run_keeps_its_slot_until_it_is_told() -> None:
    """R-088, R-179: it may still run elsewhere, so strict order waits for its outcome."""
    b, c = use("b"), use("c")
    first = Life(concurrency=1).connect(b)
    second = Life(concurrency=1, stored=first.store()).connect(b, c)
    before = second.deliveries
    second.notice(p.Delivered("b", result(), 1))
    second.sent("b")
    assert (before, second.deliveries) == ([], ["c"])


# ---- what the store knows and memory does not


def test_a_call_that_the_store_knows_as_open_is_not_begun_anew() -> None:
    """R-069: `HistoryRead.known` holds calls in any state, and none of them is new."""
    dispatched = Call(id="tu1", kind="builtin", tool="echo", input=b"{}", state="dispatched", attempts=1)
    life = Life()
    life.retrieved()
    life.opened()
    life.page(use("tu1"))
    life.read(dispatched)
    assert life.deliveries == []


LATER: Any = Call(id="tu1", kind="builtin", tool="echo", input=b"{}", state="of_a_later_version")  # type: ignore[arg-type]


def test_a_call_in_a_state_of_a_later_version_is_not_delivered() -> None:
    """R-069 and the design: after a rollback it is left alone."""
    life = Life(stored=Stored(calls=(LATER,))).connect(use("tu1"))
    assert (life.deliveries, life.calls) == ([], {})


@pytest.mark.parametrize(
    "one",
    [
        user_result("tu1"),
        verdict("tu1", "deny"),
        event("user.interrupt", at=10_000_000),
        event("session.status_terminated"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_call_in_a_state_of_a_later_version_disturbs_no_event(one: Any) -> None:
    """R-069 and the design: what would settle it does not bring the run down, and it is not written."""
    life = Life(stored=Stored(calls=(replace(LATER, processed_at=stamp(0)),))).connect()
    life.receive(one)
    assert life.calls == {}
