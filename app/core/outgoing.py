"""What is sent upstream for a call: one builder per kind, and how to recognise our own result.

Shapes are those of the sessions API: request objects are closed, so nothing is sent that is not listed.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from app.core.calls import Call, Decision, Result, digest
from app.core.events import Answer, CustomToolResult, UserToolResult

NO_OUTPUT = b'[{"type":"text","text":"(no output)"}]'
DENY_MESSAGE_CHARS_MAX = 10_000
EDIT_TOLD_CHARS_MAX: Final = 2_000
"""Of an edited input; the agent is told of a longer one by its beginning and its digest."""


def result_event(call: Call, result: Result, *, with_thread: bool = False) -> bytes:
    """The event that carries a result of the call's own kind, as it is `told`, byte for byte.

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
        "content": msgspec.Raw(told(call, result).content),
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
    """Whether an answer seen upstream equals the result that we hold, as it is `told`."""
    if not isinstance(answer, UserToolResult | CustomToolResult):
        return False
    if bool(answer.is_error) != result.is_error:
        return False
    try:
        return bool(json.loads(bytes(answer.content)) == json.loads(result.content))
    except (ValueError, RecursionError):
        return False


def edit_notice(edited_input: bytes) -> str:
    """What the agent is told of an edited input, in at most `EDIT_TOLD_CHARS_MAX` and 300 characters."""
    shown = edited_input.decode("utf-8", "replace")
    opening = "A person edited the input of this call before it ran. The tool was called with"
    if len(shown) <= EDIT_TOLD_CHARS_MAX:
        return f"{opening}: {shown}"
    cut = f"cut: {EDIT_TOLD_CHARS_MAX} of {len(shown)} characters"
    return f"{opening} the input {digest(edited_input)}: {shown[:EDIT_TOLD_CHARS_MAX]}\n{cut}"


def told(call: Call, result: Result) -> Result:
    """The result as the agent gets it: where a person edited the input, a block before it says so.

    Else the agent believes that its own input ran. What never went to a tool never ran, edited or not.
    """
    if call.edited_input is None or not call.executed:
        return result
    notice = msgspec.json.encode({"type": "text", "text": edit_notice(call.edited_input)})
    rest = result.content.strip().removeprefix(b"[")
    return Result(b"[" + notice + (b"" if rest.strip() == b"]" else b",") + rest, result.is_error)
