"""Subscriptions: where a tenant's notifications go, which events they are of, and how that fares."""

from __future__ import annotations

import base64
import secrets as random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Row, delete, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.logs import logger
from app.store import tables
from app.store.secrets import Secrets, UnreadableSecretError
from app.store.tools import SIGNING_KEY_BYTES

SUBSCRIPTIONS_MAX: Final = 20
"""Of one tenant: each event may become as many notifications."""

SECRET: Final = "subscriptions.secret"  # noqa: S105 - the name of a column
HEADERS: Final = "subscriptions.headers"

_LOCK: Final = text("select pg_advisory_xact_lock(hashtextextended('subscriptions of ' || :tenant, 0))")

log = logger(__name__)
_subscriptions = tables.subscriptions
_notifications = tables.notifications


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscription as stored, and what became of its notifications.

    `pending` ones wait or are under way; `dropped` ones were never delivered: too many, too old, or given up
    when the endpoint answered 410, which is `disabled_reason` `gone`. `failures` are in a row, and nothing is
    sent before `retry_at`.
    """

    name: str
    url: str
    events: tuple[str, ...]
    header_names: tuple[str, ...]
    enabled: bool
    disabled_reason: str | None
    disabled_at: datetime | None
    pending: int
    dropped: int
    failures: int
    retry_at: datetime | None
    last_success_at: datetime | None
    last_error: str | None
    last_error_at: datetime | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Put:
    """What subscribing did; `signing_secret` is set when the subscription is new."""

    subscription: Subscription
    signing_secret: str | None = field(repr=False)


class TooManySubscriptionsError(Exception):
    """The tenant has `SUBSCRIPTIONS_MAX` subscriptions."""


async def put(
    connection: AsyncConnection,
    secrets: Secrets,
    tenant: str,
    name: str,
    *,
    url: str,
    events: Collection[str],
    headers: Mapping[str, str],
    enabled: bool,
) -> Put:
    """Subscribe, or replace a subscription: its signing key stays, and what waits is sent at once.

    Raises:
        TooManySubscriptionsError: it would be one too many.
    """
    # In order, for a tenant, so that two that are new at once are counted and none is made twice.
    await connection.execute(_LOCK, {"tenant": tenant})
    row = (await connection.execute(_one(tenant, name).with_for_update())).one_or_none()
    sealed = secrets.encrypt(msgspec.json.encode(dict(headers)), column=HEADERS, row=(tenant, name))
    values = {"url": url, "events": sorted(events), "enabled": enabled, "headers": sealed}
    if row is None:
        count = await connection.scalar(select(func.count()).where(_subscriptions.c.tenant == tenant))
        if (count or 0) >= SUBSCRIPTIONS_MAX:
            raise TooManySubscriptionsError
        key = random.token_bytes(SIGNING_KEY_BYTES)
        values["secret"] = secrets.encrypt(key, column=SECRET, row=(tenant, name))
        created = insert(_subscriptions).values(tenant=tenant, name=name, **values).returning(_subscriptions)
        row = (await connection.execute(created)).one()
        return Put(_subscription(secrets, row, 0), "whsec_" + base64.b64encode(key).decode())
    values |= {"disabled_reason": None, "disabled_at": None, "failures": 0, "retry_at": None}
    await connection.execute(
        update(_subscriptions).where(*_is(tenant, name)).values(**values, updated_at=func.now())
    )
    if enabled:
        is_waiting = (
            _notifications.c.tenant == tenant, _notifications.c.subscription == name,
            _notifications.c.replica_id.is_(None),
        )  # fmt: skip
        await connection.execute(update(_notifications).where(*is_waiting).values(due_at=func.now()))
    stored = await get(connection, secrets, tenant, name)
    assert stored is not None, "the row is locked"
    return Put(stored, None)


async def get(connection: AsyncConnection, secrets: Secrets, tenant: str, name: str) -> Subscription | None:
    row = (await connection.execute(_one(tenant, name))).one_or_none()
    if row is None:
        return None
    return _subscription(secrets, row, (await _pending(connection, tenant, [name])).get(name, 0))


async def page(
    connection: AsyncConnection, secrets: Secrets, tenant: str, *, after: str | None, limit: int
) -> list[Subscription]:
    """Return subscriptions in the order of their names, from the first name after `after`."""
    query = (
        select(_subscriptions)
        .where(_subscriptions.c.tenant == tenant)
        .order_by(_subscriptions.c.name)
        .limit(limit)
    )
    if after is not None:
        query = query.where(_subscriptions.c.name > after)
    rows = (await connection.execute(query)).all()
    pending = await _pending(connection, tenant, [row.name for row in rows])
    return [_subscription(secrets, row, pending.get(row.name, 0)) for row in rows]


async def remove(connection: AsyncConnection, tenant: str, name: str) -> bool:
    """Delete a subscription with what waits for it; return whether there was one."""
    gone = await connection.execute(delete(_subscriptions).where(*_is(tenant, name)))
    await connection.execute(
        delete(_notifications).where(_notifications.c.tenant == tenant, _notifications.c.subscription == name)
    )
    return gone.rowcount > 0


def _is(tenant: str, name: str) -> tuple[Any, ...]:
    return _subscriptions.c.tenant == tenant, _subscriptions.c.name == name


def _one(tenant: str, name: str) -> Any:
    return select(_subscriptions).where(*_is(tenant, name))


async def _pending(connection: AsyncConnection, tenant: str, names: Sequence[str]) -> dict[str, int]:
    n = _notifications
    rows = await connection.execute(
        select(n.c.subscription, func.count().label("n"))
        .where(n.c.tenant == tenant, n.c.subscription.in_(names))
        .group_by(n.c.subscription)
    )
    return {row.subscription: row.n for row in rows}


def _subscription(secrets: Secrets, row: Row[Any], pending: int) -> Subscription:
    try:
        plain = secrets.decrypt(row.headers, column=HEADERS, row=(row.tenant, row.name))
        header_names = tuple(msgspec.json.decode(plain, type=dict[str, str]))
    except UnreadableSecretError as error:
        log.error("subscription_unreadable", tenant=row.tenant, subscription=row.name, reason=str(error))
        header_names = ()
    return Subscription(
        name=row.name,
        url=row.url,
        events=tuple(row.events),
        header_names=header_names,
        enabled=row.enabled,
        disabled_reason=row.disabled_reason,
        disabled_at=row.disabled_at,
        pending=pending,
        dropped=row.dropped,
        failures=row.failures,
        retry_at=row.retry_at,
        last_success_at=row.last_success_at,
        last_error=row.last_error,
        last_error_at=row.last_error_at,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
