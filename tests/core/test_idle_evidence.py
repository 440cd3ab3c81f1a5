"""The countdown across reconnects and restarts: it fires only on fresh evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core import protocol as p
from tests.core.life import (
    Life,
    custom,
    event,
    idle,
    use,
    user_result,
)

NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    ("user.tool_confirmation", {"tool_use_id": "other", "result": "allow"}),
    ("session.thread_status_terminated", {"session_thread_id": "th1"}),
    ("session.updated", {}),
    ("session.usage", {}),
    ("user.interrupt", {}),
]


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


def disconnected() -> Life:
    """Armed at 0, cut at 50, back at 120 but not read yet."""
    life = quiet()
    life.receive(idle(id="i1"))
    life.at(50)
    life.closed()
    life.at(120)
    life.opened()
    return life


def test_a_deadline_that_passes_while_disconnected_does_not_end_the_run() -> None:
    """R-254: the evidence is stale."""
    assert None is disconnected().end


def test_a_deadline_that_passed_ends_the_run_once_history_shows_nothing_newer() -> None:
    """R-254: at once."""
    life = disconnected()
    life.page(idle(id="i1"))
    life.read()
    life.at(120)
    assert p.End("idle") == life.end


def test_a_deadline_that_passed_does_not_end_a_session_that_went_on() -> None:
    """R-254: what is newer is served."""
    life = disconnected()
    life.page(idle(id="i1"), event("user.message", content=[]), custom("ctu1"))
    life.read()
    life.at(3600)
    assert (None, ["ctu1"]) == (life.end, life.deliveries)


def test_a_reconnect_does_not_extend_the_window() -> None:
    """R-255: the same idle keeps its first deadline."""
    first = idle(id="i1")
    life = quiet()
    life.receive(first)
    life.at(20)
    life.closed()
    life.at(21)
    life.opened()
    life.page(first)
    life.read()
    assert ends_at(life, 60)


def unread() -> Life:
    """Armed, cut, reconnected, and no history to be had."""
    life = quiet()
    life.receive(idle(id="i1"))
    life.at(20)
    life.closed()
    life.opened()
    life.read_failed()
    return life


def test_the_countdown_does_not_fire_while_history_cannot_be_read() -> None:
    """R-256."""
    life = unread()
    life.at(3600)
    assert None is life.end


@pytest.mark.parametrize(("type_", "fields"), NEUTRAL, ids=[name for name, _ in NEUTRAL])
def test_a_neutral_event_does_not_stand_in_for_the_history(type_: str, fields: dict[str, Any]) -> None:
    """R-256: it neither fires nor confirms the countdown."""
    life = unread()
    life.receive(event(type_, **fields))
    life.at(3600)
    assert None is life.end


def test_a_live_idle_stands_in_for_the_history() -> None:
    """R-256: it settles the matter."""
    life = unread()
    life.at(100)
    life.receive(idle(id="i2"))
    assert ends_at(life, 160)


def test_a_read_that_succeeds_at_last_lets_the_countdown_fire() -> None:
    """R-256."""
    life = unread()
    life.at(100)
    life.page(idle(id="i1"))
    life.read()
    life.at(100)
    assert p.End("idle") == life.end


def test_a_hold_dropped_while_history_is_unknown_starts_no_countdown() -> None:
    """R-257: not before it has been read."""
    life = quiet()
    life.receive(ask(thread="th1"), idle(id="i1"))
    life.closed()
    life.opened()
    life.read_failed()
    life.receive(event("session.thread_status_terminated", session_thread_id="th1"))
    life.at(3600)
    assert ("thread_terminated", None) == (life.state("tu1"), life.end)
    life.page(idle(id="i1"))
    life.read()
    assert ends_at(life, 3660)


def test_the_window_of_a_session_long_idle_starts_at_the_attach() -> None:
    """R-258: not in the past."""
    life = Life(max_idle_s=60)
    life.at(1000)
    life.connect(idle(at=-86_400.0))
    assert ends_at(life, 1060)


def restarted(moment: float, *history: Any) -> Life:
    """A run that begins after one that was armed at 0 by i1 died."""
    first = quiet()
    first.receive(idle(id="i1", at=1.0))
    life = Life(max_idle_s=60, stored=first.store())
    life.at(moment)
    return life.connect(*history)


def test_a_restart_keeps_the_deadline() -> None:
    """R-259: the store hands it on."""
    assert ends_at(restarted(40, idle(id="i1", at=1.0)), 60)


def test_a_restart_after_the_deadline_ends_at_once() -> None:
    """R-260: no new window is opened."""
    life = restarted(300, idle(id="i1", at=1.0))
    life.at(300)
    assert p.End("idle") == life.end


def test_a_restart_after_the_deadline_serves_what_is_newer() -> None:
    """R-260."""
    life = restarted(300, idle(id="i1", at=1.0), custom("ctu1", at=200.0))
    life.at(301)
    assert (None, ["ctu1"]) == (life.end, life.deliveries)


def test_a_restart_does_not_end_before_history_was_read() -> None:
    """R-260: the deadline is past, the evidence is old."""
    first = quiet()
    first.receive(idle(id="i1"))
    life = Life(max_idle_s=60, stored=first.store())
    life.at(300)
    life.retrieved()
    life.opened()
    life.at(400)
    assert None is life.end


def test_an_event_wins_over_a_deadline_that_nobody_noticed() -> None:
    """R-261: the end was not committed, so the call runs."""
    life = quiet()
    life.receive(idle())
    life.now = 61
    life.receive(custom("ctu1"))
    life.at(3600)
    assert (None, ["ctu1"]) == (life.end, life.deliveries)


def test_nothing_is_taken_in_after_the_end() -> None:
    """R-262: not routed, not recorded."""
    life = quiet()
    life.receive(idle())
    life.at(60)
    assert [] == life.receive(custom("ctu1"))


@pytest.mark.parametrize("at", [3600.0, -7200.0])
def test_the_times_of_events_do_not_move_the_deadline(at: float) -> None:
    """R-263: only the runner's own clock does."""
    life = quiet()
    life.receive(idle())
    life.receive(event("session.usage", at=at))
    assert ends_at(life, 60)


def test_a_run_after_an_idle_end_repeats_nothing() -> None:
    """R-264: answered calls are known, or answered in history."""
    call, answered = use("tu1"), user_result("tu1", "ok")
    first = quiet(60, call)
    first.answer("tu1")
    first.receive(answered, idle(id="i1"))
    first.at(60)
    # The store forgets the countdown when the session is attached again.
    life = Life(max_idle_s=60, stored=first.store(idle_id=None, idle_deadline=None))
    life.at(300)
    life.connect(call, answered, idle(id="i1"))
    assert ([], []) == (life.deliveries, life.sends)
    assert ends_at(life, 360)


def test_a_run_after_an_idle_end_serves_what_came_meanwhile() -> None:
    """R-264."""
    first = quiet()
    first.receive(idle(id="i1"))
    first.at(60)
    life = Life(max_idle_s=60, stored=first.store(idle_id=None, idle_deadline=None))
    life.connect(idle(id="i1"), custom("ctu1"))
    assert ["ctu1"] == life.deliveries


def test_a_changed_window_starts_anew() -> None:
    """PATCH of a live attachment."""
    life = quiet()
    life.receive(idle())
    life.at(50)
    life.notice(p.SettingsChanged(replace(p.Settings(), max_idle_s=20.0)))
    assert ends_at(life, 70)
