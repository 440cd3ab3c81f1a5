"""Inputs that do not fit are answered where nothing was delivered, and said why."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from app.core import protocol as p
from app.core.inputs import INPUT_BYTES_MAX, misfit
from app.core.tools import Tool
from tests.core.life import ALWAYS_ALLOW, ECHO, Life, custom, unknown, use, verdict

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {"order_id": {"type": "string"}, "count": {"type": "integer", "maximum": 5}},
    "required": ["order_id"],
}
CHECKED = replace(ECHO, input_schema=json.dumps(ORDER))
OF_AGENT = replace(ECHO, input_schema="agent")
FIT = {"order_id": "A-1"}
UNFIT: dict[str, Any] = {"order_id": 7}


def agent_tools(schema: Any = ORDER) -> list[Any]:
    return [*ALWAYS_ALLOW, {"type": "custom", "name": "echo", "input_schema": schema}]


def lives(*tools: Tool, **more: Any) -> Life:
    return Life(tools=tools or (CHECKED,), **more).connect()


def why(schema: Any, value: Any) -> str | None:
    return misfit(json.dumps(schema), value if isinstance(value, bytes) else json.dumps(value).encode())


# ---- what becomes of a call


def test_an_input_that_fits_is_delivered_byte_for_byte() -> None:
    """Checking only looks."""
    raw = b'{ "order_id" : "\\u0041", "count":1.0 ,"n":12345678901234567890.10}'
    life = lives()
    life.receive(replace_input(custom("ctu1"), raw))
    assert [raw] == [effect.call.input for effect in life.of(p.Deliver)]


def replace_input(call: Any, raw: bytes) -> Any:
    return msgspec.structs.replace(call, input=msgspec.Raw(raw))


@pytest.mark.parametrize(
    ("call", "type_"),
    [(custom("c1", input=UNFIT), "user.custom_tool_result"), (use("c1", input=UNFIT), "user.tool_result")],
)
def test_an_input_that_does_not_fit_is_answered_at_once(call: Any, type_: str) -> None:
    """An error result of the call's own kind, no delivery, and the record says so."""
    life = lives()
    life.receive(call)
    [sent] = life.sends
    assert (type_, True, []) == (sent["type"], sent["is_error"], life.deliveries)
    assert "order_id must be of type string" in sent["content"][0]["text"]
    life.sent("c1")
    record = life.calls["c1"]
    assert ("posted", 0, True) == (record.state, record.attempts, record.posted)
    assert "input_schema" in (record.detail or "")


def test_nobody_is_asked_about_a_call_that_cannot_run() -> None:
    """The check comes before our own gate."""
    life = lives(replace(CHECKED, gate="ask"))
    life.receive(custom("ctu1", input=UNFIT), custom("ctu2", input=FIT))
    assert ("posting", "held") == (life.state("ctu1"), life.state("ctu2"))


def test_a_call_that_upstream_holds_is_checked_once_it_is_allowed() -> None:
    """Upstream would refuse a result before."""
    life = lives()
    life.receive(use("tu1", permission="ask", input=UNFIT))
    assert ("held", []) == (life.state("tu1"), life.sends)
    life.receive(verdict("tu1", "allow"))
    assert ("posting", ["user.tool_result"]) == (life.state("tu1"), [sent["type"] for sent in life.sends])


def test_a_denied_call_is_not_checked() -> None:
    life = lives()
    life.receive(use("tu1", permission="ask", input=UNFIT), verdict("tu1", "deny"))
    assert ("denied", []) == (life.state("tu1"), life.sends)


def test_a_call_that_waits_is_checked_by_the_schema_that_came_meanwhile() -> None:
    life = lives(ECHO, concurrency=1)
    life.receive(custom("ctu1"), custom("ctu2", input=UNFIT))
    life.notice(p.ToolsChanged({"echo": CHECKED}))
    life.answer("ctu1")
    assert (["ctu1"], "posting") == (life.deliveries, life.state("ctu2"))


def test_a_held_call_is_checked_again_when_it_is_allowed() -> None:
    """Its tool may take other inputs by then."""
    life = lives(replace(ECHO, gate="ask"))
    life.receive(custom("ctu1", input=UNFIT))
    life.notice(p.ToolsChanged({"echo": replace(CHECKED, gate="ask")}))
    life.decide("ctu1", "allow")
    assert ("posting", []) == (life.state("ctu1"), life.deliveries)


