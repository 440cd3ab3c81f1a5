"""Held calls whose time is over: the store says when, and a deny comes that nobody gave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core import protocol as p
from app.core.calls import Gate
from tests.core.life import ECHO, GATED, Life, custom, idle, mcp, refused, unknown, use, verdict

MESSAGE = "Nobody decided on this call in time. Do not retry without new instructions."
ASKS = replace(ECHO, gate="ask", expires_in_s=60.0)
LIMITED = replace(GATED, expires_in_s=60.0)


def expire(life: Life, call_id: str) -> list[p.Effect]:
    return life.decide(call_id, "deny", via="expiry", message=MESSAGE)


def gate(life: Life, call_id: str) -> tuple[float | None, str] | None:
    gate = life.calls[call_id].gate
    return None if gate is None else (gate.expires_in_s, gate.on_expiry)


def test_a_hold_names_the_time_that_the_registration_grants() -> None:
    """By either gate, and whoever runs the call in the end."""
    keeps = replace(LIMITED, name="kept", on_expiry="keep", expires_in_s=5.0)
    life = Life(tools=(ASKS, LIMITED, keeps), environment="cloud").connect(
        custom("c1"),
        use("c2", "gated", permission="ask"),
        use("c3", "kept", permission="ask"),
        mcp("c4", "kept", permission="ask"),
        use("c5", "unknown", permission="ask"),
    )
    assert [(60.0, "deny"), (60.0, "deny"), (5.0, "keep"), (5.0, "keep"), (None, "deny")] == [
        gate(life, f"c{n}") for n in range(1, 6)
    ]


def test_a_hold_names_when_its_registration_has_people_reminded() -> None:
    life = Life(tools=(replace(ASKS, remind_after_s=30.0), LIMITED)).connect(
        custom("c1"), use("c2", "gated", permission="ask")
    )
    gates = [life.calls[id_].gate for id_ in ("c1", "c2")]
    assert [30.0, None] == [gate and gate.remind_after_s for gate in gates]


def test_a_custom_call_without_a_registration_of_its_own_has_the_time_of_the_catch_all() -> None:
    """Built-in and MCP calls are not its own."""
    life = Life(tools=(replace(ASKS, name="*"),)).connect(
        custom("c1", "any"), use("c2", "any", permission="ask"), mcp("c3", "any", permission="ask")
    )
    assert [60.0, None, None] == [found and found[0] for found in (gate(life, f"c{n}") for n in (1, 2, 3))]


def test_a_call_whose_outcome_is_unknown_has_time_of_its_own() -> None:
    """To deliver once more is another question."""
    life = Life(tools=(replace(ECHO, on_unknown="ask", expires_in_s=60.0),)).connect(custom("c1"))
    life.deliver("c1", unknown=True)
    assert Gate("tool", None, "outcome_unknown", 60.0) == life.calls["c1"].gate


@pytest.mark.parametrize(
    ("call", "type_"), [(custom("c1"), "user.custom_tool_result"), (use("c1"), "user.tool_result")]
)
def test_a_call_that_expires_at_our_gate_is_answered_in_its_own_type(call: Any, type_: str) -> None:
    """The agent hears that nobody decided, not that somebody said no."""
    life = Life(tools=(ASKS,)).connect(call)
    expire(life, "c1")
    [sent] = life.sends
    assert (type_, True, MESSAGE) == (sent["type"], sent["is_error"], sent["content"][0]["text"])
    life.sent("c1")
    assert ("expired", []) == (life.state("c1"), life.deliveries)


def test_a_call_that_expires_at_upstreams_gate_is_denied_there_with_a_message() -> None:
    """And nothing else is posted."""
    life = Life(tools=(LIMITED,)).connect(use("tu1", "gated", permission="ask"))
    expire(life, "tu1")
    assert [("user.tool_confirmation", "deny", MESSAGE)] == [
        (sent["type"], sent["result"], sent["deny_message"]) for sent in life.sends
    ]
    assert "held" == life.state("tu1")
    life.sent("tu1")
    assert ("expired", 1) == (life.state("tu1"), len(life.sends))


def test_the_echo_of_our_deny_ends_the_call_as_expired() -> None:
    """It may come before the send is answered."""
    life = Life(tools=(LIMITED,)).connect(use("tu1", "gated", permission="ask"))
    expire(life, "tu1")
    life.receive(verdict("tu1", "deny"))
    life.sent("tu1")
    assert ("expired", "expiry") == (life.state("tu1"), life.calls["tu1"].decision.via)  # type: ignore[union-attr]


def test_an_allow_given_elsewhere_beats_an_expiry_that_upstream_refused() -> None:
    """Upstream's first verdict counts there, and so it does here."""
    life = Life(tools=(LIMITED,)).connect(use("tu1", "gated", permission="ask"))
    expire(life, "tu1")
    life.sent("tu1", refused(400))
    life.looked("tu1", p.Findings(verdicts=(verdict("tu1", "allow"),)))
    assert ["tu1"] == life.deliveries


def test_a_question_about_an_unknown_outcome_that_expires_posts_what_is_known() -> None:
    """The tool may have run: that is what the agent must hear."""
    life = Life(tools=(replace(ECHO, on_unknown="ask", expires_in_s=60.0),)).connect(custom("c1"))
    life.deliver("c1", "it may have run", unknown=True)
    expire(life, "c1")
    [sent] = life.sends
    assert "it may have run" == sent["content"][0]["text"]
    life.sent("c1")
    assert "expired" == life.state("c1")


def test_an_expiry_that_a_crash_cut_short_still_ends_expired() -> None:
    """The result and the intent to post it were stored; whether it arrived was not."""
    first = Life(tools=(ASKS,)).connect(custom("c1"))
    expire(first, "c1")
    first.sent("c1", unknown())
    life = Life(tools=(ASKS,), stored=first.store()).connect(custom("c1"))
    life.looked("c1")
    life.sent("c1")
    assert "expired" == life.state("c1")


def test_a_call_that_moved_on_does_not_expire() -> None:
    """Somebody decided before the run read of the expiry."""
    life = Life(tools=(ASKS,)).connect(custom("c1"))
    life.decide("c1", "allow", id="dec_1")
    life.decide("c1", "deny", id="dec_2", via="expiry", message=MESSAGE)
    assert (["c1"], ["dec_2"]) == (
        life.deliveries, [effect.decision_id for effect in life.of(p.RefuseDecision)]
    )  # fmt: skip


def test_time_alone_expires_nothing_here() -> None:
    """The store's clock decides, for every replica alike."""
    life = Life(tools=(ASKS,), max_idle_s=60).connect(custom("c1"), idle())
    life.at(3_600)
    assert ("held", [], None) == (life.state("c1"), life.sends, life.end)
