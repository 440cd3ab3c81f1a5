"""The delivery log: what became of each request to a webhook, by call and by tool.

It shows no secret: a URL goes out without its query and credentials, a reply as a cleaned excerpt.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field

from app.api.access import Authenticated, GuardedRoute, requires
from app.api.bridge import Given
from app.api.lists import (
    LIMIT_DEFAULT,
    Cursor,
    Limit,
    ListOf,
    ToolName,
    decode_cursor,
    encode_cursor,
    json_response,
)
from app.api.problems import documented, invalid, not_found
from app.store import deliveries, tools
from app.store.deliveries import Delivery, Place

router = APIRouter(tags=["tools"], route_class=GuardedRoute)

_Attempt = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class DeliveryView(BaseModel):
    """One HTTP request to the webhook. `code` is null when a result was read from the reply."""

    session_id: str
    call_id: str
    attempt: int
    tool: str
    url: str | None = Field(description="Where it went, without the query.")
    replica: str
    started_at: datetime = Field(description="When it was noted; it may have waited for its turn since.")
    finished_at: datetime | None
    duration_ms: int | None = Field(description="Of the attempt itself, from the look-up to the last byte.")
    http_status: int | None
    code: str | None
    reply_excerpt: str | None = Field(
        description="The reply's beginning as one line, without markup and secrets; at most 2,048 characters."
    )


@router.get(
    "/tools/{name}/deliveries",
    response_model=ListOf[DeliveryView],
    summary="List a tool's deliveries, newest first",
    responses=documented("tool_not_found", "invalid_request"),
    **requires("tools"),
)
async def list_deliveries(
    name: ToolName,
    bridge: Given,
    caller: Authenticated,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
    failed: Annotated[bool, Query(description="Only those with a code.")] = False,
) -> Response:
    before = _place(cursor)
    async with bridge.engine.connect() as connection:
        if not await tools.exists(connection, caller.tenant, name):
            raise not_found("tool_not_found")
        page = await deliveries.of_tool(
            connection, caller.tenant, name, before=before, limit=limit, only_failed=failed
        )
    next_cursor = encode_cursor(page.items[-1].place) if page.has_more else None
    return json_response({"data": [delivery_object(one) for one in page.items], "next_cursor": next_cursor})


def delivery_object(delivery: Delivery) -> dict[str, Any]:
    """Return the object that the api shows for a delivery."""
    return {
        "session_id": delivery.session_id,
        "call_id": delivery.call_id,
        "attempt": delivery.attempt,
        "tool": delivery.tool,
        "url": None if delivery.url is None else shown_url(delivery.url),
        "replica": delivery.replica_id,
        "started_at": delivery.started_at,
        "finished_at": delivery.finished_at,
        "duration_ms": delivery.duration_ms,
        "http_status": delivery.http_status,
        "code": delivery.code,
        "reply_excerpt": delivery.reply_excerpt,
    }


def shown_url(url: str) -> str | None:
    """The URL without query, fragment and credentials; None if it cannot be read."""
    try:
        split = urlsplit(url)
    except ValueError:
        return None
    return f"{split.scheme}://{split.netloc.rpartition('@')[2]}{split.path}"


def _place(cursor: str | None) -> Place | None:
    place = decode_cursor(cursor, tuple[datetime, str, str, _Attempt])
    if place is not None and (place[0].tzinfo is None or "\0" in place[1] + place[2]):
        raise invalid("cursor", "must be the next_cursor of this list's page before, unchanged")
    return place