def test_a_call_that_was_delivered_is_not_checked_any_more() -> None:
    """It may have run: what a person lets be delivered again is delivered."""
    life = lives(replace(ECHO, on_unknown="ask"))
    life.receive(custom("ctu1", input=UNFIT))
    life.deliver("ctu1", unknown=True)
    life.notice(p.ToolsChanged({"echo": replace(CHECKED, on_unknown="ask")}))
    life.decide("ctu1", "allow")
    assert ["ctu1", "ctu1"] == life.deliveries


def test_an_unowned_call_is_checked_when_its_tool_is_registered() -> None:
    life = lives(replace(ECHO, name="other"))
    life.receive(custom("ctu1", input=UNFIT))
    life.notice(p.ToolsChanged({"echo": CHECKED}))
    assert ("posting", []) == (life.state("ctu1"), life.deliveries)


def test_the_answer_of_an_earlier_run_is_posted_and_not_made_anew() -> None:
    """A crash after it was stored: the next run looks, and sends the same."""
    first = lives()
    first.receive(custom("ctu1", input=UNFIT))
    life = Life(tools=(CHECKED,), stored=first.store()).connect()
    life.looked("ctu1")
    assert first.sends == life.sends


def test_the_answer_survives_a_lost_send() -> None:
    life = lives()
    life.receive(custom("ctu1", input=UNFIT))
    life.sent("ctu1", unknown())
    life.looked("ctu1")
    life.sent("ctu1")
    assert ("posted", 2) == (life.state("ctu1"), len(life.sends))


def test_a_schema_that_cannot_be_used_any_more_delivers_nothing() -> None:
    """Whoever asked for a check gets no unchecked call, and the agent is told whose business it is."""
    life = lives(replace(ECHO, input_schema='{"type": "strin"}'))
    life.receive(custom("ctu1"))
    assert ("posting", []) == (life.state("ctu1"), life.deliveries)
    assert "operator" in life.sends[0]["content"][0]["text"]


# ---- the agent's own schema


def test_the_agents_own_schema_is_used_if_the_tool_says_so() -> None:
    life = lives(OF_AGENT, agent_tools=agent_tools())
    life.receive(custom("ctu1", input=UNFIT), custom("ctu2", input=FIT))
    assert ("posting", ["ctu2"]) == (life.state("ctu1"), life.deliveries)


def test_the_agents_own_schema_is_not_used_unasked() -> None:
    life = lives(ECHO, agent_tools=agent_tools())
    life.receive(custom("ctu1", input=UNFIT))
    assert ["ctu1"] == life.deliveries


def test_a_session_that_was_updated_is_checked_by_its_new_schema() -> None:
    life = lives(OF_AGENT, agent_tools=agent_tools())
    life.retrieved(p.SessionFacts(False, agent_tools({"type": "object"}), "self_hosted"))
    life.receive(custom("ctu1", input=UNFIT))
    assert ["ctu1"] == life.deliveries


@pytest.mark.parametrize(
    "declared",
    [
        [],
        None,
        [{"type": "custom", "name": "other", "input_schema": ORDER}],
        [{"type": "custom", "name": "echo"}],
        [{"type": "custom", "name": "echo", "input_schema": {"type": "strin"}}],
        [{"type": "custom", "name": "echo", "input_schema": {"maximum": float("nan")}}],
        [{"type": "custom", "name": ["echo"], "input_schema": ORDER}, "custom", None],
    ],
)
def test_a_schema_of_the_agent_that_is_unknown_or_of_no_use_checks_nothing(declared: Any) -> None:
    """Its tool's operator cannot mend it."""
    life = lives(OF_AGENT, agent_tools=declared)
    life.receive(custom("ctu1", input=UNFIT))
    assert ["ctu1"] == life.deliveries


def test_a_child_thread_is_not_checked_by_the_schema_of_another_agent() -> None:
    life = lives(OF_AGENT, agent_tools=agent_tools())
    life.receive(custom("ctu1", input=UNFIT, thread="th1"))
    assert ["ctu1"] == life.deliveries


# ---- what is said


