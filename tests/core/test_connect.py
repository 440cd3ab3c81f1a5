"""How a run begins: the session object, the stream, then the history; and what ends it there."""

from __future__ import annotations

from typing import Any

import pytest

from app.core import protocol as p
from app.core.calls import Call
from app.core.retry import wait_s
from app.core.session import Stored
from tests.core.life import (
    Life,
    custom,
    event,
    refused,
    result,
    text,
    unknown,
    use,
    user_result,
)

OVER = p.SessionFacts(is_over=True)
SILENCE = p.Failure("unknown", message="no byte came for 90 s", is_silence=True)
NO_PREVIEWS = refused(400, "event_deltas: unknown delta type")


def _refused_at_first(failure: p.Failure) -> Life:
    """A run whose first STREAM gets this answer."""
    life = Life()
    life.retrieved()
    life.closed(failure)
    return life


def _open_call(state: Any, **more: Any) -> Call:
    """A call that an earlier run left behind."""
    return Call(id="tu1", kind="builtin", tool="echo", input=b"{}", state=state, **more)


# ---- to the end, and in which order


def test_a_session_is_served_until_it_terminates() -> None:
    """R-001: one call is delivered, answered and posted; the terminal event names the end."""
    life = Life().connect()
    life.receive(use("tu1", input={"x": 42}), event("session.status_terminated", "e9"))
    life.answer("tu1", "42")
    assert life.end == p.End("terminated", None, "e9")


def test_the_result_of_the_last_call_is_sent_before_the_run_ends() -> None:
    """R-001: the answer carries the call's own type, its id, its blocks and an explicit flag."""
    life = Life().connect()
    life.receive(use("tu1", input={"x": 42}), event("session.status_terminated", "e9"))
    life.deliver("tu1", "42")
    assert life.sends == [
        {"type": "user.tool_result", "tool_use_id": "tu1", "content": text("42"), "is_error": False}
    ]


def test_the_webhook_gets_the_call_with_its_input() -> None:
    """R-001: one delivery, with the input's own bytes."""
    life = Life().connect()
    life.receive(use("tu1", input={"x": 42}))
    assert [(d.call.id, d.call.input) for d in life.of(p.Deliver)] == [("tu1", b'{"x": 42}')]


def test_history_is_asked_for_only_once_the_stream_stands() -> None:
    """R-002: RETRIEVE, STREAM, and LIST after STREAM was established."""
    life = Life()
    life.retrieved()
    assert life.effects == [p.Retrieve(), p.OpenStream()]


def test_an_established_stream_is_followed_by_the_history_at_once() -> None:
    """R-002: LIST is issued without a wait when STREAM stands."""
    life = Life()
    life.retrieved()
    assert life.opened() == [p.ReadHistory(None)]


def test_a_call_in_both_history_and_stream_is_delivered_once() -> None:
    """R-003: the gap between STREAM and LIST shows an event twice."""
    tu1 = use("tu1")
    life = Life().connect(tu1)
    life.receive(tu1)
    assert life.deliveries == ["tu1"]


def test_a_call_of_the_gap_that_is_over_by_the_time_of_its_repeat_stays_over() -> None:
    """R-003: the stream's buffer may lag behind the post."""
    tu1 = use("tu1")
    life = Life().connect(tu1)
    life.answer("tu1")
    life.receive(tu1)
    assert life.deliveries == ["tu1"]


# ---- what the first STREAM may answer


@pytest.mark.parametrize("status", [401, 403])
def test_a_bad_credential_ends_the_run(status: int) -> None:
    """R-007: the end reason is `auth_failed`."""
    life = _refused_at_first(refused(status, "invalid x-api-key"))
    assert life.end == p.End("auth_failed", "invalid x-api-key")


@pytest.mark.parametrize("status", [401, 403])
def test_a_bad_credential_is_tried_once(status: int) -> None:
    """R-007: one STREAM, no LIST."""
    life = _refused_at_first(refused(status))
    assert (len(life.of(p.OpenStream)), life.of(p.ReadHistory)) == (1, [])


@pytest.mark.parametrize("status", [404, 410])
def test_an_unknown_session_ends_the_run(status: int) -> None:
    """R-008: the end reason is `session_gone`."""
    life = _refused_at_first(refused(status, "not found"))
    assert life.end == p.End("session_gone", "not found")


@pytest.mark.parametrize("status", [404, 410])
def test_an_unknown_session_is_tried_once(status: int) -> None:
    """R-008: one STREAM."""
    assert len(_refused_at_first(refused(status)).of(p.OpenStream)) == 1


@pytest.mark.parametrize("status", [400, 405, 413, 422])
def test_any_other_refusal_ends_the_run_with_what_upstream_said(status: int) -> None:
    """R-009: `upstream_rejected`, and upstream's message is kept."""
    life = _refused_at_first(refused(status, "limit: must be positive"))
    assert life.end == p.End("upstream_rejected", "limit: must be positive")


@pytest.mark.parametrize("status", [400, 405, 413, 422])
def test_any_other_refusal_is_met_once(status: int) -> None:
    """R-009: one STREAM."""
    assert len(_refused_at_first(refused(status)).of(p.OpenStream)) == 1


def test_a_server_without_previews_is_asked_again_without_them() -> None:
    """R-010: the refusal names `event_deltas`."""
    life = _refused_at_first(NO_PREVIEWS)
    assert life.of(p.OpenStream) == [p.OpenStream(previews=True), p.OpenStream(previews=False)]


