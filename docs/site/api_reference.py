"""Writes the reference of the API as Markdown, of its OpenAPI document: operations by subject, then objects.

What the usual renderers make of the document is examples of invented values; readers look for fields, their
limits and defaults, so this makes tables of those.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

METHODS = ("get", "put", "post", "patch", "delete")
_LIMITS = (
    ("minimum", "at least", ""),
    ("exclusiveMinimum", "more than", ""),
    ("maximum", "at most", ""),
    ("exclusiveMaximum", "less than", ""),
    ("minLength", "at least", " characters"),
    ("maxLength", "at most", " characters"),
    ("minItems", "at least", " items"),
    ("maxItems", "at most", " items"),
)


def rendered(document: Mapping[str, Any]) -> str:
    """Return everything below the page's introduction."""
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method in METHODS:
            if operation := operations.get(method):
                shared = operations.get("parameters", [])
                lines = by_tag.setdefault(operation["tags"][0], [])
                lines.extend(_operation(method.upper(), path, operation, shared))
    parts = []
    for tag in sorted(by_tag):
        parts += [f"## {tag.capitalize()}", "", *by_tag[tag]]
    parts += ["## Objects", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += [*_object(name, schema)]
    return "\n\n" + "\n".join(parts) + "\n"


def _operation(
    method: str, path: str, operation: Mapping[str, Any], shared: list[dict[str, Any]]
) -> Iterator[str]:
    yield f"### `{method} {path}`"
    yield ""
    yield f"{_prose(operation['summary'])}. {_prose(operation.get('description', ''))}"
    yield ""
    scopes = [scope for one in operation.get("security", []) for values in one.values() for scope in values]
    if scopes:
        yield f"*Scope:* {', '.join(f'`{scope}`' for scope in scopes)}."
        yield ""
    parameters = [*shared, *operation.get("parameters", [])]
    if parameters:
        yield from _table(
            "parameter",
            (
                (one["name"], one["in"], {"description": one.get("description", ""), **one["schema"]})
                for one in parameters
            ),
        )
    if body := operation.get("requestBody"):
        yield f"*Body:* {_contents(body['content'])}."
        yield ""
    yield "*Answers:*"
    yield ""
    for status, response in sorted(operation["responses"].items()):
        said = _prose(response["description"])
        content = _contents(response["content"]) if "content" in response and status < "400" else ""
        yield f"- `{status}` {': '.join(filter(None, (said, content)))}"
    yield ""


def _contents(content: Mapping[str, Any]) -> str:
    """A body in every media type that it may have."""
    found = []
    for media_type, one in content.items():
        shown = _kind(one.get("schema", {}))
        found.append(shown if media_type == "application/json" else f"{shown} as `{media_type}`")
    return " or ".join(found)


def _object(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if text := schema.get("description"):
        yield _prose(text)
        yield ""
    required = set(schema.get("required", ()))
    if properties := schema.get("properties"):
        yield from _table(
            "member",
            ((key, "required" if key in required else "", value) for key, value in properties.items()),
        )
    else:
        yield f"{_kind({**schema, 'description': ''})}."
        yield ""


def _table(head: str, rows: Iterator[tuple[str, str, Mapping[str, Any]]]) -> Iterator[str]:
    yield f"| {head} | | is | means |"
    yield "|---|---|---|---|"
    for name, remark, schema in rows:
        default = schema.get("default")
        if_left_out = "" if default is None else f"`{json.dumps(default)}` if left out"
        remarks = ", ".join(filter(None, (remark, if_left_out)))
        cells = (f"`{name}`", remarks, _kind(schema), _prose(schema.get("description", "")))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _kind(schema: Mapping[str, Any]) -> str:
    """What a value is, with its limits."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_kind(option) for option in options))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any JSON")
    if kind == "array":
        kind = f"array of {_kind(schema.get('items', {}))}"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        kind = f"object of {_kind(schema['additionalProperties'])}"
    elif "format" in schema:
        kind = f"{kind} ({schema['format']})"
    limits = [f"{word} {schema[key]:.12g}{of}" for key, word, of in _LIMITS if key in schema]
    if "pattern" in schema:
        limits.append(f"fits `{schema['pattern']}`")
    return ", ".join([kind, *limits])


def _prose(text: str) -> str:
    """A description on one line, in which angle brackets are no HTML."""
    parts = " ".join(text.split()).removesuffix(".").split("`")
    parts[::2] = [part.replace("<", r"\<") for part in parts[::2]]
    return "`".join(parts)
