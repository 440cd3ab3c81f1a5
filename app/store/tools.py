"""The registry: which webhook serves calls of which name, for each tenant.

Every change raises `registries.version` in its own transaction; that row's lock puts the changes of one
tenant in order.
"""

from __future__ import annotations

import base64
import secrets as random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Row, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.tools import CATCH_ALL, Tool
from app.logs import logger
from app.store import tables
from app.store.secrets import Secrets, UnreadableSecretError
from app.store.wakeups import notify, registry_key

SIGNING_KEY_BYTES: Final = 32
TOOLS_MAX: Final = 1000
"""Of one tenant: each of its sessions holds them all in memory."""
AFFECTED_CALLS_MAX: Final = 100
"""How many open calls of a deleted tool are named; the count is exact."""

_SECRETS: Final = "tools.secrets"
_HEADERS: Final = "tools.headers"
_OPEN_STATES: Final = ("held", "queued", "dispatched", "answered", "posting", "unowned")

log = logger(__name__)
_tools = tables.tools


class _SigningKey(msgspec.Struct):
    """One signing key, in base64; `expires_at` in seconds since 1970 once a newer one replaced it."""

    key: str
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Registration:
    """A tool as registered. `policy` holds the members of the registration that are neither url, nor text,
    nor secret; `header_names` are those of the write-only headers. `disabled_reason` is set while the service
    keeps the tool disabled: `gone`, its endpoint answered 410."""

    name: str
    url: str
    description: str | None
    policy: Mapping[str, Any]
    header_names: tuple[str, ...]
    version: int
    disabled_reason: str | None
    disabled_at: datetime | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Put:
    """What registering did; `signing_secret` is set when the tool is new."""

    registration: Registration
    signing_secret: str | None


@dataclass(frozen=True, slots=True)
class Removed:
    """A deleted tool's open calls: the first ones as (session, call, state), and their number."""

    calls: tuple[tuple[str, str, str], ...]
    calls_total: int


class TooManyToolsError(Exception):
    """The tenant has `TOOLS_MAX` tools."""


async def put(
    connection: AsyncConnection,
    secrets: Secrets,
    tenant: str,
    name: str,
    *,
    url: str,
    description: str | None,
    policy: Mapping[str, Any],
    headers: Mapping[str, str],
) -> Put:
    """Register or replace a tool. Replacing keeps its signing keys; the same again changes nothing.

    Raises:
        TooManyToolsError: it would be one too many.
    """
    await _lock_registry(connection, tenant)
    row = (await connection.execute(_one(tenant, name))).one_or_none()
    if row is None:
        count = await connection.scalar(select(func.count()).where(_tools.c.tenant == tenant))
        if (count or 0) >= TOOLS_MAX:
            raise TooManyToolsError
        signing_key = random.token_bytes(SIGNING_KEY_BYTES)
        values = _values(secrets, tenant, name, url, description, policy, headers)
        stored = [_SigningKey(base64.b64encode(signing_key).decode())]
        values["secrets"] = secrets.encrypt(msgspec.json.encode(stored), column=_SECRETS, row=(tenant, name))
        created = insert(_tools).values(tenant=tenant, name=name, **values).returning(_tools)
        row = (await connection.execute(created)).one()
        await _raise_version(connection, tenant)
        return Put(_registration(secrets, row), "whsec_" + stored[0].key)
    current = _registration(secrets, row)
    is_same = (current.url, current.description, dict(current.policy)) == (url, description, dict(policy))
    if is_same and _headers(secrets, row) == dict(headers):
        return Put(current, None)
    values = _values(secrets, tenant, name, url, description, policy, headers)
    changed = (
        update(_tools)
        .where(_tools.c.tenant == tenant, _tools.c.name == name)
        .values(**values, version=_tools.c.version + 1, updated_at=func.now())
        .returning(_tools)
    )
    row = (await connection.execute(changed)).one()
    if current.url != url:
        await _forget_health(connection, tenant, name)
    await _raise_version(connection, tenant)
    return Put(_registration(secrets, row), None)


