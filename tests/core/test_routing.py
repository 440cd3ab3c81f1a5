"""Which events become deliveries, and which calls are ours to run."""

from __future__ import annotations

from typing import Any

import pytest

from app.core import protocol as p
from app.core.tools import Tool
from tests.core.life import (
    ALWAYS_ALLOW,
    GATED,
    Life,
    custom,
    event,
    idle,
    mcp,
    use,
    verdict,
)

BASH = Tool(name="bash", url="https://tools.example/bash")
SEARCH = Tool(name="search", url="https://tools.example/search")

QUIET_EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("user.message", {"content": []}),
    ("user.interrupt", {}),
    ("user.tool_confirmation", {"tool_use_id": "x", "result": "allow"}),
    ("user.tool_result", {"tool_use_id": "x", "content": []}),
    ("user.custom_tool_result", {"custom_tool_use_id": "x", "content": []}),
    ("user.define_outcome", {"description": "d"}),
    ("agent.message", {"content": []}),
    ("agent.thinking", {}),
    ("agent.tool_result", {"tool_use_id": "x"}),
    ("agent.mcp_tool_use", {"name": "search", "mcp_server_name": "github", "input": {}}),
    ("agent.mcp_tool_result", {"mcp_tool_use_id": "x"}),
    ("agent.thread_message_sent", {"to_session_thread_id": "th1", "content": []}),
    ("agent.thread_message_received", {"from_session_thread_id": "th1", "content": []}),
    ("agent.thread_context_compacted", {}),
    ("session.error", {"error": {"type": "unknown_error"}}),
    ("session.status_running", {}),
    ("session.status_idle", {"stop_reason": {"type": "end_turn"}}),
    ("session.status_rescheduled", {}),
    ("session.updated", {}),
    ("session.usage", {}),
    ("session.thread_created", {"session_thread_id": "th1"}),
    ("session.thread_status_running", {"session_thread_id": "th1"}),
    ("session.thread_status_idle", {"session_thread_id": "th1", "stop_reason": {"type": "end_turn"}}),
    ("session.thread_status_rescheduled", {"session_thread_id": "th1"}),
    ("session.thread_status_terminated", {"session_thread_id": "th1"}),
    ("span.model_request_start", {}),
    ("span.model_request_end", {"model_request_start_id": "x"}),
    ("span.outcome_evaluation_end", {"outcome_id": "o"}),
    ("system.message", {"content": []}),
    ("workflow_run.started", {"workflow_run_id": "w"}),
    ("event_start", {"event": {"type": "agent.message", "id": "m1"}}),
    ("event_delta", {"event_id": "m1", "delta": {"type": "content_delta", "index": 0}}),
]


@pytest.mark.parametrize(("type_", "fields"), QUIET_EVENTS, ids=[name for name, _ in QUIET_EVENTS])
def test_only_a_call_is_delivered_or_answered(type_: str, fields: dict[str, Any]) -> None:
    """R-100: every other known type leads to no delivery and no send."""
    life = Life(tools=(SEARCH, GATED)).connect()
    life.receive(event(type_, **fields))
    assert (life.deliveries, life.sends) == ([], [])


def test_a_quiet_type_does_not_keep_a_later_call_from_running() -> None:
    """R-100: all of them in one history leave the next call as it would be."""
    history = [event(type_, **fields) for type_, fields in QUIET_EVENTS]
    life = Life().connect(*history)
    life.receive(use("tu1"))
    assert ["tu1"] == life.deliveries


def test_an_mcp_call_is_never_executed_although_a_tool_has_its_name() -> None:
    """R-101: no delivery and no result."""
    life = Life().connect()
    life.receive(mcp("m1", "echo", permission="allow"))
    life.receive(mcp("m2", "echo"))
    assert (life.deliveries, life.sends) == ([], [])


def test_an_allowed_mcp_call_does_not_defer_the_countdown() -> None:
    """R-101: the platform runs it, so it is no business of ours."""
    life = Life(max_idle_s=60).connect()
    life.receive(mcp("m1", "echo", permission="allow"), idle())
    life.at(60)
    assert life.end == p.End("idle")


