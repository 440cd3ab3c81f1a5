"""Problems: every way in which a request can fail, as `application/problem+json` with a stable code.

`CODES` is closed and documented in `docs/errors.md`. A problem's `detail` is a sentence that names the thing,
the limit and the remedy; it never repeats what the client sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:bascule:problem:"
BODY_BYTES_MAX: Final = 1_048_576
ERRORS_MAX: Final = 50
"""So many members of a malformed request are named."""
RETRY_AFTER_S: Final = 2

CODES: Final[Mapping[str, tuple[int, str]]] = {
    "invalid_json": (400, "The body is not JSON"),
    "unauthenticated": (401, "A valid key is required"),
    "unverified_webhook": (401, "The webhook's signature is not good"),
    "key_expired": (401, "The key has expired"),
    "forbidden": (403, "The key may not do this"),
    "not_an_approver": (403, "The key may not decide on this tool's calls"),
    "not_found": (404, "There is no such address"),
    "session_not_found": (404, "The session is not attached"),
    "tool_not_found": (404, "There is no such tool"),
    "call_not_found": (404, "There is no such call"),
    "message_not_found": (404, "There is no such message"),
    "key_not_found": (404, "There is no such key"),
    "test_not_found": (404, "There is no such test"),
    "send_not_found": (404, "There is no such send"),
    "subscription_not_found": (404, "There is no such subscription"),
    "credential_not_found": (404, "There is no such credential"),
    "rule_not_found": (404, "There is no such rule"),
    "attach_rule_not_found": (404, "There is no such attach rule"),
    "method_not_allowed": (405, "The address does not take this method"),
    "settings_differ": (409, "The session is attached with other settings"),
    "detaching": (409, "The session is being detached"),
    "session_ended": (409, "The session is over"),
    "not_attached": (409, "The session is not attached now"),
    "already_decided": (409, "Somebody decided otherwise"),
    "call_over": (409, "The call is over"),
    "not_awaiting_confirmation": (409, "The call waits for nobody"),
    "expired": (409, "The time to decide is over"),
    "not_awaiting_callback": (409, "The call is not at its webhook"),
    "already_answered": (409, "The call has another result"),
    "not_redeliverable": (409, "The call cannot be delivered again"),
    "too_many_wishes": (409, "Too many calls wait to be delivered again"),
    "approved_otherwise": (409, "Another input was approved"),
    "tool_changed": (409, "The tool is not as it was shown"),
    "input_changed": (409, "The input is not the one that was shown"),
    "refused_by_upstream": (409, "Upstream refused it"),
    "waiting_on_calls": (409, "The session waits for answers to calls"),
    "upstream_unreachable": (409, "Upstream could not be reached in time"),
    "send_unknown": (409, "Upstream may have taken the events, or not"),
    "too_many_sends": (409, "Too many sends of the session are open"),
    "too_many_tools": (409, "The tenant has too many tools"),
    "too_many_subscriptions": (409, "The tenant has too many subscriptions"),
    "credential_from_environment": (409, "The credential is the environment's"),
    "too_many_credentials": (409, "The tenant has too many credentials"),
    "too_many_rules": (409, "The tenant has too many rules"),
    "too_many_attach_rules": (409, "The tenant has too many attach rules"),
    "too_many_tests": (409, "The tenant has too many tests under way"),
    "too_many_secrets": (409, "The tool has too many signing secrets"),
    "secrets_unreadable": (409, "The tool's secrets cannot be read"),
    "idempotency_in_flight": (409, "The first request is still being answered"),
    "idempotency_unreadable": (409, "The first answer cannot be read"),
    "callback_late": (410, "The tool's time is over"),
    "body_too_large": (413, "The body is too large"),
    "unsupported_media_type": (415, "The body must be JSON"),
    "invalid_request": (422, "The request is malformed"),
    "idempotency_key_reused": (422, "The key stands for another request"),
    "not_editable": (422, "The call's input cannot be edited"),
    "input_unfit": (422, "The edited input cannot run"),
    "rule_unfit": (422, "No rule can be made of the call"),
    "rate_limited": (429, "The key asks too often"),
    "too_many_failures": (429, "Too many wrong keys came from the address"),
    "internal_error": (500, "The service failed"),
    "too_many_streams": (503, "Too many streams are open"),
    "database_unavailable": (503, "The database cannot be reached"),
}

PATH_CODES: Final = {
    "session_id": "session_not_found",
    "name": "tool_not_found",
    "call_id": "call_not_found",
    "event_id": "message_not_found",
    "key_id": "key_not_found",
    "test_id": "test_not_found",
    "send_id": "send_not_found",
    "subscription": "subscription_not_found",
    "rule_id": "rule_not_found",
    "credential": "credential_not_found",
    "attach_rule": "attach_rule_not_found",
}
"""What is missing when a path parameter has a form that no id has."""

_UNLIKE: Final = {
    "session_id": "This cannot be the id of a session: one is 1 to 128 letters, digits, _ or -, like sesn_….",
    "name": "This cannot be the name of a tool: one is 1 to 128 printable characters without a slash.",
    "call_id": "This cannot be the id of a call: one is 1 to 256 printable characters, such as sevt_….",
    "event_id": "This cannot be the id of a message: one is 1 to 256 printable characters, such as sevt_….",
    "key_id": "This cannot be the id of a key: one is key_ and 24 hexadecimal digits, as GET /keys shows it.",
    "test_id": "This cannot be the id of a test: one is test_ and 24 hexadecimal digits.",
    "send_id": "This cannot be the id of a send: one is send_ and 24 hexadecimal digits.",
    "rule_id": "This cannot be the id of a rule: one is rul_ and 24 hexadecimal digits.",
    "attach_rule": "This cannot be an attach rule's name: one is 1 to 64 letters, digits, dots, _ or -.",
    "credential": "This cannot be a credential's name: one is 1 to 64 letters, digits, dots, _ or -.",
    "subscription": "This cannot be a subscription's name: one is 1 to 64 letters, digits, dots, _ or -.",
}

NOT_FOUND_DETAILS: Final = {
    "session_not_found": "No session of that id was attached; POST /sessions/{id}/attach attaches it.",
    "tool_not_found": "No tool of that name is registered; PUT /tools/{name} registers it.",
    "call_not_found": "The session has no call of that id; GET /sessions/{id}/calls lists those it has.",
    "message_not_found": "The session has no message of that id; it may be a preview that was dropped.",
    "key_not_found": "The tenant has no key of that id; GET /keys lists those it has.",
    "subscription_not_found": "No subscription has that name; PUT /subscriptions/{name} makes one.",
    "credential_not_found": "No credential has that name; PUT /credentials/{name} stores one.",
    "attach_rule_not_found": "No attach rule has that name; PUT /attach-rules/{name} makes one.",
    "rule_not_found": "The tenant has no rule of that id; GET /rules lists those it has.",
    "test_not_found": "The tool has no test of that id; POST /tools/{name}/test makes one.",
    "send_not_found": "The session has no send of that id; POST /sessions/{id}/events makes one.",
}


class Problem(Exception):
    """A request's failure, raised where it is known and answered by the handler below.

    `members` are added to the answer as they are; `errors` are (member of the request, sentence).
    """

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        errors: Sequence[tuple[str, str]] = (),
        members: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(code)
        self.code = code
        self.status = CODES[code][0]
        self.detail = detail
        self.errors = errors
        self.members = members or {}
        self.headers = headers or {}


def not_found(code: str) -> Problem:
    """Return the 404 of a thing that the tenant does not have, whoever else may have it."""
    return Problem(code, NOT_FOUND_DETAILS[code])


def invalid(field: str, message: str) -> Problem:
    """Return the 422 for one member of the request."""
    return Problem("invalid_request", _MALFORMED, errors=[(field, message)])


def respond(problem: Problem, request_id: str) -> Response:
    """Return the answer for a problem."""
    status, title = CODES[problem.code]
    body = {
        "type": TYPE_PREFIX + problem.code,
        "title": title,
        "status": status,
        "detail": problem.detail,
        "code": problem.code,
        "request_id": request_id,
    }
    if problem.errors:
        body["errors"] = [{"field": field, "message": message} for field, message in problem.errors]
    return Response(
        msgspec.json.encode(body | dict(problem.members)),
        status_code=status,
        headers=dict(problem.headers),
        media_type=MEDIA_TYPE,
    )


def unavailable() -> Problem:
    return Problem(
        "database_unavailable",
        "The service cannot use its database now. Nothing of this request was stored unless it was answered"
        " before; repeat it after the time in retry-after.",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )


def failed() -> Problem:
    return Problem("internal_error", "The service failed; its log has the cause under this request_id.")


def add_handlers(app: FastAPI) -> None:
    """Answer every refusal of the framework, and every `Problem`, as a problem."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)


