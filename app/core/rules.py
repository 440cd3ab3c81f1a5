"""Standing rules: what somebody decided beforehand for calls to come.

A rule names the calls that it is about: by tool, kind and session, and by tests of arguments. Deny beats ask,
ask beats allow, whatever is more specific. What cannot be tested is never allowed by a rule: an input that
readers take differently goes before a person as soon as a rule that denies or asks would have to test it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final, Literal, get_args

import msgspec

from app.core.calls import Call, Gate
from app.core.events import Kind
from app.core.strict_json import Unreadable, read

Operator = Literal["equals", "one_of", "at_most", "at_least", "is_given"]
OPERATORS: Final[tuple[Operator, ...]] = get_args(Operator)
Effect = Literal["allow", "ask", "deny"]

TESTED_BYTES_MAX: Final = 1_048_576
"""A longer input is not tested."""
ASKING: Final = ("rule_asks", "rule_over")
"""The reasons of gates whose rule does not answer."""
VIA: Final = "rule"
"""How a rule's decision was made; the rule is who made it."""
_POINTER: Final = re.compile(r"(/([^~/]|~[01])*)*")
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_ABSENT: Final = object()
_UNREADABLE: Final = object()
_Number = tuple[Decimal]
"""A JSON number as read here: a tuple equals nothing else, so 1 is not true, but it is 1.0."""


@dataclass(frozen=True, slots=True)
class ArgumentTest:
    """A test of one argument: a JSON pointer (RFC 6901), an operator, and a JSON text to compare with.

    `equals` and `one_of` compare JSON values, numbers by their value; `at_most` and `at_least` hold for
    numbers only, never for a string of digits; `is_given` compares with true or false. Of an argument that is
    not there, only `is_given` `false` holds.
    """

    argument: str
    operator: Operator
    value: str


@dataclass(frozen=True, slots=True)
class Rule:
    """What is decided for the calls that it is about: None in `tool`, `kind` or `session_id` means any.

    All `tests` must hold. `only` are the arguments that the input may have at most; None: any others too.
    `deny_message` is for the agent.
    """

    id: str
    effect: Effect
    tool: str | None = None
    kind: Kind | None = None
    session_id: str | None = None
    tests: tuple[ArgumentTest, ...] = ()
    only: frozenset[str] | None = None
    deny_message: str | None = None


def is_comparable(value: bytes) -> bool:
    """Whether a JSON text can be what a test compares with."""
    return _readable(value) is not _UNREADABLE


def is_pointer(text: str) -> bool:
    """Whether a text is a JSON pointer."""
    return _POINTER.fullmatch(text) is not None


def ruling(rules: Sequence[Rule], kind: Kind, tool: str, input_: bytes) -> Rule | None:
    """Return the rule that rules a call, or None; the rules are those about any session, or its own.

    Its effect is `ask` where one that denies or asks could not be tested. Of several with one effect it is
    the first.
    """
    concerned = [rule for rule in rules if rule.tool in (None, tool) and rule.kind in (None, kind)]
    if not concerned:
        return None
    is_read = any(rule.tests or rule.only is not None for rule in concerned)
    read = _readable(input_) if is_read else _UNREADABLE
    found: dict[Effect, Rule] = {}
    for rule in concerned:
        fits = _fits(rule, read)
        if fits:
            found.setdefault(rule.effect, rule)
        elif fits is None and rule.effect != "allow":
            found.setdefault("ask", replace(rule, effect="ask"))
    return found.get("deny") or found.get("ask") or found.get("allow")


def rule_gate(rule: Rule | None) -> Gate | None:
    """The gate of a rule on a call that no other gate holds, or None."""
    if rule is None or rule.effect == "allow":
        return None
    return Gate("rule", None, "rule_asks" if rule.effect == "ask" else "rule_denies", rule=rule.id)


def is_promised(call: Call) -> bool:
    """Whether nobody was told of a held call, as a rule was about to answer."""
    return call.gate is not None and call.gate.rule is not None and call.gate.reason not in ASKING


def over_gate(call: Call, live: Iterable[str]) -> Gate | None:
    """The gate of a call that a rule allowed which is live no more, or None."""
    decision = call.decision
    if decision is None or decision.via != VIA or call.attempts > 0 or decision.by in live:
        return None
    return Gate("rule", None, "rule_over", rule=decision.by)


def like(input_: bytes, same: Iterable[str] | None) -> tuple[tuple[ArgumentTest, ...], frozenset[str]]:
    """Return the tests that inputs like this one pass, and the arguments that they may have.

    `same` names the arguments whose values must be this input's; None means all.

    Raises:
        Unreadable: the input is no JSON object that every reader takes alike.
        KeyError: it has no argument of a name in `same`.
    """
    written = _written(input_)
    names = list(written) if same is None else list(same)
    tests = tuple(ArgumentTest("/" + _escaped(name), "equals", written[name].decode()) for name in names)
    return tests, frozenset(written)


def _written(input_: bytes) -> dict[str, bytes]:
    """The members of an object, each as it was written."""
    if not isinstance(_read(input_), dict):
        raise Unreadable("it is no JSON object")
    return {
        name: bytes(raw) for name, raw in msgspec.json.decode(input_, type=dict[str, msgspec.Raw]).items()
    }


def _fits(rule: Rule, read: Any) -> bool | None:
    """Whether an input passes the tests of a rule; None if they cannot be made."""
    if not rule.tests and rule.only is None:
        return True
    if read is _UNREADABLE:
        return None
    if rule.only is not None and not (isinstance(read, dict) and read.keys() <= rule.only):
        return False
    return all(_holds(test, read) for test in rule.tests)


def _holds(test: ArgumentTest, read: Any) -> bool:
    found, wanted = _at(read, test.argument), _read(test.value.encode())
    if test.operator == "is_given":
        return bool((found is not _ABSENT) == wanted)
    match test.operator:
        case "equals":
            return bool(found == wanted)
        case "one_of":
            return any(found == one for one in wanted)
        case "at_most":
            return isinstance(found, tuple) and bool(found <= wanted)
        case "at_least":
            return isinstance(found, tuple) and bool(found >= wanted)


def _at(read: Any, pointer: str) -> Any:
    found = read
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name, _ABSENT)
        elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return _ABSENT
    return found


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _readable(input_: bytes) -> Any:
    try:
        return _read(input_)
    except Unreadable:
        return _UNREADABLE


def _read(text: bytes) -> Any:
    """Read JSON that every reader takes alike.

    Raises:
        Unreadable: it is not, or is larger than what is read.
    """
    if len(text) > TESTED_BYTES_MAX:
        raise Unreadable(f"it has more than {TESTED_BYTES_MAX} bytes")
    try:
        return read(text, parse_int=_number, parse_float=_number)
    except Unreadable:
        raise
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise Unreadable("it is nested too deeply, has too large a number, or is no JSON") from error


def _number(digits: str) -> _Number:
    return (Decimal(digits),)
