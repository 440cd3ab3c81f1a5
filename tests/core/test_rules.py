"""Standing rules: which one rules a call, and what that means for its way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core import protocol as p
from app.core.rules import ArgumentTest, Rule, is_comparable, is_pointer, like, ruling
from app.core.strict_json import Unreadable
from tests.core.life import ECHO, GATED, Life, custom, idle, mcp, refused, use

ALLOW = Rule("rul_allow", "allow", tool="echo")
ASK = Rule("rul_ask", "ask", tool="echo")
DENY = Rule("rul_deny", "deny", tool="echo")
ASKS = replace(ECHO, gate="ask")


def about(input_: str, *rules: Rule) -> tuple[str, str] | None:
    """The id and effect of the rule that rules a custom call of `echo`."""
    rule = ruling(rules, "custom", "echo", input_.encode())
    return None if rule is None else (rule.id, rule.effect)


def with_test(operator: Any, value: str, argument: str = "/n", effect: Any = "allow") -> Rule:
    return Rule("rul_tested", effect, tool="echo", tests=(ArgumentTest(argument, operator, value),))


# ---- which rule


def test_deny_beats_ask_and_ask_beats_allow_in_whatever_order() -> None:
    for rules in ((ALLOW, ASK, DENY), (DENY, ASK, ALLOW), (ASK, DENY, ALLOW)):
        assert ("rul_deny", "deny") == about("{}", *rules)
    assert ("rul_ask", "ask") == about("{}", ALLOW, ASK)
    assert about("{}") is None


def test_of_two_with_one_effect_the_older_one_is_named() -> None:
    assert ("rul_allow", "allow") == about("{}", ALLOW, replace(ALLOW, id="rul_later"))


@pytest.mark.parametrize(
    "rule", [replace(ALLOW, tool="ech"), replace(ALLOW, tool="ECHO"), replace(ALLOW, kind="builtin")]
)
def test_a_rule_is_about_its_exact_tool_and_kind(rule: Rule) -> None:
    assert about("{}", rule) is None


@pytest.mark.parametrize(
    ("operator", "value", "input_", "holds"),
    [
        ("equals", "100", '{"n":100}', True),
        ("equals", "100", '{"n":1e2}', True),
        ("equals", "100", '{"n":100.0}', True),
        ("equals", "100", '{"n":100.00000000000000001}', False),
        ("equals", "100", '{"n":"100"}', False),
        ("equals", "1", '{"n":true}', False),
        ("equals", "null", '{"n":null}', True),
        ("equals", "null", "{}", False),
        ("equals", '{"a":[1,2]}', '{"n":{"a":[1,2]}}', True),
        ("equals", '{"a":[1,2]}', '{"n":{"a":[2,1]}}', False),
        ("equals", '"\\u00e9"', '{"n":"é"}', True),
        ("one_of", '["a","b"]', '{"n":"b"}', True),
        ("one_of", '["a","b"]', '{"n":"c"}', False),
        ("one_of", "[]", '{"n":"c"}', False),
        ("at_most", "100", '{"n":100}', True),
        ("at_most", "100", '{"n":100.01}', False),
        ("at_most", "100", '{"n":"7"}', False),
        ("at_most", "100", '{"n":[7]}', False),
        ("at_most", "100", '{"n":true}', False),
        ("at_most", "100", "{}", False),
        ("at_most", "100", '{"n":-1e999999}', True),
        ("at_least", "0.1", '{"n":0.1}', True),
        ("at_least", "0.1", '{"n":0.0999999999999999999999}', False),
        ("is_given", "true", '{"n":null}', True),
        ("is_given", "true", "{}", False),
        ("is_given", "false", "{}", True),
        ("is_given", "false", '{"n":0}', False),
        ("equals", "1", "[1]", False),
        ("equals", "1", "7", False),
    ],
)
def test_a_test_holds_for_what_it_says_and_nothing_like_it(
    operator: Any, value: str, input_: str, holds: bool
) -> None:
    assert holds is (about(input_, with_test(operator, value)) is not None)


@pytest.mark.parametrize(
    ("pointer", "input_"),
    [
        ("", "7"),
        ("/a~1b", '{"a/b":7}'),
        ("/~0", '{"~":7}'),
        ("/", '{"":7}'),
        ("/to/1/n", '{"to":[0,{"n":7}]}'),
    ],
)
def test_an_argument_is_found_by_its_pointer(pointer: str, input_: str) -> None:
    assert is_pointer(pointer)
    assert about(input_, with_test("equals", "7", pointer)) is not None


@pytest.mark.parametrize("pointer", ["/to/-1", "/to/01", "/to/2", "/to/99999999999", "/to/a", "/x/y"])
def test_what_is_not_there_is_not_found(pointer: str) -> None:
    assert about('{"to":[7,7],"x":1}', with_test("is_given", "true", pointer)) is None


@pytest.mark.parametrize("text", ["n", "/a~", "/a~2", "a/b"])
def test_other_texts_are_no_pointers(text: str) -> None:
    assert not is_pointer(text)


def test_all_tests_must_hold_and_no_other_argument_may_be_there() -> None:
    tests = (ArgumentTest("/a", "equals", "1"), ArgumentTest("/b", "equals", "2"))
    rule = replace(ALLOW, tests=tests, only=frozenset("ab"))
    assert about('{"a":1,"b":2}', rule) is not None
    assert about('{"a":1,"b":3}', rule) is None
    assert about('{"a":1,"b":2,"c":0}', rule) is None
    assert about("[]", replace(rule, tests=())) is None


AMBIGUOUS = [
    '{"n":1,"n":1000}',
    '{"n":NaN}',
    '{"n":1e99999999999999999999}',
    "[" * 100_000,
    '{"n":1}' + " " * 1_048_576,
]


@pytest.mark.parametrize("input_", AMBIGUOUS, ids=range(len(AMBIGUOUS)))
def test_what_cannot_be_tested_is_allowed_by_no_test_and_asked_about_by_those_that_would_deny(
    input_: str,
) -> None:
    """Two readers of one input may see two amounts."""
    assert about(input_, with_test("at_most", "100")) is None
    assert about(input_, replace(ALLOW, only=frozenset("n"))) is None
    assert ("rul_tested", "ask") == about(input_, with_test("at_least", "100", effect="deny"), ALLOW)
    assert ("rul_tested", "ask") == about(input_, with_test("at_least", "100", effect="ask"))
    assert ("rul_deny", "deny") == about(input_, DENY)


@pytest.mark.parametrize("value", ['{"a":1,"a":2}', "NaN", "[" * 10_000])
def test_nothing_is_compared_with_what_readers_take_differently(value: str) -> None:
    assert not is_comparable(value.encode())


# ---- like this one

LIKE = b'{"to": "ana@example.org", "amount": 100.50, "a/b": {"x": [1]}}'


def test_a_rule_of_an_input_holds_for_it_and_for_nothing_else() -> None:
    tests, only = like(LIKE, None)
    rule = replace(ALLOW, tests=tests, only=only)
    assert about(LIKE.decode(), rule) is not None
    assert about(LIKE.decode().replace("100.50", "100.5"), rule) is not None
    for other in (("100.50", "100.51"), ("ana", "eve"), ("[1]", "[1, 2]"), ("{", '{"cc": 1,')):
        assert about(LIKE.decode().replace(*other, 1), rule) is None


def test_of_the_arguments_only_those_that_were_named_must_be_the_same() -> None:
    tests, only = like(LIKE, ["to"])
    rule = replace(ALLOW, tests=tests, only=only)
    assert about('{"to":"ana@example.org","amount":7}', rule) is not None
    assert about('{"to":"eve@example.org","amount":7}', rule) is None
    assert about('{"to":"ana@example.org","cc":"eve@example.org"}', rule) is None


@pytest.mark.parametrize("input_", [b"[]", b"7", b'{"a":1,"a":2}', b'{"a":NaN}'])
def test_no_rule_is_made_of_what_is_no_plain_object(input_: bytes) -> None:
    with pytest.raises(Unreadable):
        like(input_, None)


def test_no_rule_is_made_about_an_argument_that_is_not_there() -> None:
    with pytest.raises(KeyError):
        like(LIKE, ["cc"])


# ---- its way


def consulted(life: Life) -> list[str]:
    return [effect.call_id for effect in life.of(p.ConsultRules)]


def gate(life: Life, call_id: str = "c1") -> tuple[str, str, str | None] | None:
    found = life.calls[call_id].gate
    return None if found is None else (found.by, found.reason, found.rule)


def test_a_rule_that_asks_holds_what_nobody_else_would() -> None:
    life = Life(rules=[ASK]).connect(custom("c1"))
    assert ("held", ("rule", "rule_asks", "rul_ask"), []) == (life.state("c1"), gate(life), consulted(life))
    life.decide("c1", "allow")
    assert ["c1"] == life.deliveries


def test_a_rule_that_denies_holds_the_call_until_the_store_has_denied_it() -> None:
    """Whether it lives is the store's to say; until then nothing runs."""
    life = Life(rules=[DENY]).connect(custom("c1"))
    assert (("rule", "rule_denies", "rul_deny"), ["c1"]) == (gate(life), consulted(life))
    assert [] == life.deliveries
    life.decide("c1", "deny", via="rule", by="rul_deny", message="too much")
    [sent] = life.sends
    words = "Denied by a standing rule: too much. Do not retry without new instructions."
    assert [{"type": "text", "text": words}] == sent["content"]


