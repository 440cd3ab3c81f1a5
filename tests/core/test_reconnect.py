"""The stream is lost: when it is opened again, and when no more."""

from __future__ import annotations

from typing import Any

import pytest

from app.core import protocol as p
from app.core.calls import Call
from app.core.retry import wait_s
from app.core.session import Stored
from tests.core.life import (
    Life,
    event,
    refused,
    result,
    unknown,
    unsent,
    use,
    user_result,
)

SILENCE = p.Failure("unknown", message="no byte came for 90 s", is_silence=True)


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


# ---- a loss is not the end


def test_a_broken_stream_is_opened_again_after_half_a_second() -> None:
    """R-040: the nominal wait; the runner draws from its upper half."""
    life = Life().connect()
    assert life.closed(unknown()) == [p.OpenStream(0.5)]


@pytest.mark.parametrize(("draw", "wait"), [(0.0, 0.25), (0.5, 0.375)])
def test_the_wait_is_drawn_from_the_upper_half_of_the_nominal_one(draw: float, wait: float) -> None:
    """R-040: [d/2, d]."""
    assert wait_s(0.5, floor_s=None, draw=draw) == wait


def test_a_run_without_its_stream_is_reconnecting() -> None:
    """R-040: the attachment says so."""
    life = Life().connect()
    life.closed(unknown())
    assert life.machine.progress.status == "reconnecting"


def test_a_run_is_live_again_once_the_stream_stands() -> None:
    """R-040: `attaching` is only before the first connect."""
    life = _connected()
    statuses = [life.machine.progress.status]
    _stream(life, failure=unknown())
    life.opened()
    assert [*statuses, life.machine.progress.status] == ["attaching", "live"]


def test_a_clean_end_of_the_stream_is_a_loss_like_any_other() -> None:
    """R-041: the session goes on, whatever the stream does."""
    life = Life().connect()
    life.receive(event("session.status_running"))
    assert life.closed() == [p.OpenStream(0.5)]


# ---- which answers are fatal


def _lost_then(failure: p.Failure) -> Life:
    """A run with a held call and a result that is not posted yet, whose second STREAM fails like this."""
    life = Life().connect()
    life.receive(use("tu1", "gated", permission="ask"), use("tu2"))
    life.deliver("tu2")
    life.sent("tu2", unsent(429))
    life.closed(unknown())
    life.closed(failure)
    return life


def test_a_fatal_answer_on_reconnect_ends_the_run() -> None:
    """R-045: there is no third attempt."""
    life = _lost_then(refused(403, "key was revoked"))
    assert (life.end, len(life.of(p.OpenStream))) == (p.End("auth_failed", "key was revoked"), 2)


def test_held_calls_survive_a_revoked_key() -> None:
    """R-045: a later attach finds them."""
    assert _lost_then(refused(403)).state("tu1") == "held"


def test_results_survive_a_revoked_key() -> None:
    """R-045: what the tool answered is kept, and the call stays open."""
    life = _lost_then(refused(403))
    assert (life.state("tu2"), life.calls["tu2"].result) == ("posting", result())


def test_a_delivery_that_ends_after_a_revoked_key_keeps_its_result() -> None:
    """R-045: it is stored for a later attach and not sent."""
    life = Life().connect(use("tu1"))
    life.closed(refused(403))
    life.deliver("tu1")
    assert (life.state("tu1"), life.sends) == ("answered", [])


TRANSIENT = [
    *(refused(status) for status in (408, 409)),
    unsent(429),
    *(unknown(status) for status in (500, 502, 503, 504, 529, 599)),
    *(unsent(), unknown()),
]
FATAL = {
    400: "upstream_rejected",
    401: "auth_failed",
    402: "upstream_rejected",
    403: "auth_failed",
    404: "session_gone",
    405: "upstream_rejected",
    410: "session_gone",
    413: "upstream_rejected",
    418: "upstream_rejected",
    422: "upstream_rejected",
    451: "upstream_rejected",
    499: "upstream_rejected",
}


@pytest.mark.parametrize("failure", TRANSIENT, ids=lambda f: f"{f.status or f.reach}")
def test_a_transient_answer_is_tried_again(failure: p.Failure) -> None:
    """R-046: and with no answer at all too."""
    life = _connected()
    assert life.closed(failure) == [p.OpenStream(0.5)]


@pytest.mark.parametrize(("status", "reason"), FATAL.items())
def test_a_fatal_answer_ends_the_run(status: int, reason: str) -> None:
    """R-046: every other 4xx."""
    life = _connected()
    life.closed(refused(status))
    assert (life.end and life.end.reason, len(life.of(p.OpenStream))) == (reason, 1)


