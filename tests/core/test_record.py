"""What the record of a call keeps, whatever became of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from app.core import protocol as p
from tests.core.life import (
    Life,
    custom,
    event,
    refused,
    text,
    use,
    user_result,
    verdict,
)


def terminated() -> Any:
    return event("session.status_terminated", "e1")


def thread_over(thread: str) -> Any:
    return event("session.thread_status_terminated", session_thread_id=thread)


def ask(call_id: str = "tu1", **more: Any) -> Any:
    return use(call_id, "gated", permission="ask", **more)


def test_each_call_ends_once() -> None:
    """R-330: one step into an end state, whatever the end."""
    life = Life(concurrency=1).connect(use("a"), use("b", permission="deny"), ask("c"), use("d"))
    life.answer("a")
    life.receive(verdict("c", "deny"), user_result("d"), terminated())
    life.deliver("d")
    ended = Counter(e.call.id for e in life.of(p.SaveCall) if e.call.is_over)
    assert {"a": 1, "b": 1, "c": 1} == {id_: n for id_, n in ended.items() if id_ != "d"}


def test_a_record_keeps_what_the_call_was() -> None:
    """R-330: input, kind, name, thread, time and attempts."""
    life = Life().connect(custom("ctu1", thread="th1", input={"x": 1}, at=5.0))
    life.answer("ctu1")
    call = life.calls["ctu1"]
    assert ("custom", "echo", "th1", b'{"x": 1}', 1) == (
        call.kind, call.tool, call.thread_id, call.input, call.attempts
    )  # fmt: skip
    assert (call.processed_at or "").endswith("14:00:05.000000Z")


def test_a_call_that_ran_and_could_not_be_posted_keeps_its_result() -> None:
    """R-332: executed, not posted."""
    life = Life().connect(use("tu1"))
    life.deliver("tu1", "42")
    life.sent("tu1", refused(400))
    life.looked("tu1")
    log = life.log("tu1")
    assert (True, False, text("42")) == (log["executed"], log["posted"], log["result"])


UNEXECUTED = {
    "denied": lambda: [ask(), verdict("tu1", "deny")],
    "unowned": lambda: [use("tu1", "missing")],
    "interrupted": lambda: [ask(), event("user.interrupt")],
    "thread_terminated": lambda: [ask(thread="th1"), thread_over("th1")],
    "session_ended": lambda: [ask(), terminated()],
    "answered_elsewhere": lambda: [ask(), user_result("tu1")],
}


@pytest.mark.parametrize("outcome", UNEXECUTED)
def test_a_call_that_was_not_executed_has_an_empty_record(outcome: str) -> None:
    """R-331: every one of them is visible."""
    life = Life().connect()
    life.receive(*UNEXECUTED[outcome]())
    log = life.log("tu1")
    assert (outcome, False, None, False, False) == (
        log["outcome"], log["executed"], log["result"], log["posted"], log["is_error"]
    )  # fmt: skip