def test_a_rule_that_allows_gates_nothing() -> None:
    life = Life(rules=[ALLOW]).connect(custom("c1"))
    assert (["c1"], None, []) == (life.deliveries, gate(life), consulted(life))


def test_a_rule_that_allows_answers_for_the_person_whom_the_tool_asks() -> None:
    life = Life(tools=[ASKS], rules=[ALLOW]).connect(custom("c1"))
    assert (("tool", "tool_asks", "rul_allow"), ["c1"]) == (gate(life), consulted(life))
    assert [] == life.deliveries
    life.decide("c1", "allow", via="rule", by="rul_allow")
    assert ["c1"] == life.deliveries


def test_a_rules_allow_of_what_upstream_holds_goes_upstream_first() -> None:
    life = Life(rules=[replace(ALLOW, tool="gated")]).connect(use("c1", "gated", permission="ask"))
    assert ["c1"] == consulted(life)
    life.decide("c1", "allow", via="rule", by="rul_allow")
    assert (["user.tool_confirmation"], []) == ([one["type"] for one in life.sends], life.deliveries)
    life.sent("c1")
    assert ["c1"] == life.deliveries


def test_mcp_calls_are_answered_by_rules_too() -> None:
    life = Life(rules=[Rule("rul_mcp", "deny", kind="mcp")]).connect(mcp("c1", permission="ask"))
    assert ["c1"] == consulted(life)