def test_an_overload_inside_the_stream_is_a_loss() -> None:
    """R-052: an error frame counts as the status that it names."""
    life = Life().connect()
    life.receive(event("session.status_running"))
    assert life.closed(unknown(529)) == [p.OpenStream(0.5)]


def test_a_refused_credential_inside_the_stream_ends_the_run() -> None:
    """R-052: the frame of the next connection is fatal."""
    life = Life().connect().reconnect(failure=unknown(529))
    life.closed(refused(401, "invalid bearer token"))
    assert life.end == p.End("auth_failed", "invalid bearer token")


# ---- the bound


def test_the_bound_allows_one_stream_more_than_its_number() -> None:
    """R-047: three reconnects are four streams."""
    life = _connected(max_reconnects=3)
    while life.end is None:
        _stream(life)
    assert len(life.of(p.OpenStream)) == 4


def test_beyond_the_bound_the_run_is_over() -> None:
    """R-047: the end reason tells."""
    life = _connected(max_reconnects=3)
    for _ in range(4):
        _stream(life)
    assert life.end is not None
    assert life.end.reason == "reconnects_exhausted"


def test_open_calls_survive_the_bound() -> None:
    """R-047: a later attach finds them."""
    life = Life(max_reconnects=0).connect(use("tu1", "gated", permission="ask"))
    life.closed(unknown())
    assert life.state("tu1") == "held"


def test_events_do_not_reset_the_bound() -> None:
    """R-048: it is a total."""
    life = _connected(max_reconnects=3)
    while life.end is None:
        _stream(life, event("session.status_running"))
    assert len(life.of(p.OpenStream)) == 4


def test_without_a_bound_nothing_ends_the_run() -> None:
    """R-049: five hundred losses later it still tries."""
    life = _connected(max_reconnects=None)
    for _ in range(500):
        life.closed(unknown())
    assert (life.end, len(life.of(p.OpenStream))) == (None, 501)


@pytest.mark.parametrize("is_established", [True, False])
def test_a_bound_of_zero_allows_no_loss(is_established: bool) -> None:
    """R-049: neither of a stream nor of the attempt to open one."""
    life = _connected(max_reconnects=0)
    if is_established:
        life.opened()
        life.read()
    life.closed(unknown())
    assert life.end is not None
    assert life.end.reason == "reconnects_exhausted"


def test_reconnects_are_counted_across_runs() -> None:
    """R-048: a restart of the service begins no new count."""
    first = _connected(max_reconnects=3)
    for _ in range(2):
        _stream(first)
    second = _connected(max_reconnects=3, stored=first.store())
    while second.end is None:
        _stream(second)
    assert len(second.of(p.OpenStream)) == 2


def test_a_takeover_is_no_reconnect() -> None:
    """R-048: the first stream of a run is not counted."""
    life = Life(max_reconnects=1).connect()
    for _ in range(5):
        life = Life(max_reconnects=1, stored=life.store()).connect()
    assert life.machine.progress.reconnects == 0


def test_silence_between_losses_leaves_the_bound_alone() -> None:
    """R-048 and the design: only losses are counted."""
    life = _connected(max_reconnects=1)
    for failure in (SILENCE, unknown(), SILENCE, SILENCE):
        _stream(life, failure=failure)
    assert (life.end, life.machine.progress.reconnects) == (None, 1)


# ---- work goes on while the stream is down


def test_a_result_is_posted_while_the_stream_is_down() -> None:
    """R-040: only reading is interrupted."""
    life = Life().connect(use("tu1"))
    life.closed(unknown())
    life.answer("tu1")
    assert life.state("tu1") == "posted"


def test_a_session_that_ended_in_the_gap_is_not_opened_again() -> None:
    """R-011, R-041: streams that only end may mean that the session is over; RETRIEVE tells."""
    life = _connected()
    for _ in range(2):
        _stream(life)
    life.retrieved(p.SessionFacts(is_over=True))
    assert life.of(p.Retrieve) == [p.Retrieve(), p.Retrieve()]
    assert life.end == p.End("terminated")


def test_a_call_answered_in_the_gap_is_closed_by_the_next_history() -> None:
    """R-060: another client may have been faster while we were away."""
    life = Life(concurrency=1).connect(use("tu1"), use("tu2"))
    life.reconnect(user_result("tu2"), failure=unknown())
    life.answer("tu1")
    assert (life.state("tu2"), life.deliveries) == ("answered_elsewhere", ["tu1"])


def test_calls_of_an_earlier_run_wait_for_the_first_history() -> None:
    """R-002, R-069: it may show that somebody settled them meanwhile."""
    queued = Call(id="tu1", kind="builtin", tool="echo", input=b"{}", state="queued")
    life = Life(stored=Stored(calls=(queued,)))
    life.retrieved()
    life.opened()
    before = life.deliveries
    life.read()
    assert (before, life.deliveries) == ([], ["tu1"])