class FieldError(BaseModel):
    """One member of a malformed request."""

    field: str = Field(description="The path of the member, such as `headers.x-trace`.")
    message: str


class ProblemBody(BaseModel):
    """A failure, by RFC 9457. Some codes add members; `docs/errors.md` lists them."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    errors: list[FieldError] | None = None


def documented(*codes: str) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that may fail with these codes, beside the ones that all share."""
    by_status: dict[int, list[str]] = {}
    for code in (*_SHARED, *codes):
        by_status.setdefault(CODES[code][0], []).append(code)
    return {
        status: {
            "description": ", ".join(f"`{code}`" for code in names),
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}},
        }
        for status, names in sorted(by_status.items())
    }


_SHARED: Final = (
    "unauthenticated", "key_expired", "forbidden", "rate_limited", "too_many_failures", "internal_error",
    "database_unavailable",
)  # fmt: skip
_MALFORMED: Final = "The request is malformed; `errors` names each member and what it must be."


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return respond(error, request.state.request_id)


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return respond(_problem_of(error, request), request.state.request_id)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = respond(_http_problem(error, request), request.state.request_id)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    if error.status_code == 405 and (methods := request.app.state.methods_of(request.url.path)):
        # The router names those of the first route that has this address.
        response.headers["allow"] = ", ".join(methods)
    return response


