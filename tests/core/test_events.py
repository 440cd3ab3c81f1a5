"""From bytes to events: what is read, what is tolerated, and what stays byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core import events
from app.core.events import (
    AgentToolResult,
    AnyEvent,
    BuiltinUse,
    Confirmation,
    CustomToolResult,
    CustomUse,
    Idle,
    Interrupt,
    Malformed,
    McpToolResult,
    McpUse,
    Message,
    Other,
    PreviewDelta,
    PreviewStart,
    ThreadIdle,
    Usage,
    UserToolResult,
)

FIXTURES = Path(__file__).parent.parent / "fixtures"
SAMPLES = sorted([*FIXTURES.glob("events/*.json"), *FIXTURES.glob("variants/*.json")])
KNOWN = {str(cls.__struct_config__.tag) for cls in get_args(events.Known)}
Json = dict[str, Any]

CALL: Json = {"type": "agent.tool_use", "id": "tu1", "name": "bash", "input": {"command": "ls"}}
IDLE: Json = {"type": "session.status_idle", "id": "i1"}


def parsed(value: object) -> AnyEvent | Malformed:
    return events.parse(json.dumps(value).encode())


def call(**fields: Any) -> BuiltinUse:
    event = parsed(CALL | fields)
    assert isinstance(event, BuiltinUse)
    return event


def idle(stop_reason: object) -> Idle:
    event = parsed(IDLE | {"stop_reason": stop_reason})
    assert isinstance(event, Idle)
    return event


# ---- samples


def test_there_are_samples_of_every_type_that_matters() -> None:
    assert {path.stem for path in FIXTURES.glob("events/*.json")} >= KNOWN


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_is_read_as_its_type(path: Path) -> None:
    sample = json.loads(path.read_bytes())
    event = events.parse(path.read_bytes())
    assert not isinstance(event, Malformed)
    assert events.type_of(event) == sample["type"]
    assert isinstance(event, Other) == (sample["type"] not in KNOWN)
    for name in ("id", "processed_at", "session_thread_id"):
        assert getattr(event, name) == sample.get(name, "" if name == "id" else None)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_with_more_in_it_reads_the_same(path: Path) -> None:
    """Keys of tomorrow change nothing, wherever they stand."""
    sample = json.loads(path.read_bytes())
    extra = {"zeta": None, **sample, "brand_new": {"type": "x", "id": 7}, "evaluation": [1]}
    plain = {name: value for name, value in sample.items() if name != "evaluation"}
    assert shown(parsed(plain)) == shown(parsed(extra))


def shown(event: AnyEvent | Malformed) -> list[object]:
    """An event's fields, raw ones as their bytes, so that events can be compared."""
    fields = [getattr(event, name) for name in event.__struct_fields__]
    return [type(event), *[bytes(f) if isinstance(f, msgspec.Raw) else f for f in fields]]


# ---- calls


@pytest.mark.parametrize(
    ("type_", "cls", "kind"),
    [
        ("agent.tool_use", BuiltinUse, "builtin"),
        ("agent.custom_tool_use", CustomUse, "custom"),
        ("agent.mcp_tool_use", McpUse, "mcp"),
    ],
)
def test_each_kind_of_call_is_known(type_: str, cls: type, kind: str) -> None:
    event = parsed(CALL | {"type": type_})
    assert isinstance(event, BuiltinUse | CustomUse | McpUse)
    assert (cls, kind) == (type(event), events.kind(event))


@pytest.mark.parametrize(
    ("permission", "read"),
    [
        ("allow", "allow"),
        ("ask", "ask"),
        ("deny", "deny"),
        ("ALLOW", "ALLOW"),
        (" allow", " allow"),
        ("hologram", "hologram"),
        ("", ""),
        (None, None),
        (7, "unreadable"),
        (True, "unreadable"),
        ({"type": "allow"}, "unreadable"),
        (["allow"], "unreadable"),
        ("allow\0", "unreadable"),
        ("\ud800", "unreadable"),
        ("a" * 300, "unreadable"),
    ],
    ids=ascii,
)
def test_a_permission_is_read_as_it_is_or_as_unreadable(permission: object, read: str | None) -> None:
    """Only null means absent: what cannot be read must not pass for it."""
    assert read == call(evaluated_permission=permission).evaluated_permission


def test_an_absent_permission_is_none() -> None:
    assert call().evaluated_permission is None


