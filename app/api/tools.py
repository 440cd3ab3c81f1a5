"""Registered tools: which webhook serves calls of which name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Body, Response
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.api.access import Authenticated, GuardedRoute, requires
from app.api.bridge import Given
from app.api.keys import NAME_CHARS_MAX
from app.api.lists import (
    LIMIT_DEFAULT,
    TOOL_NAME_CHARS_MAX,
    Cursor,
    Limit,
    ListOf,
    ToolName,
    decode_cursor,
    encode_cursor,
    printable,
)
from app.api.mutations import Mutating
from app.api.problems import Problem, documented, invalid, not_found
from app.core.headers import HEADER_CHARS_MAX, HEADERS_MAX, is_refused_webhook, is_well_formed
from app.core.schemas import SchemaRefused, compiled
from app.core.tools import Retry
from app.store import audit, health, tools
from app.store.audit import Entry, Kind
from app.store.health import Health
from app.store.reminders import REMINDERS_MAX
from app.store.secrets import UnreadableSecretError
from app.store.tools import Registration

URL_CHARS_MAX: Final = 2048
FIELD_CHARS_MAX: Final = 200
"""Of the place in a schema that a refusal names."""
DESCRIPTION_CHARS_MAX: Final = 10_000
DAY_S: Final = 86_400
OVERLAP_S_MAX: Final = 7 * DAY_S
APPROVERS_MAX: Final = 100

_INPUT_SCHEMA: Final = (
    "A JSON Schema 2020-12, or `agent` for the one with which the session's agent declares the tool. A call"
    " whose input does not fit is answered with an error result that says where, undelivered, before `gate`"
    " asks. `$ref` points into the schema and never back to itself; `format` is not checked;"
    " patterns have no look-around and no back-references. `agent` checks custom calls of the session's own"
    " agent, as far as its schema is known and could be registered here; what it does not know is delivered."
)
_CATCH_ALL: Final = (
    "A tool named `*` (also written `%2A`) serves the custom calls of every name without a registration of"
    " its own; one that is disabled has one. It never serves built-in or MCP calls. Its policies,"
    " slots and delivery log are its own; `data.tool` in the request body is the name that the agent called."
    " Registering such a name later takes over its waiting calls, and none that has been delivered."
)

router = APIRouter(tags=["tools"], route_class=GuardedRoute)

Seconds = Annotated[float, Field(ge=1, le=600, allow_inf_nan=False)]


Approver = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX), printable]


class ToolPolicy(BaseModel):
    """How calls of a tool are delivered, gated and read."""

    model_config = ConfigDict(strict=True, extra="forbid")

    timeout_s: Seconds = Field(120.0, description="One wall clock over all attempts of a call.")
    attempt_timeout_s: Seconds | None = Field(None, description="Of one attempt; null means timeout_s.")
    retry: Retry = Field("connect_only", description="What may be delivered again; see the webhook guide.")
    on_unknown: Literal["answer", "ask"] = Field("answer", description="When nobody knows whether it ran.")
    gate: Literal["upstream", "ask"] = Field("upstream", description="`ask` holds every call for a person.")
    approvers: Annotated[list[Approver], Field(min_length=1, max_length=APPROVERS_MAX)] | None = Field(
        None, description="Ids or names of the keys that may decide on calls of this name; null: all."
    )
    approvals_required: int = Field(
        1, ge=1, le=2, description="With 2 an allow takes two different keys; a deny always takes one."
    )
    expires_in_s: int | None = Field(
        None, ge=1, le=30 * DAY_S, description="How long a call of this name is held; null: for ever."
    )
    on_expiry: Literal["deny", "keep"] = Field(
        "deny", description="Then: `deny` it, or `keep` it and show it as overdue. Nothing ever allows it."
    )
    remind_after_s: int | None = Field(
        None,
        ge=1,
        le=30 * DAY_S,
        description="How long a call of this name is held before subscribers get `confirmation.reminded`;"
        f" {REMINDERS_MAX} times at most, after twice as long each time; null: never.",
    )
    callback_timeout_s: int = Field(3600, ge=0, le=DAY_S, description="0 refuses a 202.")
    callback_timeout_max_s: int = Field(DAY_S, ge=0, le=30 * DAY_S)
    when_unhealthy: Literal["wait", "answer"] = Field(
        "wait",
        description="While the endpoint is down, calls wait for it up to timeout_s, or are answered at once.",
    )
    concurrency: int = Field(32, ge=1, le=1000)
    enabled: bool = True
    reply_bytes_max: int = Field(1_048_576, ge=1024, le=16_777_216)
    result_chars_max: int = Field(100_000, ge=100, le=1_000_000)
    input_schema: dict[str, Any] | Literal["agent"] | None = Field(None, description=_INPUT_SCHEMA)


class ToolBody(ToolPolicy):
    """A tool as registered. What is left out has its default, also when it replaces an earlier one."""

    url: str = Field(min_length=1, max_length=URL_CHARS_MAX)
    description: str | None = Field(None, max_length=DESCRIPTION_CHARS_MAX)
    headers: dict[str, str] = Field(
        default_factory=dict, description="Sent with every delivery. Write-only: reads show the names."
    )

    @field_validator("url", "description")
    @classmethod
    def _storable(cls, value: str | None) -> str | None:
        if value is not None and "\0" in value:
            raise ValueError("must not hold NUL")
        return value

    @field_validator("headers")
    @classmethod
    def _sendable(cls, value: dict[str, str]) -> dict[str, str]:
        return checked_headers(value, is_refused_webhook)

    @model_validator(mode="after")
    def _agrees(self) -> ToolBody:
        if self.attempt_timeout_s is not None and self.attempt_timeout_s > self.timeout_s:
            raise ValueError("attempt_timeout_s must be at most timeout_s")
        if self.approvers is not None and len(set(self.approvers)) < self.approvals_required:
            raise ValueError("approvers must name as many keys as approvals_required says, or be null")
        is_denied_in_time = self.expires_in_s is not None and self.on_expiry == "deny"
        if is_denied_in_time and (self.remind_after_s or 0) >= (self.expires_in_s or 0):
            raise ValueError(
                "remind_after_s must be less than expires_in_s, after which the call is denied;"
                " or on_expiry must be `keep`"
            )
        if self.callback_timeout_max_s < self.callback_timeout_s:
            raise ValueError("callback_timeout_max_s must be at least callback_timeout_s")
        return self


class HealthView(BaseModel):
    """Whether the endpoint works, by the worst view of the replicas."""

    state: str = Field(
        description="`closed`: it works. `open`: it is down, nothing is sent. `half_open`: one call tries it."
    )
    since: datetime | None = Field(description="The first failure after the last success.")
    last_error: str | None = Field(description="A delivery's code, with the HTTP status if there was one.")
    failures: int = Field(description="In a row, when the state last changed.")


class SecretTimesView(BaseModel):
    """A signing secret that is live, without the secret."""

    created_at: datetime
    expires_at: datetime | None = Field(
        description="When it signs no more, by the database's clock; null for the newest."
    )


class ToolView(ToolPolicy):
    """A tool as stored."""

    name: str
    url: str
    description: str | None
    header_names: list[str]
    signing_secrets: list[SecretTimesView] = Field(description="Those that sign now, the newest first.")
    fault: str | None = Field(
        description="Why the tool cannot be called, and what to do; its calls are `unowned` until then."
    )
    version: int = Field(description="Rises with each change of the registration.")
    disabled_reason: str | None = Field(
        description="Why the service set `enabled` to false: `gone`, the endpoint answered 410. PUT enables."
    )
    disabled_at: datetime | None
    health: HealthView
    created_at: datetime
    updated_at: datetime


class NewToolView(ToolView):
    """A tool just registered, with the secret that signs its deliveries: it is shown this once."""

    signing_secret: str = Field(description="`whsec_` and base64 of 32 bytes.")


class RotateBody(BaseModel):
    """How long the secrets before the new one sign beside it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    overlap_s: Annotated[
        float,
        Field(ge=0, le=OVERLAP_S_MAX, allow_inf_nan=False, description="0 ends the earlier secrets at once."),
    ] = DAY_S


