"""What goes out: the identity, body, signature and headers of a delivery."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from app.core.calls import Call, digest
from app.core.headers import is_refused_webhook, is_well_formed
from app.core.signatures import signature
from app.core.tools import Tool
from app.core.traces import traceparent

CONTENT_TYPE: Final = "application/json"
_NO_TOKEN: Final = b'","token":""}}}'
TEST_IDENTITY: Final = "test/"
"""Stands for the session in the `webhook-id` of a test call: no session has such an id."""


def build_body(
    call: Call,
    session_id: str,
    timestamp: str | None = None,
    *,
    callback_url: str | None = None,
    is_test: bool = False,
) -> bytes:
    """Serialise a call for its tool: once, to be stored and sent as the same bytes at each attempt.

    The call's input goes in as the bytes that arrived; an edited one goes in its place, marked as such and
    with its digest. `timestamp` (RFC 3339) defaults to the moment upstream processed the call, and is null if
    nobody knows it. `callback_url` is where the tool may report its result later; the token for it is left
    out here and goes in by `with_token`. `is_test` marks a call that no agent made.
    """
    members: dict[str, Any] = {
        "call_id": call.id,
        "session_id": session_id,
        "thread_id": call.thread_id,
        "tool": call.tool,
        "kind": call.kind,
    }
    if is_test:
        members["test"] = True
    if call.edited_input is not None:
        members |= {"input_edited": True, "input_digest": digest(call.edited_input)}
    head = json.dumps(members, separators=(",", ":"))
    moment = json.dumps(call.processed_at if timestamp is None else timestamp)
    opening = f'{{"type":"tool.call","timestamp":{moment},"data":{head[:-1]},"input":'
    body = opening.encode() + call.sent_input
    if callback_url is None:
        return body + b"}}"
    return body + b',"callback":{"url":' + json.dumps(callback_url)[:-1].encode() + _NO_TOKEN


def has_callback(body: bytes) -> bool:
    """Whether the body offers a callback."""
    return body.endswith(_NO_TOKEN)


def with_token(body: bytes, token: str) -> bytes:
    """The body as it is sent: with the token of its callback, which is letters, digits and `._-`."""
    return body.removesuffix(_NO_TOKEN) + _NO_TOKEN.replace(b'""', f'"{token}"'.encode())


def sign(secrets: Sequence[bytes], webhook_id: str, timestamp_s: int, body: bytes) -> str:
    """The `webhook-signature` of a delivery: one `v1` entry for each live secret, newest first.

    Raises:
        ValueError: there is no secret; an unsigned delivery never leaves.
    """
    if not secrets:
        raise ValueError("a delivery needs at least one signing secret")
    return " ".join(signature(secret, webhook_id, timestamp_s, body) for secret in secrets)


def headers(
    tool: Tool,
    *,
    webhook_id: str,
    now: float,
    body: bytes,
    attempt: int,
    deadline_s: float,
    is_sampled: bool = True,
    version: str,
) -> dict[str, str]:
    """The headers of one attempt.

    `now` and `deadline_s` are in seconds since 1970; the secrets that are live at `now` sign. The tool's own
    headers come first and never replace ours: those that may not be set are left out.

    Raises:
        ValueError: no secret is live.
    """
    fields = {
        name: value
        for name, value in tool.headers
        if is_well_formed(name, value) and not is_refused_webhook(name)
    }
    return fields | {
        "content-type": CONTENT_TYPE,
        "accept": "application/json, text/plain",
        "accept-encoding": "identity",
        "user-agent": f"bascule/{version}",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": sign(tool.keys_at(now), webhook_id, int(now), body),
        "bascule-attempt": str(attempt),
        "bascule-deadline": str(int(deadline_s)),
        "traceparent": traceparent(webhook_id, attempt, is_sampled=is_sampled),
    }