async def disable_gone(connection: AsyncConnection, tenant: str, tool: Tool) -> bool:
    """Disable a tool whose endpoint answered 410; return whether this did it.

    Only the registration that was called is disabled: one that was put since then is another try.
    """
    await _lock_registry(connection, tenant)
    is_it = (
        _tools.c.tenant == tenant, _tools.c.name == tool.name,
        _tools.c.version == tool.version, _tools.c.url == tool.url,
    )  # fmt: skip
    stored = await connection.scalar(select(_tools.c.policy).where(*is_it))
    policy = {} if stored is None else msgspec.json.decode(stored, type=dict[str, Any])
    if stored is None or not policy.get("enabled", True):
        return False
    await connection.execute(
        update(_tools)
        .where(*is_it)
        .values(
            policy=msgspec.json.encode(policy | {"enabled": False}).decode(),
            disabled_reason="gone", disabled_at=func.now(),
            version=_tools.c.version + 1, updated_at=func.now(),
        )
    )  # fmt: skip
    await _raise_version(connection, tenant)
    return True


async def get(connection: AsyncConnection, secrets: Secrets, tenant: str, name: str) -> Registration | None:
    row = (await connection.execute(_one(tenant, name))).one_or_none()
    return None if row is None else _registration(secrets, row)


async def exists(connection: AsyncConnection, tenant: str, name: str) -> bool:
    query = select(_tools.c.name).where(_tools.c.tenant == tenant, _tools.c.name == name)
    return await connection.scalar(query) is not None


async def page(
    connection: AsyncConnection, secrets: Secrets, tenant: str, *, after: str | None, limit: int
) -> list[Registration]:
    """Return tools in the order of their names, from the first name after `after`."""
    query = select(_tools).where(_tools.c.tenant == tenant).order_by(_tools.c.name).limit(limit)
    if after is not None:
        query = query.where(_tools.c.name > after)
    return [_registration(secrets, row) for row in await connection.execute(query)]


async def remove(connection: AsyncConnection, tenant: str, name: str) -> Removed | None:
    """Delete a tool and tell which calls that leaves without one; None if there is no such tool."""
    await _lock_registry(connection, tenant)
    gone = await connection.execute(
        delete(_tools).where(_tools.c.tenant == tenant, _tools.c.name == name).returning(_tools.c.name)
    )
    if gone.one_or_none() is None:
        return None
    await _raise_version(connection, tenant)
    await _forget_health(connection, tenant, name)
    calls = tables.calls
    is_affected = (calls.c.tenant == tenant, calls.c.state.in_(_OPEN_STATES), _is_served_by(tenant, name))
    total = await connection.scalar(select(func.count()).select_from(calls).where(*is_affected))
    first = await connection.execute(
        select(calls.c.session_id, calls.c.id, calls.c.state)
        .where(*is_affected)
        .order_by(calls.c.position)
        .limit(AFFECTED_CALLS_MAX)
    )
    return Removed(tuple((row.session_id, row.id, row.state) for row in first), total or 0)


def _is_served_by(tenant: str, name: str) -> ColumnElement[bool]:
    """Whether a registration serves a call: as the one that it was delivered to, or is to be."""
    calls, deliveries = tables.calls, tables.deliveries
    went = select(deliveries.c.call_id).where(
        deliveries.c.tenant == tenant,
        deliveries.c.session_id == calls.c.session_id,
        deliveries.c.call_id == calls.c.id,
    )
    own = select(_tools.c.name).where(_tools.c.tenant == tenant, _tools.c.name == calls.c.tool)
    is_its = calls.c.tool == name
    if name == CATCH_ALL:
        # An unowned one is another's, or of an attachment that does not admit it.
        is_its = (calls.c.kind == "custom") & (calls.c.state != "unowned") & ~own.exists()
    return went.where(deliveries.c.tool == name).exists() | (is_its & ~went.exists())


async def load_registry(
    connection: AsyncConnection, secrets: Secrets, tenant: str
) -> tuple[int, dict[str, Tool]]:
    """Return the tenant's tools by name, and a version that rises with each change of them.

    The tools are at least as new as the version. A tool whose secrets cannot be read is not `is_readable`, so
    that its calls park as `unowned` instead of stopping every session of the tenant.
    """
    version = await registry_version(connection, tenant)
    tools = {}
    for row in await connection.execute(select(_tools).where(_tools.c.tenant == tenant)):
        try:
            tools[row.name] = _tool(secrets, row)
        except UnreadableSecretError as error:
            log.error("tool_unreadable", tenant=tenant, tool=row.name, reason=str(error))
            tools[row.name] = Tool(row.name, row.url, is_readable=False)
    return version, tools


