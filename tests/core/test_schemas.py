"""Which schemas may be registered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.core.schemas import DEPTH_MAX, PATTERNS_MAX, SCHEMA_BYTES_MAX, VALUES_MAX, SchemaRefused, compiled


def refusal(schema: Any) -> tuple[tuple[str | int, ...], str]:
    with pytest.raises(SchemaRefused) as caught:
        compiled(schema if isinstance(schema, str) else json.dumps(schema))
    return caught.value.path, str(caught.value)


def doubling(times: int) -> dict[str, Any]:
    """A schema of a few lines that refers to its definitions twice at each of these levels."""
    defs: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, times + 1):
        defs[f"d{level}"] = {"anyOf": [{"$ref": f"#/$defs/d{level - 1}"}, {"$ref": f"#/$defs/d{level - 1}"}]}
    return {"$defs": defs, "$ref": f"#/$defs/d{times}"}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"type": "strin"}}}, ("properties", "a", "type")),
        ({"properties": {"a": {"minimum": "3"}}}, ("properties", "a", "minimum")),
        ({"items": [{"type": "string"}]}, ("items",)),
        ({"required": "a"}, ("required",)),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, ("$schema",)),
        ({"properties": {"a": {"$id": "https://example.com/a"}}}, ("properties", "a", "$id")),
        ({"properties": {"a": {"pattern": "(?=x)"}}}, ("properties", "a", "pattern")),
        ({"properties": {"a": {"pattern": r"(x)\1"}}}, ("properties", "a", "pattern")),
        ({"properties": {"a": {"pattern": "(a{1000}){1000}"}}}, ("properties", "a", "pattern")),
    ],
)
def test_an_invalid_schema_is_refused_and_said_where(schema: Any, path: tuple[str, ...]) -> None:
    assert path == refusal(schema)[0]


@pytest.mark.parametrize(
    "reference",
    ["https://example.com/x", "file:///etc/passwd", "other.json", "//example.com/x", "#name", "#/a%2Fb"],
)
def test_a_reference_out_of_the_schema_is_refused(reference: str) -> None:
    """Nothing is ever fetched, and no other reading of a reference goes unmeasured."""
    path, sentence = refusal({"properties": {"a": {"$ref": reference}}, "a%2Fb": True})
    assert (("properties", "a", "$ref"), True) == (path, "nothing is fetched" in sentence)


def test_a_reference_to_nothing_is_refused() -> None:
    assert "does not hold" in refusal({"properties": {"a": {"$ref": "#/$defs/a"}}})[1]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"properties": {"next": {"$ref": "#"}}},
        {"properties": {"a": {"items": {"$ref": "#/properties/a"}}}},
        {"dependencies": {"const": {"$ref": "#/dependencies/const"}}},
    ],
)
def test_a_schema_that_leads_back_to_itself_is_refused(schema: Any) -> None:
    """Its work would grow with the depth of an input that an agent chooses."""
    assert "back to itself" in refusal(schema)[1]


@pytest.mark.parametrize(
    "schema",
    [
        {
            "properties": {
                "$ref": {"type": "string"},
                "$id": {"type": "string"},
                "pattern": {"type": "string"},
            }
        },
        {"const": {"$ref": "https://example.com/x"}, "default": {"$id": 7}, "enum": [{"$ref": 1}]},
        {"$id": "https://example.com/order", "$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"definitions": {"id": {"type": "string"}}, "properties": {"a": {"$ref": "#/definitions/id"}}},
        {"$defs": {"a/b~c": True}, "properties": {"a": {"$ref": "#/$defs/a~1b~0c"}}},
        doubling(8),
    ],
)
def test_what_only_looks_like_a_reference_is_accepted(schema: Any) -> None:
    compiled(json.dumps(schema))


def test_a_schema_is_bounded_with_its_references_followed() -> None:
    """A few hundred bytes can stand for more work than any input needs."""
    assert "references followed" in refusal(doubling(40))[1]
    assert "references followed" in refusal({"enum": list(range(VALUES_MAX))})[1]
    patterns = {str(number): {"pattern": "x"} for number in range(PATTERNS_MAX + 1)}
    assert "patterns" in refusal({"properties": patterns})[1]


def test_an_unevaluated_keyword_counts_for_each_level_that_it_looks_into_again() -> None:
    schema: dict[str, Any] = {"properties": {"a": True}}
    for _ in range(12):
        schema = {"anyOf": [schema, {"required": ["z"]}], "unevaluatedProperties": False}
    assert "references followed" in refusal(schema)[1]


def test_a_schema_is_bounded_in_bytes_and_depth() -> None:
    deep: dict[str, Any] = {}
    for _ in range(DEPTH_MAX):
        deep = {"not": deep}
    compiled(json.dumps(deep))
    assert "levels" in refusal({"not": deep})[1]
    assert str(SCHEMA_BYTES_MAX) in refusal({"description": "x" * SCHEMA_BYTES_MAX})[1]
    assert "JSON" in refusal('{"a":' * 100_000)[1]


@pytest.mark.parametrize("text", ["", "[]", "7", '"agent"', "nope"])
def test_only_an_object_is_a_schema(text: str) -> None:
    assert "JSON" in refusal(text)[1]