@pytest.mark.parametrize(
    ("repeated", "read"),
    [(b'"allow","evaluated_permission":"ask"', "ask"), (b'"ask","evaluated_permission":"allow"', "allow")],
)
@pytest.mark.parametrize("oddity", [b"null", b'"\\ud800"', b"7"])
def test_of_a_repeated_name_the_last_stands(repeated: bytes, read: str, oddity: bytes) -> None:
    """As the SDKs read it, by whichever way the event is decoded."""
    event = events.parse(
        b'{"type":"agent.tool_use","id":"a","name":"n","evaluated_permission":'
        + repeated
        + b',"session_thread_id":'
        + oddity
        + b"}"
    )
    if oddity == b'"\\ud800"':
        assert isinstance(event, Malformed)
        return
    assert isinstance(event, BuiltinUse)
    assert event.evaluated_permission == read


@pytest.mark.parametrize(
    "name",
    ["a" * 257, "a\0", "\ud800", "b" * 10_000],
    ids=["long", "NUL", "surrogate", "longer"],
)
def test_a_name_that_cannot_be_stored_becomes_one_that_nothing_registers(name: str) -> None:
    read = call(name=name).name
    assert len(read) <= events.TOOL_NAME_CHARS_MAX
    assert read.endswith("\ufffd")
    read.encode()


def test_a_server_name_that_cannot_be_stored_is_made_storable() -> None:
    event = parsed(CALL | {"type": "agent.mcp_tool_use", "mcp_server_name": "a\0\ud800"})
    assert isinstance(event, McpUse)
    assert event.mcp_server_name == "a\ufffd\ufffd"


# ---- the input stays byte for byte