def test_a_gated_mcp_call_is_listed() -> None:
    """R-102: it waits for a person, with upstream's gate."""
    life = Life().connect()
    life.receive(mcp("m1", permission="ask"))
    call = life.calls["m1"]
    assert ("held", "upstream", "ask") == (
        call.state,
        call.gate and call.gate.by,
        call.gate and call.gate.reason,
    )


def test_a_gated_mcp_call_defers_the_countdown() -> None:
    """R-102: a held MCP call is in the blocker set."""
    life = Life(max_idle_s=60).connect()
    life.receive(mcp("m1", permission="ask"), idle())
    life.at(3600)
    assert life.end is None


def test_an_allow_takes_a_gated_mcp_call_off_the_list_without_a_delivery() -> None:
    """R-102: allow seen upstream ends it; the platform runs it."""
    life = Life(tools=(SEARCH,), max_idle_s=60).connect()
    life.receive(mcp("m1", permission="ask"), idle(), verdict("m1", "allow"))
    assert ("posted", []) == (life.state("m1"), life.deliveries)
    life.at(60)
    assert life.end == p.End("idle")


def test_a_result_of_the_platform_takes_a_gated_mcp_call_off_the_list() -> None:
    """R-102: somebody else let it run."""
    life = Life(max_idle_s=60).connect()
    life.receive(mcp("m1", permission="ask"), idle())
    life.receive(event("agent.mcp_tool_result", mcp_tool_use_id="m1"))
    assert "answered_elsewhere" == life.state("m1")


def test_an_mcp_call_named_in_requires_action_is_held() -> None:
    """R-102: upstream waits on it, so it asks, although its permission was absent."""
    life = Life().connect()
    life.receive(mcp("m1"), idle("requires_action", "m1"))
    assert ("held", "required_action") == (
        life.state("m1"),
        life.calls["m1"].gate and life.calls["m1"].gate.reason,
    )


def test_an_mcp_call_that_history_shows_as_required_is_held() -> None:
    """R-102: the same, learnt at attach."""
    life = Life().connect(mcp("m1"), idle("requires_action", "m1"))
    assert "held" == life.state("m1")


def test_an_mcp_call_confirmed_through_the_service_ends_posted_with_one_confirmation() -> None:
    """R-102, D-060: the verdict is all that we post."""
    life = Life(tools=(SEARCH,)).connect()
    life.receive(mcp("m1", permission="ask"))
    life.decide("m1", "allow")
    assert "held" == life.state("m1")
    life.sent("m1")
    assert [{"type": "user.tool_confirmation", "tool_use_id": "m1", "result": "allow"}] == life.sends
    assert {
        "executed": False, "posted": True, "is_error": False, "confirmation": "allow", "result": None,
        "outcome": "posted",
    } == life.log("m1")  # fmt: skip


def test_an_mcp_call_denied_through_the_service_ends_denied() -> None:
    """R-102: deny ends it too, and nothing but the verdict is sent."""
    life = Life().connect()
    life.receive(mcp("m1", permission="ask"))
    life.decide("m1", "deny")
    life.sent("m1")
    assert ("denied", 1) == (life.state("m1"), len(life.sends))


@pytest.mark.parametrize("permission", [None, "allow"])
def test_a_verdict_on_an_ungated_mcp_call_changes_nothing(permission: str | None) -> None:
    """R-103: it is noted and nothing else happens."""
    life = Life(tools=(SEARCH,)).connect()
    life.receive(mcp("m9", permission=permission), verdict("m9", "allow"))
    assert ([], [], {}) == (life.deliveries, life.sends, life.calls)


def test_a_verdict_on_an_mcp_call_that_nobody_saw_changes_nothing() -> None:
    """R-103: an unknown id does no harm."""
    life = Life(tools=(SEARCH,)).connect()
    life.receive(verdict("m9", "allow"))
    assert ([], [], {}) == (life.deliveries, life.sends, life.calls)


def test_a_builtin_call_of_a_cloud_session_is_left_to_the_platform() -> None:
    """R-104: the platform runs it and would refuse our result."""
    life = Life(tools=(BASH,), environment="cloud").connect()
    life.receive(use("tu1", "bash"))
    assert ("unowned", [], []) == (life.state("tu1"), life.deliveries, life.sends)


