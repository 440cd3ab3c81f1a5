"""When an endpoint counts as down: values only, no clock."""

from __future__ import annotations

import pytest

from app.webhooks.breaker import (
    FAILURES_MIN,
    PAUSE_CAP_S,
    PAUSE_START_S,
    PROBE_LOOK_S,
    SUSTAINED_S,
    Breaker,
)


def failing(times: int, *, over_s: float) -> Breaker:
    """A breaker after so many failures, evenly from 0 on; the last one at `over_s`."""
    breaker = Breaker()
    for number in range(times):
        assert not breaker.begin()
        breaker.failed(over_s * number / (times - 1), "timeout", is_probe=False)
    return breaker


def opened() -> Breaker:
    return failing(FAILURES_MIN, over_s=SUSTAINED_S)


def test_sustained_failure_opens() -> None:
    breaker = opened()
    assert ("open", FAILURES_MIN, 0.0, "timeout") == (
        breaker.state, breaker.failures, breaker.since, breaker.last_error
    )  # fmt: skip
    assert PAUSE_START_S == breaker.wait_s(SUSTAINED_S)


@pytest.mark.parametrize(
    ("times", "over_s"),
    [(FAILURES_MIN - 1, 10 * SUSTAINED_S), (10 * FAILURES_MIN, SUSTAINED_S - 1), (2, SUSTAINED_S)],
)
def test_few_or_sudden_failures_open_nothing(times: int, over_s: float) -> None:
    breaker = failing(times, over_s=over_s)
    assert ("closed", 0.0) == (breaker.state, breaker.wait_s(over_s))


def test_one_success_begins_the_count_anew() -> None:
    breaker = failing(FAILURES_MIN - 1, over_s=SUSTAINED_S)
    breaker.succeeded()
    assert (0, None, None) == (breaker.failures, breaker.since, breaker.last_error)
    breaker.failed(SUSTAINED_S + 1, "timeout", is_probe=False)
    assert ("closed", SUSTAINED_S + 1) == (breaker.state, breaker.since)


def test_one_probe_at_a_time_is_let_through_after_the_pause() -> None:
    breaker, now = opened(), SUSTAINED_S + PAUSE_START_S
    assert 1.0 == breaker.wait_s(now - 1)
    assert 0.0 == breaker.wait_s(now)
    assert breaker.begin()
    assert ("half_open", PROBE_LOOK_S) == (breaker.state, breaker.wait_s(now))


def test_the_pause_doubles_with_each_failed_probe_up_to_the_cap() -> None:
    breaker, now, pauses = opened(), SUSTAINED_S, []
    for _ in range(6):
        pauses.append(pause_s := breaker.wait_s(now))
        now += pause_s
        assert breaker.begin()
        breaker.failed(now, "timeout", is_probe=True)
    assert [5.0, 10.0, 20.0, 40.0, 60.0, 60.0] == pauses
    assert PAUSE_CAP_S == pauses[-1]


def test_a_probe_that_succeeds_closes_and_forgets() -> None:
    breaker = opened()
    breaker.begin()
    breaker.succeeded()
    assert ("closed", 0, 0.0) == (breaker.state, breaker.failures, breaker.wait_s(SUSTAINED_S))
    for number in range(FAILURES_MIN):
        breaker.failed(100.0 + number * SUSTAINED_S, "timeout", is_probe=False)
    assert PAUSE_START_S == breaker.wait_s(100.0 + (FAILURES_MIN - 1) * SUSTAINED_S)


def test_failures_that_began_earlier_prolong_no_pause() -> None:
    breaker = opened()
    breaker.failed(SUSTAINED_S + 1, "disconnected", is_probe=False)
    assert ("open", PAUSE_START_S - 1) == (breaker.state, breaker.wait_s(SUSTAINED_S + 1))
    breaker.begin()
    breaker.failed(SUSTAINED_S + 9, "disconnected", is_probe=False)
    assert "half_open" == breaker.state


def test_a_late_success_of_an_earlier_attempt_closes_too() -> None:
    breaker = opened()
    breaker.begin()
    breaker.succeeded()
    breaker.failed(99.0, "timeout", is_probe=True)
    assert ("closed", 1) == (breaker.state, breaker.failures)


def test_a_probe_that_says_nothing_makes_room_for_the_next() -> None:
    breaker, now = opened(), SUSTAINED_S + PAUSE_START_S
    breaker.begin()
    breaker.released()
    assert ("open", 0.0) == (breaker.state, breaker.wait_s(now))
    assert breaker.begin()
