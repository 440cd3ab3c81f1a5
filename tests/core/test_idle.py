"""When a quiet session is over: armed, deferred, disarmed, and what survives a reconnect."""

from __future__ import annotations

from typing import Any

import pytest

from app.core import protocol as p
from tests.core.life import (
    Life,
    event,
    idle,
    text,
    unsent,
    use,
    verdict,
)


def quiet(window_s: float | None = 60, *history: Any) -> Life:
    """A session that has been read and is silent."""
    return Life(max_idle_s=window_s).connect(*history)


def ends_at(life: Life, moment: float) -> bool:
    """Whether the run ends by idleness at this moment and not a second before."""
    life.at(moment - 1)
    if life.end is not None:
        return False
    life.at(moment)
    return life.end == p.End("idle")


def ask(call_id: str = "tu1", **more: Any) -> Any:
    return use(call_id, "gated", permission="ask", **more)


def test_a_quiet_session_ends_when_the_window_has_passed() -> None:
    """R-230: by the clock alone, and the stream is closed."""
    life = quiet()
    life.receive(idle())
    assert ends_at(life, 60)
    assert 1 == len(life.of(p.CloseStream))


def test_the_window_is_sixty_seconds_by_default() -> None:
    """R-231."""
    assert 60.0 == p.Settings().max_idle_s


def test_a_disabled_window_never_ends_a_run() -> None:
    """R-232: alive after a day."""
    life = quiet(None)
    life.receive(idle())
    life.at(86_400)
    assert None is life.end


@pytest.mark.parametrize(
    "stop_reason",
    [
        {"type": "end_turn"},
        {"type": "retries_exhausted"},
        {"type": "refusal", "stop_details": {"type": "refusal", "category": "cyber"}},
        {"type": "budget_reached"},
        {"type": "coffee_break"},
        {},
        None,
        "odd",
    ],
    ids=str,
)
def test_a_stop_reason_that_ends_the_turn_arms(stop_reason: object) -> None:
    """R-234: known or not."""
    life = quiet()
    life.receive(event("session.status_idle", "i1", stop_reason=stop_reason))
    assert ends_at(life, 60)


def test_an_absent_stop_reason_arms() -> None:
    """R-234."""
    life = quiet()
    life.receive(event("session.status_idle", "i1"))
    assert ends_at(life, 60)


@pytest.mark.parametrize("event_ids", [["x"], [], None, "x"], ids=str)
def test_requires_action_never_arms(event_ids: object) -> None:
    """R-234: with any or no ids."""
    life = quiet()
    life.receive(
        event("session.status_idle", "i1", stop_reason={"type": "requires_action", "event_ids": event_ids})
    )
    life.at(3600)
    assert None is life.end


def test_requires_action_disarms() -> None:
    """R-235."""
    life = quiet()
    life.receive(idle())
    life.at(10)
    life.receive(idle("requires_action", "tu1"))
    life.at(3600)
    assert None is life.end


def test_silence_without_an_idle_does_not_end_a_run() -> None:
    """R-236: the agent may be thinking."""
    life = quiet(0.05)
    life.receive(event("agent.message", "m1", content=text("hi")), use("tu1"))
    life.answer("tu1")
    life.at(3600)
    assert None is life.end


ACTIVITY: list[tuple[str, dict[str, Any]]] = [
    ("session.status_running", {}),
    ("user.message", {"content": []}),
    ("agent.message", {"content": []}),
    ("agent.custom_tool_use", {"name": "app_tool", "input": {}}),
    ("event_start", {"event": {"type": "agent.message", "id": "m9"}}),
    ("agent.hologram", {}),
    ("session.thread_status_idle", {"session_thread_id": "th1", "stop_reason": {"type": "end_turn"}}),
]


@pytest.mark.parametrize(("type_", "fields"), ACTIVITY, ids=[name for name, _ in ACTIVITY])
def test_activity_disarms(type_: str, fields: dict[str, Any]) -> None:
    """R-237, R-025, R-243: at the last second."""
    life = quiet()
    life.receive(idle())
    life.at(59)
    life.receive(event(type_, **fields))
    life.at(200)
    assert None is life.end


def test_the_next_idle_arms_in_full() -> None:
    """R-238."""
    life = quiet()
    life.receive(idle())
    life.at(59)
    life.receive(event("session.status_running"))
    life.at(100)
    life.receive(idle())
    assert ends_at(life, 160)


