"""How long a run waits before it opens the stream again, and what cuts the wait short."""

from __future__ import annotations

from typing import Any

import pytest

from app.core import protocol as p
from app.core.retry import wait_s
from tests.core.life import Life, event, idle, mcp, unknown, unsent, use, verdict


def _waits(life: Life) -> list[float]:
    """The nominal waits before each STREAM but the first."""
    return [stream.after_s for stream in life.of(p.OpenStream)[1:]]


def _stream(life: Life, *events: Any, failure: p.Failure | None = None) -> None:
    """A stream that stands, shows its history (nothing), delivers these events, and is lost."""
    life.opened()
    life.read()
    life.receive(*events)
    life.closed(failure)


def _connected(**settings: Any) -> Life:
    """A run that has asked for its first stream."""
    life = Life(**settings)
    life.retrieved()
    return life


# ---- the backoff


def test_waits_double_up_to_ten_seconds() -> None:
    """R-042: 0.5, 1, 2, 4, 8, then 10."""
    life = _connected()
    for _ in range(7):
        life.closed(unknown())
    assert _waits(life) == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@pytest.mark.parametrize("nominal_s", [0.5, 1.0, 2.0, 4.0, 8.0, 10.0])
@pytest.mark.parametrize("draw", [0.0, 0.3, 0.999])
def test_every_wait_is_drawn_from_the_upper_half(nominal_s: float, draw: float) -> None:
    """R-042: each actual wait lies in [d/2, d]."""
    assert nominal_s / 2 <= wait_s(nominal_s, floor_s=None, draw=draw) <= nominal_s


@pytest.mark.parametrize(
    "one",
    [
        event("agent.hologram"),
        verdict("elsewhere", "allow"),
        event("session.usage"),
        event("event_delta", "", at=None, event_id="m1", delta={"type": "content_delta"}),
        event("session.status_running"),
        mcp("mcp1", permission="allow"),
        idle("requires_action"),
    ],
    ids=["unknown", "verdict", "usage", "event_delta", "running", "mcp call", "idle"],
)
def test_any_event_resets_the_backoff(one: Any) -> None:
    """R-043: whatever its type."""
    life = _connected()
    for _ in range(5):
        life.closed(unknown())
    _stream(life, one, failure=unknown())
    assert _waits(life)[-1] == 0.5


def test_a_repeated_event_resets_the_backoff() -> None:
    """R-043: it says as much about the connection as a new one."""
    life = _connected()
    tu1 = use("tu1")
    _stream(life, tu1, failure=unknown())
    for _ in range(4):
        life.closed(unknown())
    _stream(life, tu1, failure=unknown())
    assert _waits(life)[-1] == 0.5


def test_connecting_alone_does_not_reset_the_backoff() -> None:
    """R-044: a server that accepts and drops is not hammered."""
    life = _connected()
    for _ in range(4):
        _stream(life)
    assert _waits(life) == [0.5, 1.0, 2.0, 4.0]


def test_a_history_full_of_events_does_not_reset_the_backoff() -> None:
    """R-044: only the stream itself can show that it works."""
    life = _connected()
    for _ in range(4):
        life.opened()
        life.page(event("user.message"))
        life.read()
        life.closed()
    assert _waits(life) == [0.5, 1.0, 2.0, 4.0]


# ---- the wait


def test_a_detach_during_the_wait_ends_the_run_at_once() -> None:
    """R-050: nobody waits for the next stream."""
    life = _connected()
    for _ in range(6):
        life.closed(unknown())
    life.notice(p.DetachRequested())
    assert life.end == p.End("detached")


def test_a_stream_that_stands_after_the_detach_reads_no_history() -> None:
    """R-050: while a delivery still drains, a stream that was being opened takes in no more work."""
    life = Life().connect(use("tu1"))
    life.closed(unknown())
    life.notice(p.DetachRequested())
    assert life.opened() == []


def test_a_call_in_a_history_read_after_the_detach_is_left_alone() -> None:
    """R-050: the next attach finds it."""
    life = Life().connect(use("tu1"))
    life.closed(unknown())
    life.notice(p.DetachRequested())
    life.opened()
    life.page(use("tu2"))
    life.read()
    assert list(life.calls) == ["tu1"]


def test_the_wait_is_no_shorter_than_upstream_asked_for() -> None:
    """R-051: `Retry-After` is the floor of the wait."""
    life = _connected()
    assert life.closed(unsent(429, retry_after_s=20)) == [p.OpenStream(0.5, floor_s=20)]


@pytest.mark.parametrize(("asked_s", "wait"), [(20, 20), (60, 60), (3600, 60)])
def test_upstream_may_ask_for_a_minute_at_most(asked_s: float, wait: float) -> None:
    """R-051: a longer `Retry-After` is cut."""
    assert wait_s(0.5, floor_s=asked_s, draw=0.5) == wait


def test_a_short_retry_after_does_not_shorten_the_backoff() -> None:
    """R-051: the longer of both counts."""
    assert wait_s(10.0, floor_s=1.0, draw=0.0) == 5.0


def test_what_upstream_asked_for_once_is_not_kept() -> None:
    """R-051: the floor belongs to its answer."""
    life = _connected()
    life.closed(unsent(503, retry_after_s=20))
    assert life.closed(unknown()) == [p.OpenStream(1.0)]
