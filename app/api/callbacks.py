"""Callbacks: where a tool that answered 202 reports its result, or that it is still at work.

The token of the delivery stands in for a key. A report is stored as it came and read as a reply of the tool's
webhook would be, by whoever runs the session.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from app.api.bridge import Given
from app.api.lists import EventId, SessionId
from app.api.problems import Problem, documented
from app.store import callbacks
from app.store.callbacks import Refused

router = APIRouter(tags=["calls"])

PROGRESS: Final = "progress"
"""The member that makes a report one of progress, in an object without `content`."""
TEXT: Final = "text/plain"
TOKEN_SCHEME: Final = "callback_token"  # noqa: S105 - a name, no secret

_REFUSALS: Final = {
    "unauthenticated": "The token is not one for this call; send authorization: Bearer and"
    " data.callback.token of the delivery, unchanged.",
    "not_awaiting_callback": "The call is not at its webhook now, or the webhook has not answered 202 yet;"
    " report progress after the 202, and a result for a call that was delivered.",
    "callback_late": "The tool's time for this call is over, and the agent was told so; a larger"
    " callback_timeout_s of the tool, or reports of progress, would have kept it open.",
    "already_answered": "The call has another result already; the first one counts.",
    "call_over": "The call is over, in the state that `state` names; nobody waits for its result any more.",
}
_EXAMPLES: Final = {
    "result": {"value": {"content": "order A-1042 has shipped"}},
    "error": {"value": {"content": "no such order", "is_error": True}},
    "progress": {"value": {"progress": "2 of 5 files read"}},
}
_BODY: Final = {
    "security": [{TOKEN_SCHEME: []}],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {}, "examples": _EXAMPLES},
            TEXT: {"schema": {"type": "string"}, "example": "order A-1042 has shipped"},
        },
    },
}


class CallbackAnswer(BaseModel):
    """The report was taken."""

    call_id: str
    is_progress: bool
    deadline: datetime = Field(description="Until when the tool may report.")


@router.post(
    "/sessions/{session_id}/calls/{call_id}/result",
    summary="Report the result of a call whose webhook answered 202, or progress",
    description="The body is what the webhook would have answered: a JSON object with `content`, any other"
    " JSON, or plain text. An object with `progress` and no `content` only extends the time, up to the tool's"
    " `callback_timeout_max_s`. The same result again is a success; another one is refused.",
    responses=documented(
        "invalid_json", "unauthenticated", "already_answered", "callback_late", "body_too_large",
        "unsupported_media_type",
    ),
    openapi_extra=_BODY,
)  # fmt: skip
async def report_result(
    session_id: SessionId, call_id: EventId, request: Request, bridge: Given
) -> CallbackAnswer:
    kind, _, token = request.headers.get("authorization", "").strip().partition(" ")
    tenant = None
    if kind.lower() == "bearer":
        tenant = callbacks.tenant_of(bridge.secrets, token.strip(), session_id, call_id)
    if tenant is None:
        raise _problem(Refused("unauthenticated"))
    content_type = request.headers.get("content-type", "")
    body = await request.body()
    is_progress = _is_progress(_read(body, content_type))
    async with bridge.engine.begin() as connection:
        if is_progress:
            done = await callbacks.extend(connection, tenant, session_id, call_id)
        else:
            done = await callbacks.report(connection, tenant, session_id, call_id, body, content_type)
    if isinstance(done, Refused):
        raise _problem(done)
    return CallbackAnswer(call_id=call_id, is_progress=is_progress, deadline=done.deadline_at)


def _read(body: bytes, content_type: str) -> Any:
    """The JSON of a report, None for plain text; what no reply could be is refused while the tool listens.

    Raises:
        Problem: it is neither, or no JSON.
    """
    media = content_type.partition(";")[0].strip().lower()
    if media == TEXT and body:
        return None
    if media != "application/json" and not media.endswith("+json"):
        raise Problem(
            "unsupported_media_type",
            "A result is JSON or plain text; send content-type: application/json or text/plain, and a body.",
        )
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise Problem("invalid_json", 'The body is not JSON; send {"content": …}, or text/plain.') from None


def _is_progress(value: Any) -> bool:
    return isinstance(value, dict) and PROGRESS in value and "content" not in value


def _problem(refused: Refused) -> Problem:
    members = {} if refused.state is None else {"state": refused.state}
    headers = {"www-authenticate": "Bearer"} if refused.code == "unauthenticated" else {}
    return Problem(refused.code, _REFUSALS[refused.code], members=members, headers=headers)
