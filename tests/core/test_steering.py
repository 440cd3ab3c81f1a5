"""What becomes of a client's events: sent again only where they surely have not arrived."""

from __future__ import annotations

import pytest

from app.core.protocol import Failure
from app.core.steering import (
    AGAIN_S_MAX,
    KEPT_S,
    UNPARKING_TRIES,
    Again,
    Refused,
    Unknown,
    after_send,
    waiting_on,
)

WAITING = (
    "Invalid user.message event at events[0]: waiting on responses to events [sevt_a, sevt_b]; only"
    " user.tool_confirmation, user.custom_tool_result, user.tool_result, or user.interrupt may be sent"
)
PARKED = Failure("refused", 400, WAITING)


def test_what_may_have_arrived_is_never_sent_again() -> None:
    failure = Failure("unknown", 502, "bad gateway")
    assert Unknown("bad gateway") == after_send(failure, tries=1, age_s=0.0)


def test_what_has_not_arrived_is_sent_again_ever_later() -> None:
    failure = Failure("unsent", message="cannot connect")
    waits = [after_send(failure, tries=tries, age_s=0.0) for tries in range(1, 12)]
    assert Again(0.5) == waits[0]
    assert Again(1.0) == waits[1]
    assert Again(AGAIN_S_MAX) == waits[-1]


def test_a_limit_of_requests_says_when_to_send_again() -> None:
    failure = Failure("unsent", 429, "slow down", retry_after_s=7.0)
    assert Again(0.5, 7.0) == after_send(failure, tries=1, age_s=0.0)


def test_nobody_expects_events_after_ten_minutes() -> None:
    failure = Failure("unsent", message="cannot connect")
    ruled = after_send(failure, tries=40, age_s=KEPT_S - 1)
    assert Refused("upstream_unreachable", "cannot connect") == ruled


def test_a_refusal_names_the_calls_that_upstream_waits_for() -> None:
    ruled = after_send(PARKED, tries=1, age_s=0.0)
    assert Refused("waiting_on_calls", WAITING, ("sevt_a", "sevt_b")) == ruled


def test_an_id_that_the_end_of_a_message_cuts_is_left_out() -> None:
    assert waiting_on(Failure("refused", 400, WAITING[:-90].split("b]")[0])) == ("sevt_a",)


def test_a_session_whose_calls_were_just_answered_is_asked_again() -> None:
    assert isinstance(after_send(PARKED, tries=1, age_s=0.0, are_answered=True), Again)


def test_a_session_that_stays_parked_is_not_asked_for_ever() -> None:
    ruled = after_send(PARKED, tries=UNPARKING_TRIES + 1, age_s=0.0, are_answered=True)
    assert isinstance(ruled, Refused)


@pytest.mark.parametrize("status", [401, 404, 413, 422])
def test_any_other_refusal_is_final(status: int) -> None:
    failure = Failure("refused", status, "no")
    assert Refused("refused_by_upstream", "no") == after_send(failure, tries=1, age_s=0.0)
