"""The queue of notifications: who sends which, for how long, and what becomes of it.

A replica that takes a notification has it until `due_at`, by the database's time; should it die, another
takes it then. Locks are taken in the order subscription, notification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.logs import logger
from app.store.secrets import Secrets, UnreadableSecretError
from app.store.statements import Bulk
from app.store.subscriptions import HEADERS, SECRET

LEASE_S: Final = 30.0
"""How long who took a notification has it: longer than one attempt may take."""
CONCURRENCY: Final = 4
"""How many notifications of one subscription are under way at once; one while its endpoint fails."""
PENDING_MAX: Final = 10_000
"""How many may wait for one subscription; the oldest beyond that are dropped."""
AGE_S_MAX: Final = 86_400.0
"""An older one is dropped."""
ORPHANS_MAX: Final = 1000
"""How many notifications without a subscription one statement removes."""

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A notification to send. `key` signs it; None if the subscription's secrets cannot be read."""

    tenant: str
    subscription: str
    id: str
    type: str
    data: str
    age_s: float | None
    created_at: datetime
    attempt: int
    url: str
    key: bytes | None = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt went: `error` is None if the endpoint took it, else it waits for `wait_s`.

    `is_gone` says that the endpoint answered 410.
    """

    claimed: Claimed
    error: str | None = None
    is_gone: bool = False
    wait_s: float = 0.0


async def claim(connection: AsyncConnection, secrets: Secrets, replica_id: str, limit: int) -> list[Claimed]:
    """Take up to `limit` notifications that are due, oldest first; never one that another has."""
    # Locked by a statement of their own, so that the next one sees what others have taken of them.
    bounds = {"limit": limit, "concurrency": CONCURRENCY}
    owners = (await connection.execute(_DUE_OWNERS, bounds)).all()
    if not owners:
        return []
    rows = await connection.execute(
        _CLAIM,
        {
            "tenants": [row.tenant for row in owners],
            "names": [row.name for row in owners],
            "replica": replica_id,
            "lease": LEASE_S,
            **bounds,
        },
    )
    return [_claimed(secrets, row) for row in sorted(rows, key=lambda row: row.position)]


# Each owner is found by one look-up, however many notifications wait for it.
_OWNERS: Final = """
    recursive owners as (
        (select tenant, subscription from notifications order by tenant, subscription limit 1)
        union all
        select n.tenant, n.subscription from owners o cross join lateral (
            select n.tenant, n.subscription from notifications n
            where (n.tenant, n.subscription) > (o.tenant, o.subscription)
            order by n.tenant, n.subscription limit 1
        ) n
    )
"""
_IS_OWNER: Final = "s.tenant = o.tenant and s.name = o.subscription"
# What one subscription may have under way, and what it has, by the database's time.
_MOST: Final = "case when s.failures > 0 then 1 else :concurrency end"
_UNDER_WAY: Final = """
    (select count(*) from notifications u where u.tenant = s.tenant and u.subscription = s.name
        and u.replica_id is not null and u.due_at > now())
