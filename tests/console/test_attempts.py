from __future__ import annotations

from app.console import attempts
from app.console.attempts import FAILURES_MAX, WINDOW_S, Attempts


def test_an_address_that_failed_too_often_waits_for_its_oldest_failure_to_pass() -> None:
    some = Attempts()
    for n in range(FAILURES_MAX):
        assert 0 == some.wait_s("a", float(n))
        some.failed("a", float(n))
    assert WINDOW_S - 9.0 == some.wait_s("a", 9.0)
    assert 0 == some.wait_s("b", 9.0)
    assert 0 == some.wait_s("a", WINDOW_S)
    some.failed("a", WINDOW_S)
    assert 1.0 == some.wait_s("a", WINDOW_S)


def test_only_so_many_addresses_are_remembered() -> None:
    some = Attempts()
    for n in range(attempts.ADDRESSES_MAX + 5):
        some.failed(str(n), 0.0)
    assert attempts.ADDRESSES_MAX == len(some._failures)
