"""The call log: every tool call of a session, and one call with its deliveries.

`input` and `result.content` go out as the JSON that came in, byte for byte; so the answers are built from
ready parts, and the models here describe them for the OpenAPI document.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field

from app.api.access import Authenticated
from app.api.bridge import Given
from app.api.deliveries import DeliveryView, delivery_object
from app.api.lists import (
    LIMIT_DEFAULT,
    Cursor,
    EventId,
    Limit,
    ListOf,
    SessionId,
    encode_cursor,
    json_response,
    position_after,
)
from app.api.polls import PolledRoute, polls
from app.api.problems import documented, not_found
from app.core.calls import digest
from app.store import attachments, calls, deliveries
from app.store.calls import CallView
from app.store.paging import Page

router = APIRouter(tags=["calls"], route_class=PolledRoute)


class ApprovalView(BaseModel):
    """One of several keys that must allow the call."""

    by: str
    via: str
    at: datetime
    edited_input_digest: str | None = Field(
        description="Of the input that it would let run in the call's place."
    )


class GateView(BaseModel):
    """Who holds the call, or held it."""

    by: Literal["upstream", "tool", "rule"]
    permission: str | None
    reason: str | None
    rule: str | None = Field(description="The standing rule that holds it, or that was to answer.")
    expires_at: datetime | None = Field(description="When a decision comes too late, if on_expiry is `deny`.")
    on_expiry: Literal["deny", "keep"] | None = Field(description="What happens then.")
    is_overdue: bool = Field(description="Whether that moment has passed and the call is held.")
    approvers: list[str] | None = Field(
        description="While it is held: the ids and names of the keys that may decide; null: all."
    )
    approvals_required: int = Field(description="While it is held: how many different keys must allow it.")
    tool_version: int = Field(
        description="While it is held: the version of the registration that an allow leads to; 0: none."
    )
    approvals: list[ApprovalView] = Field(description="Those that alone did not suffice.")


class DecisionView(BaseModel):
    """Somebody's decision on the call. `sending` until upstream has accepted it."""

    result: Literal["allow", "deny"]
    status: Literal["accepted", "sending", "refused"]
    by: str = Field(description="A key's id, `admin`, `upstream`, `expiry`, or the id of a standing rule.")
    via: str = Field(description="`api`, `console`, `rule`, `expiry`, `stream` or `policy`.")
    at: datetime
    deny_message: str | None
    edited_input_digest: str | None = Field(description="Of the input that it put in the call's place.")


class ResultView(BaseModel):
    """What the call came to."""

    content: list[Any]
    is_error: bool


class CallObject(BaseModel):
    """One tool call of the agent."""

    id: str
    session_id: str
    thread_id: str | None
    kind: Literal["custom", "builtin", "mcp"]
    tool: str
    input: Any = Field(description="As the agent wrote it, digit for digit.")
    input_digest: str = Field(description="`sha256:` and the hex of the input's raw bytes.")
    edited_input: Any = Field(
        description="What an allow put in the place of `input`, as its tool gets it; null: nothing."
        " While another key must allow the call, what the last approval would put there."
    )
    state: str
    outcome_unknown: bool
    awaits_callback: bool = Field(description="Its webhook answered 202; its result comes by callback.")
    gate: GateView | None
    decision: DecisionView | None
    attempts: int
    result: ResultView | None
    posted: bool
    created_at: datetime
    updated_at: datetime


class CallDetail(CallObject):
    """A call with what led to its state."""

    detail: str | None = Field(description="Why it ended so, in a sentence.")
    deliveries: list[DeliveryView]


@router.get(
    "/sessions/{session_id}/calls",
    response_model=ListOf[CallObject],
    summary="List a session's calls in the order of their first record",
    responses=documented("session_not_found", "invalid_request"),
    **polls("read"),
)
async def list_calls(
    session_id: SessionId,
    bridge: Given,
    caller: Authenticated,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
    state: Annotated[str | None, Query(pattern="^[a-z_]{1,64}$", description="Only these.")] = None,
) -> Response:
    after = position_after(cursor)
    async with bridge.engine.connect() as connection:
        if not await attachments.exists(connection, caller.tenant, session_id):
            raise not_found("session_not_found")
        page = await calls.page(connection, caller.tenant, session_id, after=after, limit=limit, state=state)
    return call_list(page)


