"""The tools: how they are registered, whether they work, and what was delivered to each."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from app.api.bridge import Given
from app.api.deliveries import shown_url
from app.api.lists import ToolName
from app.api.problems import not_found
from app.console.access import ConsoleRoute, Signed, shown_to
from app.console.pages import page
from app.store import deliveries, health, tools
from app.store.health import Health
from app.store.tools import TOOLS_MAX

DELIVERIES_MAX: Final = 100

router = APIRouter(route_class=ConsoleRoute)


@router.get("/console/tools", **shown_to("tools"))
async def tool_list(request: Request, bridge: Given, viewer: Signed) -> Response:
    tenant = viewer.caller.tenant
    async with bridge.engine.connect() as connection:
        found = await tools.page(connection, bridge.secrets, tenant, after=None, limit=TOOLS_MAX)
        seen = await health.of(connection, tenant, [tool.name for tool in found])
    shown = [(tool, shown_url(tool.url), seen.get(tool.name, Health())) for tool in found]
    return page(request, "tools.html", viewer=viewer, tools=shown)


@router.get("/console/tools/{name}", **shown_to("tools"))
async def tool_page(
    request: Request, bridge: Given, viewer: Signed, name: ToolName, failed: bool = False
) -> Response:
    tenant = viewer.caller.tenant
    async with bridge.engine.connect() as connection:
        found = await tools.get(connection, bridge.secrets, tenant, name)
        if found is None:
            raise not_found("tool_not_found")
        seen = await health.of(connection, tenant, [name])
        log = await deliveries.of_tool(
            connection, tenant, name, before=None, limit=DELIVERIES_MAX, only_failed=failed
        )
    return page(
        request,
        "tool.html",
        viewer=viewer,
        tool=found,
        url=shown_url(found.url),
        health_of=seen.get(name, Health()),
        attempts=log.items,
        has_more=log.has_more,
        failed=failed,
    )
