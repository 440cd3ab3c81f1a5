"""The audit as it was chained, newest first; what it shows can be verified with `bascule audit verify`."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from app.api.bridge import Given
from app.api.lists import POSITION_MAX
from app.console.access import ConsoleRoute, Signed, shown_to
from app.console.cards import name_of
from app.console.pages import page
from app.store import audit, keys

ROWS: Final = 100

router = APIRouter(route_class=ConsoleRoute)


@router.get("/console/audit", **shown_to("admin"))
async def audit_page(
    request: Request,
    bridge: Given,
    viewer: Signed,
    before: Annotated[int | None, Query(ge=1, le=POSITION_MAX)] = None,
) -> Response:
    tenant = viewer.caller.tenant
    async with bridge.engine.connect() as connection:
        found = await audit.page(connection, tenant, after=before, limit=ROWS + 1, is_newest_first=True)
        names = await keys.names(connection, tenant, {row.entry.actor for row in found})
    rows = [(row, name_of(row.entry.actor, row.entry.via, names)) for row in found[:ROWS]]
    return page(request, "audit.html", viewer=viewer, rows=rows, has_more=len(found) > ROWS)