@router.get(
    "/sessions/{session_id}/calls/{call_id}",
    response_model=CallDetail,
    summary="Show a call with every delivery",
    responses=documented("session_not_found", "call_not_found"),
    **polls("read"),
)
async def get_call(session_id: SessionId, call_id: EventId, bridge: Given, caller: Authenticated) -> Response:
    async with bridge.engine.connect() as connection:
        if not await attachments.exists(connection, caller.tenant, session_id):
            raise not_found("session_not_found")
        call = await calls.get(connection, caller.tenant, session_id, call_id)
        if call is None:
            raise not_found("call_not_found")
        found = await deliveries.of_call(connection, caller.tenant, session_id, call_id)
    shown = call_object(call)
    shown["detail"] = call.detail
    shown["deliveries"] = [delivery_object(delivery) for delivery in found]
    return json_response(shown)


def call_list(page: Page[CallView]) -> Response:
    """Answer with a page of calls."""
    next_cursor = encode_cursor([page.items[-1].position]) if page.has_more else None
    return json_response({"data": [call_object(call) for call in page.items], "next_cursor": next_cursor})


def call_object(call: CallView) -> dict[str, Any]:
    """Return the object that the api shows for a call, for `msgspec` to encode."""
    raw_input = call.input.encode()
    gate = decision = result = None
    edited = call.edited_input
    if call.gate is not None:
        gate = gate_object(call.gate)
    if call.decision is not None:
        decision = decision_object(call.decision)
    if call.result is not None:
        result = {"content": msgspec.Raw(call.result.encode()), "is_error": bool(call.is_error)}
    return {
        "id": call.id,
        "session_id": call.session_id,
        "thread_id": call.thread_id,
        "kind": call.kind,
        "tool": call.tool,
        "input": msgspec.Raw(raw_input),
        "input_digest": digest(raw_input),
        "edited_input": None if edited is None else msgspec.Raw(edited.encode()),
        "state": call.state,
        "outcome_unknown": call.outcome_unknown,
        "awaits_callback": call.awaits_callback,
        "gate": gate,
        "decision": decision,
        "attempts": call.attempts,
        "result": result,
        "posted": call.posted,
        "created_at": call.created_at,
        "updated_at": call.updated_at,
    }


def gate_object(gate: calls.Gate) -> dict[str, Any]:
    """Return the object that the api shows for a gate."""
    return {
        "by": gate.by,
        "permission": gate.permission,
        "reason": gate.reason,
        "rule": gate.rule,
        "expires_at": gate.expires_at,
        "on_expiry": gate.on_expiry,
        "is_overdue": gate.is_overdue,
        "approvers": gate.rules.approvers,
        "approvals_required": gate.rules.approvals_required,
        "tool_version": gate.rules.version,
        "approvals": [approval_object(one) for one in gate.approvals],
    }


def decision_object(decision: calls.Decision) -> dict[str, Any]:
    """Return the object that the api shows for a decision."""
    return {
        "result": decision.result,
        "status": decision.status,
        "by": decision.by,
        "via": decision.via,
        "at": decision.at,
        "deny_message": decision.deny_message,
        "edited_input_digest": digest_of(decision.edited_input),
    }


def approval_object(approval: calls.Approval) -> dict[str, Any]:
    """Return the object that the api shows for an approval."""
    return {
        "by": approval.by,
        "via": approval.via,
        "at": approval.at,
        "edited_input_digest": digest_of(approval.edited_input),
    }


def digest_of(text: str | None) -> str | None:
    """Return the digest of an input, None for none."""
    return None if text is None else digest(text.encode())