"""
# Those that have least under way come first, so that no busy one keeps others waiting.
_DUE_OWNERS: Final = text(
    f"""
    with {_OWNERS}
    select s.tenant, s.name from owners o join subscriptions s on {_IS_OWNER}
    cross join lateral (select {_UNDER_WAY} as count offset 0) u
    where s.enabled and coalesce(s.retry_at <= now(), true) and u.count < {_MOST} and exists (
        select from notifications n
        where n.tenant = s.tenant and n.subscription = s.name and n.due_at <= now())
    order by u.count, random() limit :limit
    for no key update of s skip locked
    """
)
_THESE: Final = "unnest(cast(:tenants as text[]), cast(:names as text[])) as o(tenant, subscription)"
_CLAIM: Final = text(
    f"""
    with due as (
        select n.tenant, n.id, s.url, s.secret, s.headers
        from {_THESE} join subscriptions s on {_IS_OWNER}
        cross join lateral (
            select n.tenant, n.id from notifications n
            where n.tenant = s.tenant and n.subscription = s.name and n.due_at <= now()
            order by n.due_at, n.position
            limit greatest(0, {_MOST} - {_UNDER_WAY})
            for update skip locked
        ) n
        limit :limit
    )
    update notifications n set replica_id = :replica, attempts = n.attempts + 1,
        due_at = now() + make_interval(secs => :lease)
    from due where n.tenant = due.tenant and n.id = due.id
    returning n.*, due.url, due.secret, due.headers
    """
)


def _claimed(secrets: Secrets, row: Row[Any]) -> Claimed:
    place = (row.tenant, row.subscription)
    key: bytes | None = None
    headers: dict[str, str] = {}
    try:
        headers = msgspec.json.decode(
            secrets.decrypt(row.headers, column=HEADERS, row=place), type=dict[str, str]
        )
        key = secrets.decrypt(row.secret, column=SECRET, row=place)
    except UnreadableSecretError as error:
        log.error(
            "subscription_unreadable", tenant=row.tenant, subscription=row.subscription, reason=str(error)
        )
    return Claimed(
        row.tenant, row.subscription, row.id, row.type, row.data, row.age_s, row.created_at, row.attempts,
        row.url, key, headers,
    )  # fmt: skip


async def finish(
    connection: AsyncConnection, replica_id: str, ended: Sequence[Ended], pause_s: Callable[[int], float]
) -> None:
    """Store how attempts went. `pause_s` gives the pause of a subscription after so many failures in a row.

    An attempt whose notification another replica has taken meanwhile still counts for its subscription.
    """
    by_owner: dict[tuple[str, str], list[Ended]] = {}
    for one in ended:
        by_owner.setdefault((one.claimed.tenant, one.claimed.subscription), []).append(one)
    owners = await connection.execute(
        _LOCK.statement,
        {"tenant": [tenant for tenant, _ in by_owner], "subscription": [name for _, name in by_owner]},
    )
    for owner in owners.all():
        await _note(connection, owner, by_owner[owner.tenant, owner.name], pause_s)
    done = [one.claimed for one in ended if one.error is None]
    if done:
        columns = {"tenant": [one.tenant for one in done], "id": [one.id for one in done]}
        await connection.execute(_REMOVE.statement, columns)
    if waiting := [one for one in ended if one.error is not None]:
        columns = {
            "tenant": [one.claimed.tenant for one in waiting], "id": [one.claimed.id for one in waiting]
        }  # fmt: skip
        waits = [one.wait_s for one in waiting]
        await connection.execute(_PUT_BACK.statement, {**columns, "wait_s": waits, "replica": replica_id})


async def _note(
    connection: AsyncConnection, owner: Row[Any], ended: Sequence[Ended], pause_s: Callable[[int], float]
) -> None:
    """Store what the attempts say of the subscription, which is locked."""
    errors = [one.error for one in ended if one.error is not None]
    is_well = len(errors) < len(ended)
    # Of several attempts that were under way together the first failure counts.
    failures = 0 if is_well else owner.failures if owner.is_paused else owner.failures + 1
    pause = pause_s(failures) if failures > owner.failures else None
    await connection.execute(
        _NOTE,
        {
            "tenant": owner.tenant, "name": owner.name, "failures": failures, "is_well": is_well,
            "pause": pause, "error": errors[-1] if errors else None,
        },
    )  # fmt: skip
    if any(one.is_gone and one.claimed.url == owner.url for one in ended):
        log.warning("subscription_disabled", tenant=owner.tenant, subscription=owner.name, reason="gone")
        await connection.execute(_DISABLE, {"tenant": owner.tenant, "name": owner.name})


_LOCK: Final = Bulk.of(
    """
    select s.tenant, s.name, s.url, s.failures, coalesce(s.retry_at > now(), false) as is_paused
    from subscriptions s where (s.tenant, s.name) in (select w.tenant, w.subscription from {rows})
    order by s.tenant, s.name for no key update
    """,
    tenant="text",
    subscription="text",
)
_NOTE: Final = text(
    """
    update subscriptions set failures = :failures,
        retry_at = case when :is_well then null else coalesce(
            now() + make_interval(secs => cast(:pause as double precision)), retry_at) end,
        last_success_at = case when :is_well then now() else last_success_at end,
        last_error = coalesce(:error, last_error),
        last_error_at = case when cast(:error as text) is null then last_error_at else now() end
    where tenant = :tenant and name = :name
    """
)
_DISABLE: Final = text(
    """
    with gone as (
        delete from notifications where tenant = :tenant and subscription = :name returning 1
    )
    update subscriptions set enabled = false, disabled_reason = 'gone', disabled_at = now(),
        dropped = dropped + (select count(*) from gone)
    where tenant = :tenant and name = :name
    """
)
_REMOVE: Final = Bulk.of(
    "delete from notifications n using {rows} where n.tenant = w.tenant and n.id = w.id",
    tenant="text",
    id="text",
)
_PUT_BACK: Final = Bulk.of(
    """
    update notifications n set replica_id = null, due_at = now() + make_interval(secs => w.wait_s)
    from {rows} where n.tenant = w.tenant and n.id = w.id and n.replica_id = :replica
    """,
    tenant="text",
    id="text",
    wait_s="double precision",
)


async def tend(connection: AsyncConnection) -> int:
    """Drop what is too old or too much, and what no subscription is there for; return how many."""
    orphans = await connection.execute(_DROP_ORPHANS, {"limit": ORPHANS_MAX})
    owners = (await connection.execute(_ALL_OWNERS)).all()
    if not owners:
        return orphans.rowcount
    dropped = await connection.execute(
        _DROP,
        {
            "tenants": [row.tenant for row in owners],
            "names": [row.name for row in owners],
            "age": AGE_S_MAX,
            "most": PENDING_MAX,
        },
    )
    return orphans.rowcount + sum(int(row.dropped) for row in dropped)


_DROP_ORPHANS: Final = text(
    f"""
    delete from notifications where ctid = any(array(
        with {_OWNERS}
        select n.ctid from owners o cross join lateral (
            select n.ctid from notifications n
            where n.tenant = o.tenant and n.subscription = o.subscription limit :limit
        ) n
        where not exists (select from subscriptions s where {_IS_OWNER}) limit :limit
    ))
    """
)
_ALL_OWNERS: Final = text(
    f"""
    with {_OWNERS}
    select s.tenant, s.name from owners o join subscriptions s on {_IS_OWNER}
    for no key update of s skip locked
    """
)
_DROP: Final = text(
    f"""
    with floors as materialized (
        select o.*, (
            select n.position from notifications n
            where n.tenant = o.tenant and n.subscription = o.subscription
            order by n.position desc offset :most limit 1
        ) as floor
        from {_THESE}
    ), gone as (
        delete from notifications n using floors o
        where n.tenant = o.tenant and n.subscription = o.subscription and (
            n.position <= o.floor or n.created_at < now() - make_interval(secs => :age))
        returning n.tenant, n.subscription
    ), counted as (
        select tenant, subscription, count(*) as dropped from gone group by 1, 2
    )
    update subscriptions s set dropped = s.dropped + o.dropped from counted o where {_IS_OWNER}
    returning o.dropped
    """
)
