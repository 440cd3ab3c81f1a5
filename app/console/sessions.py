"""The sessions, and one session as it goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fastapi import APIRouter, Request, Response

from app.api.bridge import Given
from app.api.lists import Cursor, SessionId, encode_cursor, moment_after
from app.api.problems import not_found
from app.console import timeline
from app.console.access import ConsoleRoute, Signed, shown_to
from app.console.pages import etag, page, unchanged
from app.store import attachments

ROWS_MAX: Final = 50

router = APIRouter(route_class=ConsoleRoute)


@router.get("/console/sessions", **shown_to("read"))
async def sessions(request: Request, bridge: Given, viewer: Signed, cursor: Cursor = None) -> Response:
    after = moment_after(cursor)
    async with bridge.engine.connect() as connection:
        found = await attachments.page(connection, viewer.caller.tenant, after=after, limit=ROWS_MAX + 1)
    shown = found[:ROWS_MAX]
    older = encode_cursor([shown[-1].created_at, shown[-1].session_id]) if len(found) > ROWS_MAX else None
    return page(request, "sessions.html", viewer=viewer, sessions=shown, older=older)


@router.get("/console/sessions/{session_id}", **shown_to("read"))
async def session(request: Request, bridge: Given, viewer: Signed, session_id: SessionId) -> Response:
    async with bridge.engine.connect() as connection:
        found = await attachments.get(connection, viewer.caller.tenant, session_id)
        if found is None:
            raise not_found("session_not_found")
        mark = await timeline.mark(connection, viewer.caller.tenant, session_id)
        known = replace(found, last_event_age_s=None)  # it rises by itself
        tag = etag(repr((known, mark, viewer.form_token)).encode())
        if (same := unchanged(request, tag)) is not None:
            return same
        entries, has_older = await timeline.newest(connection, viewer.caller.tenant, session_id)
    response = page(
        request,
        "session.html",
        viewer=viewer,
        session=found,
        entries=entries,
        has_older=has_older,
        text_chars=timeline.TEXT_CHARS_MAX,
        entries_max=timeline.ENTRIES_MAX,
    )
    response.headers["etag"] = tag
    return response
