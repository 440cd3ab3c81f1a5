"""Our own gate: a tool that asks, whatever upstream allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core import protocol as p
from tests.core.life import (
    ECHO,
    GATED,
    Life,
    custom,
    event,
    idle,
    unknown,
    use,
    verdict,
)

ASKS = replace(ECHO, gate="ask")


def asked(**more: Any) -> Life:
    """A session with one custom call whose tool asks."""
    life = Life(tools=(replace(ASKS, **more),)).connect()
    life.receive(custom("ctu1"))
    return life


def test_a_call_of_a_tool_that_asks_is_held() -> None:
    """Custom calls too, which upstream never gates."""
    call = asked().calls["ctu1"]
    assert ("held", "tool", "tool_asks") == (
        call.state,
        call.gate and call.gate.by,
        call.gate and call.gate.reason,
    )


def test_an_allow_on_our_gate_queues_and_sends_no_confirmation() -> None:
    """Upstream knows nothing of this gate."""
    life = asked()
    life.decide("ctu1", "allow")
    assert (["ctu1"], []) == (life.deliveries, life.sends)


@pytest.mark.parametrize(
    ("call", "type_"), [(custom("c1"), "user.custom_tool_result"), (use("c1"), "user.tool_result")]
)
def test_a_deny_on_our_gate_posts_an_error_result_of_the_calls_own_type(call: Any, type_: str) -> None:
    """The agent is told in the words of the reviewer."""
    life = Life(tools=(ASKS,)).connect(call)
    life.decide("c1", "deny", message="Too expensive.")
    [sent] = life.sends
    words = "Denied by a reviewer: Too expensive. Do not retry without new instructions."
    assert (type_, True, [{"type": "text", "text": words}]) == (
        sent["type"],
        sent["is_error"],
        sent["content"],
    )


def test_a_deny_on_our_gate_ends_denied_once_it_was_posted() -> None:
    """Unexecuted, and the answer is on record."""
    life = asked()
    life.decide("ctu1", "deny")
    assert "posting" == life.state("ctu1")
    life.sent("ctu1")
    log = life.log("ctu1")
    assert ("denied", False, True, "deny") == (
        log["outcome"],
        log["executed"],
        log["posted"],
        log["confirmation"],
    )


def test_a_deny_on_our_gate_ends_denied_when_only_a_look_shows_that_it_landed() -> None:
    """The answer of the send was lost, its effect was not."""
    life = asked()
    life.decide("ctu1", "deny")
    life.sent("ctu1", unknown())
    ours = {name: value for name, value in life.sends[0].items() if name != "type"}
    life.looked("ctu1", p.Findings(answers=(event("user.custom_tool_result", **ours),)))
    assert ("denied", True) == (life.state("ctu1"), life.calls["ctu1"].posted)


def test_an_allow_after_a_deny_on_our_gate_is_refused() -> None:
    """Deny is sticky."""
    life = asked()
    life.decide("ctu1", "deny", id="dec_1")
    life.decide("ctu1", "allow", id="dec_2")
    life.sent("ctu1")
    assert ("denied", [], ["dec_2"]) == (
        life.state("ctu1"), life.deliveries, [e.decision_id for e in life.of(p.RefuseDecision)]
    )  # fmt: skip


def test_a_decision_that_is_brought_again_after_the_call_has_ended_stays_what_it_is() -> None:
    """Wishes are read before what was done about the last one is stored."""
    life = asked()
    for _ in range(2):
        life.decide("ctu1", "deny", id="dec_1")
        life.sent("ctu1")
    assert ("denied", []) == (life.state("ctu1"), life.of(p.RefuseDecision))


def test_two_gates_take_one_decision() -> None:
    """Upstream's confirmation goes first, and our gate does not ask again."""
    life = Life(tools=(replace(GATED, gate="ask"),)).connect(use("tu1", "gated", permission="ask"))
    life.decide("tu1", "allow")
    assert ["user.tool_confirmation"] == [sent["type"] for sent in life.sends]
    life.sent("tu1")
    assert ["tu1"] == life.deliveries


def test_a_call_held_by_our_gate_defers_the_countdown() -> None:
    """It waits for a person like any other."""
    life = Life(tools=(ASKS,), max_idle_s=60).connect(custom("ctu1"), idle())
    life.at(3600)
    assert None is life.end


def test_a_call_held_by_our_gate_is_still_held_after_a_restart() -> None:
    """Nothing turns a hold into a run."""
    call = custom("ctu1")
    first = Life(tools=(ASKS,)).connect(call)
    life = Life(tools=(ASKS,), stored=first.store()).connect(call)
    assert ([], []) == (life.deliveries, life.sends)


def test_a_decision_on_our_gate_is_fed_to_the_run_after_a_crash() -> None:
    """It was committed, and the process died before it took effect."""
    first = asked()
    life = Life(tools=(ASKS,), stored=first.store()).connect()
    life.decide("ctu1", "allow")
    assert ["ctu1"] == life.deliveries


def test_a_verdict_seen_upstream_settles_a_call_that_our_gate_holds() -> None:
    """Somebody else decided first: deny posts the error that the agent waits for."""
    life = asked()
    life.receive(verdict("ctu1", "deny"))
    assert ("posting", True) == (life.state("ctu1"), life.sends[0]["is_error"])
