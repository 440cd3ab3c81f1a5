"""The OpenAPI document, as the routes declare it and as the service behaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import RedirectResponse
from starlette.routing import compile_path

from app.api.access import SCHEME
from app.api.callbacks import TOKEN_SCHEME
from app.api.examples import add_examples
from app.api.limits import HEADERS as LIMIT_HEADERS
from app.api.mutations import KEY, KEY_CODES, REPLAY_HEADERS
from app.api.polls import POLLED
from app.api.problems import CODES, PATH_CODES, ProblemBody, documented

DESCRIPTION: Final = (
    "Forwards the tool calls of Claude Managed Agents sessions to registered webhooks, holds those that need"
    " a person, posts each result back once, and keeps the agent's messages as text."
)
_METHODS: Final = ("get", "put", "post", "patch", "delete")


def describe(app: FastAPI) -> None:
    """Let the app serve a document in which every failure is a problem, and lead browsers to it."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.state.methods_of = partial(methods_of, app)
    app.openapi = document  # type: ignore[method-assign]  # as FastAPI documents it
    app.add_api_route("/", _root, include_in_schema=False)


async def _root() -> RedirectResponse:
    return RedirectResponse("/docs")


def _takes_values(operation: dict[str, Any]) -> bool:
    """Whether a request may hold a value that is refused; one in the path names something unknown instead."""
    parameters = operation.get("parameters", ())
    return "requestBody" in operation or any(one["in"] != "path" for one in parameters)


def methods_of(app: FastAPI, path: str) -> list[str]:
    """Return the methods that the document has for an address."""
    paths = app.openapi()["paths"].items()
    found = [methods for template, methods in paths if compile_path(template)[0].match(path)]
    return sorted({name.upper() for methods in found for name in methods if name in _METHODS})


def _add_codes(responses: dict[str, Any], codes: Sequence[str]) -> None:
    """Add failures that an operation shares with others of its kind to those that it names itself."""
    for code in codes:
        status = CODES[code][0]
        if f"`{code}`" in responses.get(str(status), {}).get("description", ""):
            continue
        if (there := responses.get(str(status))) is None:
            responses[str(status)] = documented(code)[status]
        else:
            there["description"] += f", `{code}`"


def _add_headers(responses: dict[str, Any], statuses: tuple[str, ...], names: Iterable[str]) -> None:
    """Add headers to the responses whose status begins so."""
    for status, response in responses.items():
        if status.startswith(statuses):
            added = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
            response.setdefault("headers", {}).update(added)


def _describe_parameters(operation: dict[str, Any]) -> None:
    """Say of those in the path what is missing otherwise, and of the others that nothing stands for null."""
    for one in operation.get("parameters", ()):
        if one["in"] == "path":
            _add_codes(operation["responses"], [PATH_CODES[one["name"]]])
        elif types := [type_ for type_ in one["schema"].get("anyOf", ()) if type_ != {"type": "null"}]:
            assert len(types) == 1
            del one["schema"]["anyOf"]
            one["schema"] |= types[0]


def _describe_body(operation: dict[str, Any]) -> None:
    """Say how a body can fail before its members are looked at."""
    content = operation.get("requestBody", {}).get("content", {})
    if content:
        _add_codes(operation["responses"], ["body_too_large"])
    if "$ref" in str(content):  # else the route reads the body itself, and says so itself
        _add_codes(operation["responses"], ["invalid_json", "unsupported_media_type"])


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=DESCRIPTION,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    schemas = document["components"]["schemas"]
    # The framework's own form of a malformed request, which we never send.
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    problem = ProblemBody.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs"))
    problem["properties"]["code"]["enum"] = sorted(CODES)
    schemas["ProblemBody"] = problem
    document["components"]["headers"] = {
        name: {"description": description, "schema": {"type": "string"}}
        for name, description in (LIMIT_HEADERS | REPLAY_HEADERS).items()
    }
    add_examples(schemas)
    document["components"]["securitySchemes"] = {
        SCHEME: {"type": "http", "scheme": "bearer", "bearerFormat": "bsk_…"},
        TOKEN_SCHEME: {"type": "http", "scheme": "bearer", "bearerFormat": "cbt.…"},
    }
    for path in document["paths"].values():
        for method in _METHODS:
            path.get(method, {}).pop(POLLED, None)
            responses = path.get(method, {}).get("responses", {})
            if "HTTPValidationError" in str(responses.get("422")):
                del responses["422"]
            if SCHEME in path.get(method, {}).get("security", [{}])[0]:
                _add_headers(responses, ("2", "429"), LIMIT_HEADERS)
            _describe_parameters(path.get(method, {}))
            _describe_body(path.get(method, {}))
            if any(one["name"] == KEY for one in path.get(method, {}).get("parameters", ())):
                _add_codes(responses, KEY_CODES)
                _add_headers(responses, ("2",), REPLAY_HEADERS)
            if responses and "422" not in responses and _takes_values(path[method]):
                responses["422"] = documented("invalid_request")[422]
    return document