class RotatedToolView(NewToolView):
    """A tool with its new secret, which is shown this once."""

    old_signs_until: datetime = Field(description="Until then the secret before it signs as well.")


class AffectedCall(BaseModel):
    """A call that is not over."""

    session_id: str
    id: str
    state: str


class RemovedTool(BaseModel):
    """What deleting a tool leaves behind: its open calls become `unowned`, or go to `*` if there is one."""

    name: str
    calls: list[AffectedCall] = Field(description="The first of them.")
    calls_total: int


def checked_headers(headers: dict[str, str], is_refused: Any) -> dict[str, str]:
    """Return the headers if every one may be added to a request of ours.

    Raises:
        ValueError: one may not; the sentence does not repeat its value.
    """
    if len(headers) > HEADERS_MAX:
        raise ValueError(f"must hold at most {HEADERS_MAX} headers")
    if len({name.lower() for name in headers}) < len(headers):
        raise ValueError("must not hold a name twice in different case")
    for name, value in headers.items():
        if not is_well_formed(name, value):
            raise ValueError(
                "must hold header names, and values of visible ASCII without line ends,"
                f" of at most {HEADER_CHARS_MAX} characters"
            )
        if is_refused(name):
            raise ValueError(f"must not set {name.lower()}: the service sets it, or HTTP does")
    return headers


