"""The upstream vocabulary: which events matter to us, and how bytes become one.

`parse` never raises on what a server sends. Unknown types become `Other`, damaged ones `Malformed`;
absent and null mean the same. Tool input is never decoded: it travels as the bytes that arrived, so that
numbers, key order and escapes reach the webhook digit for digit.
Field names and meanings are those of the Managed Agents sessions API (beta `managed-agents-2026-04-01`).
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

Kind = Literal["builtin", "custom", "mcp"]

CALL_ID_CHARS_MAX = 256
"""Longer event ids are treated as damaged: ids are keys of the store."""
TOOL_NAME_CHARS_MAX = 256

_EMPTY = msgspec.Raw(b"{}")
_NO_BLOCKS = msgspec.Raw(b"[]")
_UNREADABLE = "unreadable"
"""Stands for a permission that is no text; like every unknown one, it holds the call."""
_UNSTORABLE = re.compile("[\\0\ud800-\udfff]")
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\],:]', re.DOTALL)


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
    event_ids: Any = None


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
    """A piece of one content block; `index` absent means 0. Whoever folds it judges index and content."""

    type: str | None = None
    index: Any = None
    content: Any = None


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


class _Entry(msgspec.Struct):
    """The members that tell whether an entry wraps its event."""

    type: str
    data: msgspec.Raw = msgspec.Raw()


class _Typed(msgspec.Struct):
    type: str


_decoder = msgspec.json.Decoder(Known)
_entry_decoder = msgspec.json.Decoder(_Entry)
_typed_decoder = msgspec.json.Decoder(_Typed)
_classes: dict[str, type[msgspec.Struct]] = {str(cls.__struct_config__.tag): cls for cls in Known.__args__}


def parse(data: bytes | msgspec.Raw) -> AnyEvent | Malformed:
    """Read one event from its JSON bytes, as a stream frame or a list entry carries them.

    An entry of the form `{"type": T, "data": {"type": T, …}}` stands for its `data`. Never raises.
    """
    data = _unwrapped(_utf8(bytes(data)))
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
    ids = reason.event_ids if isinstance(reason.event_ids, list) else []
    return tuple(id_ for id_ in ids if isinstance(id_, str) and id_ and _is_storable(id_))


def _utf8(data: bytes) -> bytes:
    """The same bytes with what is not UTF-8 replaced: the strict decoder skips raw members unread."""
    if data.isascii():
        return data
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace").encode()
    return data


def _unwrapped(data: bytes) -> bytes:
    """The event inside an entry that repeats its type around it, as lists of some servers do; else `data`.

    The types must agree, so that an unknown event that quotes a call in its `data` is no call.
    """
    if b'"data"' not in data:
        return data
    try:
        entry = _entry_decoder.decode(data)
        inner = bytes(entry.data)
        if inner.startswith(b"{") and _typed_decoder.decode(inner).type == entry.type:
            return inner
    except (msgspec.DecodeError, RecursionError, ValueError):
        return _unwrapped_loosely(data)
    return data


def _checked(event: AnyEvent) -> AnyEvent | Malformed:
    """Refuse ids that the store could not keep; make what else it keeps storable."""
    if not _is_storable(event.id) or not _is_storable(event.session_thread_id or ""):
        return Malformed("id")
    if not _is_storable(event.processed_at or ""):
        event = msgspec.structs.replace(event, processed_at=None)
    match event:
        case BuiltinUse() | CustomUse() | McpUse():
            return _checked_use(event)
        case UserToolResult() | CustomToolResult() | AgentToolResult() | McpToolResult() if not _is_storable(
            answered_id(event)
        ):
            return Malformed("id of the answered call")
        case Confirmation() if not _is_storable(event.tool_use_id):
            return Malformed("id of the confirmed call")
        case Confirmation() if event.deny_message and _UNSTORABLE.search(event.deny_message):
            return msgspec.structs.replace(event, deny_message=_storable(event.deny_message))
        case PreviewStart() if not event.event.id or not _is_storable(event.event.id):
            return Malformed("event_start: id")
        case Message() if not event.id:
            return Malformed("agent.message: id")
        case Message() | UserToolResult() | CustomToolResult() if bytes(event.content) == b"null":
            return msgspec.structs.replace(event, content=_NO_BLOCKS)
    return event


def _checked_use(use: Use) -> Use | Malformed:
    if not use.id or not use.name:
        return Malformed("call without id or name")
    if not _is_storable(use.name):
        # The mark keeps a cut name from being that of a registered tool.
        name = _storable(use.name)[: TOOL_NAME_CHARS_MAX - 1] + "\ufffd"
        use = msgspec.structs.replace(use, name=name)
    if not _is_storable(use.evaluated_permission or ""):
        use = msgspec.structs.replace(use, evaluated_permission=_UNREADABLE)
    if isinstance(use, McpUse) and not _is_storable(use.mcp_server_name or ""):
        server = _storable(use.mcp_server_name or "")[:CALL_ID_CHARS_MAX]
        use = msgspec.structs.replace(use, mcp_server_name=server)
    return use


def _is_storable(text: str) -> bool:
    """Whether Postgres can keep and index the text: bounded, no NUL, no lone surrogate."""
    return len(text) <= CALL_ID_CHARS_MAX and not _UNSTORABLE.search(text)


def _storable(text: str) -> str:
    return _UNSTORABLE.sub("\ufffd", text)


def _unwrapped_loosely(data: bytes) -> bytes:
    members = _members(data.decode())
    inner = members.get("data", "") if members else ""
    inner_members = _members(inner)
    if not members or not inner_members:
        return data
    type_ = _loads(members.get("type", ""))
    return (
        inner.encode() if isinstance(type_, str) and type_ == _loads(inner_members.get("type", "")) else data
    )


def _parse_loosely(data: bytes) -> AnyEvent | Malformed:
    """Read an event that the strict decoder refused: unknown types, wrong field types, odd JSON."""
    text = data.decode()
    raw = None
    try:
        fields = json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError:
        return Malformed("not JSON")
    except (RecursionError, ValueError):
        # Nested too deeply, or a number of thousands of digits: the members still stand.
        raw = _members(text)
        fields = raw and {name: _loads(part) for name, part in raw.items()}
    if not isinstance(fields, dict):
        return Malformed("not an object")
    type_ = fields.get("type")
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
    return _checked_loosely(cls, fields, raw or _members(text) or {})


def _checked_loosely(
    cls: type[msgspec.Struct], fields: dict[str, Any], raw: dict[str, str]
) -> AnyEvent | Malformed:
    """Build a known event field by field: a wrong optional field counts as absent."""
    built: dict[str, Any] = {}
    for field in msgspec.structs.fields(cls):
        value = fields.get(field.name)
        if field.name in ("input", "content") and field.name in raw and cls is not PreviewDelta:
            if field.name == "input" or raw[field.name] != "null":
                built[field.name] = msgspec.Raw(raw[field.name].encode("utf-8", "replace"))
            continue
        if field.name == "evaluated_permission" and value is not None and not isinstance(value, str):
            built[field.name] = _UNREADABLE  # unknown, therefore held
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


def _refuse(constant: str) -> Any:
    """NaN and Infinity are Python's, not JSON's: no webhook could read them."""
    raise json.JSONDecodeError("not a JSON number", constant, 0)


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
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
    for token in _TOKEN.finditer(text):
        char = text[token.start()]
        if char == '"':
            if name is None:
                name = _loads(token.group())
            continue
        if char in "{[":
            depth += 1
        elif char == ":" and depth == 1:
            start = token.end()
        elif char in "}]" or (char == "," and depth == 1):
            if char != ",":
                depth -= 1
            if (depth == 0 or char == ",") and isinstance(name, str):
                members[name] = text[start : token.start()].strip()
                name = None
    return members if depth == 0 else None
