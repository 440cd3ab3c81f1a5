"""Attach rules: sessions of an agent or an environment are attached by themselves."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.access import Authenticated, GuardedRoute, requires
from app.api.bridge import Given
from app.api.lists import NAME, ListOf
from app.api.mutations import Mutating
from app.api.problems import Problem, documented, not_found
from app.api.sessions import SessionSettings, check_credential, settings_view
from app.store import attach_rules
from app.store.attach_rules import RULES_MAX, StoredRule, TooManyAttachRulesError
from app.store.attachments import Settings

router = APIRouter(tags=["sessions"], route_class=GuardedRoute)

RuleName = Annotated[str, Path(pattern=NAME, description="Of your choice; the first one by name counts.")]
_ID: Final = "^[A-Za-z0-9_-]{1,128}$"


class AttachRuleBody(BaseModel):
    """Which sessions are attached by themselves, and how. What is left out has its default."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        json_schema_extra={
            "examples": [{"agent_id": "agent_011CZkYpogX7uDKUyvBTophP", "settings": {"max_idle_s": 300}}]
        },
    )

    agent_id: Annotated[str | None, Field(pattern=_ID, description="null: of every agent.")] = None
    environment_id: Annotated[str | None, Field(pattern=_ID, description="null: in every environment.")] = (
        None
    )
    settings: SessionSettings = Field(
        default_factory=SessionSettings,
        description="Of the attachments it makes; `credential` names the workspace that it is about.",
    )
    enabled: bool = True


class AttachRuleView(BaseModel):
    """A rule as stored."""

    name: str
    agent_id: str | None
    environment_id: str | None
    settings: SessionSettings
    enabled: bool
    created_at: datetime
    updated_at: datetime


@router.put(
    "/attach-rules/{attach_rule}",
    summary="Attach sessions by themselves, or replace such a rule",
    responses={
        200: {"model": AttachRuleView, "description": "It was there; what it attached stays as it is"},
        201: {"model": AttachRuleView, "description": "The rule is new"},
        **documented("invalid_request", "too_many_attach_rules"),
    },
    **requires("sessions"),
)
async def put_attach_rule(
    attach_rule: RuleName, body: AttachRuleBody, mutation: Mutating, caller: Authenticated
) -> Response:
    wanted = body.settings.model_dump()
    wanted["tools"] = None if wanted["tools"] is None else tuple(wanted["tools"])
    settings = Settings(**wanted)
    async with mutation.begin() as connection:
        await check_credential(connection, caller.tenant, settings.credential, field="settings.credential")
        try:
            rule, is_new = await attach_rules.put(
                connection, caller.tenant, attach_rule,
                agent_id=body.agent_id, environment_id=body.environment_id,
                settings=settings, enabled=body.enabled,
            )  # fmt: skip
        except TooManyAttachRulesError as error:
            raise Problem(
                "too_many_attach_rules", f"The tenant has {RULES_MAX} attach rules; delete one first."
            ) from error
    return Response(
        _view(rule).model_dump_json(), status_code=201 if is_new else 200, media_type="application/json"
    )


@router.get(
    "/attach-rules",
    summary="List the attach rules by name",
    responses=documented(),
    **requires("sessions"),
)
async def list_attach_rules(bridge: Given, caller: Authenticated) -> ListOf[AttachRuleView]:
    async with bridge.engine.connect() as connection:
        found = await attach_rules.every(connection, caller.tenant)
    return ListOf(data=[_view(rule) for rule in found], next_cursor=None)


@router.get(
    "/attach-rules/{attach_rule}",
    summary="Show an attach rule",
    responses=documented("attach_rule_not_found"),
    **requires("sessions"),
)
async def get_attach_rule(attach_rule: RuleName, bridge: Given, caller: Authenticated) -> AttachRuleView:
    async with bridge.engine.connect() as connection:
        found = await attach_rules.get(connection, caller.tenant, attach_rule)
    if found is None:
        raise not_found("attach_rule_not_found")
    return _view(found)


@router.delete(
    "/attach-rules/{attach_rule}",
    status_code=204,
    summary="Delete an attach rule; what it attached stays",
    responses=documented("attach_rule_not_found"),
    **requires("sessions"),
)
async def delete_attach_rule(attach_rule: RuleName, mutation: Mutating, caller: Authenticated) -> Response:
    async with mutation.begin() as connection:
        if not await attach_rules.remove(connection, caller.tenant, attach_rule):
            raise not_found("attach_rule_not_found")
    return Response(status_code=204)


def _view(rule: StoredRule) -> AttachRuleView:
    return AttachRuleView(
        name=rule.name, agent_id=rule.agent_id, environment_id=rule.environment_id,
        settings=settings_view(rule.settings), enabled=rule.enabled,
        created_at=rule.created_at, updated_at=rule.updated_at,
    )  # fmt: skip
