"""A history read that breaks off: what stays, what is asked again, and the live stream meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core import protocol as p
from app.core.calls import Call
from app.core.connection import SWEEP_EVENTS, SWEEP_S
from app.core.session import Stored
from tests.core.life import (
    ECHO,
    Life,
    custom,
    event,
    idle,
    refused,
    result,
    unknown,
    unsent,
    use,
    user_result,
    verdict,
)


def _opened(**settings: Any) -> Life:
    """A run whose stream stands and whose first history read is under way."""
    life = Life(**settings)
    life.retrieved()
    life.opened()
    return life


def _broken_off(*page: Any, **settings: Any) -> Life:
    """A run whose first history read broke off after one page."""
    life = _opened(**settings)
    life.page(*page)
    life.read_failed(unknown(500))
    return life


# ---- half a history decides nothing


def test_a_call_of_a_read_that_broke_off_is_not_delivered() -> None:
    """R-064: the missing page may hold its answer."""
    assert _broken_off(use("tu1")).deliveries == []


def test_a_call_of_a_read_that_broke_off_still_runs_when_it_comes_live() -> None:
    """R-064: it was not marked as seen."""
    tu1 = use("tu1")
    life = _broken_off(tu1)
    life.receive(tu1)
    assert life.deliveries == ["tu1"]


def test_a_call_that_came_live_runs_once_although_the_next_read_lists_it() -> None:
    """R-064, R-067: the repeated read knows it."""
    tu1 = use("tu1")
    life = _broken_off(tu1)
    life.receive(tu1)
    life.page(tu1)
    life.read()
    assert life.deliveries == ["tu1"]


def test_a_read_that_broke_off_arms_no_countdown() -> None:
    """R-064: its last event need not be the last one."""
    life = _broken_off(idle(), max_idle_s=60)
    life.at(3600)
    assert life.end is None


def test_a_read_that_broke_off_leaves_the_countdown_as_it_was() -> None:
    """R-064: neither cleared nor moved."""
    life = Life(max_idle_s=60).connect(idle(id="i1"))
    life.at(10)
    life.closed(unknown())
    life.opened()
    life.page(event("user.message"))
    life.read_failed()
    progress = life.machine.progress
    assert (progress.idle_id, progress.idle_deadline) == ("i1", 60)


@pytest.mark.parametrize("state", ["queued", "answered", "posting"])
def test_calls_of_an_earlier_run_wait_while_the_history_fails(state: Any) -> None:
    """R-064: only a whole read can show that nobody settled them meanwhile."""
    answer = None if state == "queued" else result()
    call = Call(id="tu1", kind="builtin", tool="echo", input=b"{}", state=state, result=answer)
    life = _broken_off(stored=Stored(calls=(call,)))
    assert (life.deliveries, life.sends) == ([], [])


# ---- facts stand by themselves


def test_an_answer_survives_a_read_that_broke_off() -> None:
    """R-065: its call is not delivered when it comes live."""
    life = _broken_off(user_result("tu1"))
    life.receive(use("tu1"))
    assert (life.deliveries, life.state("tu1")) == ([], "answered_elsewhere")


def test_an_answer_listed_with_its_call_survives_a_read_that_broke_off() -> None:
    """R-065: the pair says the same as the answer alone."""
    tu1 = use("tu1")
    life = _broken_off(tu1, user_result("tu1"))
    life.receive(tu1)
    assert life.deliveries == []


def test_an_answer_closes_an_open_call_although_the_read_broke_off() -> None:
    """R-065: at once."""
    life = Life().connect(use("tu1", "gated", permission="ask"))
    life.closed(unknown())
    life.opened()
    life.page(user_result("tu1"))
    life.read_failed()
    assert life.state("tu1") == "answered_elsewhere"


def test_a_verdict_survives_a_read_that_broke_off() -> None:
    """R-065: its call runs when it comes live."""
    life = _broken_off(verdict("tu2", "allow"))
    life.receive(use("tu2", "gated", permission="ask"))
    assert (life.deliveries, life.log("tu2")["confirmation"]) == (["tu2"], "allow")


def test_a_verdict_releases_a_held_call_although_the_read_broke_off() -> None:
    """R-065: once, also when the repeated read shows it again."""
    allow = verdict("tu2", "allow")
    life = Life().connect(use("tu2", "gated", permission="ask"))
    life.closed(unknown())
    life.opened()
    life.page(allow)
    life.read_failed()
    life.page(allow)
    life.read()
    assert life.deliveries == ["tu2"]


def test_a_thread_termination_survives_a_read_that_broke_off() -> None:
    """R-065: the thread's calls are not run when they come live."""
    life = _broken_off(event("session.thread_status_terminated", session_thread_id="th1"))
    life.receive(use("tu3", thread="th1", permission="allow"))
    assert (life.deliveries, life.state("tu3")) == ([], "thread_terminated")


