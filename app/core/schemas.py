"""JSON Schemas of tool inputs: what may be registered, and how it is made ready.

The dialect is 2020-12. A schema comes from outside, so its size is taken before it is used, with its
references followed: how much work a check may be is known before it begins. Patterns run in linear time, and
nothing is ever fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import jsonschema_rs

from app.core.misfits import cut, expectation

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_BYTES_MAX: Final = 65_536
DEPTH_MAX: Final = 64
"""Levels of arrays and objects, references followed."""
VALUES_MAX: Final = 10_000
"""JSON values, references followed; an object with an `unevaluated…` keyword counts threefold."""
PATTERNS_MAX: Final = 50
"""Of `pattern` and `patternProperties`, references followed."""
PATTERN_BYTES_MAX: Final = 16_384
"""Of one pattern, compiled: long counted repetitions, like `{1,255}`, take most."""
COMPILED_MAX: Final = 256
"""How many schemas are kept ready."""

_UNEVALUATED: Final = ("unevaluatedProperties", "unevaluatedItems")
_UNEVALUATED_FACTOR: Final = 3
_NAMED: Final = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
)
"""Keywords whose members are names, not keywords."""
_PLAIN: Final = ("const", "enum", "default", "examples", "required", "dependentRequired")
"""Keywords whose values are data, not schemas."""
_REGEX: Final = jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES_MAX, dfa_size_limit=PATTERN_BYTES_MAX)


class SchemaRefused(ValueError):
    """The schema cannot be used. `path` says where, as keys and indices from its root."""

    def __init__(self, path: Sequence[str | int], message: str) -> None:
        super().__init__(message)
        self.path = tuple(path)


@dataclass(frozen=True, slots=True)
class InputSchema:
    """A schema ready for use. `values` and `patterns` are its size, references followed."""

    values: int
    patterns: int
    validator: jsonschema_rs.Draft202012Validator


@lru_cache(COMPILED_MAX)
def compiled(text: str) -> InputSchema:
    """Read a schema from its JSON text.

    Raises:
        SchemaRefused: it is no schema, too large, refers outside itself or to itself, or uses what cannot be
            checked in bounded time.
    """
    if len(text.encode("utf-8", "replace")) > SCHEMA_BYTES_MAX:
        raise SchemaRefused((), f"must be at most {SCHEMA_BYTES_MAX} bytes of JSON")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise SchemaRefused((), "must be JSON") from None
    if not isinstance(schema, dict):
        raise SchemaRefused((), "must be a JSON object")
    if schema.get("$schema", DIALECT) != DIALECT:
        raise SchemaRefused(("$schema",), f"must be {DIALECT}, or be left out")
    # They name the schema, and an identity of its own would be the base of its references.
    schema = {name: value for name, value in schema.items() if name not in ("$schema", "$id")}
    size = _Measure(schema).size()
    try:
        validator = jsonschema_rs.Draft202012Validator(
            schema, offline=True, pattern_options=_REGEX, validate_formats=False
        )
    except jsonschema_rs.ValidationError as error:
        raise SchemaRefused(error.instance_path, _refusal(error)) from None
    except ValueError as error:
        raise SchemaRefused((), f"cannot be read: {cut(str(error))}") from None
    return InputSchema(size.values, size.patterns, validator)


@dataclass(frozen=True, slots=True)
class _Size:
    values: int = 1
    patterns: int = 0
    height: int = 0


class _Measure:
    """Walks a schema with its references followed, each target once."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._targets: dict[str, _Size] = {}
        self._following: set[str] = set()

    def size(self) -> _Size:
        return self._of(self._schema, (), is_schema=True)

    def _of(self, value: Any, path: tuple[str | int, ...], *, is_schema: bool) -> _Size:
        """Measure a value. `is_schema` says that an object's keys are keywords."""
        if len(path) > DEPTH_MAX:
            raise SchemaRefused(path[:8], f"must be nested at most {DEPTH_MAX} levels deep")
        if isinstance(value, list):
            parts = [self._of(item, (*path, index), is_schema=is_schema) for index, item in enumerate(value)]
            return self._sum(parts, path)
        if not isinstance(value, dict):
            return _Size()
        if not is_schema:
            return self._sum([self._of(v, (*path, k), is_schema=False) for k, v in value.items()], path)
        parts = [self._keyword(name, inner, (*path, name)) for name, inner in value.items()]
        size = self._sum(parts, path)
        if any(name in value for name in _UNEVALUATED):
            # They look at their siblings once more.
            size = _Size(size.values * _UNEVALUATED_FACTOR, size.patterns * _UNEVALUATED_FACTOR, size.height)
        return self._checked(size, path)

    def _keyword(self, name: str, value: Any, path: tuple[str | int, ...]) -> _Size:
        if name == "$ref" and isinstance(value, str):
            return self._reference(value, path)
        if name in ("$dynamicRef", "$recursiveRef", "$id", "$schema"):
            raise SchemaRefused(path, f"{name} is not supported here: refer to #/$defs/… with $ref")
        if name in _PLAIN:
            return self._of(value, path, is_schema=False)
        if name in _NAMED and isinstance(value, dict):
            size = self._sum([self._of(v, (*path, k), is_schema=True) for k, v in value.items()], path)
            more = len(value) if name == "patternProperties" else 0
            return _Size(size.values, size.patterns + more, size.height)
        size = self._of(value, path, is_schema=True)
        return _Size(size.values, size.patterns + (name == "pattern"), size.height)

    def _reference(self, pointer: str, path: tuple[str | int, ...]) -> _Size:
        if pointer in self._following or pointer == "#":
            raise SchemaRefused(
                path, "must not lead back to itself: the work of a check could not be bounded"
            )
        if not pointer.startswith("#/") or "%" in pointer:
            raise SchemaRefused(
                path, "must point into this schema by plain names, like #/$defs/name; nothing is fetched"
            )
        size = self._targets.get(pointer)
        if size is None:
            self._following.add(pointer)
            size = self._of(self._target(pointer, path), path, is_schema=True)
            self._following.discard(pointer)
            self._targets[pointer] = size
        if len(path) + size.height > DEPTH_MAX:
            raise SchemaRefused(path, f"must be nested at most {DEPTH_MAX} levels deep")
        return size

    def _target(self, pointer: str, path: tuple[str | int, ...]) -> Any:
        target: Any = self._schema
        for part in pointer[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise SchemaRefused(path, f"points to {cut(pointer)}, which the schema does not hold")
        return target

    def _sum(self, parts: Iterable[_Size], path: tuple[str | int, ...]) -> _Size:
        values, patterns, height = 1, 0, 0
        for part in parts:
            values, patterns = values + part.values, patterns + part.patterns
            height = max(height, part.height + 1)
        return self._checked(_Size(values, patterns, height), path)

    def _checked(self, size: _Size, path: tuple[str | int, ...]) -> _Size:
        if size.values > VALUES_MAX:
            raise SchemaRefused(path, f"must hold at most {VALUES_MAX} values, references followed")
        if size.patterns > PATTERNS_MAX:
            raise SchemaRefused(path, f"must hold at most {PATTERNS_MAX} patterns, references followed")
        return size


def _refusal(error: jsonschema_rs.ValidationError) -> str:
    if error.kind.name == "format":
        return (
            f"must be a regular expression without look-around and back-references, of at most"
            f" {PATTERN_BYTES_MAX} bytes compiled"
        )
    return expectation(error)
