"""What is sent upstream for a call, and how our own result is recognised."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from app.core import events as ev
from app.core.calls import Call, Decision, Result, State
from app.core.outgoing import (
    DENY_MESSAGE_CHARS_MAX,
    error_result,
    is_same_result,
    result_event,
    verdict_event,
)
from tests.core.life import event, text


def call(kind: ev.Kind = "builtin", state: State = "queued", **more: Any) -> Call:
    return Call(id="c1", kind=kind, tool="bash", input=b"{}", state=state, **more)


@pytest.mark.parametrize(
    ("kind", "type_", "field"),
    [("builtin", "user.tool_result", "tool_use_id"),
     ("custom", "user.custom_tool_result", "custom_tool_use_id")],
)  # fmt: skip
@pytest.mark.parametrize("is_error", [True, False])
@pytest.mark.parametrize(("thread_id", "with_thread"), [(None, True), ("th1", False), ("th1", True)])
def test_a_result_event_holds_what_the_api_lists(
    kind: ev.Kind, type_: str, field: str, is_error: bool, thread_id: str | None, with_thread: bool
) -> None:
    """R-200, R-148."""
    content = json.dumps(text("x")).encode()
    sent = json.loads(
        result_event(call(kind, thread_id=thread_id), Result(content, is_error), with_thread=with_thread)
    )
    expected: dict[str, Any] = {"type": type_, field: "c1", "content": text("x"), "is_error": is_error}
    if with_thread and thread_id:
        expected["session_thread_id"] = thread_id
    assert expected == sent


@pytest.mark.parametrize(
    ("result", "message", "expected"),
    [
        ("allow", None, {"result": "allow"}),
        ("allow", "no", {"result": "allow"}),
        ("deny", None, {"result": "deny"}),
        ("deny", "", {"result": "deny"}),
        ("deny", "no", {"result": "deny", "deny_message": "no"}),
    ],
)
def test_a_verdict_event_holds_what_the_api_lists(
    result: Literal["allow", "deny"], message: str | None, expected: dict[str, str]
) -> None:
    """R-145: a message goes with a deny only."""
    decision = Decision(result, "sending", "ana", "api", None, message)
    sent = json.loads(verdict_event(call(thread_id="th1"), decision))
    assert {"type": "user.tool_confirmation", "tool_use_id": "c1", **expected} == sent


def test_a_deny_message_is_cut_to_what_upstream_takes() -> None:
    decision = Decision("deny", "sending", "ana", "api", None, "x" * 20_000)
    assert DENY_MESSAGE_CHARS_MAX == len(json.loads(verdict_event(call(), decision))["deny_message"])


@pytest.mark.parametrize(("value", "expected"), [("broken", "broken"), ("", "(no output)"), ("é\n", "é\n")])
def test_an_error_result_is_one_text_block(value: str, expected: str) -> None:
    result = error_result(value)
    assert (True, text(expected)) == (result.is_error, json.loads(result.content))


OURS = Result(json.dumps(text("a")).encode(), is_error=False)


@pytest.mark.parametrize(
    ("answer", "is_same"),
    [
        ({"content": text("a"), "is_error": False}, True),
        ({"content": text("a"), "is_error": None}, True),
        ({"content": text("a")}, True),
        ({"content": [{"text": "a", "type": "text"}], "is_error": False}, True),
        ({"content": text("a"), "is_error": True}, False),
        ({"content": text("b"), "is_error": False}, False),
        ({"content": [], "is_error": False}, False),
        ({"content": None}, False),
    ],
)
def test_our_own_result_is_recognised_by_value(answer: dict[str, Any], is_same: bool) -> None:
    """R-203, R-209."""
    assert is_same is is_same_result(event("user.tool_result", tool_use_id="c1", **answer), OURS)


@pytest.mark.parametrize(
    "answer",
    [
        {"type_": "agent.tool_result", "tool_use_id": "c1"},
        {"type_": "agent.mcp_tool_result", "mcp_tool_use_id": "c1"},
    ],
)
def test_a_result_of_the_platform_is_never_ours(answer: dict[str, Any]) -> None:
    assert not is_same_result(event(content=text("a"), is_error=False, **answer), OURS)
