"""What is sent upstream for a call: one builder per kind, and how to recognise our own result.

Shapes are those of the sessions API: request objects are closed, so nothing is sent that is not listed.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from app.core.calls import Call, Decision, Result
from app.core.events import Answer, CustomToolResult, UserToolResult

NO_OUTPUT = b'[{"type":"text","text":"(no output)"}]'
DENY_MESSAGE_CHARS_MAX = 10_000


def result_event(call: Call, result: Result, *, with_thread: bool = False) -> bytes:
    """The event that carries a result of the call's own kind; the content goes out byte for byte.

    `with_thread` adds the thread, for servers that ask for it.
    """
    type_, field = (
        ("user.custom_tool_result", "custom_tool_use_id")
        if call.kind == "custom"
        else ("user.tool_result", "tool_use_id")
    )
    body: dict[str, Any] = {
        "type": type_,
        field: call.id,
        "content": msgspec.Raw(result.content),
        "is_error": result.is_error,
    }
    if with_thread and call.thread_id is not None:
        body["session_thread_id"] = call.thread_id
    return msgspec.json.encode(body)


def verdict_event(call: Call, decision: Decision, *, with_thread: bool = False) -> bytes:
    """The event that carries a decision on upstream's gate; a message only goes with a deny."""
    body: dict[str, Any] = {
        "type": "user.tool_confirmation",
        "tool_use_id": call.id,
        "result": decision.result,
    }
    if decision.result == "deny" and decision.deny_message:
        body["deny_message"] = decision.deny_message[:DENY_MESSAGE_CHARS_MAX]
    if with_thread and call.thread_id is not None:
        body["session_thread_id"] = call.thread_id
    return msgspec.json.encode(body)


def error_result(text: str) -> Result:
    """An error result of one text block."""
    block = {"type": "text", "text": text or "(no output)"}
    return Result(msgspec.json.encode([block]), is_error=True)


def is_same_result(answer: Answer, result: Result) -> bool:
    """Whether an answer seen upstream equals the result that we hold."""
    if not isinstance(answer, UserToolResult | CustomToolResult):
        return False
    if bool(answer.is_error) != result.is_error:
        return False
    try:
        return bool(json.loads(bytes(answer.content)) == json.loads(result.content))
    except (ValueError, RecursionError):
        return False