@pytest.mark.parametrize(
    ("schema", "value", "sentence"),
    [
        (ORDER, {}, 'the input lacks the member "order_id"'),
        (ORDER, [], "the input must be of type object"),
        ({"type": ["string", "null"]}, 7, "the input must be of type null or string"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 7, "the input must be of type string or null"),
        ({"anyOf": [{"minimum": 9}, {"type": "null"}]}, 7, "the input must fit one of its alternatives"),
        ({"oneOf": [True, True]}, 7, "the input must fit exactly one of its alternatives"),
        ({"enum": ["a", 1, None]}, "b", 'the input must be one of "a", 1, null'),
        ({"const": "a"}, "b", 'the input must be "a"'),
        ({"properties": {"a": {"items": {"minimum": 3}}}}, {"a": [3, 2]}, "a[1] must be at least 3"),
        ({"properties": {"a b": {"maxLength": 1}}}, {"a b": "xx"}, '["a b"] must have at most 1 characters'),
        ({"pattern": "^A$"}, "b", "the input must match the pattern ^A$"),
        ({"multipleOf": 0.01}, 0.015, "the input must be a multiple of 0.01"),
        ({"uniqueItems": True}, [1, 1], "the input must not hold an item twice"),
        ({"properties": {"a": True}, "additionalProperties": False}, {"x": 1},
         'the input must not have the member "x"'),
        ({"additionalProperties": False}, {"x": 1}, "the input must not have a member"),
        ({"properties": {"x": False}}, {"x": 1}, "x must not be there"),
        ({"contains": {"const": 1}}, [2], "the input must hold as many items of a kind as `contains` says"),
    ],
)  # fmt: skip
def test_the_agent_is_told_where_and_what_was_expected(schema: Any, value: Any, sentence: str) -> None:
    assert f"- {sentence}" == why(schema, value)


def test_five_errors_are_told_and_the_others_counted() -> None:
    told = why({"items": {"type": "string"}}, list(range(9))) or ""
    assert (6, "- and 4 more") == (len(told.splitlines()), told.splitlines()[-1])


def test_what_is_told_is_short_and_holds_no_value_of_the_input() -> None:
    secret = "s3cret" * 1000
    schema = {
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x" * 5000] * 2}, "c": {"const": "y" * 5000}},
        "additionalProperties": False,
        "required": ["z" * 5000],
    }
    told = why(schema, {"a": secret, "b": secret, "c": secret, "d" * 5000: 1}) or ""
    assert ("s3cret" in told, len(told) < 2000) == (False, True)


@pytest.mark.parametrize(
    "raw", [b'{"a":1,"a":2}', b'{"a":NaN}', b'"\\ud800"', b"[" * 50_000 + b"]" * 50_000, b"1" * 5000]
)
def test_an_input_that_readers_would_read_differently_does_not_fit(raw: bytes) -> None:
    """Whoever asked for a check would otherwise be told of another value than the tool sees."""
    assert "cannot be checked" in (why({"uniqueItems": True}, raw) or "")


@pytest.mark.parametrize(
    ("schema", "raw", "fits"),
    [
        ({"type": "integer"}, b"1.0", True),
        ({"type": "integer"}, b"1e400", True),
        ({"maximum": 5.5}, b"5.5000000000000000000001", False),
        ({"multipleOf": 0.1}, b"0.3", True),
        ({"maximum": 12345678901234567890}, b"12345678901234567891", False),
    ],
)
def test_numbers_are_compared_digit_for_digit(schema: Any, raw: bytes, fits: bool) -> None:
    assert fits == (why(schema, raw) is None)


# ---- bounds


def test_an_input_that_would_take_too_long_is_not_checked() -> None:
    branches = {"items": {"anyOf": [{"const": number} for number in range(1000)]}}
    assert "too large to be checked" in (why(branches, [7] * 10_000) or "")
    assert "bytes" in (why({}, b'"' + b"x" * INPUT_BYTES_MAX + b'"') or "")
    searched = {"allOf": [{"pattern": "x"}] * 50}
    assert "too large to be checked" in (why(searched, "x" * 100_000) or "")


def test_a_large_input_that_does_not_fit_is_told_so_without_a_list() -> None:
    """Listing its errors could take more memory than all else."""
    assert "too large to say where" in (why({"items": {"type": "string"}}, list(range(100_000))) or "")


def test_a_pattern_that_would_backtrack_for_ever_comes_to_an_end() -> None:
    assert why({"pattern": "^(a+)+$"}, "a" * 100_000 + "b")
