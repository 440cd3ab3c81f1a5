"""What schemathesis must know of the service that the document cannot say.

Each rule here mends a request that the document allows and the service rightly refuses, or that would take
long, before it is sent. Requests that break the document on purpose go out as they are, and nothing looks at
answers.
"""

from __future__ import annotations

import base64
import itertools
import os
from typing import Any

import schemathesis

WAIT_S_MAX = 0.02
"""A long poll that nothing ends waits for so long; what is no valid `wait_s` goes out as it is."""
_URL = os.environ["BASCULE_TOOL_URL"]
GIVEN = {
    # Schemes, hosts and ranges of addresses are the operator's to allow.
    "url": _URL,
    "upstream_url": _URL,
    "webhook_signing_key": "whsec_" + base64.b64encode(bytes(32)).decode(),
    "credential": "default",
    # One that is not stored is looked for upstream for two seconds.
    "tool_use_id": os.environ["BASCULE_CALL_ID"],
    # Its maximum, 2^63 - 1, is compared as a float that is larger.
    "tool_version": 1,
    # Names of headers and labels have rules of their own.
    "headers": {"x-trace": "1"},
    "extra_headers": {"x-trace": "1"},
    "labels": {"team": "orders"},
    # Members with limits that depend on one another.
    "timeout_s": 600,
    "callback_timeout_max_s": 2_592_000,
    "on_expiry": "keep",
    "approvals_required": 1,
}
"""Members that take the place of what was made up, unless that is null."""
SCHEMA = {"type": "object"}
TEST = {"argument": "/amount", "at_most": 50}

_numbers = itertools.count()


@schemathesis.hook
def before_call(context: Any, case: Any, **kwargs: Any) -> None:
    if not case.query:
        case.query = {}  # to add to
    query, headers = case.query, case.headers or {}
    if _is_number(query.get("wait_s")) and WAIT_S_MAX < float(query["wait_s"]) <= 60:
        query["wait_s"] = WAIT_S_MAX
    if case.operation.definition.raw["operationId"] == "follow_session":
        _from_the_beginning(query, headers)
    if not case.meta.generation.mode.is_positive:
        return
    # A cursor is what the page before gave, and a call is one of a session.
    query.pop("cursor", None)
    if "session" not in query:
        query.pop("call", None)
    for name, value in query.items():
        query[name] = _plain(value)
    # A key stands for one request, and another one with it is refused.
    if "idempotency-key" in headers:
        headers["idempotency-key"] = f"request-{next(_numbers)}"
    if isinstance(case.body, dict):
        case.body = _agreeing(_plain(case.body))


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _from_the_beginning(query: Any, headers: Any) -> None:
    """Let a stream that is going to open have a first event at once."""
    places = (query.get("after", 0), headers.get("last-event-id", 0))
    if all(str(place).isdecimal() and int(place) < 2**63 for place in places):
        headers.pop("last-event-id", None)
        query["after"] = 0


def _plain(value: Any) -> Any:
    """Names and texts hold printable characters, which patterns of JSON Schema cannot ask for everywhere, and
    integers are written without a fraction."""
    match value:
        case dict():
            return {_plain(name): _plain(member) for name, member in value.items()}
        case list():
            return [_plain(member) for member in value]
        case str():
            return "".join(one if one.isprintable() and one.isascii() else "_" for one in value)
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


def _agreeing(body: dict[str, Any]) -> dict[str, Any]:
    """Members that must agree with one another, or with what there is."""
    for name, value in GIVEN.items():
        if body.get(name) is not None:
            body[name] = value
    if "attempt_timeout_s" in body:
        body["timeout_s"] = GIVEN["timeout_s"]
    if "callback_timeout_s" in body:
        body["callback_timeout_max_s"] = GIVEN["callback_timeout_max_s"]
    if "remind_after_s" in body:
        body["on_expiry"] = "keep"
    if isinstance(body.get("input_schema"), dict):
        body["input_schema"] = SCHEMA
    if body.get("tools"):
        body["tools"] = [name.replace("/", "_") for name in body["tools"]]
    if body.get("tests"):
        body["tests"] = [TEST]
    if body.get("effect") == "allow" and body.get("tool") is None:
        body["tool"] = "lookup_order"
    if "deny" not in (body.get("effect"), body.get("result")):
        body.pop("deny_message", None)
    if body.get("result") == "deny":
        body.pop("input", None)
    if body.get("result") == "deny" or body.get("input") is not None:
        body.pop("rule", None)
    if isinstance(body.get("settings"), dict):
        _agreeing(body["settings"])
    return body