def test_where_a_rule_asks_no_other_one_answers() -> None:
    life = Life(tools=[ASKS], rules=[ALLOW, ASK]).connect(custom("c1"))
    assert (("tool", "tool_asks", None), []) == (gate(life), consulted(life))


def test_whoever_is_asked_already_is_answered_for_by_a_rule_that_comes_later() -> None:
    life = Life(tools=[ASKS]).connect(custom("c1"), custom("c2", input={"n": 1}))
    life.notice(p.ToolsChanged({"echo": ASKS}, (replace(ALLOW, only=frozenset()),)))
    assert ["c1"] == consulted(life)


def test_rules_that_did_not_change_are_not_consulted_again() -> None:
    life = Life(tools=[ASKS], rules=[ALLOW]).connect(custom("c1"))
    life.notice(p.ToolsChanged({"echo": ASKS}, (ALLOW,)))
    assert ["c1"] == consulted(life)


def test_no_rule_answers_whether_to_deliver_again() -> None:
    tool = replace(ECHO, on_unknown="ask")
    life = Life(tools=[tool], rules=[ALLOW]).connect(custom("c1"))
    life.deliver("c1", "lost", unknown=True)
    assert (("tool", "outcome_unknown", None), []) == (gate(life), consulted(life))


def test_a_rule_that_was_made_while_a_call_waited_for_its_turn_holds_it() -> None:
    life = Life(concurrency=1).connect(custom("c1"), custom("c2"))
    life.notice(p.ToolsChanged({"echo": ECHO}, (ASK,)))
    life.answer("c1")
    assert ("held", ("rule", "rule_asks", "rul_ask")) == (life.state("c2"), gate(life, "c2"))


