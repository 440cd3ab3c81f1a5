"""The upstream vocabulary: which events matter to us, and how bytes become one.

`parse` never raises on what a server sends. Unknown types become `Other`, damaged ones `Malformed`;
absent and null mean the same. Tool input is never decoded: it travels as the bytes that arrived, so that
numbers, key order and escapes reach the webhook digit for digit.
Field names and meanings are those of the Managed Agents sessions API (beta `managed-agents-2026-04-01`).
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

Kind = Literal["builtin", "custom", "mcp"]

CALL_ID_CHARS_MAX = 256
"""Longer event ids are treated as damaged: ids are keys of the store."""
TOOL_NAME_CHARS_MAX = 256

_EMPTY = msgspec.Raw(b"{}")
_NO_BLOCKS = msgspec.Raw(b"[]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What all events share. `id` is empty on previews and may be empty on an interrupt."""

    id: str = ""
    processed_at: str | None = None
    session_thread_id: str | None = None

    @property
    def at(self) -> float | None:
        """`processed_at` in seconds since 1970, or None while queued or unreadable."""
        return seconds(self.processed_at)


class _Use(Event, frozen=True, kw_only=True):
    id: str
    name: str
    input: msgspec.Raw = _EMPTY
    evaluated_permission: str | None = None


class BuiltinUse(_Use, frozen=True, kw_only=True, tag="agent.tool_use"):
    """The agent calls a tool of its toolset."""


class CustomUse(_Use, frozen=True, kw_only=True, tag="agent.custom_tool_use"):
    """The agent calls a tool that only a client can run."""


class McpUse(_Use, frozen=True, kw_only=True, tag="agent.mcp_tool_use"):
    """The agent calls a tool of an MCP server; the platform runs it, we may only confirm it."""

    mcp_server_name: str | None = None


class UserToolResult(Event, frozen=True, kw_only=True, tag="user.tool_result"):
    """A client's result of a built-in call."""

    tool_use_id: str
    content: msgspec.Raw = _NO_BLOCKS
    is_error: bool | None = None


class CustomToolResult(Event, frozen=True, kw_only=True, tag="user.custom_tool_result"):
    """A client's result of a custom call."""

    custom_tool_use_id: str
    content: msgspec.Raw = _NO_BLOCKS
    is_error: bool | None = None


class AgentToolResult(Event, frozen=True, kw_only=True, tag="agent.tool_result"):
    """A result that the platform made: it ran the call, or refused it."""

    tool_use_id: str


class McpToolResult(Event, frozen=True, kw_only=True, tag="agent.mcp_tool_result"):
    """The result of an MCP call, made by the platform."""

    mcp_tool_use_id: str


class Confirmation(Event, frozen=True, kw_only=True, tag="user.tool_confirmation"):
    """A verdict on a call; only `allow` allows, every other `result` denies."""

    tool_use_id: str
    result: str | None = None
    deny_message: str | None = None


class Interrupt(Event, frozen=True, kw_only=True, tag="user.interrupt"):
    """Somebody stopped the agent; `session_thread_id` null means every thread."""


class StopReason(msgspec.Struct, frozen=True):
    """Why a session or thread went idle. An absent or unknown type means that the turn is over."""

    type: str | None = None
    event_ids: list[str] | None = None


class Idle(Event, frozen=True, kw_only=True, tag="session.status_idle"):
    """No thread runs."""

    stop_reason: StopReason | None = None

    @property
    def is_requires_action(self) -> bool:
        return self.stop_reason is not None and self.stop_reason.type == "requires_action"

    @property
    def wanted(self) -> tuple[str, ...]:
        """The calls that upstream waits for: at least these, not exactly these."""
        return _wanted(self.stop_reason)


class ThreadIdle(Event, frozen=True, kw_only=True, tag="session.thread_status_idle"):
    """One thread went idle."""

    stop_reason: StopReason | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        return _wanted(self.stop_reason)


class ThreadTerminated(Event, frozen=True, kw_only=True, tag="session.thread_status_terminated"):
    """A thread takes no more input."""


class ThreadRunning(Event, frozen=True, kw_only=True, tag="session.thread_status_running"):
    """A thread works."""


class Terminated(Event, frozen=True, kw_only=True, tag="session.status_terminated"):
    """The session is over."""


