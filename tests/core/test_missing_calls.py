"""Calls that upstream waits for and nobody here has seen; and the sweeps that find what was lost."""

from __future__ import annotations

from app.core import protocol as p
from app.core.connection import SWEEP_S
from tests.core.life import T0, Life, custom, event, idle, mcp, refused, unknown, use

# ---- looked for at once


def test_an_unknown_call_that_upstream_waits_for_is_looked_for_at_once() -> None:
    """R-093: on the live connection, from the position before the idle."""
    life = Life().connect(event("session.status_running", at=0))
    effects = life.receive(idle("requires_action", "ctu7", at=60))
    assert effects == [p.ReadHistory(T0 - 120)]


def test_a_lost_call_that_history_shows_is_routed() -> None:
    """R-093: like any other."""
    life = Life().connect()
    ctu7, waits = custom("ctu7"), idle("requires_action", "ctu7")
    life.receive(waits)
    life.page(ctu7, waits)
    life.read()
    assert (life.deliveries, life.machine.progress.missing) == (["ctu7"], ())


def test_a_lost_call_still_passes_the_gate() -> None:
    """R-093, promise 1: that upstream waits for it allows nothing."""
    life = Life().connect()
    tu7, waits = use("tu7", "gated", permission="ask"), idle("requires_action", "tu7")
    life.receive(waits)
    life.page(tu7, waits)
    life.read()
    assert (life.deliveries, life.state("tu7")) == ([], "held")


def test_a_known_call_that_upstream_waits_for_needs_no_read() -> None:
    """R-093: it is here already."""
    life = Life().connect(custom("ctu7"))
    assert life.receive(idle("requires_action", "ctu7")) == []


def test_one_read_at_a_time_looks_for_lost_calls() -> None:
    """R-093: a second idle waits for the first read."""
    life = Life().connect()
    life.clear()
    life.receive(idle("requires_action", "ctu7"), idle("requires_action", "ctu7", "ctu8"))
    assert len(life.of(p.ReadHistory)) == 1


def test_an_id_that_came_during_a_read_is_looked_for_after_it() -> None:
    """R-093: the read under way may have begun too early to show it."""
    life = Life().connect()
    ctu7 = custom("ctu7")
    both = idle("requires_action", "ctu7", "ctu8")
    life.receive(idle("requires_action", "ctu7"), both)
    life.page(ctu7)
    assert p.ReadHistory(None) in life.read()


def test_a_lost_call_outside_the_window_is_found_by_a_full_read() -> None:
    """R-093, R-074: a contradiction means that the whole history is read."""
    life = Life().connect(event("session.status_running"))
    waits = idle("requires_action", "ctu7")
    life.receive(waits)
    life.page(waits)
    assert life.read() == [p.ReadHistory(None)]


def _still_missing(**settings: float) -> Life:
    """A run that read the whole history without finding a call that upstream waits for."""
    life = Life(**settings).connect(event("session.status_running", at=0))  # type: ignore[arg-type]
    waits = idle("requires_action", "ctu7", at=60)
    life.receive(waits)
    for _ in range(2):
        life.page(waits)
        life.read()
    return life


def test_an_id_that_no_history_shows_is_named() -> None:
    """R-093: the attachment's status says which, and that upstream contradicts itself."""
    progress = _still_missing().machine.progress
    assert (progress.missing, progress.flags) == (("ctu7",), {"upstream_contradiction"})


def test_an_id_that_no_history_shows_does_not_make_reads_without_end() -> None:
    """R-093: the window, then all; the next one is the sweep."""
    life = _still_missing()
    life.at(SWEEP_S - 1)
    assert len(life.of(p.ReadHistory)) == 3


def test_a_missing_call_that_comes_late_is_served() -> None:
    """R-093: live, after it was given up for missing."""
    life = _still_missing()
    life.receive(custom("ctu7", at=61))
    assert life.deliveries == ["ctu7"]


def test_a_missing_call_stays_named_while_upstream_waits_for_it() -> None:
    """R-093, promise 5: a sweep whose window holds no status says nothing about what upstream waits for."""
    life = _still_missing()
    life.receive(event("session.updated", at=500))
    life.at(SWEEP_S)
    life.page(event("session.updated", at=500))
    life.read()
    life.page(idle("requires_action", "ctu7", at=60))
    life.read()
    assert life.machine.progress.missing == ("ctu7",)


def test_a_restart_does_not_forget_a_missing_call() -> None:
    """R-093, promise 5: the successor's window need not show that upstream waits for it."""
    first = _still_missing()
    first.receive(event("session.updated", at=500))
    second = Life(stored=first.store()).connect(event("session.updated", at=500))
    second.page(idle("requires_action", "ctu7", at=60))
    second.read()
    assert second.machine.progress.missing == ("ctu7",)


def test_an_idle_without_wants_clears_what_was_missing() -> None:
    """R-093: upstream waits no more."""
    life = _still_missing()
    life.receive(idle(at=70))
    assert (life.machine.progress.missing, life.machine.progress.flags) == ((), frozenset())


def test_a_call_that_a_person_asks_for_is_looked_for() -> None:
    """R-093 and the design's `confirm`: an id that the store does not hold is looked up in history."""
    life = Life().connect()
    effects = life.notice(p.Wanted(("tu7",)))
    assert [type(effect) for effect in effects] == [p.ReadHistory]


def test_an_mcp_call_that_upstream_waits_for_is_held() -> None:
    """R-093, promise 1: known all along, and now a person must decide."""
    life = Life().connect(mcp("mcp1"))
    life.receive(idle("requires_action", "mcp1"))
    assert life.state("mcp1") == "held"


# ---- sweeps


def test_history_is_read_again_every_five_minutes() -> None:
    """R-074 and the design: what the stream lost is found without a disconnect."""
    life = Life().connect(event("session.status_running", at=0))
    life.at(SWEEP_S)
    assert life.effects[-1] == p.ReadHistory(T0 - 120)


def test_a_call_that_only_a_sweep_shows_is_served() -> None:
    """R-060: the stream was alive and lost it."""
    life = Life().connect()
    life.at(SWEEP_S)
    life.page(use("tu1"))
    life.read()
    assert life.deliveries == ["tu1"]


def test_sweeps_go_on_while_the_stream_cannot_be_opened() -> None:
    """The design: a sweep lists whether or not the stream is alive."""
    life = Life().connect()
    life.clear()
    for _ in range(40):
        life.closed(unknown(503))
        life.at(life.now + 10)
    assert len(life.of(p.ReadHistory)) == 1


def test_a_sweep_that_is_refused_does_not_end_the_run() -> None:
    """R-068: the stream carries on."""
    life = Life().connect()
    life.at(SWEEP_S)
    life.read_failed(refused(403))
    life.receive(use("tu1"))
    assert (life.end, life.deliveries) == (None, ["tu1"])