def test_what_a_rule_allowed_goes_back_to_a_person_when_the_rule_ends_before_it_was_sent() -> None:
    """C-041: a revoked rule lets nothing more run."""
    life = Life(tools=[ASKS], rules=[ALLOW], concurrency=1).connect(custom("c1"), custom("c2"))
    life.decide("c1", "allow", via="rule", by="rul_allow", id="dec_1")
    life.decide("c2", "allow", via="rule", by="rul_allow", id="dec_2")
    life.notice(p.ToolsChanged({"echo": ASKS}, ()))
    life.answer("c1")
    assert (["c1"], ("rule", "rule_over", "rul_allow")) == (life.deliveries, gate(life, "c2"))
    assert life.calls["c2"].decision is None
    life.decide("c2", "allow", id="dec_3")
    assert ["c1", "c2"] == life.deliveries


def test_upstream_may_refuse_the_allow_of_a_rule_that_has_ended_and_a_person_is_asked() -> None:
    """It never asked, so that the allow on record would suffice; but there is none any more."""
    life = Life(rules=[ALLOW], agent_tools=None).connect(use("c1"))
    life.decide("c1", "allow", via="rule", by="rul_allow")
    life.notice(p.ToolsChanged({"echo": ECHO}, ()))
    life.sent("c1", refused(400, "the call does not wait for a confirmation"))
    life.looked("c1", p.Findings())
    assert (("rule", "rule_over", "rul_allow"), None, []) == (
        gate(life), life.calls["c1"].decision, life.deliveries
    )  # fmt: skip


def test_what_a_person_allowed_stays_allowed_when_a_rule_asks() -> None:
    life = Life(tools=[ASKS], concurrency=1).connect(custom("c1"), custom("c2"))
    life.decide("c1", "allow", id="dec_1")
    life.decide("c2", "allow", id="dec_2")
    life.notice(p.ToolsChanged({"echo": ASKS}, (ASK,)))
    life.answer("c1")
    assert ["c1", "c2"] == life.deliveries


def test_a_restart_consults_the_rules_again_and_for_what_was_promised_also_without_one() -> None:
    """Nobody was told of a call that a rule was about to answer."""
    life = Life(tools=[ASKS], rules=[ALLOW]).connect(custom("c1"))
    for rules in ([ALLOW], []):
        again = Life(tools=[ASKS], rules=rules, stored=life.store()).connect(custom("c1"))
        assert (["c1"], "held") == (consulted(again), again.machine.ledger.calls["c1"].state)


def test_an_expired_ask_is_no_promise() -> None:
    life = Life(rules=[ASK]).connect(custom("c1"))
    again = Life(stored=life.store()).connect(custom("c1"))
    assert ([], "held") == (consulted(again), again.machine.ledger.calls["c1"].state)


def test_a_call_that_a_rule_holds_is_parked_with_its_tool() -> None:
    life = Life(rules=[ASK]).connect(custom("c1"), idle("requires_action", "c1"))
    life.notice(p.ToolsChanged({"gated": GATED}, (ASK,)))
    assert "unowned" == life.state("c1")
