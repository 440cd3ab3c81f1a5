"""A tool that answers 202: the call stays open, takes no slot, and ends by its report or its deadline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core import protocol as p
from app.core.calls import Call
from app.core.session import Stored
from tests.core.life import ECHO, Life, custom, event, result, stamp, use

LATE = "promised a result, but reported none in time"


def promised(*call_ids: str, retry: str = "connect_only", **settings: object) -> Life:
    """The tool has taken these calls with 202."""
    tool = replace(ECHO, retry=retry)  # type: ignore[arg-type]
    life = Life(tools=(tool,), **settings).connect()  # type: ignore[arg-type]
    for call_id in call_ids:
        life.receive(custom(call_id))
        life.notice(p.Promised(call_id, life.calls[call_id].attempts))
    return life


def said(life: Life) -> list[str]:
    return [sent["content"][0]["text"] for sent in life.sends]


def test_a_promised_call_stays_open_and_its_report_is_posted() -> None:
    life = promised("ctu1")
    assert ("dispatched", True, []) == (life.state("ctu1"), life.calls["ctu1"].awaits_callback, life.sends)
    assert [p.Watch("ctu1")] == life.of(p.Watch)
    life.answer("ctu1", "shipped")
    assert ("posted", False, ["shipped"]) == (
        life.state("ctu1"), life.calls["ctu1"].awaits_callback, said(life),
    )  # fmt: skip


def test_a_promised_call_takes_no_slot() -> None:
    """The tool works, not its endpoint: hours of it must not keep the agent's other calls waiting."""
    life = promised("ctu1", "ctu2", "ctu3", concurrency=2)
    assert ["ctu1", "ctu2", "ctu3"] == life.deliveries


def test_one_at_a_time_stays_in_order_also_behind_a_promise() -> None:
    life = promised("ctu1", concurrency=1)
    life.receive(custom("ctu2"))
    assert ["ctu1"] == life.deliveries
    life.answer("ctu1")
    assert ["ctu1", "ctu2"] == life.deliveries


@pytest.mark.parametrize(("retry", "is_unknown"), [("never", True), ("connect_only", True), ("safe", False)])
def test_a_broken_promise_is_an_error_and_no_reason_to_call_again(retry: str, is_unknown: bool) -> None:
    """Its time was for all attempts together, so a tool that may be repeated is not."""
    life = promised("ctu1", retry=retry)
    life.notice(p.Orphaned("ctu1"))
    assert ("posting", is_unknown, 1) == (
        life.state("ctu1"), life.calls["ctu1"].outcome_unknown, len(life.deliveries),
    )  # fmt: skip
    assert LATE in said(life)[0]


def test_a_promise_outlives_the_run_that_heard_it() -> None:
    call = Call(
        "ctu1", "custom", "echo", b"{}", "dispatched", attempts=1, awaits_callback=True, processed_at=stamp(0)
    )
    life = Life(tools=(replace(ECHO, retry="safe"),), stored=Stored((call,))).connect()
    life.receive(custom("ctu2"))
    assert (["ctu2"], []) == (life.deliveries, life.sends)
    life.notice(p.Delivered("ctu1", result("kept"), 1))
    assert ["kept"] == said(life)


def test_a_report_for_an_interrupted_call_is_kept_and_not_posted() -> None:
    life = promised("ctu1")
    life.receive(event("user.interrupt"))
    life.deliver("ctu1", "too late")
    assert ("interrupted", []) == (life.state("ctu1"), life.sends)


def test_a_second_report_changes_nothing() -> None:
    life = promised("ctu1")
    life.answer("ctu1", "first")
    life.deliver("ctu1", "second")
    assert ["first"] == said(life)


def test_a_promised_call_is_delivered_again_when_an_operator_asks() -> None:
    """Whatever `retry` says: somebody knows that the tool has lost it."""
    life = promised("ctu1", retry="never")
    life.notice(p.Redeliver(("ctu1", "unknown")))
    assert (["ctu1", "ctu1"], 2) == (life.deliveries, life.calls["ctu1"].attempts)
    life.answer("ctu1", "found")
    assert ["found"] == said(life)


def test_only_a_promised_call_is_delivered_again() -> None:
    """One that is under way, answered or held gets nowhere by that."""
    life = Life().connect()
    life.receive(custom("ctu1"), custom("ctu2"), use("tu3", "gated", permission="ask"))
    life.answer("ctu2")
    life.notice(p.Redeliver(("ctu1", "ctu2", "tu3")))
    assert ["ctu1", "ctu2"] == life.deliveries


def test_one_asked_for_meanwhile_waits_for_the_history() -> None:
    """Somebody may have settled it while nobody served the session."""
    call = Call(
        "ctu1", "custom", "echo", b"{}", "dispatched", attempts=1, awaits_callback=True, processed_at=stamp(0)
    )
    life = Life(stored=Stored((call,)))
    life.notice(p.Redeliver(("ctu1",)))
    assert [] == life.deliveries
    life.connect()
    assert ["ctu1"] == life.deliveries