INPUTS = {
    "NUL": rb'{"a":"\u0000"}',
    "lone surrogate": rb'{"a":"\ud800","\udfff":1}',
    "1E400": b'{"a":1E400}',
    "2^53+1": b'{"a":9007199254740993}',
    "duplicate keys": b'{"a":1,"a":2}',
    "1.10": b'{"a":1.10,"b":-0.0,"c":1e-7}',
    "spaces": b'{ "b" : [ 1 , 2 ]\t,\n"a":{} }',
    "5000 digits": b'{"a":' + b"7" * 5_000 + b"}",
    "depth": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "unicode": '{"a":"é\u2028🙂\u0301"}'.encode(),
    "escapes": rb'{"a":"\/\"\\\u0041\b","}":"{","[":",:"}',
    "null": b"null",
    "no object": b'[1,"x"]',
    "string": b'"ls"',
    "number": b"7",
    "wraps": b'{"data":{"type":"agent.tool_use","id":"x","name":"y"},"type":"agent.tool_use"}',
}
AROUND = {
    "plain": (b'{"type":"agent.tool_use","id":"tu1","name":"bash","input":', b"}"),
    "first": (b'{"input":', b',"name":"bash","id":"tu1","type":"agent.tool_use"}'),
    "spaced": (
        b' {\n"type" : "agent.tool_use" , "id":"tu1","name":"bash", "input" : ',
        b' , "x":[{"input":1}]}\n',
    ),
    "escaped name": (rb'{"type":"agent.tool_use","id":"tu1","name":"bash","inp\u0075t":', b"}"),
    "loose": (b'{"evaluated_permission":7,"type":"agent.tool_use","id":"tu1","name":"bash","input":', b"}"),
    "odd neighbour": (
        rb'{"a":"\ud800\"","type":"agent.tool_use","id":"tu1","name":"bash","input":',
        b',"b":' + b"7" * 5_000 + b"}",
    ),
    "wrapped": (
        b'{"type":"agent.tool_use","data":{"type":"agent.tool_use","id":"tu1","name":"bash","input":',
        b"}}",
    ),
    "wrapped oddly": (
        rb'{"x":"\ud800","data":{"type":"agent.tool_use","id":"tu1","name":"bash","input":',
        b'},"type":"agent.tool_use"}',
    ),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("input_", INPUTS.values(), ids=INPUTS)
def test_an_input_is_kept_byte_for_byte(input_: bytes, around: tuple[bytes, bytes]) -> None:
    """R-182: whatever its shape, and by whichever way the event is decoded."""
    event = events.parse(input_.join(around))
    assert isinstance(event, BuiltinUse)
    assert (event.id, event.name) == ("tu1", "bash")
    assert input_ == bytes(event.input)


def test_an_absent_input_is_an_empty_object() -> None:
    """R-182: a call without input is still a call."""
    event = events.parse(b'{"type":"agent.tool_use","id":"tu1","name":"bash"}')
    assert isinstance(event, BuiltinUse)
    assert bytes(event.input) == b"{}"


@pytest.mark.parametrize("bad", [b"\xff", b"\xed\xa0\x80", b"\xc3", b"\xf0\x9f\x99"], ids=bytes.hex)
def test_bytes_that_are_not_utf8_are_replaced(bad: bytes) -> None:
    """No webhook could read them otherwise."""
    event = events.parse(b'{"type":"agent.tool_use","id":"tu1","name":"bash","input":{"a":"x' + bad + b'"}}')
    assert isinstance(event, BuiltinUse)
    assert json.loads(bytes(event.input).decode())["a"].strip("\ufffd") == "x"


@pytest.mark.parametrize(
    "bad", [b"NaN", b"Infinity", b"-Infinity", b"01", b'"\t"', b"'a'", b"[1,]", rb'"\q"']
)
def test_input_that_is_not_json_is_damaged(bad: bytes) -> None:
    """R-026: a webhook would get a body that it cannot read."""
    damaged = b'{"type":"agent.tool_use","id":"tu1","name":"bash","input":{"a":' + bad + b"}}"
    assert isinstance(events.parse(damaged), Malformed)


def test_the_content_of_results_and_messages_is_kept_byte_for_byte() -> None:
    for head in (
        b'{"type":"agent.message","id":"m1","content":',
        b'{"type":"user.tool_result","tool_use_id":"tu1","content":',
        b'{"type":"user.custom_tool_result","custom_tool_use_id":"tu1","content":',
    ):
        for content in INPUTS.values():
            event = events.parse(head + content + b"}")
            assert isinstance(event, Message | UserToolResult | CustomToolResult)
            assert (b"[]" if content == b"null" else content) == bytes(event.content)


# ---- absent and null


@pytest.mark.parametrize("type_", sorted(KNOWN))
def test_absent_and_null_are_the_same(type_: str) -> None:
    sample = json.loads((FIXTURES / "events" / f"{type_}.json").read_bytes())
    (cls,) = [cls for cls in get_args(events.Known) if cls.__struct_config__.tag == type_]
    optional = {
        field.name for field in msgspec.structs.fields(cls) if not field.required and field.name != "input"
    }
    absent = {name: value for name, value in sample.items() if name not in optional}
    assert shown(parsed(absent)) == shown(parsed(absent | dict.fromkeys(optional)))


@pytest.mark.parametrize("type_", sorted(KNOWN))
def test_an_optional_field_of_a_wrong_kind_counts_as_absent(type_: str) -> None:
    sample = json.loads((FIXTURES / "events" / f"{type_}.json").read_bytes())
    bare = {
        name: value for name, value in sample.items() if name not in ("processed_at", "session_thread_id")
    }
    assert shown(parsed(bare)) == shown(parsed(bare | {"processed_at": 7, "session_thread_id": ["x"]}))


@pytest.mark.parametrize("content", [None, "absent"])
def test_a_message_without_content_has_no_blocks(content: str | None) -> None:
    event = parsed({"type": "agent.message", "id": "m1"} | ({} if content else {"content": None}))
    assert isinstance(event, Message)
    assert bytes(event.content) == b"[]"


# ---- why a session went idle


@pytest.mark.parametrize(
    "reason",
    [None, {}, {"type": None}, {"type": "end_turn"}, {"type": "hologram"}, {"type": 7}, "end_turn", [], 7],
    ids=str,
)
def test_every_other_stop_reason_ends_the_turn(reason: object) -> None:
    """Absent, null, unknown or unreadable: nobody is asked for anything."""
    event = idle(reason)
    assert (event.is_requires_action, event.wanted) == (False, ())


def test_an_absent_stop_reason_ends_the_turn() -> None:
    event = parsed(IDLE)
    assert isinstance(event, Idle)
    assert (event.is_requires_action, event.wanted) == (False, ())


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        (["a", "b"], ("a", "b")),
        ([], ()),
        (None, ()),
        ("a", ()),
        ({"a": 1}, ()),
        (["a", None, 7, "", ["b"], "c"], ("a", "c")),
        (["a", "b\0", "\ud800", "x" * 257], ("a",)),
    ],
    ids=ascii,
)
def test_a_required_action_stays_one_whatever_its_ids(ids: object, wanted: tuple[str, ...]) -> None:
    """One damaged id must not turn a waiting session into a finished one."""
    event = idle({"type": "requires_action", "event_ids": ids})
    assert (True, wanted) == (event.is_requires_action, event.wanted)


