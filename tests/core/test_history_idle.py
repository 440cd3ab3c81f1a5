"""What the end of the history says about the session's idleness."""

from __future__ import annotations

from typing import Any

import pytest

from app.core import protocol as p
from tests.core.life import Life, custom, event, idle, unknown, use, verdict

IDLE = p.End("idle")
TERMINATED = "session.thread_status_terminated"


# ---- which endings arm


def test_a_history_that_ends_idle_arms_the_countdown() -> None:
    """R-077: the run ends a window after the read."""
    life = Life(max_idle_s=60)
    life.at(5)
    life.connect(event("user.message"), idle())
    life.at(65)
    assert life.end == IDLE


def test_a_history_that_ends_idle_gives_the_full_window() -> None:
    """R-077: not a moment less, however old the idle is."""
    life = Life(max_idle_s=60)
    life.at(5)
    life.connect(event("user.message"), idle(at=-86_400))
    life.at(64.9)
    assert life.end is None


@pytest.mark.parametrize(
    "neutral",
    [
        verdict("zz", "allow"),
        event(TERMINATED, session_thread_id="th1"),
        event("session.updated"),
        event("session.usage"),
        event("user.interrupt"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_neutral_event_after_the_idle_does_not_hide_it(neutral: Any) -> None:
    """R-078: none of them is followed by another idle."""
    life = Life(max_idle_s=60).connect(idle(), neutral)
    life.at(60)
    assert life.end == IDLE


def test_several_neutral_events_after_the_idle_do_not_hide_it() -> None:
    """R-078: the scenario's own list."""
    life = Life(max_idle_s=60).connect(
        idle(),
        verdict("zz", "allow"),
        event(TERMINATED, session_thread_id="th1"),
        event("session.updated"),
    )
    life.at(60)
    assert life.end == IDLE


@pytest.mark.parametrize("type_", ["user.message", "session.status_running", "agent.hologram"])
def test_a_history_that_ends_busy_arms_nothing(type_: str) -> None:
    """R-078: the idle before it is over."""
    life = Life(max_idle_s=60).connect(idle(), event(type_))
    life.at(3600)
    assert life.end is None


def test_a_history_that_ends_waiting_for_a_client_arms_nothing() -> None:
    """R-078, R-234: `requires_action` never does."""
    life = Life(max_idle_s=60).connect(idle("requires_action", "elsewhere"))
    life.at(3600)
    assert life.end is None


# ---- what defers it


def test_a_listed_call_runs_before_the_window_starts() -> None:
    """R-079: the window is full from its post on."""
    life = Life(max_idle_s=60).connect(custom("ctu1"), idle())
    life.at(5)
    life.answer("ctu1")
    life.at(64.9)
    assert (life.deliveries, life.end) == (["ctu1"], None)


def test_a_window_after_a_listed_call_ends_the_run() -> None:
    """R-079: sixty seconds after the post."""
    life = Life(max_idle_s=60).connect(custom("ctu1"), idle())
    life.at(5)
    life.answer("ctu1")
    life.at(65)
    assert life.end == IDLE


def test_a_call_that_was_denied_in_the_history_is_recorded_so() -> None:
    """R-080: neither executed nor posted."""
    life = Life(max_idle_s=0.05).connect(
        use("tu1", "gated", permission="ask"), verdict("tu1", "deny"), idle()
    )
    assert life.log("tu1") == {
        "executed": False,
        "posted": False,
        "is_error": False,
        "confirmation": "deny",
        "result": None,
        "outcome": "denied",
    }


def test_a_call_that_was_denied_in_the_history_does_not_keep_the_run_alive() -> None:
    """R-080: nothing is sent, and the run ends by idle."""
    life = Life(max_idle_s=0.05).connect(
        use("tu1", "gated", permission="ask"), verdict("tu1", "deny"), idle()
    )
    life.at(0.05)
    assert (life.sends, life.end) == ([], IDLE)


def test_a_listed_call_that_is_held_keeps_the_run_alive() -> None:
    """R-081: it waits for a person, and nothing runs or is sent."""
    life = Life(max_idle_s=0.1).connect(use("tu1", "gated", permission="ask"), idle())
    life.at(1)
    assert (life.end, life.deliveries, life.sends) == (None, [], [])


def test_a_countdown_is_cancelled_by_what_the_next_history_shows() -> None:
    """R-082: the run waits for the verdict, whatever was armed before."""
    life = Life(max_idle_s=0.8).connect()
    life.receive(idle())
    life.reconnect(event("user.message"), use("tu1", "gated", permission="ask"), idle(), failure=unknown())
    life.at(2.5)
    assert (life.end, life.state("tu1"), life.machine.progress.idle_deadline) == (None, "held", None)


def test_a_listed_call_of_a_terminated_thread_is_not_run() -> None:
    """R-083: whichever comes first in the list."""
    life = Life().connect(
        use("tu1", thread="th1", permission="allow"), event(TERMINATED, session_thread_id="th1"), idle()
    )
    assert (life.deliveries, life.state("tu1")) == ([], "thread_terminated")


def test_a_listed_call_of_a_terminated_thread_does_not_keep_the_run_alive() -> None:
    """R-083: the countdown arms."""
    life = Life(max_idle_s=60).connect(
        use("tu1", thread="th1", permission="allow"), event(TERMINATED, session_thread_id="th1"), idle()
    )
    life.at(60)
    assert life.end == IDLE


def test_a_call_without_a_thread_is_not_of_a_terminated_one() -> None:
    """R-083: only the thread's own calls are over."""
    life = Life().connect(use("tu1"), event(TERMINATED, session_thread_id="th1"))
    assert life.deliveries == ["tu1"]


# ---- a read that is older than what came live


def test_an_idle_of_a_late_read_does_not_outweigh_newer_live_activity() -> None:
    """R-067, R-077: the list was made before the message that came live while it was on its way."""
    life = Life(max_idle_s=60)
    life.retrieved()
    life.opened()
    life.read_failed()
    old, message = idle(), event("user.message")
    life.receive(message)
    life.page(old)
    life.read()
    life.at(3600)
    assert life.end is None


def test_an_idle_of_a_sweep_does_not_outweigh_newer_live_activity() -> None:
    """R-077 and the design's sweep: the idle was lost live, and the agent works again."""
    life = Life(max_idle_s=60).connect(event("user.message"))
    life.at(300)
    old, message = idle(), event("user.message")
    life.receive(message)
    life.page(old)
    life.read()
    life.at(3600)
    assert life.end is None
