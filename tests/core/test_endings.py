"""Terminal events: what is under way may finish, and nothing else begins."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from app.core import protocol as p
from tests.core.life import (
    ECHO,
    Life,
    event,
    refused,
    text,
    unsent,
    use,
)


def terminated() -> Any:
    return event("session.status_terminated", "e1")


def thread_over(thread: str) -> Any:
    return event("session.thread_status_terminated", session_thread_id=thread)


def ask(call_id: str = "tu1", **more: Any) -> Any:
    return use(call_id, "gated", permission="ask", **more)


@pytest.mark.parametrize(
    ("type_", "reason"), [("session.status_terminated", "terminated"), ("session.deleted", "deleted")]
)
def test_a_terminal_event_ends_the_run(type_: str, reason: Any) -> None:
    """R-280, R-281: with its id, and the stream is closed."""
    life = Life().connect()
    life.receive(event(type_, "e1"))
    assert p.End(reason, None, "e1") == life.end
    assert 1 == len(life.of(p.CloseStream))


def test_nothing_is_reopened_after_a_terminal_event() -> None:
    """R-280: the stream ends, and that is that; also while a delivery is still under way."""
    life = Life().connect(use("tu1"))
    life.clear()
    life.receive(terminated())
    life.closed()
    life.answer("tu1")
    life.closed()
    assert [] == life.of(p.OpenStream)


def test_work_that_had_not_started_ends_with_the_session() -> None:
    """R-282: held, or waiting for a slot; no delivery, no confirmation."""
    life = Life(concurrency=1).connect(use("tu0"), ask("tu1"), use("tu2"))
    life.receive(terminated())
    life.answer("tu0")
    assert ("session_ended", "session_ended") == (life.state("tu1"), life.state("tu2"))
    assert ["tu0"] == life.deliveries


def test_a_decision_after_the_terminal_event_is_refused() -> None:
    """R-282: confirmations are closed."""
    life = Life().connect(use("tu0"), ask("tu1"))
    life.receive(terminated())
    life.decide("tu1", "allow")
    assert ["dec_1"] == [effect.decision_id for effect in life.of(p.RefuseDecision)]


def test_a_delivery_under_way_may_finish_and_is_posted() -> None:
    """R-283: within 30 s; then the run ends."""
    life = Life().connect(use("tu1"))
    life.receive(terminated())
    life.at(29)
    life.deliver("tu1")
    assert None is life.end
    life.sent("tu1")
    assert ("posted", p.End("terminated", None, "e1")) == (life.state("tu1"), life.end)


def test_a_delivery_that_takes_too_long_ends_with_the_session() -> None:
    """R-283: 30 s, and it is on record that it ran."""
    life = Life().connect(use("tu1"))
    life.receive(terminated())
    life.at(29.9)
    assert None is life.end
    life.at(30)
    log = life.log("tu1")
    assert ("session_ended", True, False) == (log["outcome"], log["executed"], log["posted"])
    assert p.End("terminated", None, "e1") == life.end


def test_a_post_that_fails_is_tried_for_a_minute_after_the_terminal_event() -> None:
    """R-283: transient failures only, at most 60 s."""
    life = Life().connect(use("tu1"))
    life.receive(terminated())
    life.deliver("tu1")
    life.sent("tu1", unsent())
    life.at(59.9)
    assert (None, 2) == (life.end, len(life.sends))
    life.at(60)
    assert ("session_ended", p.End("terminated", None, "e1")) == (life.state("tu1"), life.end)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_a_refusal_after_the_terminal_event_ends_the_call_with_the_session(status: int) -> None:
    """R-283: no substitute, whatever the refusal says."""
    life = Life().connect(use("tu1"))
    life.receive(terminated())
    life.deliver("tu1")
    life.sent("tu1", refused(status, "content: bad"))
    assert ("session_ended", True, 1) == (life.state("tu1"), life.log("tu1")["executed"], len(life.sends))


def test_a_refusal_looked_into_when_the_session_ends_brings_no_substitute() -> None:
    """R-283: the refusal came first, the look ends after the terminal event."""
    life = Life().connect(use("tu1"))
    life.deliver("tu1")
    life.sent("tu1", refused(400, "content: bad"))
    life.receive(terminated())
    life.looked("tu1")
    assert ("session_ended", 1) == (life.state("tu1"), len(life.sends))


def test_a_result_kept_although_the_session_ended_can_be_read() -> None:
    """R-283: stored before it was posted."""
    life = Life().connect(use("tu1"))
    life.receive(terminated())
    life.deliver("tu1", "42")
    life.sent("tu1", refused(400))
    assert text("42") == life.log("tu1")["result"]


def test_events_after_the_terminal_one_are_ignored() -> None:
    """R-284: also while a delivery is finishing."""
    life = Life().connect(use("tu1"))
    life.receive(terminated(), use("tu9"))
    life.answer("tu1")
    assert (["tu1"], False) == (life.deliveries, "tu9" in life.calls)


@pytest.mark.parametrize(
    ("type_", "fields"),
    [
        ("session.error", {"error": {"type": "unknown_error", "retry_status": {"type": "terminal"}}}),
        ("session.status_rescheduled", {}),
        ("session.thread_status_terminated", {"session_thread_id": "th1"}),
    ],
)
def test_only_the_terminal_types_end_a_run(type_: str, fields: dict[str, Any]) -> None:
    """R-285, R-297: the next call runs."""
    life = Life().connect()
    life.receive(event(type_, **fields), use("tu1"))
    assert (None, ["tu1"]) == (life.end, life.deliveries)


def test_a_finished_run_says_what_became_of_each_call() -> None:
    """R-286: what the counts of the attachment are made from."""
    life = Life().connect(use("a"), use("b", permission="deny"), ask("c"), use("d", "missing"))
    life.answer("a")
    life.receive(terminated())
    assert Counter(posted=1, denied=1, session_ended=2) == Counter(call.state for call in life.calls.values())


def test_a_call_of_a_session_that_was_over_is_not_answered_for_a_disabled_tool() -> None:
    """R-075: nothing is sent to a session that ended, whatever the registry says."""
    life = Life(tools=(replace(ECHO, enabled=False),)).connect(use("tu1"), terminated())
    assert ([], "session_ended") == (life.sends, life.state("tu1"))