def test_an_interrupt_survives_a_read_that_broke_off() -> None:
    """R-065: like the other facts; calls before it are settled."""
    tu1, stop = use("tu1"), event("user.interrupt")
    life = _broken_off(stop)
    life.receive(tu1)
    assert (life.deliveries, life.state("tu1")) == ([], "interrupted")


# ---- meanwhile, and again


def test_live_calls_are_served_after_a_failed_read() -> None:
    """R-066: run and posted."""
    life = _broken_off()
    life.receive(use("tu5"))
    life.answer("tu5")
    assert life.state("tu5") == "posted"


@pytest.mark.parametrize("failure", [unknown(500), unknown(), unsent(), unsent(429), refused(409)])
def test_a_failed_read_is_repeated_on_the_same_connection(failure: p.Failure) -> None:
    """R-067: after waits that double, from the same position."""
    life = _opened()
    for _ in range(3):
        life.read_failed(failure)
    assert life.of(p.ReadHistory)[1:] == [
        p.ReadHistory(None, 0.5),
        p.ReadHistory(None, 1.0),
        p.ReadHistory(None, 2.0),
    ]


def test_a_repeated_read_honours_retry_after() -> None:
    """R-067, R-051: the floor of the wait."""
    life = _opened()
    assert life.read_failed(unsent(429, retry_after_s=20)) == [p.ReadHistory(None, 0.5, 20)]


def test_a_call_that_only_the_repeated_read_shows_runs_once() -> None:
    """R-067: the stream stays open and silent."""
    life = _opened()
    life.read_failed(unknown(500))
    life.read_failed(unknown(500))
    life.page(use("tu1"))
    life.read()
    assert life.deliveries == ["tu1"]


def test_pages_of_a_read_that_broke_off_do_not_count_in_the_next_one() -> None:
    """R-067: the answer may have come between both reads."""
    tu1 = use("tu1")
    life = _broken_off(tu1)
    life.page(tu1, user_result("tu1"))
    life.read()
    assert life.deliveries == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 422])
def test_a_refused_read_does_not_end_the_run(status: int) -> None:
    """R-068: live calls are served."""
    life = _opened()
    life.read_failed(refused(status))
    life.receive(use("tu5"))
    assert (life.end, life.deliveries) == (None, ["tu5"])


def test_a_refused_read_is_not_repeated_before_the_sweep() -> None:
    """R-068: not by backoff, not when upstream waits for an unknown call, and not for many events."""
    life = _opened()
    life.read_failed(refused(403))
    life.receive(idle("requires_action", "ctu7"), *(event("session.usage") for _ in range(SWEEP_EVENTS)))
    life.at(SWEEP_S - 1)
    assert len(life.of(p.ReadHistory)) == 1