def test_a_thread_wants_its_calls_too() -> None:
    reason = {"type": "requires_action", "event_ids": ["a"]}
    event = parsed({"type": "session.thread_status_idle", "session_thread_id": "t1", "stop_reason": reason})
    assert isinstance(event, ThreadIdle)
    assert (event.wanted, event.session_thread_id) == (("a",), "t1")


# ---- unknown types


def test_an_unknown_type_is_another_event() -> None:
    """R-025: it asks nothing of us, and keeps its name, id and time for observers."""
    event = parsed({"type": "agent.hologram", "id": "h1", "anything": True, "processed_at": "2026-10-29"})
    assert event == Other(type="agent.hologram", id="h1", processed_at="2026-10-29")
    assert isinstance(event, Other)
    assert events.type_of(event) == "agent.hologram"


@pytest.mark.parametrize("id_", [7, None, ["h1"], {}], ids=str)
def test_an_unknown_type_needs_no_readable_id(id_: object) -> None:
    """R-025: it is still an event that was received."""
    assert parsed({"type": "agent.hologram", "id": id_}) == Other(type="agent.hologram")


@pytest.mark.parametrize("type_", ["Agent.tool_use", "agent.tool_use ", "agent", "", "BuiltinUse", "Other"])
def test_a_type_that_is_almost_known_is_unknown(type_: str) -> None:
    """R-025: types are compared exactly."""
    assert isinstance(parsed(CALL | {"type": type_}), Other)


# ---- entries that wrap their event


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_wrapped_event_is_that_event(path: Path) -> None:
    """Lists of some servers repeat the type around the event; nothing of the wrapping counts."""
    sample = json.loads(path.read_bytes())
    wrapped = {"seq": 1, "id": "row1", "type": sample["type"], "data": sample, "processed_at": None, "ts": 7}
    assert shown(parsed(sample)) == shown(parsed(wrapped))


def test_a_wrapped_idle_keeps_its_stop_reason() -> None:
    """All its fields are optional, so the wrapping alone would read as a finished turn."""
    inner = IDLE | {"stop_reason": {"type": "requires_action", "event_ids": ["tu1"]}}
    event = parsed({"type": IDLE["type"], "data": inner})
    assert isinstance(event, Idle)
    assert event.wanted == ("tu1",)


@pytest.mark.parametrize("data", [CALL, {"type": 7}, {}, [CALL], "agent.tool_use", None], ids=str)
def test_an_event_that_quotes_another_is_itself(data: object) -> None:
    """Only data of the same type is the event: a call that is quoted is not made."""
    assert isinstance(parsed({"type": "agent.hologram", "data": data}), Other)
    assert isinstance(parsed(IDLE | {"data": data}), Idle)


def test_only_one_wrapping_is_taken_off() -> None:
    data = b'{"type":"x","data":' * 100_000 + b'{"type":"x"}' + b"}" * 100_000
    assert isinstance(events.parse(data), Other)
    twice = {"type": "x", "id": "1", "data": {"type": "x", "id": "2", "data": {"type": "x", "id": "3"}}}
    assert parsed(twice) == Other(type="x", id="2")


# ---- what is no event


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"x",
        b"{",
        b'{"type":"user.interrupt"',
        b'{"type":"user.interrupt"}}',
        b'{"type":"user.interrupt"}{}',
        b"[]",
        b'"user.interrupt"',
        b"7",
        b"null",
        b"NaN",
        b"\xff",
        b"\x00",
        b'\xef\xbb\xbf{"type":"user.interrupt"}',
        "{'type':'user.interrupt'}".encode("utf-16"),
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b"{" * 100_000,
        b'{"a":' * 100_000,
        b"7" * 5_000,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_json_object_is_damaged(data: bytes) -> None:
    """R-026: counted and skipped."""
    assert isinstance(events.parse(data), Malformed)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"id": "tu1"},
        {"type": None},
        {"type": 7},
        {"type": ["agent.tool_use"]},
        CALL | {"name": None},
        CALL | {"name": 7},
        CALL | {"name": ""},
        CALL | {"id": None},
        CALL | {"id": 7},
        CALL | {"id": ""},
        {"type": "agent.tool_use", "id": "tu1"},
        {"type": "agent.tool_use", "name": "bash"},
        {"type": "user.tool_result"},
        {"type": "user.tool_result", "tool_use_id": None},
        {"type": "user.custom_tool_result", "tool_use_id": "tu1"},
        {"type": "agent.tool_result", "tool_use_id": 7},
        {"type": "agent.mcp_tool_result"},
        {"type": "user.tool_confirmation", "result": "allow"},
        {"type": "agent.message", "content": []},
        {"type": "agent.message", "id": "", "content": []},
        {"type": "event_start"},
        {"type": "event_start", "event": {"type": "agent.message"}},
        {"type": "event_start", "event": {"type": "agent.message", "id": ""}},
        {"type": "event_delta", "event_id": "m1"},
        {"type": "event_delta", "delta": {"type": "content_delta"}},
    ],
    ids=str,
)
def test_an_event_without_what_it_is_about_is_damaged(value: Json) -> None:
    """R-026: counted and skipped; none of them makes a call."""
    assert isinstance(parsed(value), Malformed)


