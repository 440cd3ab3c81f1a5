"""The standing rules: what is decided without asking, by whose word, and the button that ends it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from app.api.bridge import Given
from app.api.lists import POSITION_MAX
from app.api.problems import not_found
from app.console import wording
from app.console.access import ConsoleRoute, Form, Signed, Viewer, shown_to
from app.console.cards import name_of
from app.console.pages import page
from app.store import audit, keys, rules
from app.store.rules import RuleView

RULES_SHOWN = 100

router = APIRouter(route_class=ConsoleRoute)


@router.get("/console/rules", **shown_to("confirm"))
async def rule_list(
    request: Request,
    bridge: Given,
    viewer: Signed,
    before: Annotated[int | None, Query(ge=1, le=POSITION_MAX)] = None,
) -> Response:
    tenant = viewer.caller.tenant
    async with bridge.engine.connect() as connection:
        found = await rules.page(connection, tenant, before=before, limit=RULES_SHOWN + 1)
        names = await keys.names(connection, tenant, {one.created_by for one in found})
    shown = [
        (one, wording.rule(one.rule), name_of(one.created_by, "api", names), _may_revoke(viewer, one))
        for one in found[:RULES_SHOWN]
    ]
    return page(request, "rules.html", viewer=viewer, rules=shown, has_more=len(found) > RULES_SHOWN)


@router.post("/console/rules/revocations", **shown_to("confirm"))
async def revoke(bridge: Given, viewer: Signed, form: Form) -> Response:
    caller = viewer.caller
    async with bridge.engine.begin() as connection:
        done = await rules.revoke(
            connection, caller.tenant, form.get("rule_id", ""), by=caller.id, only_own=not viewer.may("admin")
        )
        if done is None:
            raise not_found("rule_not_found")
        revoked, is_new = done
        if is_new:
            entry = rules.entry(caller.tenant, "rule.revoked", revoked, caller.id, "console")
            await audit.append(connection, [entry])
    return RedirectResponse("/console/rules", status_code=303)


def _may_revoke(viewer: Viewer, one: RuleView) -> bool:
    """Whoever made a rule may end it, and the admins."""
    return viewer.may("admin") or one.created_by == viewer.caller.id