def test_a_second_idle_restarts_the_window() -> None:
    """R-239."""
    life = quiet()
    life.receive(idle(id="i1"))
    life.at(30)
    life.receive(idle(id="i2"))
    assert ends_at(life, 90)


NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    ("user.tool_confirmation", {"tool_use_id": "other", "result": "allow"}),
    ("session.thread_status_terminated", {"session_thread_id": "th1"}),
    ("session.updated", {}),
    ("session.usage", {}),
    ("user.interrupt", {}),
]


@pytest.mark.parametrize(("type_", "fields"), NEUTRAL, ids=[name for name, _ in NEUTRAL])
def test_a_neutral_event_leaves_the_countdown_alone(type_: str, fields: dict[str, Any]) -> None:
    """R-240, R-241, R-242: no idle would ever follow it."""
    life = quiet()
    life.receive(idle())
    life.at(30)
    life.receive(event(type_, **fields))
    assert ends_at(life, 60)


def test_the_idle_of_a_thread_does_not_arm() -> None:
    """R-243: the session may still be at work."""
    life = quiet()
    life.receive(
        event("session.thread_status_idle", session_thread_id="th1", stop_reason={"type": "end_turn"})
    )
    life.at(3600)
    assert None is life.end


def test_a_held_call_defers() -> None:
    """R-244."""
    life = quiet(0.1)
    life.receive(ask(), idle())
    life.at(1)
    assert None is life.end


@pytest.mark.parametrize("result", ["deny", "escalate"])
def test_a_deny_lets_the_countdown_proceed(result: str) -> None:
    """R-245: from then, in full."""
    life = quiet()
    life.receive(ask(), idle())
    life.at(500)
    life.receive(verdict("tu1", result))
    assert ends_at(life, 560)
    assert [] == life.deliveries


def test_an_allow_does_not_cut_the_tool_short() -> None:
    """R-246: the window starts once the result is posted."""
    life = quiet()
    life.receive(ask(), idle())
    life.at(500)
    life.receive(verdict("tu1", "allow"))
    life.at(590)
    life.answer("tu1")
    assert ends_at(life, 650)


def test_an_allow_that_history_shows_does_not_cut_the_tool_short() -> None:
    """R-247."""
    life = quiet()
    life.receive(ask())
    life.at(10)
    life.reconnect(verdict("tu1", "allow"), idle())
    life.at(100)
    life.answer("tu1")
    assert ends_at(life, 160)


def test_the_window_starts_with_the_last_of_several_blockers() -> None:
    """R-248."""
    life = quiet()
    life.receive(ask("tu1"), ask("tu2"), idle())
    life.at(100)
    life.receive(verdict("tu1", "deny"))
    life.at(200)
    life.receive(verdict("tu2", "deny"))
    assert ends_at(life, 260)


def test_activity_cancels_a_deferred_countdown() -> None:
    """R-249: the turn it belonged to is past."""
    life = quiet()
    life.receive(ask(), idle(), event("session.status_running"), verdict("tu1", "deny"))
    life.at(3600)
    assert None is life.end


def test_a_hold_restored_from_the_store_defers_a_running_countdown() -> None:
    """R-250: the successor finds both."""
    first = quiet()
    first.receive(ask())
    stored = first.store(idle_id="i1", idle_deadline=60.0)
    life = Life(max_idle_s=60, stored=stored).connect(idle(id="i1"))
    life.at(3600)
    assert None is life.end


def test_a_call_in_flight_defers() -> None:
    """R-251: 60 s after its end, not after the idle."""
    life = quiet()
    life.receive(use("tu1"))
    life.at(5)
    life.receive(idle())
    life.at(90)
    life.answer("tu1")
    assert ends_at(life, 150)


def test_a_result_that_cannot_be_posted_defers() -> None:
    """R-252."""
    life = quiet()
    life.receive(use("tu1"))
    life.deliver("tu1")
    life.sent("tu1", unsent())
    life.receive(idle())
    life.at(600)
    life.sent("tu1")
    assert ends_at(life, 660)


def test_a_call_that_the_server_denied_does_not_defer() -> None:
    """R-253."""
    life = quiet()
    life.receive(use("tu1", "gated", permission="deny"), idle())
    assert ends_at(life, 60)
