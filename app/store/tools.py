"""The registry: which webhook serves calls of which name, for each tenant.

Every change raises `registries.version` in its own transaction; that row's lock puts the changes of one
tenant in order.
"""

from __future__ import annotations

import base64
import math
import secrets as random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Row, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.tools import CATCH_ALL, SigningSecret, Tool
from app.logs import logger
from app.store import audit, tables
from app.store.audit import Entry
from app.store.secrets import Secrets, UnreadableSecretError
from app.store.wakeups import notify, registry_key

SIGNING_KEY_BYTES: Final = 32
SECRETS_MAX: Final = 10
"""Of one tool that sign at a time. One more is refused: to end the oldest's overlap instead would cut off the
receiver that still uses it, above all when somebody rotates again and again because the answers were lost."""
TOOLS_MAX: Final = 1000
"""Of one tenant: each of its sessions holds them all in memory."""
AFFECTED_CALLS_MAX: Final = 100
"""How many open calls of a deleted tool are named; the count is exact."""

_PREFIX: Final = "whsec_"
_ROTATED: Final = "POST /tools/{name}/rotate-secret with an overlap_s of 0 makes a new secret"
_PUT_AGAIN: Final = "PUT /tools/{name} sets the headers anew"
_NOW: Final = func.now().label("now")
_SECRETS: Final = "tools.secrets"
_HEADERS: Final = "tools.headers"
_OPEN_STATES: Final = ("held", "queued", "dispatched", "answered", "posting", "unowned")

log = logger(__name__)
_tools = tables.tools


class _SigningKey(msgspec.Struct, omit_defaults=True):
    """One signing key, in base64. Times are in seconds since 1970 by the database's clock.

    `expires_at` is set once a newer one replaced it; `created_at` is missing for a tool's first one.
    """

    key: str
    expires_at: float | None = None
    created_at: float | None = None


@dataclass(frozen=True, slots=True)
class SecretTimes:
    """What may be shown of a live signing secret; `expires_at` is None for the newest."""

    created_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class Registration:
    """A tool as registered. `policy` holds the members of the registration that are neither url, nor text,
    nor secret; `header_names` are those of the write-only headers. `fault` says what cannot be read, and the
    remedy: the tool is not called then. `disabled_reason` is set while the service keeps the tool disabled:
    `gone`, its endpoint answered 410."""

    name: str
    url: str
    description: str | None
    policy: Mapping[str, Any]
    header_names: tuple[str, ...]
    signing_secrets: tuple[SecretTimes, ...]
    fault: str | None
    version: int
    disabled_reason: str | None
    disabled_at: datetime | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Put:
    """What registering did; `signing_secret` is set when the tool is new."""

    registration: Registration
    signing_secret: str | None = field(repr=False)
    is_changed: bool = True


@dataclass(frozen=True, slots=True)
class Rotated:
    """A new signing secret, and until when the one before it signs beside it."""

    registration: Registration
    signing_secret: str = field(repr=False)
    old_signs_until: datetime


@dataclass(frozen=True, slots=True)
class Removed:
    """A deleted tool's open calls: the first ones as (session, call, state), and their number."""

    calls: tuple[tuple[str, str, str], ...]
    calls_total: int


class TooManyToolsError(Exception):
    """The tenant has `TOOLS_MAX` tools."""


