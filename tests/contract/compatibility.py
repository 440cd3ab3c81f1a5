"""Which changes of the OpenAPI document break a client of the pinned one.

`python -m tests.contract.compatibility` pins the document as it is now: at a release, not before. A request
that was right must stay right, and an answer readable; members, values and failures may be added to answers,
and anything to what may be asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.openapi import document

PINNED = Path(__file__).with_name("pinned.json")
DEPTH_MAX = 20
WORDS = ("description", "summary", "title", "example", "examples", "tags")
UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems")


def breaks(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the operation that a change breaks, as `GET /path`, and what it is."""
    for path, operations in old["paths"].items():
        for method, was in operations.items():
            where = f"{method.upper()} {path}"
            now = new["paths"].get(path, {}).get(method)
            found = ["is gone"] if now is None else _of_operation(_Pair(old, new), was, now)
            yield from ((where, what) for what in found)


class _Pair:
    """Two documents, and how one of their schemas goes beyond another."""

    def __init__(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        self._schemas = [one["components"]["schemas"] for one in (old, new)]

    def narrowed(self, old: Any, new: Any, place: str) -> Iterator[str]:
        """Say what the old schema allows and the new one does not: a request may be refused now."""
        yield from self._beyond((old, 0), (new, 1), place, is_answer=False, depth=0)

    def widened(self, old: Any, new: Any, place: str) -> Iterator[str]:
        """Say what the new schema allows and the old one did not: an answer may be misread."""
        yield from self._beyond((new, 1), (old, 0), place, is_answer=True, depth=0)

    def _beyond(
        self, given: tuple[Any, int], limit: tuple[Any, int], place: str, *, is_answer: bool, depth: int
    ) -> Iterator[str]:
        assert depth < DEPTH_MAX, f"{place} nests too deeply to compare"
        ones, others = self._alternatives(*given), self._alternatives(*limit)
        for one in ones:
            found = [
                list(self._beyond_one(one, given[1], other, limit[1], place, is_answer, depth))
                for other in others
            ]
            # The nearest of the alternatives says what is wrong.
            if all(found):
                yield from min(found, key=len)

    def _alternatives(self, schema: Any, side: int) -> list[dict[str, Any]]:
        if "$ref" in schema:
            return self._alternatives(self._schemas[side][schema["$ref"].rpartition("/")[2]], side)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return [one for each in schema[word] for one in self._alternatives(each, side)]
        return [schema]

    def _beyond_one(
        self, given: Any, side: int, limit: Any, other: int, place: str, is_answer: bool, depth: int
    ) -> Iterator[str]:
        if "type" in limit and limit["type"] != given.get("type"):
            if (given.get("type"), limit["type"]) != ("integer", "number"):
                yield f"{place}: {given.get('type', 'any type')} instead of {limit['type']}"
            return
        yield from _beyond_limits(given, limit, place, is_answer)
        if missing := set(limit.get("required", ())) - set(given.get("required", ())):
            yield f"{place}: {', '.join(sorted(missing))} required on one side, and not on the other"
        known = limit.get("properties", {})
        for name, member in given.get("properties", {}).items():
            within = f"{place}.{name}"
            if name in known:
                pair = ((member, side), (known[name], other))
                yield from self._beyond(*pair, within, is_answer=is_answer, depth=depth + 1)
            elif not is_answer and limit.get("additionalProperties") is False:
                yield f"{within}: gone"
        if is_answer and (gone := known.keys() - given.get("properties", {}).keys()):
            yield f"{place}: {', '.join(sorted(gone))} gone"
        for word in ("items", "additionalProperties"):
            if isinstance(limit.get(word), dict) and isinstance(given.get(word), dict):
                pair = ((given[word], side), (limit[word], other))
                yield from self._beyond(*pair, f"{place}[]", is_answer=is_answer, depth=depth + 1)


def _of_operation(pair: _Pair, was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for word in ("operationId", "security"):
        if was.get(word) != now.get(word):
            yield f"{word} differs"
    old, new = _parameters(was), _parameters(now)
    yield from (f"{name} is gone" for name in old.keys() - new.keys())
    for name, parameter in new.items():
        if parameter.get("required") and not old.get(name, {}).get("required"):
            yield f"{name} is required"
        if name in old:
            yield from pair.narrowed(old[name]["schema"], parameter["schema"], name)
    old_body, new_body = was.get("requestBody", {}), now.get("requestBody", {})
    if new_body.get("required") and not old_body.get("required"):
        yield "body is required"
    for media_type, content in old_body.get("content", {}).items():
        if media_type not in new_body.get("content", {}):
            yield f"body: no {media_type}"
        else:
            schema = new_body["content"][media_type].get("schema", {})
            yield from pair.narrowed(content.get("schema", {}), schema, "body")
    for status, answer in was["responses"].items():
        if status not in now["responses"]:
            yield f"no {status}"
            continue
        for media_type, content in answer.get("content", {}).items():
            if (there := now["responses"][status].get("content", {}).get(media_type)) is None:
                yield f"{status}: no {media_type}"
            else:
                yield from pair.widened(content.get("schema", {}), there.get("schema", {}), status)


def _parameters(operation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{one['in']} {one['name']}": one for one in operation.get("parameters", ())}


def _beyond_limits(given: Any, limit: Any, place: str, is_answer: bool) -> Iterator[str]:
    if is_answer:
        return  # readers live with other values of a known type
    for word, is_upper in (*((word, True) for word in UPPER), *((word, False) for word in LOWER)):
        if word in limit:
            there = given.get(word)
            if there is None or (there > limit[word] if is_upper else there < limit[word]):
                yield f"{place}: {word} {limit[word]}"
    if "pattern" in limit and limit["pattern"] != given.get("pattern"):
        yield f"{place}: another pattern"
    allowed, values = (_values(limit), _values(given))
    if allowed is not None and (values is None or not values <= allowed):
        yield f"{place}: fewer values"
    if limit.get("additionalProperties") is False and given.get("additionalProperties") is not False:
        yield f"{place}: no other members"


def _values(schema: Any) -> set[str] | None:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return None if values is None else {json.dumps(value) for value in values}


def pinned(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document without what is no promise: words, and which failures there are."""
    kept: dict[str, Any] = _without_words(document)
    for operations in kept["paths"].values():
        for operation in operations.values():
            answers = operation["responses"].items()
            operation["responses"] = {status: one for status, one in answers if status < "400"}
    return kept


def _without_words(value: Any, *, is_members: bool = False) -> Any:
    # Names of members may be words as well.
    if isinstance(value, dict):
        return {
            name: _without_words(one, is_members=name in ("properties", "schemas") and not is_members)
            for name, one in value.items()
            if is_members or name not in WORDS
        }
    return [_without_words(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    PINNED.write_text(json.dumps(pinned(document()), separators=(",", ":")) + "\n", encoding="utf-8")
