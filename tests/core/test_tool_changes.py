"""An allow leads where it led when it was given: a tool that is registered anew asks again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core import protocol as p
from tests.core.life import ECHO, Life, custom, event, idle, result, use, verdict

ASKS = replace(ECHO, gate="ask", version=3)
ANEW = replace(ASKS, url="https://tools.example/elsewhere", version=4)


def waiting() -> Life:
    """Two calls, of which the second was allowed and waits for its turn."""
    life = Life(tools=[ASKS], concurrency=1).connect(custom("c1"), custom("c2"))
    life.decide("c1", "allow", id="dec_1", tool_version=3)
    life.decide("c2", "allow", id="dec_2", tool_version=3)
    return life


def held_as(life: Life) -> tuple[str, str | None]:
    call = life.calls["c2"]
    return call.state, call.gate and call.gate.reason


def test_a_call_that_was_allowed_and_not_sent_goes_back_to_a_person() -> None:
    life = waiting()
    life.notice(p.ToolsChanged({"echo": ANEW}))
    life.answer("c1")
    assert (("held", "tool_changed"), ["c1"]) == (held_as(life), life.deliveries)
    assert life.calls["c2"].decision is None
    life.decide("c2", "allow", id="dec_3", tool_version=4)
    assert ["c1", "c2"] == life.deliveries


def test_an_allow_that_is_read_after_the_change_is_of_the_tool_before_it() -> None:
    life = Life(tools=[ANEW]).connect(custom("c1"), custom("c2"))
    life.decide("c2", "allow", tool_version=3)
    assert (("held", "tool_changed"), []) == (held_as(life), life.deliveries)


@pytest.mark.parametrize("version", [None, 4])
def test_an_allow_of_the_tool_as_it_is_or_of_no_known_one_counts(version: int | None) -> None:
    life = Life(tools=[ANEW]).connect(custom("c2"))
    life.decide("c2", "allow", tool_version=version)
    assert ["c2"] == life.deliveries


def test_one_that_nobody_ran_when_it_was_allowed_asks_when_somebody_would() -> None:
    """Upstream's gate, and a tool that is registered after the allow."""
    life = Life(tools=[]).connect(use("c2", permission="ask"))
    life.decide("c2", "allow", tool_version=0)
    life.sent("c2")
    assert "unowned" == life.state("c2")
    life.notice(p.ToolsChanged({"echo": ANEW}))
    assert (("held", "tool_changed"), []) == (held_as(life), life.deliveries)
    life.decide("c2", "deny", id="dec_2")
    assert ["user.tool_confirmation", "user.tool_result"] == [sent["type"] for sent in life.sends]


def test_the_echo_of_our_allow_does_not_answer_the_new_question() -> None:
    life = Life(tools=[ASKS], concurrency=1).connect(custom("c1"), use("c2", permission="ask"))
    life.decide("c1", "allow", id="dec_1", tool_version=3)
    life.decide("c2", "allow", id="dec_2", tool_version=3)
    life.sent("c2")
    life.notice(p.ToolsChanged({"echo": ANEW}))
    life.answer("c1")
    life.receive(verdict("c2", "allow"))
    assert (("held", "tool_changed"), ["c1"]) == (held_as(life), life.deliveries)


def test_upstream_is_not_told_again_of_an_allow_when_an_interrupt_came_between() -> None:
    """It asks for the result; the verdict it has."""
    life = Life(tools=[ANEW]).connect(use("c2", permission="ask"))
    life.decide("c2", "allow", tool_version=3)
    life.sent("c2")
    life.receive(event("user.interrupt"))
    assert "interrupted" == life.state("c2")
    life.receive(idle("requires_action", "c2"))
    assert ("held", "tool_changed") == held_as(life)
    life.decide("c2", "allow", id="dec_2", tool_version=4)
    assert (1, ["c2"]) == (len(life.sends), life.deliveries)


def test_a_delivery_that_was_begun_stays_where_it_went() -> None:
    tool = replace(ECHO, retry="safe", version=3)
    life = Life(tools=[replace(tool, gate="ask")]).connect(custom("c1"))
    life.decide("c1", "allow", tool_version=3)
    changed = replace(tool, gate="ask", version=4)
    again = Life(tools=[changed], stored=life.store()).connect(custom("c1"))
    again.notice(p.Orphaned("c1"))
    assert ["c1"] == again.deliveries
    again.deliver("c1", result())
    assert "posting" == again.state("c1")
