"""A person edits the input of a custom call: what is an edit, what runs, and what the agent is told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from app.core import protocol as p
from app.core.calls import Call, Decision, Result
from app.core.edits import EditRefused, is_editable, read_edit
from app.core.inputs import INPUT_BYTES_MAX
from app.core.outgoing import EDIT_TOLD_CHARS_MAX, error_result, is_same_result, result_event, told
from tests.core.life import ECHO, Life, custom, event, text

ASKS = replace(ECHO, gate="ask")
ORIGINAL = b'{"amount": 900, "to": "A-1"}'
EDITED = b'{"amount":90,"to":"A-1"}'
ALLOW = Decision("allow", "accepted", "ana", "api", id="dec_1", edited_input=EDITED)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ('{"amount": 90, "to": "A-1"}', EDITED),
        (' {\r\n\t"amount" : 90 ,\n "to":"A-1" } ', EDITED),
        ('{"to": "A 1", "n": 1.10, "big": 1E400}', b'{"to":"A 1","n":1.10,"big":1E400}'),
        ('{"to": "\\" [ \\\\"}', b'{"to":"\\" [ \\\\"}'),
        ('{"amount": 900.0, "to": "A-1"}', b'{"amount":900.0,"to":"A-1"}'),
        ('{"é": "\\u202e"}', '{"é":"\\u202e"}'.encode()),
        ("{}", b"{}"),
    ],
)
def test_an_edit_is_kept_as_it_was_written_but_for_the_space_between_its_values(
    typed: str, read: bytes
) -> None:
    assert read == read_edit(typed, ORIGINAL)


@pytest.mark.parametrize("typed", ['{"to":"A-1","amount":900}', '{ "amount":900, "to":"\\u0041-1" }'])
def test_what_says_the_same_as_the_original_is_no_edit(typed: str) -> None:
    assert read_edit(typed, ORIGINAL) is None


@pytest.mark.parametrize(
    ("typed", "original"), [('{"a": true}', b'{"a": 1}'), ('{"a": 1}', b'{"a": 2, "a": 1}')]
)
def test_what_a_reader_could_take_differently_is_an_edit(typed: str, original: bytes) -> None:
    assert read_edit(typed, original) is not None


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ('{"amount": 90,}', "at line 1, column 15. Correct it there."),
        ('{\n"amount" 90}', "at line 2, column 10"),
        ("[1]", "It is no JSON object"),
        ("", "It is no JSON"),
        ('{"a": 1, "a": 2}', "names a member of an object twice"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": ' + "[" * 20_000 + "]" * 20_000 + "}", "nested too deeply"),
        ('{"a": "' + "x" * INPUT_BYTES_MAX + '"}', f"send at most {INPUT_BYTES_MAX}"),
        ('{"a": "\ud800"}', "half a character"),
    ],
)
def test_what_no_tool_could_read_is_refused_with_the_place_or_the_limit(typed: str, words: str) -> None:
    with pytest.raises(EditRefused) as refused:
        read_edit(typed, ORIGINAL)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "by", "reason", "is_so"),
    [
        ("custom", "tool", "tool_asks", True),
        ("custom", "rule", "ask", True),
        ("custom", None, None, True),
        ("custom", "tool", "outcome_unknown", False),
        ("custom", "upstream", "unknown_permission", False),
        ("builtin", "tool", "tool_asks", False),
        ("mcp", "upstream", "required_action", False),
    ],
)
def test_only_a_custom_call_at_a_gate_of_ours_can_be_edited(
    kind: Any, by: str | None, reason: str | None, is_so: bool
) -> None:
    assert is_so is is_editable(kind, by, reason)


def held(**more: Any) -> Life:
    life = Life(tools=(replace(ASKS, **more),)).connect()
    life.receive(custom("c1", input=json.loads(ORIGINAL)))
    return life


def decide(life: Life, decision: Decision = ALLOW) -> None:
    life.notice(p.Decided("c1", decision))


def test_an_edited_input_goes_to_the_tool_and_the_agents_own_stays() -> None:
    life = held()
    decide(life)
    call = life.calls["c1"]
    assert ["c1"] == life.deliveries
    assert (EDITED, EDITED, json.loads(ORIGINAL)) == (
        call.edited_input,
        call.sent_input,
        json.loads(call.input),
    )


def test_the_agent_is_told_before_the_result_what_ran() -> None:
    life = held()
    decide(life)
    life.deliver("c1", "done")
    [sent] = life.sends
    notice, result = sent["content"]
    assert "A person edited the input of this call" in notice["text"]
    assert notice["text"].endswith(EDITED.decode())
    assert text("done") == [result]


@pytest.mark.parametrize("schema", ['{"properties": {"amount": {"minimum": 100}}}'])
def test_an_edited_input_that_does_not_fit_goes_back_to_a_person(schema: str) -> None:
    """Only the runner knows the agent's own schema; the agent did no wrong, so it hears nothing."""
    life = held(input_schema=schema)
    decide(life)
    assert ("held", [], []) == (life.state("c1"), life.deliveries, life.sends)
    [refusal] = life.of(p.RefuseDecision)
    assert ("dec_1", True) == (refusal.decision_id, "input_schema" in refusal.refusal)
    decide(life, replace(ALLOW, id="dec_2", edited_input=None))
    assert ["c1"] == life.deliveries
    assert life.calls["c1"].edited_input is None


def call(**more: Any) -> Call:
    return Call(
        "c1", "custom", "echo", ORIGINAL, "posting", **({"attempts": 1, "edited_input": EDITED} | more)
    )


@pytest.mark.parametrize(
    "content", [b"[]", b'[{"type":"text","text":"a"}]', b' [ {"type":"text","text":"a"} ] ']
)
@pytest.mark.parametrize("is_error", [True, False])
def test_the_notice_leads_any_content(content: bytes, is_error: bool) -> None:
    shown = told(call(), Result(content, is_error))
    blocks = json.loads(shown.content)
    assert (is_error, json.loads(content)) == (shown.is_error, blocks[1:])
    assert blocks[0]["text"].endswith(f"called with: {EDITED.decode()}")


def test_a_long_edit_is_told_by_its_beginning_and_its_digest() -> None:
    long = b'{"a":"' + b"x" * 100_000 + b'"}'
    blocks = json.loads(told(call(edited_input=long), error_result("no")).content)
    assert len(blocks[0]["text"]) <= EDIT_TOLD_CHARS_MAX + 300
    assert "sha256:" in blocks[0]["text"]
    assert blocks[0]["text"].endswith("cut: 2000 of 100008 characters")


@pytest.mark.parametrize("more", [{"edited_input": None}, {"attempts": 0}])
def test_nothing_is_told_of_what_was_not_edited_or_did_not_run(more: dict[str, Any]) -> None:
    result = error_result("no")
    assert result == told(call(**more), result)


def test_our_own_result_is_recognised_with_its_notice() -> None:
    """Else an answer that upstream took would be sent again after a crash."""
    ours = Result(json.dumps(text("done")).encode(), is_error=False)
    sent = json.loads(result_event(call(), ours))
    answer = event(sent.pop("type"), **sent)
    assert is_same_result(answer, told(call(), ours))
    assert not is_same_result(answer, ours)
