"""What the service hears of sessions that it does not serve: webhooks of the platform, once each, and sweeps.

A session that ended by idleness is attached again at once. One that nobody attached becomes a sighting: some
replica asks upstream about it, and attaches it if a rule says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import attach_rules, attachments, tables
from app.store.attachments import Accepted
from app.store.secrets import Secrets, UnreadableSecretError
from app.store.wakeups import notify, wish_key

KEYS_MAX: Final = 1_000
"""So many signing keys are tried on a webhook."""
HOOKS_KEPT_S: Final = 86_400.0
"""The platform repeats a webhook within minutes; its signature is good for five."""
SIGHTINGS_MAX: Final = 1_000
"""Of one tenant at once; the sweep finds the others."""
AGAIN_S: Final = 15.0
"""After this a sighting is looked at once more, unless it was settled; the wait doubles."""
TRIES_MAX: Final = 8
IDLE_KEPT_DAYS: Final = 30
"""Sessions that ended by idleness longer ago are not looked for in the list; webhooks still wake them."""
KEY: Final = "hook_keys.key"

_keys, _hooks, _sightings = tables.hook_keys, tables.hooks, tables.sightings
_a = tables.attachments


@dataclass(frozen=True, slots=True)
class HookKey:
    """A key that signs webhooks about the sessions of a credential's workspace."""

    tenant: str
    credential: str
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Sighting:
    """A session to ask upstream about."""

    tenant: str
    credential: str
    session_id: str
    tries: int


@dataclass(frozen=True, slots=True)
class Known:
    """An attachment of a session that was listed; `ended_at` is set where it ended by idleness."""

    ended_at: datetime | None
    seen_updated_at: str | None


# ---- webhooks


async def put_key(
    connection: AsyncConnection, secrets: Secrets, tenant: str, credential: str, key: bytes | None
) -> None:
    """Store the key that signs webhooks about a credential's workspace; None forgets it."""
    where = (_keys.c.tenant == tenant, _keys.c.credential == credential)
    if key is None:
        await connection.execute(_keys.delete().where(*where))
        return
    sealed = secrets.encrypt(key, column=KEY, row=(tenant, credential))
    stored = insert(_keys).values(tenant=tenant, credential=credential, key=sealed)
    await connection.execute(
        stored.on_conflict_do_update(index_elements=["tenant", "credential"], set_={"key": sealed})
    )


async def has_keys(connection: AsyncConnection, tenant: str) -> frozenset[str]:
    """Return the credentials of the tenant whose webhooks are taken."""
    return frozenset(await connection.scalars(select(_keys.c.credential).where(_keys.c.tenant == tenant)))


async def keys(connection: AsyncConnection, secrets: Secrets) -> list[HookKey]:
    """Return the stored keys of all tenants; those that cannot be read are left out."""
    found = []
    for row in await connection.execute(select(_keys).order_by(_keys.c.tenant).limit(KEYS_MAX)):
        try:
            key = secrets.decrypt(row.key, column=KEY, row=(row.tenant, row.credential))
        except UnreadableSecretError:
            continue
        found.append(HookKey(row.tenant, row.credential, key))
    return found


async def heard(
    connection: AsyncConnection, tenant: str, credential: str, webhook_id: str, session_id: str
) -> bool:
    """Take a webhook about a session; return False if it was taken before. Nothing in it is believed."""
    first = insert(_hooks).values(tenant=tenant, id=webhook_id).on_conflict_do_nothing()
    if not (await connection.execute(first)).rowcount:
        return False
    known = (await known_of(connection, tenant, [session_id])).get(session_id)
    if known is None:
        await sight(connection, tenant, credential, [session_id])
    elif known.ended_at is not None:
        await attachments.wake(connection, tenant, session_id)
    return True


# ---- sightings


async def sight(
    connection: AsyncConnection, tenant: str, credential: str, session_ids: Collection[str]
) -> None:
    """Let some replica ask upstream about sessions, if a rule could be about them."""
    if not await attach_rules.live(connection, tenant, credential):
        return
    count = await connection.scalar(select(func.count()).where(_sightings.c.tenant == tenant))
    room = SIGHTINGS_MAX - (count or 0)
    rows = [
        {"tenant": tenant, "credential": credential, "session_id": session_id}
        for session_id in sorted(session_ids)[: max(0, room)]
    ]
    if rows:
        await connection.execute(insert(_sightings).on_conflict_do_nothing(), rows)
        await notify(connection, [wish_key(tenant, rows[0]["session_id"])])


