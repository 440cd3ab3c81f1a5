"""Credentials of a tenant: what its sessions are served with upstream. Write-only."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from app.api.access import Authenticated, Caller, GuardedRoute, requires
from app.api.bridge import Bridge, Given
from app.api.keys import OtherTenant, tenant_of
from app.api.lists import NAME, ListOf
from app.api.mutations import Mutating
from app.api.problems import Problem, documented, not_found
from app.core.signatures import key_of
from app.settings import HttpUrl
from app.store import audit, credentials, sightings
from app.store.audit import Entry, Kind
from app.store.credentials import CREDENTIALS_MAX, DEFAULT, CredentialView, TooManyCredentialsError
from app.store.keys import DEFAULT_TENANT

router = APIRouter(tags=["credentials"], route_class=GuardedRoute)

CredentialName = Annotated[str, Path(pattern=NAME, description="As the attach body names it.")]


def _signing_key(value: str) -> str:
    key_of(value)
    return value


class CredentialBody(BaseModel):
    """A credential; it replaces an earlier one of its name, and sessions go on with it."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    type: Literal["api_key", "bearer"] = Field(description="Sent as `x-api-key`, or as a bearer token.")
    secret: str = Field(
        min_length=1, max_length=4096, pattern=r"^[\x21-\x7e]+$", description="Never shown again."
    )
    webhook_signing_key: Annotated[str, AfterValidator(_signing_key)] | None = Field(
        None,
        max_length=512,
        description="`whsec_…`: signs the webhooks of this workspace's endpoint that leads to"
        " `/hooks/anthropic`. Never shown again; null takes none.",
    )
    upstream_url: HttpUrl | None = Field(
        None,
        max_length=2048,
        description="null: the service's own. Only BASCULE_ADMIN_KEY may name one: the service calls it.",
    )


class CredentialObject(BaseModel):
    """A credential without its secret."""

    name: str
    type: Literal["api_key", "bearer"]
    upstream_url: str | None
    takes_webhooks: bool = Field(description="Whether a key is known that signs its workspace's webhooks.")
    source: Literal["stored", "environment"] = Field(
        description="`environment`: ANTHROPIC_API_KEY, which is `default` of tenant `default`."
    )
    created_at: datetime | None
    updated_at: datetime | None


@router.put(
    "/credentials/{credential}",
    summary="Store or replace a credential",
    responses={
        200: {"model": CredentialObject, "description": "It was there; sessions go on with the new one"},
        201: {"model": CredentialObject, "description": "The credential is new"},
        **documented("invalid_request", "too_many_credentials", "credential_from_environment"),
    },
    **requires("admin"),
)
async def put_credential(
    credential: CredentialName,
    body: CredentialBody,
    bridge: Given,
    mutation: Mutating,
    caller: Authenticated,
    tenant: OtherTenant = None,
) -> Response:
    of = tenant_of(caller, tenant)
    _refuse_environments(bridge, of, credential)
    if body.upstream_url is not None and not caller.is_operator:
        raise Problem(
            "forbidden",
            "Only BASCULE_ADMIN_KEY may name an upstream_url, as the service itself calls it; leave it out.",
        )
    async with mutation.begin() as connection:
        try:
            stored, is_new = await credentials.put(
                connection, bridge.secrets, of, credential,
                kind=body.type, secret=body.secret, upstream_url=body.upstream_url,
            )  # fmt: skip
        except TooManyCredentialsError as error:
            raise Problem(
                "too_many_credentials",
                f"The tenant has {CREDENTIALS_MAX} credentials; delete one first.",
            ) from error
        key = body.webhook_signing_key
        await sightings.put_key(
            connection, bridge.secrets, of, credential, None if key is None else key_of(key)
        )
        await audit.append(connection, [_entry("credential.stored", caller, of, credential)])
    return Response(
        _object(stored, takes_webhooks=key is not None).model_dump_json(),
        status_code=201 if is_new else 200,
        media_type="application/json",
    )


@router.get(
    "/credentials",
    summary="List the credentials by name",
    responses=documented("invalid_request"),
    **requires("admin"),
)
async def list_credentials(
    bridge: Given, caller: Authenticated, tenant: OtherTenant = None
) -> ListOf[CredentialObject]:
    of = tenant_of(caller, tenant)
    async with bridge.engine.connect() as connection:
        found = await credentials.every(connection, of)
        hooked = await sightings.has_keys(connection, of)
    shown = [_object(one, takes_webhooks=one.name in hooked) for one in found]
    if _is_environments(bridge, of, DEFAULT):
        shown = [_environments(bridge), *(one for one in shown if one.name != DEFAULT)]
    return ListOf(data=shown, next_cursor=None)


@router.get(
    "/credentials/{credential}",
    summary="Show a credential without its secret",
    responses=documented("credential_not_found"),
    **requires("admin"),
)
async def get_credential(
    credential: CredentialName, bridge: Given, caller: Authenticated, tenant: OtherTenant = None
) -> CredentialObject:
    of = tenant_of(caller, tenant)
    if _is_environments(bridge, of, credential):
        return _environments(bridge)
    async with bridge.engine.connect() as connection:
        found = await credentials.get(connection, of, credential)
        hooked = await sightings.has_keys(connection, of)
    if found is None:
        raise not_found("credential_not_found")
    return _object(found, takes_webhooks=credential in hooked)


@router.delete(
    "/credentials/{credential}",
    status_code=204,
    summary="Delete a credential; sessions that use it wait for another of its name",
    responses=documented("credential_not_found", "credential_from_environment"),
    **requires("admin"),
)
async def delete_credential(
    credential: CredentialName,
    bridge: Given,
    mutation: Mutating,
    caller: Authenticated,
    tenant: OtherTenant = None,
) -> Response:
    of = tenant_of(caller, tenant)
    _refuse_environments(bridge, of, credential)
    async with mutation.begin() as connection:
        if not await credentials.remove(connection, of, credential):
            raise not_found("credential_not_found")
        await sightings.put_key(connection, bridge.secrets, of, credential, None)
        await audit.append(connection, [_entry("credential.deleted", caller, of, credential)])
    return Response(status_code=204)


def _is_environments(bridge: Bridge, tenant: str, name: str) -> bool:
    return bridge.settings.anthropic_api_key is not None and (tenant, name) == (DEFAULT_TENANT, DEFAULT)


def _refuse_environments(bridge: Bridge, tenant: str, name: str) -> None:
    if _is_environments(bridge, tenant, name):
        raise Problem(
            "credential_from_environment",
            "This credential is ANTHROPIC_API_KEY of the service's environment; change it there, or use"
            " another name.",
        )


def _entry(kind: Kind, caller: Caller, tenant: str, name: str) -> Entry:
    return Entry(tenant, kind, caller.id, "api", subject=name)


def _environments(bridge: Bridge) -> CredentialObject:
    return CredentialObject(
        name=DEFAULT,
        type="api_key",
        upstream_url=None,
        takes_webhooks=bridge.settings.anthropic_webhook_signing_key is not None,
        source="environment",
        created_at=None,
        updated_at=None,
    )


def _object(found: CredentialView, *, takes_webhooks: bool) -> CredentialObject:
    return CredentialObject(
        name=found.name, type=found.type, upstream_url=found.upstream_url, source="stored",
        takes_webhooks=takes_webhooks,
        created_at=found.created_at, updated_at=found.updated_at,
    )  # fmt: skip