@pytest.mark.parametrize(
    "id_", ["a\0", "\ud800", "é" * 257, "a" * 257], ids=["NUL", "surrogate", "é", "long"]
)
@pytest.mark.parametrize(
    "value",
    [
        CALL,
        CALL | {"session_thread_id": "ID", "id": "tu1"},
        {"type": "agent.hologram"},
        {"type": "session.status_idle"},
        {"type": "user.tool_result", "tool_use_id": "ID", "id": "r1"},
        {"type": "agent.tool_result", "tool_use_id": "ID", "id": "r1"},
        {"type": "user.custom_tool_result", "custom_tool_use_id": "ID", "id": "r1"},
        {"type": "agent.mcp_tool_result", "mcp_tool_use_id": "ID", "id": "r1"},
        {"type": "user.tool_confirmation", "tool_use_id": "ID", "id": "r1"},
        {"type": "event_start", "event": {"type": "agent.message", "id": "ID"}, "id": ""},
    ],
    ids=str,
)
def test_an_id_that_cannot_be_stored_is_damaged(value: Json, id_: str) -> None:
    """R-026: ids are keys of the store, and no event may break a transaction."""
    value = {"id": "ID"} | value if value is not CALL else CALL | {"id": "ID"}
    assert isinstance(events.parse(json.dumps(value).replace('"ID"', json.dumps(id_)).encode()), Malformed)


def test_an_id_at_the_limit_is_kept() -> None:
    assert call(id="é" * events.CALL_ID_CHARS_MAX).id == "é" * events.CALL_ID_CHARS_MAX


def test_an_interrupt_needs_no_id() -> None:
    """R-027: it may be empty or missing."""
    assert parsed({"type": "user.interrupt", "id": ""}) == parsed({"type": "user.interrupt"}) == Interrupt()


# ---- answers, verdicts, previews


@pytest.mark.parametrize(
    ("value", "cls"),
    [
        ({"type": "user.tool_result", "tool_use_id": "tu1"}, UserToolResult),
        ({"type": "agent.tool_result", "tool_use_id": "tu1"}, AgentToolResult),
        ({"type": "user.custom_tool_result", "custom_tool_use_id": "tu1"}, CustomToolResult),
        ({"type": "agent.mcp_tool_result", "mcp_tool_use_id": "tu1"}, McpToolResult),
    ],
)
def test_each_answer_names_its_call(value: Json, cls: type[events.Answer]) -> None:
    event = parsed(value)
    assert isinstance(event, cls)
    assert events.answered_id(event) == "tu1"


@pytest.mark.parametrize("flag", [True, False, None, "absent", "true", 1], ids=str)
def test_an_answers_error_flag_is_true_false_or_unknown(flag: object) -> None:
    event = parsed(
        {"type": "user.tool_result", "tool_use_id": "tu1"} | ({} if flag == "absent" else {"is_error": flag})
    )
    assert isinstance(event, UserToolResult)
    assert event.is_error is (flag if isinstance(flag, bool) else None)


@pytest.mark.parametrize("result", ["allow", "deny", "maybe", "", None, 7, True, ["allow"]], ids=str)
def test_only_the_text_allow_is_an_allow(result: object) -> None:
    event = parsed({"type": "user.tool_confirmation", "tool_use_id": "tu1", "result": result})
    assert isinstance(event, Confirmation)
    assert (event.result == "allow") == (result == "allow")