def test_the_sweep_asks_again_also_after_a_refusal() -> None:
    """R-068, promise 5: a stream that lives on for days would leave what came before it unseen."""
    life = _opened()
    life.read_failed(refused(403))
    life.at(SWEEP_S)
    life.page(custom("ctu1"))
    life.read()
    assert (["ctu1"], frozenset()) == (life.deliveries, life.machine.progress.flags)


def test_a_refused_read_is_visible() -> None:
    """R-068: the attachment shows `history_degraded`."""
    life = _opened()
    life.read_failed(refused(403))
    assert life.machine.progress.flags == {"history_degraded"}


def test_the_next_connection_asks_for_the_history_again() -> None:
    """R-068: the refusal holds for one connection."""
    life = _opened()
    life.read_failed(refused(403))
    life.reconnect(custom("ctu1"))
    assert (life.deliveries, life.machine.progress.flags) == (["ctu1"], frozenset())


def test_an_unknown_call_that_upstream_waits_for_is_named_although_history_is_refused() -> None:
    """R-068, R-093: nobody can look for it, so a person must see it (promise 5)."""
    life = _opened()
    life.read_failed(refused(403))
    life.receive(idle("requires_action", "ctu7"))
    assert life.machine.progress.missing == ("ctu7",)


# ---- the session is over


@pytest.mark.parametrize(
    ("type_", "reason"), [("session.status_terminated", "terminated"), ("session.deleted", "deleted")]
)
def test_a_terminal_event_in_the_history_ends_the_run(type_: str, reason: str) -> None:
    """R-075: at once, and the stream is closed unread."""
    life = Life().connect(use("tu1"), event(type_, "e2"))
    assert life.effects[-2:] == [p.CloseStream(), p.End(reason, None, "e2")]  # type: ignore[arg-type]


@pytest.mark.parametrize("type_", ["session.status_terminated", "session.deleted"])
def test_a_call_of_a_session_that_ended_is_recorded_and_not_delivered(type_: str) -> None:
    """R-075: it becomes `session_ended`."""
    life = Life().connect(use("tu1"), event(type_, "e2"))
    assert (life.deliveries, life.state("tu1")) == ([], "session_ended")


def test_open_calls_of_an_earlier_run_end_with_the_session() -> None:
    """R-075: held ones too."""
    first = Life().connect(use("tu1", "gated", permission="ask"))
    second = Life(stored=first.store()).connect(event("session.status_terminated", "e2"))
    assert second.state("tu1") == "session_ended"


def test_a_call_of_a_disabled_tool_is_not_answered_once_the_session_is_over() -> None:
    """R-075: nothing is sent to a session that is over."""
    life = Life(tools=(replace(ECHO, enabled=False),))
    life.connect(use("tu1"), event("session.status_terminated", "e2"))
    assert life.sends == []


@pytest.mark.parametrize("type_", ["session.status_terminated", "session.deleted"])
def test_a_terminal_event_before_a_failing_page_ends_the_run(type_: str) -> None:
    """R-076: the missing page cannot take it back."""
    life = _broken_off(event(type_, "e2"))
    assert life.end is not None
    assert life.end.event_id == "e2"


def test_a_read_that_keeps_failing_asks_for_the_whole_log_from_the_third_repeat_on() -> None:
    """K-12: some servers fail on the filter by time alone."""
    life = Life().connect(event("user.message"))
    life.closed()
    life.opened()
    reads = []
    for _ in range(6):
        life.clear()
        life.read_failed(unknown(500))
        reads.append(life.of(p.ReadHistory)[0].since is None)
    assert reads == [False, False, True, True, True, True]


def test_calls_of_a_history_that_is_paged_in_circles_are_named() -> None:
    """R-091, promise 5: they may be answered on a page that never comes, so they are not run, but shown."""
    life = Life()
    life.retrieved()
    life.opened()
    life.page(use("tu1"))
    life.read_failed(p.Failure("refused", is_paging_loop=True))
    assert life.machine.progress.missing == ("tu1",)
    assert life.deliveries == []