class Deleted(Event, frozen=True, kw_only=True, tag="session.deleted"):
    """The session and its history are gone."""


class Message(Event, frozen=True, kw_only=True, tag="agent.message"):
    """A complete agent message: canonical, whatever its preview said."""

    id: str
    content: msgspec.Raw = _NO_BLOCKS


class PreviewHead(msgspec.Struct, frozen=True):
    """Which message a preview is of."""

    id: str
    type: str | None = None


class PreviewStart(Event, frozen=True, kw_only=True, tag="event_start"):
    """A message begins to stream."""

    event: PreviewHead


class PreviewFragment(msgspec.Struct, frozen=True):
    """A piece of one content block; `index` absent means 0."""

    type: str | None = None
    index: int | None = None
    content: dict[str, Any] | None = None


class PreviewDelta(Event, frozen=True, kw_only=True, tag="event_delta"):
    """More of a streaming message."""

    event_id: str
    delta: PreviewFragment


class ModelRequestEnd(Event, frozen=True, kw_only=True, tag="span.model_request_end"):
    """A model request is over: previews whose message never came will never come."""


class SessionUpdated(Event, frozen=True, kw_only=True, tag="session.updated"):
    """The session's settings changed."""


class Usage(Event, frozen=True, kw_only=True, tag="session.usage"):
    """What the session has cost; directly before each idle."""


class Other(Event, frozen=True, kw_only=True):
    """A type that asks nothing of us, known or unknown. `type` is its name."""

    type: str


class Malformed(msgspec.Struct, frozen=True):
    """Bytes that are no event; counted and skipped."""

    reason: str


Use = BuiltinUse | CustomUse | McpUse
Answer = UserToolResult | CustomToolResult | AgentToolResult | McpToolResult
Known = (
    BuiltinUse
    | CustomUse
    | McpUse
    | UserToolResult
    | CustomToolResult
    | AgentToolResult
    | McpToolResult
    | Confirmation
    | Interrupt
    | Idle
    | ThreadIdle
    | ThreadTerminated
    | ThreadRunning
    | Terminated
    | Deleted
    | Message
    | PreviewStart
    | PreviewDelta
    | ModelRequestEnd
    | SessionUpdated
    | Usage
)
AnyEvent = Known | Other

_decoder = msgspec.json.Decoder(Known)
_classes: dict[str, type[msgspec.Struct]] = {str(cls.__struct_config__.tag): cls for cls in Known.__args__}


def parse(data: bytes | msgspec.Raw) -> AnyEvent | Malformed:
    """Read one event from its JSON bytes, as a stream frame or a list entry carries them.

    An entry of the form `{"type": …, "data": {event}}` is unwrapped. Never raises.
    """
    data = _utf8(bytes(data))
    try:
        event: AnyEvent = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return _parse_loosely(data)
    return _checked(event)


def kind(use: Use) -> Kind:
    """The kind of a call, as `Call.kind` names it."""
    match use:
        case BuiltinUse():
            return "builtin"
        case CustomUse():
            return "custom"
        case McpUse():
            return "mcp"


def answered_id(answer: Answer) -> str:
    """The id of the call that an answer settles. The id alone decides; kinds are not compared."""
    match answer:
        case CustomToolResult():
            return answer.custom_tool_use_id
        case McpToolResult():
            return answer.mcp_tool_use_id
        case UserToolResult() | AgentToolResult():
            return answer.tool_use_id


def type_of(event: AnyEvent) -> str:
    """The event's `type` as upstream spells it."""
    if isinstance(event, Other):
        return event.type
    return str(event.__struct_config__.tag)


def seconds(timestamp: str | None) -> float | None:
    """An RFC 3339 timestamp with any fraction length in seconds since 1970, or None if it is not one."""
    if not timestamp:
        return None
    try:
        moment = datetime.fromisoformat(timestamp)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _wanted(reason: StopReason | None) -> tuple[str, ...]:
    if reason is None or reason.type != "requires_action":
        return ()
    return tuple(id_ for id_ in reason.event_ids or () if id_)


def _utf8(data: bytes) -> bytes:
    """The same bytes with what is not UTF-8 replaced: the strict decoder skips raw members unread."""
    if data.isascii():
        return data
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace").encode()
    return data


