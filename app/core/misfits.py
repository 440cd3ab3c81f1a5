"""The sentences that say where a value does not fit a schema, and what was expected there.

They tell of the schema, and the names of members; never a value of the input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jsonschema_rs

LISTED_MAX: Final = 5
"""How many of several names or options are told."""
CHARS_MAX: Final = 200
"""Of a path or an expectation as told; longer ones are cut."""


def sentence(error: jsonschema_rs.ValidationError) -> str:
    """Where it is, and what the schema expects there."""
    return f"{path(error.instance_path)} {expectation(error)}"


def path(parts: Sequence[str | int]) -> str:
    """A path as people write it: `lines[0].price`."""
    told = ""
    for part in parts:
        if isinstance(part, int):
            told += f"[{part}]"
        elif part.isidentifier():
            told += f".{part}" if told else part
        else:
            told += f"[{json.dumps(part, ensure_ascii=False)}]"
    return cut(told) or "the input"


def expectation(error: jsonschema_rs.ValidationError) -> str:
    """What the schema expects there."""
    name, facts = error.kind.name, error.kind.as_dict()
    limit = facts.get("limit")
    match name:
        case "type":
            return f"must be of type {_either(facts['types'])}"
        case "required":
            return f"lacks the member {_json(facts['property'])}"
        case "additionalProperties" | "unevaluatedProperties":
            return f"must not have the member {_listed(facts['unexpected'])}"
        case "enum":
            return f"must be one of {_listed(facts['options'])}"
        case "const":
            return f"must be {_json(facts['expected_value'])}"
        case "pattern":
            return f"must match the pattern {cut(facts['pattern'])}"
        case "multipleOf":
            return f"must be a multiple of {cut(str(facts['multiple_of']))}"
        case "anyOf" | "oneOf":
            types = _types(error, facts)
            return f"must be of type {types}" if types else f"must fit {_COUNTED[name]} of its alternatives"
    if name == "falseSchema" and error.schema_path[-1:] == ["additionalProperties"]:
        return "must not have a member"
    if limit is not None and name in _LIMITS:
        return _LIMITS[name].format(cut(str(limit)))
    return _OTHERS.get(name, f"must satisfy `{cut(name)}`")


_COUNTED: Final = {"anyOf": "one", "oneOf": "exactly one"}
_LIMITS: Final = {
    "minimum": "must be at least {}",
    "maximum": "must be at most {}",
    "exclusiveMinimum": "must be more than {}",
    "exclusiveMaximum": "must be less than {}",
    "minLength": "must have at least {} characters",
    "maxLength": "must have at most {} characters",
    "minItems": "must have at least {} items",
    "maxItems": "must have at most {} items",
    "additionalItems": "must have at most {} items",
    "minProperties": "must have at least {} members",
    "maxProperties": "must have at most {} members",
}
_OTHERS: Final = {
    "uniqueItems": "must not hold an item twice",
    "unevaluatedItems": "has more items than are allowed",
    "propertyNames": "has a member whose name is not allowed",
    "contains": "must hold as many items of a kind as `contains` says",
    "falseSchema": "must not be there",
    "not": "is of a form that `not` excludes",
}


def _types(error: jsonschema_rs.ValidationError, facts: Mapping[str, Any]) -> str | None:
    """The types among which a value may choose, if that is all that its alternatives differ in."""
    types: list[str] = []
    for branch in facts["context"]:
        first = branch[0] if branch else None
        if first is None or first.kind.name != "type" or first.instance_path != error.instance_path:
            return None
        types += first.kind.as_dict()["types"]
    return _either(types)


def _either(types: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(types))


def _listed(values: Sequence[Any]) -> str:
    more = f" and {len(values) - LISTED_MAX} more" if len(values) > LISTED_MAX else ""
    return cut(", ".join(_json(value) for value in values[:LISTED_MAX])) + more


def _json(value: Any) -> str:
    return cut(json.dumps(value, ensure_ascii=False, default=str), CHARS_MAX // LISTED_MAX)


def cut(text: str, chars_max: int = CHARS_MAX) -> str:
    """The text, its end left out if it is longer."""
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"
