"""API keys of a tenant."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.api.access import Authenticated, Caller, GuardedRoute, requires
from app.api.bridge import Given
from app.api.lists import LIMIT_DEFAULT, Cursor, KeyId, Limit, ListOf, encode_cursor, moment_after
from app.api.mutations import Mutating
from app.api.problems import Problem, documented, not_found
from app.settings import REQUESTS_PER_MIN_MAX
from app.store import audit, keys
from app.store.audit import Entry, Kind
from app.store.keys import SCOPES, Key, Scope

NAME_CHARS_MAX: Final = 128
EXPIRES_IN_S_MAX: Final = 10 * 365 * 86_400
_TENANT: Final = "^[a-z0-9][a-z0-9_-]{0,62}$"

router = APIRouter(tags=["keys"], route_class=GuardedRoute)

OtherTenant = Annotated[
    str | None, Query(pattern=_TENANT, description="Another tenant; BASCULE_ADMIN_KEY may name one.")
]


class KeyBody(BaseModel):
    """A key to create."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(min_length=1, max_length=NAME_CHARS_MAX, description="For people.")
    scopes: list[Scope] = Field(min_length=1, max_length=len(SCOPES))
    tenant: str | None = Field(
        None,
        pattern=_TENANT,
        description="Another tenant, created if new; BASCULE_ADMIN_KEY may name one.",
    )

    expires_in_s: int | None = Field(
        None, ge=1, le=EXPIRES_IN_S_MAX, description="Then it is refused; null: it does not expire."
    )

    requests_per_min: int | None = Field(
        None,
        ge=1,
        le=REQUESTS_PER_MIN_MAX,
        description="How often it may ask one replica; null: as BASCULE_KEY_REQUESTS_PER_MIN says.",
    )

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("must hold printable characters only")
        return value


class KeyView(BaseModel):
    """A key as stored: only a hash of it is."""

    id: str
    name: str
    tenant: str
    scopes: list[str]
    created_at: datetime
    revoked_at: datetime | None
    expires_at: datetime | None = Field(description="By the database's clock; null: it does not expire.")
    last_used_at: datetime | None = Field(description="To about a minute; null: never, as far as is known.")
    requests_per_min: int | None = Field(description="null: as BASCULE_KEY_REQUESTS_PER_MIN says.")


class NewKeyView(KeyView):
    """A key just created: this is the only time it is shown."""

    key: str


@router.post(
    "/keys",
    status_code=201,
    summary="Create a key",
    responses=documented("invalid_request"),
    **requires("admin"),
)
async def create_key(body: KeyBody, mutation: Mutating, caller: Authenticated) -> NewKeyView:
    tenant = tenant_of(caller, body.tenant)
    async with mutation.begin() as connection:
        key, text = await keys.create(
            connection,
            tenant,
            body.name,
            body.scopes,
            expires_in_s=body.expires_in_s,
            requests_per_min=body.requests_per_min,
        )
        await audit.append(connection, [_entry("key.created", caller, key)])
    return NewKeyView(**_view(key).model_dump(), key=text)


@router.get(
    "/keys",
    summary="List the keys, those too that were revoked or have expired, oldest first",
    responses=documented("invalid_request"),
    **requires("admin"),
)
async def list_keys(
    bridge: Given,
    caller: Authenticated,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
    tenant: OtherTenant = None,
) -> ListOf[KeyView]:
    place = moment_after(cursor)
    async with bridge.engine.connect() as connection:
        found = await keys.page(connection, tenant_of(caller, tenant), after=place, limit=limit + 1)
    shown, next_cursor = found[:limit], None
    if len(found) > limit:
        next_cursor = encode_cursor([shown[-1].created_at, shown[-1].id])
    return ListOf(data=[_view(key) for key in shown], next_cursor=next_cursor)


@router.delete(
    "/keys/{key_id}",
    summary="Revoke a key at once and for good",
    responses=documented("key_not_found", "invalid_request"),
    **requires("admin"),
)
async def revoke_key(
    key_id: KeyId, mutation: Mutating, caller: Authenticated, tenant: OtherTenant = None
) -> KeyView:
    async with mutation.begin() as connection:
        key = await keys.revoke(connection, tenant_of(caller, tenant), key_id)
        if key is not None:
            await audit.append(connection, [_entry("key.revoked", caller, key)])
    if key is None:
        raise not_found("key_not_found")
    return _view(key)


def _entry(kind: Kind, caller: Caller, key: Key) -> Entry:
    return Entry(key.tenant, kind, caller.id, "api", subject=key.id)


def tenant_of(caller: Caller, named: str | None) -> str:
    """Return the tenant that a request is about.

    Raises:
        Problem: it names another one, and does not come with the operator's key.
    """
    if named is None or named == caller.tenant:
        return caller.tenant
    if not caller.is_operator:
        raise Problem("forbidden", "Only BASCULE_ADMIN_KEY may name another tenant; leave `tenant` out.")
    return named


def _view(key: Key) -> KeyView:
    return KeyView(
        id=key.id,
        name=key.name,
        tenant=key.tenant,
        scopes=list(key.scopes),
        created_at=key.created_at,
        revoked_at=key.revoked_at,
        expires_at=key.expires_at,
        last_used_at=key.last_used_at,
        requests_per_min=key.requests_per_min,
    )