def _checked(event: AnyEvent) -> AnyEvent | Malformed:
    """Refuse ids that the store could not keep; make tool names storable, which can match no registration."""
    if not _is_storable(event.id):
        return Malformed("id")
    if isinstance(event, BuiltinUse | CustomUse | McpUse):
        if not event.id or not event.name:
            return Malformed("call without id or name")
        if not _is_storable(event.name):
            name = event.name.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
            return msgspec.structs.replace(event, name=name[:TOOL_NAME_CHARS_MAX])
    return event


def _is_storable(text: str) -> bool:
    """Whether Postgres can keep and index the text: bounded, no NUL, no lone surrogate."""
    if text.isascii():
        return len(text) <= CALL_ID_CHARS_MAX and "\0" not in text
    return len(text) <= CALL_ID_CHARS_MAX and "\0" not in text and not _SURROGATE.search(text)


def _parse_loosely(data: bytes) -> AnyEvent | Malformed:
    """Read an event that the strict decoder refused: unknown types, wrong field types, odd JSON."""
    text = data.decode()
    try:
        value = json.loads(text)
    except (RecursionError, ValueError) as error:
        if isinstance(error, json.JSONDecodeError):
            return Malformed("not JSON")
        value = None  # nested too deeply, or a number of thousands of digits: the members still stand
    raw = _members(text)
    if raw is None:
        return Malformed("not an object")
    fields = {name: _loads(part) for name, part in raw.items()} if value is None else value
    type_ = fields.get("type")
    wrapped = fields.get("data")
    if isinstance(wrapped, dict) and isinstance(wrapped.get("type"), str):
        return parse(raw["data"].encode())
    if not isinstance(type_, str):
        return Malformed("no type")
    cls = _classes.get(type_)
    if cls is None:
        return _checked(
            Other(
                id=_text(fields.get("id")) or "",
                type=type_,
                processed_at=_text(fields.get("processed_at")),
                session_thread_id=_text(fields.get("session_thread_id")),
            )
        )
    return _checked_loosely(cls, fields, raw)


def _checked_loosely(
    cls: type[msgspec.Struct], fields: dict[str, Any], raw: dict[str, str]
) -> AnyEvent | Malformed:
    """Build a known event field by field: a wrong optional field counts as absent."""
    built: dict[str, Any] = {}
    for field in msgspec.structs.fields(cls):
        value = fields.get(field.name)
        if field.name in ("input", "content") and field.name in raw and cls is not PreviewDelta:
            if value is not None or field.name == "input":
                built[field.name] = msgspec.Raw(raw[field.name].encode("utf-8", "replace"))
            continue
        if field.name == "evaluated_permission" and value is not None and not isinstance(value, str):
            built[field.name] = "unreadable"  # unknown, therefore held
            continue
        try:
            built[field.name] = msgspec.convert(value, field.type)
        except (msgspec.ValidationError, RecursionError):
            if field.required:
                return Malformed(f"{cls.__struct_config__.tag}: {field.name}")
    event = cls(**built)
    return _checked(event)  # type: ignore[arg-type]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        return None


def _members(text: str) -> dict[str, str] | None:
    """The raw text of each member of a JSON object, without decoding or recursing into any.

    Assumes a well-formed document; of a repeated name the last one stands, as everywhere.
    """
    text = text.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return None
    members: dict[str, str] = {}
    depth, start, name = 0, 1, None
    position, end = 0, len(text)
    while position < end:
        char = text[position]
        if char == '"':
            position = _string_end(text, position)
            if depth == 1 and name is None:
                name = _loads(text[start:position])
            continue
        if char in "{[":
            depth += 1
        elif char == ":" and depth == 1:
            start = position + 1
        elif char in "}]" or (char == "," and depth == 1):
            if char != ",":
                depth -= 1
            if (depth == 0 or char == ",") and isinstance(name, str):
                members[sys.intern(name)] = text[start:position].strip()
                name = None
            if char == ",":
                start = position + 1
        position += 1
    return members if depth == 0 else None


def _string_end(text: str, start: int) -> int:
    """The position after the string that begins at `start`."""
    position = start + 1
    while position < len(text):
        if text[position] == "\\":
            position += 2
        elif text[position] == '"':
            return position + 1
        else:
            position += 1
    return position