def test_a_reason_for_a_denial_is_made_storable() -> None:
    event = parsed(
        {"type": "user.tool_confirmation", "tool_use_id": "tu1", "deny_message": "a\0b\ud800" * 200}
    )
    assert isinstance(event, Confirmation)
    assert event.deny_message == "a\ufffdb\ufffd" * 200


@pytest.mark.parametrize("index", [None, 0, 3, -1, "0", 0.5, True, 10**30], ids=str)
def test_a_fragments_index_is_left_to_who_folds_it(index: object) -> None:
    """Dropping such a delta here would leave a hole in the text that nobody knows of."""
    delta = {"type": "content_delta", "index": index, "content": {"type": "text", "text": "x"}}
    event = parsed({"type": "event_delta", "event_id": "m1", "delta": delta})
    assert isinstance(event, PreviewDelta)
    assert index == event.delta.index


def test_a_preview_may_lack_everything_but_its_id() -> None:
    event = parsed({"type": "event_start", "event": {"id": "m1"}})
    assert isinstance(event, PreviewStart)
    assert (event.event.id, event.event.type) == ("m1", None)


def test_usage_and_the_like_are_told_apart_by_class() -> None:
    assert isinstance(parsed({"type": "session.usage", "id": "u1"}), Usage)


# ---- times


@pytest.mark.parametrize(
    ("timestamp", "at"),
    [
        ("1970-01-01T00:00:01Z", 1.0),
        ("1970-01-01T00:00:01.5Z", 1.5),
        ("1970-01-01T00:00:01.123456789Z", 1.123456),
        ("1970-01-01T01:00:01+01:00", 1.0),
        ("1970-01-01T00:00:01", 1.0),
        ("0001-01-01T00:00:00+23:59", -62135683140.0),
        ("9999-12-31T23:59:59-23:59", 253402387139.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("2026-13-01T00:00:00Z", None),
        ("2026-10-29T14:00:60Z", None),
        ("\ud800", None),
        ("\0", None),
        ("٢٠٢٦-10-29T14:00:00Z", None),
    ],
    ids=ascii,
)
def test_a_time_is_seconds_since_1970_or_none(timestamp: str | None, at: float | None) -> None:
    assert at == events.seconds(timestamp)
    assert at == call(processed_at=timestamp).at


def test_a_time_that_cannot_be_stored_is_none() -> None:
    assert call(processed_at="2026-10-29\0").processed_at is None
    assert call(processed_at="1" * 300).processed_at is None


# ---- anything

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *("type", "id", "name", "input", "content", "data", "event", "event_id", "delta", "stop_reason"),
        *("tool_use_id", "custom_tool_use_id", "mcp_tool_use_id", "evaluated_permission", "processed_at"),
        *("session_thread_id", "result", "deny_message", "is_error", "mcp_server_name"),
    ]
)


@given(st.binary(max_size=60))
def test_any_bytes_are_an_event_or_damaged(data: bytes) -> None:
    assert isinstance(events.parse(data), events.Event | Malformed)


@given(JSON)
def test_any_json_is_an_event_or_damaged(value: object) -> None:
    assert isinstance(parsed(value), events.Event | Malformed)


@given(st.sampled_from(sorted(KNOWN)), st.dictionaries(NAMES, JSON, max_size=6))
def test_any_members_make_an_event_or_damage(type_: str, members: Json) -> None:
    """Whatever is made of them can be stored."""
    event = parsed(members | {"type": type_})
    assert isinstance(event, events.Event | Malformed)
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, str) and name not in ("event_id", "result"):
            value.encode()
            assert "\0" not in value


@given(st.sampled_from(SAMPLES), st.data())
def test_any_damage_to_a_sample_is_an_event_or_damaged(path: Path, data: st.DataObject) -> None:
    sample = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(sample) - 1))
        sample[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    assert isinstance(events.parse(bytes(sample)), events.Event | Malformed)


@given(JSON, st.dictionaries(NAMES.filter(lambda name: name != "data"), JSON, max_size=4))
def test_any_input_is_kept_byte_for_byte(value: object, members: Json) -> None:
    """R-182: whatever stands around it."""
    try:
        input_ = json.dumps(value, allow_nan=False).encode()
        around = json.dumps(members | {"type": "agent.tool_use", "id": "tu1", "name": "n"}, allow_nan=False)
    except ValueError:
        return
    event = events.parse(around[:-1].encode() + b',"input":' + input_ + b"}")
    if isinstance(event, Malformed):
        assert event.reason == "id"
    else:
        assert isinstance(event, BuiltinUse)
        assert input_ == bytes(event.input)