@router.put(
    "/tools/{name}",
    summary="Register or replace a tool",
    description=_CATCH_ALL,
    responses={
        200: {"model": ToolView, "description": "The tool was there; its signing secret stays"},
        201: {"model": NewToolView, "description": "The tool is new"},
        **documented("invalid_request", "too_many_tools"),
    },
    **requires("tools"),
)
async def put_tool(
    name: ToolName, body: ToolBody, bridge: Given, mutation: Mutating, caller: Authenticated
) -> Response:
    if (sentence := bridge.check_url(body.url)) is not None:
        raise invalid("url", sentence)
    if isinstance(body.input_schema, dict):
        _check_schema(body.input_schema)
    policy = body.model_dump(include=set(ToolPolicy.model_fields))
    async with mutation.begin() as connection:
        try:
            done = await tools.put(
                connection,
                bridge.secrets,
                caller.tenant,
                name,
                url=body.url,
                description=body.description,
                policy=policy,
                headers=body.headers,
            )
        except tools.TooManyToolsError as error:
            raise Problem(
                "too_many_tools", f"The tenant has {tools.TOOLS_MAX} tools; delete one first."
            ) from error
        seen = await health.of(connection, caller.tenant, [name])
        if done.is_changed:
            kind: Kind = "tool.changed" if done.signing_secret is None else "tool.registered"
            version = f"version_{done.registration.version}"
            put = Entry(caller.tenant, kind, caller.id, "api", subject=name, detail=version)
            await audit.append(connection, [put])
    view = _view(done.registration, seen)
    if done.signing_secret is None:
        return Response(view.model_dump_json(), media_type="application/json")
    new = NewToolView(**view.model_dump(), signing_secret=done.signing_secret)
    return Response(new.model_dump_json(), status_code=201, media_type="application/json")


@router.get(
    "/tools",
    summary="List the tools by name",
    responses=documented("invalid_request"),
    **requires("tools"),
)
async def list_tools(
    bridge: Given, caller: Authenticated, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None
) -> ListOf[ToolView]:
    place = decode_cursor(cursor, tuple[str])
    if place is not None and not (0 < len(place[0]) <= TOOL_NAME_CHARS_MAX and place[0].isprintable()):
        raise invalid("cursor", "must be the next_cursor of this list's page before, unchanged")
    async with bridge.engine.connect() as connection:
        found = await tools.page(
            connection,
            bridge.secrets,
            caller.tenant,
            after=None if place is None else place[0],
            limit=limit + 1,
        )
        seen = await health.of(connection, caller.tenant, [registration.name for registration in found])
    shown = [_view(registration, seen) for registration in found[:limit]]
    return ListOf(data=shown, next_cursor=encode_cursor([shown[-1].name]) if len(found) > limit else None)


