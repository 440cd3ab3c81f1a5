"""Upstream's gate: which calls wait, and what releases or ends them."""

from __future__ import annotations

from typing import Any

import pytest

from app.core import protocol as p
from tests.core.life import Life, event, idle, use, verdict

DENIED = {
    "executed": False,
    "posted": False,
    "is_error": False,
    "confirmation": "deny",
    "result": None,
    "outcome": "denied",
}


def ask(call_id: str = "tu1", **more: Any) -> Any:
    return use(call_id, "gated", permission="ask", **more)


def test_an_asking_call_waits() -> None:
    """R-120: no delivery and no send."""
    life = Life().connect()
    life.receive(ask())
    assert ("held", [], []) == (life.state("tu1"), life.deliveries, life.sends)


def test_a_call_held_to_the_end_of_the_session_is_closed_with_it() -> None:
    """R-120: the log keeps it, unexecuted."""
    life = Life().connect()
    life.receive(ask(), event("session.status_terminated"))
    assert DENIED | {"confirmation": None, "outcome": "session_ended"} == life.log("tu1")
    assert [] == life.sends


def test_an_allow_releases_a_held_call() -> None:
    """R-121: one delivery, one post."""
    life = Life().connect()
    life.receive(ask(), verdict("tu1", "allow", id="c1"))
    life.answer("tu1")
    assert (["tu1"], 1, "allow") == (life.deliveries, len(life.sends), life.log("tu1")["confirmation"])


def test_a_deny_resolves_a_held_call() -> None:
    """R-122: nothing runs and nothing is posted."""
    life = Life().connect()
    life.receive(ask(), verdict("tu1", "deny"))
    assert (DENIED, [], []) == (life.log("tu1"), life.deliveries, life.sends)


def test_a_denied_call_counts_as_resolved() -> None:
    """R-122: it does not defer the countdown."""
    life = Life(max_idle_s=60).connect()
    life.receive(ask(), verdict("tu1", "deny"), idle())
    life.at(60)
    assert p.End("idle") == life.end


def test_a_call_that_the_server_denies_is_denied_at_once() -> None:
    """R-123: no confirmation is needed."""
    life = Life().connect()
    life.receive(use("tu1", "gated", permission="deny"))
    assert (DENIED, [], []) == (life.log("tu1"), life.deliveries, life.sends)


def test_the_servers_deny_beats_an_allow_recorded_before() -> None:
    """R-124: the platform will not run it whatever a person says."""
    life = Life().connect()
    life.receive(verdict("tu1", "allow"), use("tu1", permission="deny"))
    assert ([], "denied") == (life.deliveries, life.state("tu1"))


@pytest.mark.parametrize("is_allow_first", [True, False])
def test_the_servers_deny_is_the_recorded_confirmation(is_allow_first: bool) -> None:
    """R-124: in either order the record says deny."""
    denied, allowed = use("tu1", permission="deny"), verdict("tu1", "allow")
    life = Life().connect()
    life.receive(*((allowed, denied) if is_allow_first else (denied, allowed)))
    assert DENIED == life.log("tu1")


def test_a_stray_deny_ends_an_ungated_call() -> None:
    """R-125: any deny wins."""
    life = Life().connect()
    life.receive(verdict("tu1", "deny"), use("tu1"))
    assert (DENIED, []) == (life.log("tu1"), life.deliveries)


def test_a_stray_deny_ends_an_ungated_call_that_waits_for_a_slot() -> None:
    """R-125: it was not delivered yet."""
    life = Life(concurrency=1).connect()
    life.receive(use("tu0"), use("tu1"), verdict("tu1", "deny"))
    life.answer("tu0")
    assert (DENIED, ["tu0"]) == (life.log("tu1"), life.deliveries)


def test_a_stray_allow_is_recorded_on_an_ungated_call() -> None:
    """R-126: it runs once."""
    life = Life().connect()
    life.receive(verdict("tu1", "allow"), use("tu1"))
    life.answer("tu1")
    assert (["tu1"], "allow") == (life.deliveries, life.log("tu1")["confirmation"])


@pytest.mark.parametrize("permission", ["allow", None])
def test_an_ungated_call_runs_on_arrival(permission: str | None) -> None:
    """R-127: explicit, or absent where the agent's policy always allows."""
    life = Life().connect()
    life.receive(use("tu1", permission=permission))
    assert (["tu1"], None) == (life.deliveries, life.log("tu1")["confirmation"])


def test_an_absent_permission_holds_while_the_policy_is_not_read() -> None:
    """R-127, promise 1: absence means nothing until the agent's tools are known."""
    life = Life(agent_tools=None).connect()
    life.receive(use("tu1"))
    assert ("held", []) == (life.state("tu1"), life.deliveries)


def test_a_call_held_for_an_unread_policy_asks_for_it() -> None:
    """R-127: RETRIEVE is repeated at once."""
    life = Life(agent_tools=None).connect()
    life.clear()
    life.receive(use("tu1"))
    assert 1 == len(life.of(p.Retrieve))