async def load(connection: AsyncConnection, secrets: Secrets, tenant: str, name: str) -> Tool | None:
    """Return one tool as `load_registry` would; None if there is none, or its secrets cannot be read."""
    row = (await connection.execute(_one(tenant, name))).one_or_none()
    try:
        return None if row is None else _tool(secrets, row)
    except UnreadableSecretError as error:
        log.error("tool_unreadable", tenant=tenant, tool=name, reason=str(error))
        return None


async def registry_version(connection: AsyncConnection, tenant: str) -> int:
    """Return the version that `load_registry` would return: 0 before the first tool."""
    registries = tables.registries
    query = select(registries.c.version).where(registries.c.tenant == tenant)
    return await connection.scalar(query) or 0


async def _lock_registry(connection: AsyncConnection, tenant: str) -> None:
    registries = tables.registries
    await connection.execute(
        upsert(registries)
        .values(tenant=tenant, version=0)
        .on_conflict_do_update(index_elements=["tenant"], set_={"version": registries.c.version})
    )


async def _raise_version(connection: AsyncConnection, tenant: str) -> None:
    registries = tables.registries
    await connection.execute(
        update(registries).where(registries.c.tenant == tenant).values(version=registries.c.version + 1)
    )
    await notify(connection, [registry_key(tenant)])


async def _forget_health(connection: AsyncConnection, tenant: str, name: str) -> None:
    """What is known of its endpoint's health was of another endpoint."""
    table = tables.tool_health
    await connection.execute(delete(table).where(table.c.tenant == tenant, table.c.tool == name))


def _one(tenant: str, name: str) -> Any:
    return select(_tools).where(_tools.c.tenant == tenant, _tools.c.name == name)


def _values(
    secrets: Secrets,
    tenant: str,
    name: str,
    url: str,
    description: str | None,
    policy: Mapping[str, Any],
    headers: Mapping[str, str],
) -> dict[str, Any]:
    sealed = secrets.encrypt(msgspec.json.encode(dict(headers)), column=_HEADERS, row=(tenant, name))
    return {
        "url": url,
        "description": description,
        "policy": msgspec.json.encode(policy).decode(),
        "headers": sealed,
        "disabled_reason": None,
        "disabled_at": None,
    }


def _headers(secrets: Secrets, row: Row[Any]) -> dict[str, str]:
    plain = secrets.decrypt(row.headers, column=_HEADERS, row=(row.tenant, row.name))
    return msgspec.json.decode(plain, type=dict[str, str])


def _registration(secrets: Secrets, row: Row[Any]) -> Registration:
    try:
        names = tuple(_headers(secrets, row))
    except UnreadableSecretError as error:
        log.error("tool_unreadable", tenant=row.tenant, tool=row.name, reason=str(error))
        names = ()
    return Registration(
        name=row.name,
        url=row.url,
        description=row.description,
        policy=msgspec.json.decode(row.policy, type=dict[str, Any]),
        header_names=names,
        version=row.version,
        disabled_reason=row.disabled_reason,
        disabled_at=row.disabled_at,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def _tool(secrets: Secrets, row: Row[Any]) -> Tool:
    plain = secrets.decrypt(row.secrets, column=_SECRETS, row=(row.tenant, row.name))
    keys: Sequence[_SigningKey] = msgspec.json.decode(plain, type=list[_SigningKey])
    policy = msgspec.json.decode(row.policy, type=dict[str, Any])
    known = {name: policy[name] for name in _TOOL_MEMBERS if name in policy}
    schema = policy.get("input_schema")
    return Tool(
        name=row.name,
        url=row.url,
        secrets=tuple(base64.b64decode(key.key) for key in keys),
        headers=tuple(_headers(secrets, row).items()),
        input_schema=msgspec.json.encode(schema).decode() if isinstance(schema, dict) else schema,
        version=row.version,
        disabled_reason=row.disabled_reason,
        **known,
    )


_TOOL_MEMBERS: Final = (
    "timeout_s",
    "attempt_timeout_s",
    "retry",
    "on_unknown",
    "gate",
    "when_unhealthy",
    "callback_timeout_s",
    "callback_timeout_max_s",
    "concurrency",
    "enabled",
    "reply_bytes_max",
    "result_chars_max",
)