@router.get(
    "/tools/{name}", summary="Show a tool", responses=documented("tool_not_found"), **requires("tools")
)
async def get_tool(name: ToolName, bridge: Given, caller: Authenticated) -> ToolView:
    async with bridge.engine.connect() as connection:
        found = await tools.get(connection, bridge.secrets, caller.tenant, name)
        seen = await health.of(connection, caller.tenant, [name])
    if found is None:
        raise not_found("tool_not_found")
    return _view(found, seen)


@router.delete(
    "/tools/{name}",
    summary="Delete a tool and name the calls that it leaves",
    responses=documented("tool_not_found"),
    **requires("tools"),
)
async def delete_tool(name: ToolName, mutation: Mutating, caller: Authenticated) -> RemovedTool:
    async with mutation.begin() as connection:
        removed = await tools.remove(connection, caller.tenant, name)
        if removed is not None:
            deleted = Entry(caller.tenant, "tool.deleted", caller.id, "api", subject=name)
            await audit.append(connection, [deleted])
    if removed is None:
        raise not_found("tool_not_found")
    calls = [AffectedCall(session_id=session, id=call, state=state) for session, call, state in removed.calls]
    return RemovedTool(name=name, calls=calls, calls_total=removed.calls_total)


@router.post(
    "/tools/{name}/rotate-secret",
    summary="Give a tool a new signing secret",
    responses=documented("tool_not_found", "too_many_secrets", "secrets_unreadable", "invalid_request"),
    **requires("tools"),
)
async def rotate_secret(
    name: ToolName,
    bridge: Given,
    mutation: Mutating,
    caller: Authenticated,
    body: Annotated[RotateBody | None, Body()] = None,
) -> RotatedToolView:
    overlap_s = (body or RotateBody()).overlap_s
    async with mutation.begin() as connection:
        try:
            done = await tools.rotate(connection, bridge.secrets, caller.tenant, name, overlap_s=overlap_s)
            seen = await health.of(connection, caller.tenant, [name])
            if done is not None:
                rotated = Entry(caller.tenant, "tool.secret_rotated", caller.id, "api", subject=name)
                await audit.append(connection, [rotated])
        except tools.TooManySecretsError as error:
            raise Problem(
                "too_many_secrets",
                f"{tools.SECRETS_MAX} secrets of the tool sign now, which is the limit. Rotate again after"
                f" {error.until:%Y-%m-%dT%H:%M:%SZ}, when the first of them ends, or with an `overlap_s` of"
                " 0, which ends them all at once.",
            ) from error
        except UnreadableSecretError as error:
            raise Problem(
                "secrets_unreadable", f"{error}; or give an `overlap_s` of 0, and only the new secret signs."
            ) from error
    if done is None:
        raise not_found("tool_not_found")
    return RotatedToolView(
        **_view(done.registration, seen).model_dump(),
        signing_secret=done.signing_secret,
        old_signs_until=done.old_signs_until,
    )


def _check_schema(schema: dict[str, Any]) -> None:
    try:
        compiled(msgspec.json.encode(schema).decode())
    except SchemaRefused as refused:
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in refused.path)
        raise invalid(f"input_schema{place}"[:FIELD_CHARS_MAX], str(refused)) from refused
    except (ValueError, RecursionError) as error:
        raise invalid("input_schema", "must be storable JSON: whole characters, not nested deeply") from error


def _view(registration: Registration, seen: Mapping[str, Health]) -> ToolView:
    known = {name: value for name, value in registration.policy.items() if name in ToolPolicy.model_fields}
    return ToolView(
        **known,
        name=registration.name,
        url=registration.url,
        description=registration.description,
        header_names=list(registration.header_names),
        signing_secrets=[
            SecretTimesView(created_at=one.created_at, expires_at=one.expires_at)
            for one in registration.signing_secrets
        ],
        fault=registration.fault,
        version=registration.version,
        disabled_reason=registration.disabled_reason,
        disabled_at=registration.disabled_at,
        health=HealthView(**asdict(seen.get(registration.name, Health()))),
        created_at=registration.created_at,
        updated_at=registration.updated_at,
    )