class TooManySecretsError(Exception):
    """`SECRETS_MAX` secrets of the tool are live; the first of them ends at `until`."""

    def __init__(self, until: datetime) -> None:
        super().__init__(until)
        self.until = until


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
        values = _values(secrets, tenant, name, url, description, policy, headers)
        key = _new_key()
        values["secrets"] = _sealed(secrets, tenant, name, [_SigningKey(key)])
        created = insert(_tools).values(tenant=tenant, name=name, **values).returning(_tools, _NOW)
        row = (await connection.execute(created)).one()
        await _raise_version(connection, tenant)
        return Put(_registration(secrets, row), _PREFIX + key)
    current = _registration(secrets, row)
    is_same = (current.url, current.description, dict(current.policy)) == (url, description, dict(policy))
    if is_same and _opened(secrets, row).headers == dict(headers):
        return Put(current, None, is_changed=False)
    values = _values(secrets, tenant, name, url, description, policy, headers)
    changed = (
        update(_tools)
        .where(_tools.c.tenant == tenant, _tools.c.name == name)
        .values(**values, version=_tools.c.version + 1, updated_at=func.now())
        .returning(_tools, _NOW)
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
    disabled = Entry(tenant, "tool.changed", "service", "service", subject=tool.name, detail="gone")
    await audit.append(connection, [disabled])
    return True


async def rotate(
    connection: AsyncConnection, secrets: Secrets, tenant: str, name: str, *, overlap_s: float
) -> Rotated | None:
    """Give a tool a new signing secret; None if there is no such tool.

    The earlier secrets sign beside it for `overlap_s` at most, by the database's time, each no longer than it
    would have anyway. An overlap of 0 ends them all, and needs none of them to be readable.

    Raises:
        TooManySecretsError: too many would be live.
        UnreadableSecretError: the earlier secrets cannot be read, and there is an overlap.
    """
    await _lock_registry(connection, tenant)
    row = (await connection.execute(_one(tenant, name))).one_or_none()
    if row is None:
        return None
    # Not now(): the transaction may have waited for another rotation.
    now = (await connection.execute(select(func.clock_timestamp()))).scalar_one()
    until = now + timedelta(seconds=overlap_s)
    earlier = _live(_keys(secrets, row), now) if overlap_s > 0 else []
    if len(earlier) >= SECRETS_MAX:
        raise TooManySecretsError(_time(min(_end(key) for key in earlier)))
    kept = [_SigningKey(key.key, min(_end(key), until.timestamp()), key.created_at) for key in earlier]
    new = _SigningKey(_new_key(), created_at=now.timestamp())
    changed = (
        update(_tools)
        .where(_tools.c.tenant == tenant, _tools.c.name == name)
        .values(secrets=_sealed(secrets, tenant, name, [new, *kept]))
        .returning(_tools, _NOW)
    )
    row = (await connection.execute(changed)).one()
    await _raise_version(connection, tenant)
    return Rotated(_registration(secrets, row), _PREFIX + new.key, until)


async def get(connection: AsyncConnection, secrets: Secrets, tenant: str, name: str) -> Registration | None:
    row = (await connection.execute(_one(tenant, name))).one_or_none()
    return None if row is None else _registration(secrets, row)


async def exists(connection: AsyncConnection, tenant: str, name: str) -> bool:
    query = select(_tools.c.name).where(_tools.c.tenant == tenant, _tools.c.name == name)
    return await connection.scalar(query) is not None


async def urls(connection: AsyncConnection, tenant: str, names: Collection[str]) -> dict[str, str]:
    """Return where calls of these tools go, of those that are registered."""
    query = select(_tools.c.name, _tools.c.url).where(_tools.c.tenant == tenant, _tools.c.name.in_(names))
    return {row.name: row.url for row in await connection.execute(query)}


async def page(
    connection: AsyncConnection, secrets: Secrets, tenant: str, *, after: str | None, limit: int
) -> list[Registration]:
    """Return tools in the order of their names, from the first name after `after`."""
    query = select(_tools, _NOW).where(_tools.c.tenant == tenant).order_by(_tools.c.name).limit(limit)
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

    The tools are at least as new as the version. One whose secrets cannot be read has a `fault`, so that its
    calls wait as `unowned` and stop no other.
    """
    version = await registry_version(connection, tenant)
    rows = await connection.execute(select(_tools, _NOW).where(_tools.c.tenant == tenant))
    return version, {row.name: _tool(secrets, row) for row in rows}


async def load(connection: AsyncConnection, secrets: Secrets, tenant: str, name: str) -> Tool | None:
    """Return one tool as `load_registry` would, or None if there is none."""
    row = (await connection.execute(_one(tenant, name))).one_or_none()
    return None if row is None else _tool(secrets, row)


async def registry_version(connection: AsyncConnection, tenant: str) -> int:
    """Return the version that `load_registry` would return: 0 before the first tool."""
    registries = tables.registries
    query = select(registries.c.version).where(registries.c.tenant == tenant)
    return await connection.scalar(query) or 0


async def raise_version(connection: AsyncConnection, tenant: str) -> None:
    """Let every replica read the tenant's tools again."""
    await _lock_registry(connection, tenant)
    await _raise_version(connection, tenant)


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
    return select(_tools, _NOW).where(_tools.c.tenant == tenant, _tools.c.name == name)


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


@dataclass(frozen=True, slots=True)
class _Opened:
    """The encrypted part of a tool, as far as it can be read; `keys` are the live ones."""

    keys: Sequence[_SigningKey] = field(repr=False)
    headers: Mapping[str, str] | None = field(repr=False)
    fault: str | None


def _opened(secrets: Secrets, row: Row[Any]) -> _Opened:
    """Read what is encrypted. What cannot be read is said in the log and in `fault`, with the remedy."""
    keys: Sequence[_SigningKey] = ()
    headers: Mapping[str, str] | None = None
    errors, remedies = [], []
    try:
        headers = _headers(secrets, row)
    except UnreadableSecretError as error:
        errors.append(error)
        remedies.append(_PUT_AGAIN)
    try:
        keys = _live(_keys(secrets, row), row.now)
    except UnreadableSecretError as error:
        errors.append(error)
        remedies.append(_ROTATED)
    if not errors:
        return _Opened(keys, headers, None)
    fault = f"{errors[0]}. If it is lost for good, {', and '.join(remedies)}."
    log.error("tool_unreadable", tenant=row.tenant, tool=row.name, reason=fault)
    return _Opened(keys, headers, fault)


def _keys(secrets: Secrets, row: Row[Any]) -> list[_SigningKey]:
    plain = secrets.decrypt(row.secrets, column=_SECRETS, row=(row.tenant, row.name))
    return msgspec.json.decode(plain, type=list[_SigningKey])


def _sealed(secrets: Secrets, tenant: str, name: str, keys: Sequence[_SigningKey]) -> bytes:
    return secrets.encrypt(msgspec.json.encode(keys), column=_SECRETS, row=(tenant, name))


def _new_key() -> str:
    return base64.b64encode(random.token_bytes(SIGNING_KEY_BYTES)).decode()


def _live(keys: Sequence[_SigningKey], now: datetime) -> list[_SigningKey]:
    return [key for key in keys if _end(key) > now.timestamp()]


def _end(key: _SigningKey) -> float:
    return math.inf if key.expires_at is None else key.expires_at


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _registration(secrets: Secrets, row: Row[Any]) -> Registration:
    opened = _opened(secrets, row)
    return Registration(
        name=row.name,
        url=row.url,
        description=row.description,
        policy=msgspec.json.decode(row.policy, type=dict[str, Any]),
        header_names=tuple(opened.headers or ()),
        signing_secrets=tuple(
            SecretTimes(
                row.created_at if key.created_at is None else _time(key.created_at),
                None if key.expires_at is None else _time(key.expires_at),
            )
            for key in opened.keys
        ),
        fault=opened.fault,
        version=row.version,
        disabled_reason=row.disabled_reason,
        disabled_at=row.disabled_at,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def _tool(secrets: Secrets, row: Row[Any]) -> Tool:
    opened = _opened(secrets, row)
    policy = msgspec.json.decode(row.policy, type=dict[str, Any])
    known = {name: policy[name] for name in _TOOL_MEMBERS if name in policy}
    schema = policy.get("input_schema")
    return Tool(
        name=row.name,
        url=row.url,
        secrets=tuple(SigningSecret(base64.b64decode(key.key), key.expires_at) for key in opened.keys),
        headers=tuple((opened.headers or {}).items()),
        input_schema=msgspec.json.encode(schema).decode() if isinstance(schema, dict) else schema,
        version=row.version,
        disabled_reason=row.disabled_reason,
        fault=opened.fault,
        **known,
    )


_TOOL_MEMBERS: Final = (
    "timeout_s",
    "attempt_timeout_s",
    "retry",
    "on_unknown",
    "gate",
    "expires_in_s",
    "on_expiry",
    "remind_after_s",
    "when_unhealthy",
    "callback_timeout_s",
    "callback_timeout_max_s",
    "concurrency",
    "enabled",
    "reply_bytes_max",
    "result_chars_max",
)
