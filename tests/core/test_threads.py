"""Threads that terminate take their calls with them."""

from __future__ import annotations

from typing import Any

import pytest

from app.core import protocol as p
from tests.core.life import (
    Life,
    custom,
    event,
    idle,
    text,
    use,
    verdict,
)


def thread_over(thread: str) -> Any:
    return event("session.thread_status_terminated", session_thread_id=thread)


def ask(call_id: str = "tu1", **more: Any) -> Any:
    return use(call_id, "gated", permission="ask", **more)


def test_a_call_of_a_terminated_thread_is_not_run() -> None:
    """R-290: it is on record all the same."""
    life = Life().connect()
    life.receive(thread_over("th1"), use("tu1", permission="allow", thread="th1"))
    assert ("thread_terminated", [], []) == (life.state("tu1"), life.deliveries, life.sends)


def test_a_waiting_call_of_a_terminated_thread_is_not_run() -> None:
    """R-291: and it leaves the blocker set."""
    life = Life(concurrency=1, max_idle_s=60).connect(custom("tu1"), custom("tu2", thread="th1"), idle())
    life.receive(thread_over("th1"))
    life.answer("tu1")
    life.at(60)
    assert (["tu1"], p.End("idle")) == (life.deliveries, life.end)


def test_a_running_call_of_a_terminated_thread_is_not_posted() -> None:
    """R-292: the delivery finishes and its result is kept."""
    life = Life().connect(custom("ctu1", thread="th1"))
    life.receive(thread_over("th1"))
    life.deliver("ctu1", "done")
    log = life.log("ctu1")
    assert ("thread_terminated", True, False, text("done")) == (
        log["outcome"], log["executed"], log["posted"], log["result"]
    )  # fmt: skip
    assert [] == life.sends


def test_a_result_that_upstream_took_as_its_thread_terminated_is_on_record_as_posted() -> None:
    """R-292: the send had left; its answer decides, as with an interrupt."""
    life = Life().connect(custom("ctu1", thread="th1"))
    life.deliver("ctu1")
    life.receive(thread_over("th1"))
    life.sent("ctu1")
    assert life.calls["ctu1"].posted


def test_a_held_call_of_a_terminated_thread_is_dropped() -> None:
    """R-293: a later allow does nothing."""
    life = Life().connect()
    life.receive(ask(thread="th1"), thread_over("th1"), verdict("tu1", "allow"))
    assert ("thread_terminated", []) == (life.state("tu1"), life.deliveries)


def test_other_threads_go_on() -> None:
    """R-294."""
    life = Life().connect()
    life.receive(thread_over("th1"), custom("a", thread="th2"), custom("b"))
    assert ["a", "b"] == life.deliveries


@pytest.mark.parametrize("is_first", [True, False])
def test_a_termination_in_history_counts_in_any_order(is_first: bool) -> None:
    """R-295."""
    call, over = custom("ctu1", thread="th1"), thread_over("th1")
    life = Life().connect(*((over, call) if is_first else (call, over)))
    assert ("thread_terminated", []) == (life.state("ctu1"), life.deliveries)


def test_a_termination_stands_although_the_read_broke_off() -> None:
    """R-296: held calls of the thread are dropped."""
    life = Life().connect(ask(thread="th1"))
    life.closed()
    life.opened()
    life.page(thread_over("th1"))
    life.read_failed()
    assert "thread_terminated" == life.state("tu1")
