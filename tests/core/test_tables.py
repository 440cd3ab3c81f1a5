"""The rules that are tables: gate, steps of a call, scope of an interrupt, and waits."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal, get_args

import pytest

from app.core import events as ev
from app.core.calls import END_STATES, STEPS, Call, Decision, Gate, State, digest
from app.core.gate import UNREAD, Policies, judge, read_policies, tool_gate
from app.core.posting import covers
from app.core.retry import RETRY_AFTER_S_MAX, backoff_s, is_fatal, wait_s
from app.core.tools import Tool
from tests.core.life import event, stamp

STATES = get_args(State)


def call(kind: ev.Kind = "builtin", state: State = "queued", **more: Any) -> Call:
    return Call(id="c1", kind=kind, tool="bash", input=b"{}", state=state, **more)


# ---- the gate


def toolset(**more: Any) -> dict[str, Any]:
    return {"type": "agent_toolset_20260401", **more}


def policy(name: object) -> dict[str, Any]:
    return {"permission_policy": {"type": name}}


def policies(default: str, **by_name: str) -> Policies:
    """Those of an agent with one toolset."""
    configs = [{"name": name, **policy(type_)} for name, type_ in by_name.items()]
    return read_policies([toolset(default_config=policy(default), configs=configs)])


ALWAYS = policies("always_allow")
POLICIES = {
    "always_allow": (ALWAYS, None),
    "always_ask": (policies("always_ask"), "ask"),
    "auto": (policies("auto"), "ask"),
    "a_new_policy": (policies("sometimes"), "ask"),
    "unread": (UNREAD, "unread_policy"),
    "allowed_by_name": (policies("always_ask", bash="always_allow"), None),
    "asked_by_name": (policies("always_allow", bash="always_ask"), "ask"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_an_absent_permission_of_a_builtin_call_takes_the_agents_policy(name: str) -> None:
    """R-127, promise 1: only `always_allow` lets it run."""
    known, reason = POLICIES[name]
    expected = ("run", None) if reason is None else ("hold", Gate("upstream", None, reason))
    assert expected == judge(call(), known, None)


def test_an_absent_permission_in_a_child_thread_holds_under_any_policy() -> None:
    """Promise 1: the policies are those of another agent."""
    assert ("hold", Gate("upstream", None, "unread_policy")) == judge(call(thread_id="th1"), ALWAYS, None)


@pytest.mark.parametrize("thread_id", [None, "th1"])
def test_an_absent_permission_of_a_custom_call_runs(thread_id: str | None) -> None:
    """Promise 1: upstream never gates a custom call."""
    assert ("run", None) == judge(call("custom", thread_id=thread_id), UNREAD, None)


@pytest.mark.parametrize(
    ("permission", "is_required", "expected"),
    [
        (None, False, ("ignore", None)),
        (None, True, ("hold", Gate("upstream", None, "required_action"))),
        ("allow", False, ("ignore", None)),
        ("ask", False, ("hold", Gate("upstream", "ask", "ask"))),
        ("deny", False, ("deny", None)),
        ("new", False, ("hold", Gate("upstream", "new", "unknown_permission"))),
    ],
)
def test_an_mcp_call_is_held_only_where_upstream_asks(
    permission: str | None, is_required: bool, expected: tuple[str, Gate | None]
) -> None:
    """R-102: by its permission, or by being waited for."""
    assert expected == judge(call("mcp", permission=permission), UNREAD, None, is_required=is_required)


KINDS: tuple[ev.Kind, ...] = ("builtin", "custom")
PERMISSIONS = ("allow", "ask", "deny", "ask_strict", "", "unreadable", None)


def expected_ruling(permission: str | None, verdict: str | None) -> str:
    if permission == "deny" or verdict == "deny":
        return "deny"
    return "run" if verdict == "allow" or permission in ("allow", None) else "hold"


@pytest.mark.parametrize(
    ("kind", "permission", "verdict"), list(product(KINDS, PERMISSIONS, ("allow", "deny", None)))
)
def test_a_call_runs_only_by_an_explicit_allow(
    kind: ev.Kind, permission: str | None, verdict: Literal["allow", "deny"] | None
) -> None:
    """R-120 to R-129: permission and verdict, every pair, where the policy always allows."""
    ruling, _ = judge(call(kind, permission=permission), ALWAYS, verdict)
    assert expected_ruling(permission, verdict) == ruling


@pytest.mark.parametrize("gate", ["upstream", "ask"])
def test_a_tool_asks_only_if_it_says_so(gate: Literal["upstream", "ask"]) -> None:
    expected = Gate("tool", None, "tool_asks") if gate == "ask" else None
    assert expected == tool_gate(Tool("echo", "https://tools.example/", gate=gate))


@pytest.mark.parametrize(
    ("agent_tools", "expected"),
    [
        (None, None),
        ([], None),
        ([{"type": "custom", "name": "bash"}], None),
        ([{"type": "mcp_toolset", "default_config": policy("always_allow")}], None),
        ([toolset()], "always_allow"),
        ([toolset(default_config=None)], "always_allow"),
        ([toolset(default_config={})], "always_allow"),
        ([toolset(default_config=policy("always_ask"))], "always_ask"),
        ([toolset(default_config=policy("auto"))], "auto"),
        ([toolset(default_config=policy(3))], "unreadable"),
        ([toolset(default_config={"permission_policy": "always_allow"})], "unreadable"),
        ([toolset(default_config="always_allow")], "unreadable"),
        ([toolset(configs=[{"name": "bash", **policy("always_ask")}])], "always_ask"),
        ([toolset(default_config=policy("always_ask"), configs=[{"name": "bash", **policy("always_allow")}])],
         "always_allow"),
        ([toolset(default_config=policy("always_ask"), configs=[{"name": "bash"}])], "always_ask"),
        ([toolset(configs=[{"name": "read", **policy("always_ask")}])], "always_allow"),
    ],
)  # fmt: skip
def test_the_policy_of_a_builtin_tool_is_read_from_the_agents_toolset(
    agent_tools: Any, expected: str | None
) -> None:
    """Promise 1: what a toolset does not say has the documented default."""
    assert expected == read_policies(agent_tools).of("bash")


@pytest.mark.parametrize(
    "configs",
    [{"bash": policy("always_ask")}, "bash", 7, ["bash"], [{**policy("always_ask")}], [{"name": 7}]],
    ids=str,
)
def test_configs_that_cannot_be_read_allow_nothing(configs: object) -> None:
    """Promise 1: one of them may have been about this tool."""
    known = read_policies([toolset(configs=configs)])
    assert "hold" == judge(call(), known, None)[0]


def test_the_stricter_of_two_toolsets_holds() -> None:
    """Promise 1: it is not known which of them the call came from."""
    known = read_policies([toolset(default_config=policy("always_ask")), toolset()])
    assert "hold" == judge(call(), known, None)[0]


# ---- the steps of a call

PERMITTED = [(old, new) for old in STATES for new in sorted(STEPS.get(old, ()))]
FORBIDDEN = [(old, new) for old in STATES for new in STATES if old != new and (old, new) not in PERMITTED]


@pytest.mark.parametrize(("old", "new"), PERMITTED)
def test_a_permitted_step_is_taken(old: State, new: State) -> None:
    assert new == call(state=old).step(new).state


@pytest.mark.parametrize(("old", "new"), FORBIDDEN)
def test_any_other_step_is_a_defect(old: State, new: State) -> None:
    with pytest.raises(ValueError, match=f"no step from {old} to {new}"):
        call(state=old).step(new)


@pytest.mark.parametrize("state", STATES)
def test_staying_is_always_permitted(state: State) -> None:
    assert 2 == call(state=state).step(state, attempts=2).attempts


@pytest.mark.parametrize("state", sorted(END_STATES - {"interrupted"}))
def test_an_end_state_is_final(state: str) -> None:
    """A.2: only an interrupted call can come back."""
    assert state not in STEPS


def test_no_step_leads_back_before_a_delivery() -> None:
    """Rule A.2-2: once a result is stored, nothing can be delivered again without a person."""
    later = {"answered", "posting"}
    assert not [old for old in later if STEPS[old] & {"queued", "dispatched", "held", "unowned"}]


# ---- the record


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (None, None),
        (Decision("allow", "accepted", "ana", "api"), "allow"),
        (Decision("deny", "sending", "ana", "api"), "deny"),
        (Decision("allow", "refused", "ana", "api"), None),
    ],
)
def test_the_confirmation_of_a_call_is_the_verdict_that_stands(
    decision: Decision | None, expected: str | None
) -> None:
    assert expected == call(decision=decision).confirmation


def test_a_digest_is_that_of_the_raw_bytes() -> None:
    """The same value written otherwise is another digest: what a person saw is what runs."""
    assert "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a" == digest(b"{}")
    assert digest(b"{}") != digest(b"{ }")


# ---- interrupts


def interrupt(at: float | None, thread: str | None = None) -> Any:
    return event("user.interrupt", at=at, session_thread_id=thread)


@pytest.mark.parametrize(
    ("stop", "called_at", "thread_id", "primary", "is_covered"),
    [
        (interrupt(5.0), 3.0, None, None, True),
        (interrupt(5.0), 5.0, None, None, True),
        (interrupt(5.0), 5.1, None, None, False),
        (interrupt(None), 3.0, None, None, False),
        (interrupt(5.0), None, None, None, False),
        (interrupt(5.0), 3.0, "th1", None, True),
        (interrupt(5.0, "th1"), 3.0, "th1", None, True),
        (interrupt(5.0, "th1"), 3.0, "th2", None, False),
        (interrupt(5.0, "th1"), 3.0, None, None, False),
        (interrupt(5.0, "th0"), 3.0, None, "th0", True),
        (interrupt(5.0, "th1"), 3.0, None, "th0", False),
        (interrupt(5.0, "th0"), 3.0, "th1", "th0", False),
    ],
)
def test_an_interrupt_covers_the_earlier_calls_of_its_scope(
    stop: Any, called_at: float | None, thread_id: str | None, primary: str | None, is_covered: bool
) -> None:
    """R-310 to R-315."""
    processed_at = None if called_at is None else stamp(called_at)
    assert is_covered is covers((stop,), call(thread_id=thread_id, processed_at=processed_at), primary)


def test_one_of_several_interrupts_is_enough() -> None:
    stops = (interrupt(1.0), interrupt(9.0, "th1"), interrupt(5.0))
    assert covers(stops, call(processed_at=stamp(3.0)), None)


# ---- waits


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 10.0), (7, 10.0), (9999, 10.0)],
)
def test_the_nominal_wait_doubles_up_to_its_cap(attempt: int, expected: float) -> None:
    """K-01 to K-03."""
    assert expected == backoff_s(attempt, start_s=0.5, cap_s=10.0)


def test_attempts_count_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        backoff_s(0, start_s=0.5, cap_s=10.0)


@pytest.mark.parametrize(
    ("nominal", "floor", "draw", "expected"),
    [
        (8.0, None, 0.0, 4.0),
        (8.0, None, 0.5, 6.0),
        (8.0, None, 1.0, 8.0),
        (0.0, None, 0.7, 0.0),
        (8.0, 20.0, 0.5, 20.0),
        (8.0, 2.0, 0.5, 6.0),
        (8.0, 3600.0, 0.5, RETRY_AFTER_S_MAX),
        (8.0, -5.0, 0.5, 6.0),
        (0.0, 2.0, 0.5, 2.0),
    ],
)
def test_the_actual_wait_lies_in_the_upper_half_and_above_the_floor(
    nominal: float, floor: float | None, draw: float, expected: float
) -> None:
    """K-04, K-09, R-201."""
    assert expected == wait_s(nominal, floor_s=floor, draw=draw)


@pytest.mark.parametrize(
    ("status", "is_final"),
    [
        (None, False), (200, False), (400, True), (401, True), (408, False), (409, False), (422, True),
        (429, False), (451, True), (500, False), (503, False), (529, False),
    ],
)  # fmt: skip
def test_a_client_error_is_final_but_for_three(status: int | None, is_final: bool) -> None:
    """R-046."""
    assert is_final is is_fatal(status)