def test_the_attachment_says_cloud_when_upstream_does_not() -> None:
    """R-104: the attachment's own setting comes first."""
    life = Life(tools=(BASH,), environment=None)
    life.notice(p.SettingsChanged(p.Settings(max_idle_s=None, environment="cloud")))
    life.connect()
    life.receive(use("tu1", "bash"))
    assert "unowned" == life.state("tu1")


def test_the_attachment_setting_overrides_what_upstream_says() -> None:
    """R-104: the setting wins over `config.type`."""
    life = Life(tools=(BASH,), environment="self_hosted")
    life.notice(p.SettingsChanged(p.Settings(max_idle_s=None, environment="cloud")))
    life.connect()
    life.receive(use("tu1", "bash"))
    assert [] == life.deliveries


def test_a_builtin_call_in_an_unknown_environment_is_delivered_by_name() -> None:
    """R-104: unknown is not cloud."""
    life = Life(tools=(BASH,), environment=None).connect()
    life.receive(use("tu1", "bash"))
    assert ["tu1"] == life.deliveries


def test_a_custom_call_of_a_cloud_session_is_delivered() -> None:
    """R-104: only built-in calls are the platform's."""
    life = Life(environment="cloud").connect()
    life.receive(custom("ctu1"))
    assert ["ctu1"] == life.deliveries


def test_the_environment_of_an_earlier_run_holds_while_retrieve_fails() -> None:
    """R-104: what was known once is kept in the progress."""
    first = Life(tools=(BASH,), environment="cloud").connect()
    life = Life(tools=(BASH,), stored=first.store())
    life.retrieved(None)
    life.opened()
    life.read()
    life.receive(use("tu1", "bash", permission="allow"))
    assert [] == life.deliveries


def test_a_gated_builtin_call_of_a_cloud_session_is_left_to_the_platform_once_allowed() -> None:
    """R-104: the verdict goes out, and the platform runs the call."""
    life = Life(tools=(BASH,), environment="cloud").connect()
    life.receive(use("tu1", "bash", permission="ask"))
    life.decide("tu1", "allow")
    life.sent("tu1")
    assert ("unowned", []) == (life.state("tu1"), life.deliveries)


def test_a_builtin_call_of_a_cloud_session_that_upstream_waits_on_is_held() -> None:
    """R-104: the platform can only be asking; a person must see it."""
    life = Life(environment="cloud").connect()
    life.receive(use("tu1", "bash"), idle("requires_action", "tu1"))
    assert "held" == life.state("tu1")


@pytest.mark.parametrize("permission", ["ask", "ask_strict", ""])
def test_a_gated_custom_call_is_held(permission: str) -> None:
    """R-105: the field is not documented for this type, and holds all the same."""
    life = Life().connect()
    life.receive(custom("ctu1", evaluated_permission=permission))
    assert ("held", []) == (life.state("ctu1"), life.deliveries)


def test_a_gated_custom_call_is_released_by_an_allow() -> None:
    """R-105: exactly like a built-in one."""
    life = Life().connect()
    life.receive(custom("ctu1", evaluated_permission="ask"), verdict("ctu1", "allow"))
    life.answer("ctu1")
    assert ("posted", "allow") == (life.state("ctu1"), life.calls["ctu1"].confirmation)


def test_a_call_of_a_subagent_runs_with_its_thread() -> None:
    """R-106: the webhook sees the thread."""
    life = Life().connect()
    life.receive(custom("ctu1", thread="th1"))
    assert ["th1"] == [effect.call.thread_id for effect in life.of(p.Deliver)]


def test_a_result_of_a_subagents_call_carries_no_thread() -> None:
    """R-106: upstream finds it by the id."""
    life = Life().connect()
    life.receive(custom("ctu1", thread="th1"))
    life.deliver("ctu1")
    assert {"type", "custom_tool_use_id", "content", "is_error"} == set(life.sends[0])


@pytest.mark.parametrize("name", ["Echo", "ECHO", "echo ", " echo", "ech"])
def test_a_name_matches_exactly(name: str) -> None:
    """R-107: no trimming and no case folding."""
    life = Life(tools=(Tool(name=name, url="https://tools.example/"),), agent_tools=ALWAYS_ALLOW).connect()
    life.receive(use("tu1", "echo"))
    assert ("unowned", []) == (life.state("tu1"), life.deliveries)