def test_a_run_without_previews_serves_calls() -> None:
    """R-010: the run proceeds."""
    life = _refused_at_first(NO_PREVIEWS)
    life.opened()
    life.read()
    life.receive(use("tu1"))
    assert life.deliveries == ["tu1"]


def test_previews_once_refused_are_not_asked_for_on_reconnect() -> None:
    """R-010: the answer holds for the run."""
    life = _refused_at_first(NO_PREVIEWS)
    life.opened()
    life.read()
    life.clear()
    life.closed(unknown())
    assert [o.previews for o in life.of(p.OpenStream)] == [False]


def test_a_second_refusal_without_previews_is_fatal() -> None:
    """R-010, R-009: even if it names `event_deltas` again."""
    life = _refused_at_first(NO_PREVIEWS)
    life.closed(NO_PREVIEWS)
    assert life.end == p.End("upstream_rejected", NO_PREVIEWS.message)


def test_asking_again_without_previews_is_no_reconnect() -> None:
    """R-010: it counts neither for the bound nor for the backoff."""
    life = Life(max_reconnects=0)
    life.retrieved()
    life.closed(NO_PREVIEWS)
    assert life.machine.progress.reconnects == 0


# ---- what RETRIEVE tells


def test_a_session_that_is_over_is_never_connected() -> None:
    """R-011: no STREAM and no LIST."""
    life = Life()
    life.retrieved(OVER)
    assert (life.of(p.OpenStream), life.of(p.ReadHistory)) == ([], [])


def test_a_session_that_is_over_ends_the_run() -> None:
    """R-011: the end reason is `terminated`."""
    life = Life()
    life.retrieved(OVER)
    assert life.end == p.End("terminated")


@pytest.mark.parametrize(
    "call",
    [
        _open_call("held"),
        _open_call("queued"),
        _open_call("dispatched", attempts=1),
        _open_call("answered", attempts=1, result=result()),
        _open_call("posting", attempts=1, result=result()),
        _open_call("unowned"),
    ],
    ids=lambda call: call.state,
)
def test_open_calls_of_a_session_that_is_over_are_closed(call: Call) -> None:
    """R-011: each open state becomes `session_ended`."""
    life = Life(stored=Stored(calls=(call,)))
    life.retrieved(OVER)
    assert life.state("tu1") == "session_ended"


def test_open_calls_of_a_session_that_is_over_are_neither_delivered_nor_sent() -> None:
    """R-011: nothing leaves for a session that is over."""
    life = Life(stored=Stored(calls=(_open_call("queued"),)))
    life.retrieved(OVER)
    assert (life.deliveries, life.sends) == ([], [])


def test_an_unreadable_session_object_decides_nothing() -> None:
    """R-012: the connect goes on when RETRIEVE failed."""
    life = Life()
    assert life.retrieved(None) == [p.OpenStream()]


def test_after_an_unreadable_session_object_the_stream_decides() -> None:
    """R-012: STREAM's own answer ends the run."""
    life = Life()
    life.retrieved(None)
    life.closed(refused(404))
    assert life.end is not None
    assert life.end.reason == "session_gone"


def test_a_builtin_call_is_held_while_its_policy_is_unread() -> None:
    """R-012: without the session's agent no built-in call without a permission runs (promise 1)."""
    life = Life()
    life.retrieved(None)
    life.opened()
    life.read()
    life.receive(use("tu1"))
    assert (life.state("tu1"), life.deliveries) == ("held", [])


def test_a_custom_call_runs_although_the_session_object_is_unreadable() -> None:
    """R-012: custom calls need no policy."""
    life = Life()
    life.retrieved(None)
    life.opened()
    life.read()
    life.receive(custom("ctu1"))
    assert life.deliveries == ["ctu1"]


# ---- detached before it began


def test_a_run_that_is_detached_before_it_connected_opens_no_stream() -> None:
    """R-013: it ends at once."""
    life = Life()
    life.notice(p.DetachRequested())
    life.retrieved()
    assert (life.of(p.OpenStream), life.end) == ([], p.End("detached"))


def test_a_run_that_is_detached_while_the_stream_opens_reads_no_history() -> None:
    """R-013: STREAM was established while the wish was on its way."""
    life = Life()
    life.retrieved()
    life.notice(p.DetachRequested())
    assert life.opened() == []


# ---- nobody watches


def test_calls_settle_although_nobody_asks_for_anything() -> None:
    """R-015: another client's answer to an unowned call closes it without any audience."""
    life = Life(tools=()).connect(use("tu1"))
    life.receive(user_result("tu1"))
    assert life.state("tu1") == "answered_elsewhere"


# ---- silence


def test_a_silent_stream_is_opened_again() -> None:
    """R-016, R-040: silence is a disconnect like any other."""
    life = Life().connect()
    assert life.closed(SILENCE) == [p.OpenStream(0.5)]


def test_silence_does_not_count_against_the_bound() -> None:
    """R-016 and the design: a quiet server must not use up `max_reconnects`."""
    life = Life(max_reconnects=0).connect()
    for _ in range(5):
        life.reconnect(failure=SILENCE)
    assert (life.end, life.machine.progress.reconnects) == (None, 0)


def test_repeated_silence_backs_off() -> None:
    """R-016, R-042: what connects and says nothing is not hammered."""
    life = Life().connect()
    for _ in range(4):
        life.reconnect(failure=SILENCE)
    assert [o.after_s for o in life.of(p.OpenStream)[1:]] == [0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_the_actual_wait_lies_between_half_and_all_of_the_nominal_one(draw: float) -> None:
    """R-040: a fleet does not come back in step."""
    assert 0.25 <= wait_s(0.5, floor_s=None, draw=draw) <= 0.5
