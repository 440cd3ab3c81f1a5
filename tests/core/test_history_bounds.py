"""How much of the history is read, what is kept of it, and what a list should not hold."""

from __future__ import annotations

from app.core import protocol as p
from app.core.connection import SWEEP_EVENTS
from app.core.history import History
from app.core.seen import IDS_MAX
from tests.core.life import T0, Life, event, idle, unknown, use, user_result

PAGING_LOOP = p.Failure("unknown", message="next_page repeats", is_paging_loop=True)

# ---- bounds


def test_a_reconnect_reads_from_two_minutes_before_the_newest_event_that_was_read() -> None:
    """R-074: an open call, however old, does not move the bound, and neither does what only came live."""
    gated = use("tu1", "gated", permission="ask", at=0)
    life = Life().connect(gated, event("session.status_running", at=3600))
    life.receive(event("session.status_running", at=3660))
    life.closed(unknown())
    assert life.opened() == [p.ReadHistory(T0 + 3600 - 120)]


def test_a_busy_stream_is_confirmed_before_the_sweep_is_due() -> None:
    """R-074, D-090: so many live events later, history is read again, and one page still holds the rest."""
    life = Life().connect(event("session.status_running", at=0))
    effects = life.receive(*(event("session.usage", at=1.0 + n) for n in range(SWEEP_EVENTS)))
    assert effects == [p.ReadHistory(T0 - 120)]
    life.page(event("session.usage", at=float(SWEEP_EVENTS)))
    life.read()
    life.closed(unknown())
    assert life.opened() == [p.ReadHistory(T0 + SWEEP_EVENTS - 120)]


def test_a_replayed_log_is_not_read_again_for_its_length() -> None:
    """R-074: some servers replay all of it on each connect; a read has shown it already."""
    log = [event("session.usage", at=1.0 + n) for n in range(SWEEP_EVENTS + 10)]
    life = Life().connect(*log)
    assert life.receive(*log) == []


def test_a_restart_reads_from_the_stored_position() -> None:
    """R-074: it is part of what is stored."""
    first = Life().connect(event("session.status_running", at=3600))
    second = Life(stored=first.store())
    second.retrieved()
    assert second.opened() == [p.ReadHistory(T0 + 3600 - 120)]


def test_the_position_stays_while_no_read_has_closed_the_gap() -> None:
    """R-074, R-064: live events beyond a gap must not hide it from the next read."""
    life = Life().connect(event("session.status_running", at=0))
    life.closed(unknown())
    life.opened()
    life.read_failed()
    life.receive(event("session.status_running", at=3600))
    life.closed(unknown())
    assert life.opened() == [p.ReadHistory(T0 - 120)]


def test_an_open_call_survives_a_read_that_does_not_list_it() -> None:
    """R-074: it is stored; only its answers need to be in the window."""
    life = Life().connect(use("tu1", "gated", permission="ask"))
    life.reconnect()
    assert life.state("tu1") == "held"


def test_memory_holds_what_is_open_not_what_was_listed() -> None:
    """R-092: calls with their answers leave nothing behind but a bounded memory of ids."""
    history = History(frozenset(), None)
    for n in range(20_000):
        history.fold(use(f"tu{n}"))
        history.fold(user_result(f"tu{n}"))
    history.fold(use("open"))
    ids = sum(f"tu{n}" in history.recent for n in range(20_000))
    assert (list(history.uses), history.answers, ids <= IDS_MAX) == (["open"], {}, True)


def test_an_open_call_on_the_first_of_many_pages_runs() -> None:
    """R-092: it is not forgotten on the way."""
    life = Life()
    life.retrieved()
    life.opened()
    life.page(use("tu1"))
    for _ in range(20):
        life.page(*(event("user.message") for _ in range(1_000)))
    life.read()
    assert life.deliveries == ["tu1"]


# ---- what a list should not hold


def test_a_preview_in_the_history_does_not_disturb_the_read() -> None:
    """R-090: calls around it run."""
    preview = event("event_start", "", at=None, event={"id": "m1", "type": "agent.message"})
    life = Life().connect(use("tu1"), preview, use("tu2"))
    assert life.deliveries == ["tu1", "tu2"]


def test_a_preview_in_the_history_is_no_message() -> None:
    """R-090: it is ignored."""
    preview = event("event_start", "", at=None, event={"id": "m1", "type": "agent.message"})
    life = Life().connect(preview)
    assert (life.of(p.SaveMessage), life.machine.messages.has_partials) == ([], False)


def test_a_preview_at_the_end_of_the_history_does_not_hide_the_idle() -> None:
    """R-090: ignored means that the idle before it is the last event."""
    preview = event("event_start", "", at=None, event={"id": "m1", "type": "agent.message"})
    life = Life(max_idle_s=60).connect(idle(), preview)
    life.at(60)
    assert life.end == p.End("idle")


def test_a_list_that_goes_in_circles_dispatches_nothing() -> None:
    """R-091: it counts as failed, like R-064."""
    life = Life()
    life.retrieved()
    life.opened()
    life.page(use("tu1"))
    life.read_failed(PAGING_LOOP)
    assert life.deliveries == []


def test_the_stream_carries_on_when_the_list_goes_in_circles() -> None:
    """R-091, R-066: live calls are served."""
    life = Life()
    life.retrieved()
    life.opened()
    life.read_failed(PAGING_LOOP)
    life.receive(use("tu5"))
    assert life.deliveries == ["tu5"]


def test_a_list_that_goes_in_circles_is_visible() -> None:
    """R-091: the attachment shows `history_degraded`."""
    life = Life()
    life.retrieved()
    life.opened()
    life.read_failed(PAGING_LOOP)
    assert "history_degraded" in life.machine.progress.flags