async def claim(connection: AsyncConnection, limit: int) -> list[Sighting]:
    """Take up to `limit` sightings that are due; whoever does not settle one leaves it for later."""
    await connection.execute(
        text("delete from sightings where tries >= :tries_max and next_at <= now()"), {"tries_max": TRIES_MAX}
    )
    rows = await connection.execute(
        text(
            """
            with due as (
                select tenant, credential, session_id from sightings where next_at <= now()
                order by next_at limit :limit for update skip locked
            )
            update sightings s set tries = s.tries + 1,
                next_at = now() + make_interval(secs => :again_s * power(2, s.tries))
            from due where s.tenant = due.tenant and s.credential = due.credential
                and s.session_id = due.session_id
            returning s.tenant, s.credential, s.session_id, s.tries
            """
        ),
        {"limit": limit, "again_s": AGAIN_S},
    )
    return [Sighting(row.tenant, row.credential, row.session_id, row.tries) for row in rows]


async def settle(connection: AsyncConnection, sighting: Sighting) -> None:
    """Nothing is left to ask about the session."""
    await connection.execute(
        _sightings.delete().where(
            _sightings.c.tenant == sighting.tenant,
            _sightings.c.credential == sighting.credential,
            _sightings.c.session_id == sighting.session_id,
        )
    )


# ---- sweeps


async def plan_sweeps(connection: AsyncConnection, every_s: float) -> None:
    """See to it that every credential is swept whose list may hold what is to be attached."""
    await connection.execute(
        text(
            """
            insert into sweeps (tenant, credential, next_at)
            select tenant, credential, now() + make_interval(secs => :every_s) from (
                select tenant, settings::json ->> 'credential' as credential from attach_rules where enabled
                union
                select tenant, settings::json ->> 'credential' from attachments
                where status = 'ended' and end_reason = 'idle'
                    and updated_at > now() - make_interval(days => :days)
            ) w on conflict do nothing
            """
        ),
        {"every_s": every_s, "days": IDLE_KEPT_DAYS},
    )
    await connection.execute(
        text("delete from hooks where received_at < now() - make_interval(secs => :kept_s)"),
        {"kept_s": HOOKS_KEPT_S},
    )


async def claim_sweeps(connection: AsyncConnection, every_s: float, limit: int) -> list[tuple[str, str]]:
    """Take up sweeps that are due, each a tenant and a credential; they are due again after `every_s`."""
    rows = await connection.execute(
        text(
            """
            with due as (
                select tenant, credential from sweeps where next_at <= now()
                order by next_at limit :limit for update skip locked
            )
            update sweeps s set next_at = now() + make_interval(secs => :every_s) from due
            where s.tenant = due.tenant and s.credential = due.credential
            returning s.tenant, s.credential
            """
        ),
        {"limit": limit, "every_s": every_s},
    )
    return [(row.tenant, row.credential) for row in rows]


async def end_sweep(connection: AsyncConnection, tenant: str, credential: str) -> None:
    """Nothing of this credential's list is of interest any more."""
    await connection.execute(
        text("delete from sweeps where tenant = :tenant and credential = :credential"),
        {"tenant": tenant, "credential": credential},
    )


async def sleeping(connection: AsyncConnection, tenant: str, credential: str) -> bool:
    """Whether sessions of this credential ended by idleness, not too long ago."""
    query = text(
        """
        select exists (
            select from attachments where tenant = :tenant and status = 'ended' and end_reason = 'idle'
                and settings::json ->> 'credential' = :credential
                and updated_at > now() - make_interval(days => :days)
        )
        """
    )
    values = {"tenant": tenant, "credential": credential, "days": IDLE_KEPT_DAYS}
    return bool(await connection.scalar(query, values))


async def known_of(
    connection: AsyncConnection, tenant: str, session_ids: Sequence[str]
) -> Mapping[str, Known]:
    """Return what is stored of those sessions that the tenant ever attached."""
    query = select(
        _a.c.session_id, _a.c.status, _a.c.end_reason, _a.c.updated_at, _a.c.upstream_updated_at
    ).where(_a.c.tenant == tenant, _a.c.session_id.in_(session_ids))
    found = {}
    for row in await connection.execute(query):
        is_asleep = row.status == "ended" and row.end_reason == "idle"
        found[row.session_id] = Known(row.updated_at if is_asleep else None, row.upstream_updated_at)
    return found


async def wake(connection: AsyncConnection, tenant: str, session_id: str, updated_at: str | None) -> bool:
    """Attach a session again that ended by idleness, noting what upstream's `updated_at` was."""
    woken = await attachments.wake(connection, tenant, session_id)
    await connection.execute(
        update(_a)
        .where(_a.c.tenant == tenant, _a.c.session_id == session_id)
        .values(upstream_updated_at=updated_at)
    )
    return isinstance(woken, Accepted)