def test_a_call_held_for_an_unread_policy_runs_once_the_policy_allows() -> None:
    """R-127: the hold was for want of knowledge."""
    allowed = Life().facts
    life = Life(agent_tools=None).connect()
    life.receive(use("tu1"))
    life.retrieved(allowed)
    life.retrieved(allowed)
    assert (["tu1"], None) == (life.deliveries, life.calls["tu1"].gate)


def test_a_call_held_for_an_unread_policy_stays_held_once_the_policy_asks() -> None:
    """R-127: it needs a person after all."""
    config = {"permission_policy": {"type": "always_ask"}}
    asking = Life(agent_tools=({"type": "agent_toolset_20260401", "default_config": config},)).facts
    life = Life(agent_tools=None).connect()
    life.receive(use("tu1"))
    life.retrieved(asking)
    assert ("held", []) == (life.state("tu1"), life.deliveries)


def test_a_call_of_a_child_thread_without_permission_is_held() -> None:
    """Promise 1: a child runs another agent, whose policies nobody read."""
    life = Life().connect()
    life.receive(use("tu1", thread="th1"))
    assert ("held", []) == (life.state("tu1"), life.deliveries)


@pytest.mark.parametrize("permission", ["ask_strict", "", "ALLOW", "allow ", True, 1, {"type": "allow"}])
def test_an_unknown_permission_holds(permission: object) -> None:
    """R-128: exactly `allow` allows; any other value, of any type, waits."""
    life = Life().connect()
    life.receive(event("agent.tool_use", "tu1", name="echo", input={}, evaluated_permission=permission))
    assert ("held", []) == (life.state("tu1"), life.deliveries)


def test_an_allow_releases_a_call_of_unknown_permission() -> None:
    """R-128: a person may let it run."""
    life = Life().connect()
    life.receive(use("tu1", permission="ask_strict"), verdict("tu1", "allow"))
    assert ["tu1"] == life.deliveries


@pytest.mark.parametrize("result", ["escalate", "", None, "Allow"])
def test_an_unknown_verdict_denies(result: str | None) -> None:
    """R-129: only `allow` allows; a missing result is the same."""
    life = Life().connect()
    life.receive(ask(), verdict("tu1", result))
    assert (DENIED, []) == (life.log("tu1"), life.deliveries)


def test_an_unknown_verdict_lets_the_countdown_proceed() -> None:
    """R-129: the call is resolved."""
    life = Life(max_idle_s=60).connect()
    life.receive(ask(), idle(), verdict("tu1", "escalate"))
    life.at(60)
    assert p.End("idle") == life.end


def test_a_verdict_before_the_call_lets_it_run_without_being_listed() -> None:
    """R-130: it is never seen as pending."""
    life = Life().connect()
    life.receive(verdict("tu1", "allow"), ask())
    assert "held" not in [effect.call.state for effect in life.of(p.SaveCall)]
    assert (["tu1"], "allow") == (life.deliveries, life.log("tu1")["confirmation"])


def test_a_verdict_on_an_unknown_id_does_nothing() -> None:
    """R-131: and nothing fails."""
    life = Life().connect()
    assert [] == life.receive(verdict("nowhere", "allow"))


def test_a_hold_does_not_block_others() -> None:
    """R-132: with one slot, the ungated call is posted before the held one."""
    life = Life(concurrency=1).connect()
    life.receive(ask(), use("tu2"))
    life.answer("tu2")
    life.receive(verdict("tu1", "allow"))
    life.answer("tu1")
    assert ["tu2", "tu1"] == [sent["tool_use_id"] for sent in life.sends]


def matrix() -> Life:
    """Every mark and every verdict, side by side, then the end of the session."""
    life = Life().connect(ask("in_history"), verdict("in_history", "allow"))
    life.receive(
        use("marked_allow", permission="allow"),
        use("marked_deny", permission="deny"),
        ask("allowed"),
        ask("denied"),
        ask("never"),
        ask("escalated"),
        use("unknown_mark", permission="ask_strict"),
        verdict("allowed", "allow"),
        verdict("denied", "deny"),
        verdict("escalated", "escalate"),
    )
    for call_id in ("in_history", "marked_allow", "allowed"):
        life.answer(call_id)
    return life


def test_the_gate_matrix_runs_exactly_what_is_allowed() -> None:
    """R-133: marked allow, allowed live, allowed in history."""
    assert {"in_history", "marked_allow", "allowed"} == set(matrix().deliveries)


def test_the_gate_matrix_posts_exactly_what_ran() -> None:
    """R-133: three posts."""
    assert ["in_history", "marked_allow", "allowed"] == [sent["tool_use_id"] for sent in matrix().sends]


def test_the_gate_matrix_ends_six_calls_before_the_session() -> None:
    """R-133: the two that nobody answered stay open."""
    life = matrix()
    assert {"never", "unknown_mark"} == {id_ for id_, call in life.calls.items() if not call.is_over}


def test_the_gate_matrix_closes_the_rest_with_the_session() -> None:
    """R-133: only the end of the session closes what was never answered."""
    life = matrix()
    life.receive(event("session.status_terminated"))
    assert {"never", "unknown_mark"} == {id_ for id_ in life.calls if life.state(id_) == "session_ended"}
