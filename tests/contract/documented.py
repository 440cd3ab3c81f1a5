"""The OpenAPI document as a judge: whether a value fits the schema that an operation has for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import jsonschema_rs
from starlette.routing import compile_path

from app.openapi import document

JSON = "application/json"
PROBLEM = "application/problem+json"


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    declared: dict[str, Any]

    @property
    def id(self) -> str:
        value: str = self.declared["operationId"]
        return value

    def body_examples(self) -> Iterator[tuple[str, Any]]:
        """Media types of the request with each of their examples."""
        for media_type, content in self.declared.get("requestBody", {}).get("content", {}).items():
            yield from ((media_type, example) for example in examples_of(content))


def operations() -> list[Operation]:
    return [
        Operation(method.upper(), path, declared)
        for path, methods in whole()["paths"].items()
        for method, declared in methods.items()
    ]


@cache
def whole() -> dict[str, Any]:
    return document()


def examples_of(content: dict[str, Any]) -> list[Any]:
    """The examples of a media type: its own, or those of the schemas that it names."""
    if "example" in content:
        return [content["example"]]
    if "examples" in content:
        return [one["value"] for one in content["examples"].values()]
    schema = content.get("schema", {})
    found: list[Any] = []
    for one in (schema, *schema.get("anyOf", ())):
        name = one.get("$ref", "").rpartition("/")[2]
        found += whole()["components"]["schemas"].get(name, {}).get("examples", [])
    return found


def errors(schema: dict[str, Any], value: Any) -> list[str]:
    """What is wrong with a value, by a schema of the document."""
    judge = jsonschema_rs.validator_for(
        {**schema, "components": whole()["components"]}, validate_formats=True
    )
    return [f"{error.instance_path}: {error.message}" for error in judge.iter_errors(value)]


def check(answer: httpx.Response) -> None:
    """Hold an answer against what the document says of its operation and status."""
    request = answer.request
    found = [
        one
        for one in operations()
        if one.method == request.method and compile_path(one.path)[0].match(request.url.path)
    ]
    # A template's fixed parts come before its parameters.
    operation = min(found, key=lambda one: one.path.count("{"))
    where = f"{operation.method} {operation.path} {answer.status_code}"
    declared = operation.declared["responses"].get(str(answer.status_code))
    assert declared is not None, f"{where} is not documented"
    content = declared.get("content", {})
    if not content:
        assert answer.content == b"", where
        return
    media_type = answer.headers["content-type"].partition(";")[0]
    assert media_type in content, f"{where}: {media_type}"
    if media_type.endswith("json"):
        assert errors(content[media_type].get("schema", {}), answer.json()) == [], where
