"""Messages: the agent's text as known now, in snapshots that a front end polls."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field

from app.api.access import Authenticated
from app.api.bridge import Bridge, Given
from app.api.lists import (
    LIMIT_DEFAULT,
    POSITION_MAX,
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
from app.store import attachments, messages
from app.store.messages import MessageView

router = APIRouter(tags=["messages"], route_class=PolledRoute)

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class MessageObject(BaseModel):
    """A message of the agent. A partial one grows, and may be replaced or dropped."""

    id: str
    state: Literal["partial", "final"]
    is_stale: bool = Field(description="A partial one that nobody writes on any more.")
    text: str = Field(description="The texts of its text blocks, joined by nothing.")
    content: list[Any]
    thread_id: str | None
    processed_at: str | None = Field(description="As upstream sent it; null while partial.")
    updated_at: datetime
    seq: int | None = Field(description="Rises with each final of the session; null while partial.")


class TextList(BaseModel):
    """Finals in the order of `seq`, then open partials."""

    data: list[MessageObject]
    next_after: int = Field(description="What to pass as `after` next time: it only passes finals.")


@router.get(
    "/sessions/{session_id}/messages",
    response_model=ListOf[MessageObject],
    summary="List a session's messages in the order of their first appearance",
    responses=documented("session_not_found", "invalid_request"),
    **polls("read"),
)
async def list_messages(
    session_id: SessionId,
    bridge: Given,
    caller: Authenticated,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Response:
    after = position_after(cursor)
    async with bridge.engine.connect() as connection:
        if not await attachments.exists(connection, caller.tenant, session_id):
            raise not_found("session_not_found")
        page = await messages.page(connection, caller.tenant, session_id, after=after, limit=limit)
    next_cursor = encode_cursor([page.items[-1].position]) if page.has_more else None
    return json_response(
        {"data": [message_object(message) for message in page.items], "next_cursor": next_cursor}
    )


@router.get(
    "/sessions/{session_id}/messages/{event_id}",
    response_model=MessageObject,
    summary="Show a message",
    responses=documented("session_not_found", "message_not_found"),
    **polls("read"),
)
async def get_message(
    session_id: SessionId, event_id: EventId, bridge: Given, caller: Authenticated
) -> Response:
    return json_response(message_object(await _message(bridge, caller.tenant, session_id, event_id)))


@router.get(
    "/sessions/{session_id}/messages/{event_id}/text",
    response_class=Response,
    summary="Show a message's text alone",
    responses={
        200: {
            "content": {"text/plain": {"schema": {"type": "string"}, "example": "I paid order A-1042 back."}},
            "headers": {"x-message-state": {"schema": {"enum": ["partial", "final"]}}},
            "description": "The text, with nothing added, trimmed or normalised",
        },
        **documented("session_not_found", "message_not_found"),
    },
    **polls("read"),
)
async def get_message_text(
    session_id: SessionId, event_id: EventId, bridge: Given, caller: Authenticated
) -> Response:
    message = await _message(bridge, caller.tenant, session_id, event_id)
    # UTF-8 cannot carry half a character; JSON can, as an escape.
    text = _SURROGATE.sub("\ufffd", message.text)
    headers = {"x-message-state": message.state, "x-content-type-options": "nosniff"}
    return Response(text.encode(), media_type="text/plain", headers=headers)


@router.get(
    "/sessions/{session_id}/text",
    response_model=TextList,
    summary="Poll a session's text",
    responses=documented("session_not_found", "invalid_request"),
    **polls("read"),
)
async def poll_text(
    session_id: SessionId,
    bridge: Given,
    caller: Authenticated,
    after: Annotated[int, Query(ge=0, le=POSITION_MAX, description="`next_after` of the last poll.")] = 0,
    limit: Limit = LIMIT_DEFAULT,
) -> Response:
    async with bridge.engine.connect() as connection:
        if not await attachments.exists(connection, caller.tenant, session_id):
            raise not_found("session_not_found")
        # Previews first: one that becomes final between the two reads is then shown twice, not lost.
        open_ones = await messages.partials(connection, caller.tenant, session_id)
        page = await messages.finals(connection, caller.tenant, session_id, after_seq=after, limit=limit)
    shown = list(page.items)
    next_after = shown[-1].seq if shown else after
    if not page.has_more:
        ids = {message.id for message in shown}
        shown += [message for message in open_ones if message.id not in ids]
    return json_response({"data": [message_object(message) for message in shown], "next_after": next_after})


async def _message(bridge: Bridge, tenant: str, session_id: str, event_id: str) -> MessageView:
    async with bridge.engine.connect() as connection:
        if not await attachments.exists(connection, tenant, session_id):
            raise not_found("session_not_found")
        message = await messages.get(connection, tenant, session_id, event_id)
    if message is None:
        raise not_found("message_not_found")
    return message


def message_object(message: MessageView) -> dict[str, Any]:
    """Return the object that the api shows for a message."""
    return {
        "id": message.id,
        "state": message.state,
        "is_stale": message.is_stale,
        "text": _json_text(message.text),
        "content": msgspec.Raw(message.content.encode()),
        "thread_id": message.thread_id,
        "processed_at": message.processed_at,
        "updated_at": message.updated_at,
        "seq": message.seq,
    }


def _json_text(text: str) -> str | msgspec.Raw:
    if _SURROGATE.search(text) is None:
        return text
    return msgspec.Raw(json.dumps(text).encode())