def _problem_of(refusal: RequestValidationError, request: Request) -> Problem:
    errors: Sequence[Mapping[str, Any]] = refusal.errors()
    for error in errors:
        if error["loc"][0] == "path":
            parameter = str(error["loc"][1])
            return Problem(PATH_CODES[parameter], _UNLIKE[parameter])
        if error["type"] == "json_invalid":
            return _invalid_json(_place(str(error["ctx"]["error"]), str(refusal.body), error["loc"][1]))
    if any(error["loc"] == ("body",) and error["type"] == "missing" for error in errors):
        return _empty_body(request)
    is_json = "json" in request.headers.get("content-type", "")
    if not is_json and any(error["loc"] == ("body",) for error in errors):
        return Problem(
            "unsupported_media_type",
            "The body must come with content-type: application/json; with curl, add"
            " -H 'content-type: application/json'.",
        )
    named = [(_field(error["loc"]), _sentence(error)) for error in errors[:ERRORS_MAX]]
    return Problem("invalid_request", _MALFORMED, errors=named)


def _field(loc: Sequence[Any]) -> str:
    # Names that the client chose may hold what UTF-8 cannot carry.
    path = ".".join(str(part) for part in loc[1:]) or str(loc[0])
    return path.encode("utf-8", "replace").decode()[:200]


def _sentence(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    return message.encode("utf-8", "replace").decode()


def _http_problem(error: HTTPException, request: Request) -> Problem:
    if error.status_code == 400:
        return _invalid_json(_beyond(error.__cause__))
    if error.status_code == 404 and "//" in request.url.path:
        return Problem("not_found", "The address has an empty part (//); is a variable of the shell unset?")
    return _HTTP_PROBLEMS.get(error.status_code, failed)()


def _invalid_json(reason: str) -> Problem:
    return Problem(
        "invalid_json", f"The body is not JSON: {reason}. In a shell, put it into single quotes: -d '{{…}}'."
    )


def _place(reason: str, document: str, position: int) -> str:
    """Say where the reader of JSON stopped, and why; its reasons never repeat the text."""
    at = json.JSONDecodeError(reason, document, position)
    return f"line {at.lineno}, column {at.colno}: {reason.removesuffix(' at')}"


def _beyond(cause: BaseException | None) -> str:
    """Say what is wrong with a body that the reader of JSON gave up on."""
    match cause:
        case UnicodeDecodeError():
            return f"its byte {cause.start + 1} is not UTF-8"
        case RecursionError():
            return "it nests too deeply"
        case _:
            return "it holds a number of too many digits, or cannot be read"


def _empty_body(request: Request) -> Problem:
    """Name what a route needs of the body that it did not get."""
    field = getattr(request.scope.get("route"), "body_field", None)
    members = getattr(getattr(field, "field_info", None), "annotation", None)
    needed = [name for name, one in getattr(members, "model_fields", {}).items() if one.is_required()]
    what = f"with {' and '.join(needed)}" if needed else "with the members to change"
    return Problem(
        "invalid_request",
        f"The body is empty; send a JSON object {what}, and content-type: application/json.",
        errors=[("body", f"must be a JSON object {what}")],
    )


def _no_route() -> Problem:
    return Problem("not_found", "There is no such address; GET /openapi.json lists those there are.")


def _no_method() -> Problem:
    return Problem(
        "method_not_allowed", "This address does not take this method; `allow` names those that it does."
    )


def _too_large() -> Problem:
    return Problem("body_too_large", f"The body is over the limit of {BODY_BYTES_MAX} bytes; send less.")


_HTTP_PROBLEMS: Final = {
    404: _no_route,
    405: _no_method,
    413: _too_large,
}
