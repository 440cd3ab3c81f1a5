"""The raw feed: upstream's events as they come, for as long as somebody follows them.

Whoever follows leaves a watch that runs out unless it is renewed; the run of the session sees it and keeps
what it receives. Nothing of this is fenced, awaited by a run, or needed by anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.batches import storable
from app.store.leases import Lease
from app.store.wakeups import notify, session_key, wish_key

WATCH_S: Final = 30.0
"""How long a watch lasts; it is renewed well before."""
KEPT_S: Final = 60.0
"""So long an event is there to be read."""
ROWS_MAX: Final = 500
"""That are read at once."""


@dataclass(frozen=True, slots=True)
class Raw:
    """An event as upstream sent it, as JSON text. `age_s` is how long it has waited to be read."""

    number: int
    event: str
    age_s: float


async def watch(connection: AsyncConnection, tenant: str, session_id: str) -> None:
    """Ask for the session's events from now on, for `WATCH_S`."""
    await connection.execute(
        text(
            "insert into watches (tenant, session_id, until_at)"
            " values (:tenant, :session_id, now() + make_interval(secs => :watch_s))"
            " on conflict (tenant, session_id) do update set until_at = excluded.until_at"
        ),
        {"tenant": tenant, "session_id": session_id, "watch_s": WATCH_S},
    )
    await notify(connection, [wish_key(tenant, session_id)])


async def watched(connection: AsyncConnection, replica_id: str) -> dict[tuple[str, str], float]:
    """Return for how many seconds the sessions of this replica are watched, and say that it is seen.

    What nobody watches any more is forgotten.
    """
    await connection.execute(
        text(
            "with gone as (delete from watches where until_at < now() returning tenant, session_id)"
            " delete from upstream_events e using gone"
            " where e.tenant = gone.tenant and e.session_id = gone.session_id"
        )
    )
    rows = await connection.execute(
        text(
            """
            with mine as (
                select w.tenant, w.session_id, w.until_at, w.term is distinct from a.term as is_new, a.term
                from watches w join attachments a on a.tenant = w.tenant and a.session_id = w.session_id
                where a.replica_id = :replica
            ), seen as (
                update watches w set term = mine.term from mine
                where mine.is_new and w.tenant = mine.tenant and w.session_id = mine.session_id
            )
            select tenant, session_id, is_new, extract(epoch from until_at - now()) as left_s from mine
            """
        ),
        {"replica": replica_id},
    )
    found = rows.all()
    await notify(connection, [session_key(row.tenant, row.session_id) for row in found if row.is_new])
    return {(row.tenant, row.session_id): float(row.left_s) for row in found}


async def is_seen(connection: AsyncConnection, tenant: str, session_id: str) -> bool:
    """Whether a run keeps the session's events for those who watch."""
    query = text("select term is not null from watches where tenant = :tenant and session_id = :session_id")
    return bool(await connection.scalar(query, {"tenant": tenant, "session_id": session_id}))


async def keep(connection: AsyncConnection, lease: Lease, events: Sequence[str]) -> None:
    """Store events for those who watch, and wake them."""
    key = {"tenant": lease.tenant, "session_id": lease.session_id}
    await connection.execute(
        text(
            "insert into upstream_events (tenant, session_id, event)"
            " select :tenant, :session_id, e from unnest(cast(:events as text[])) with ordinality as u(e, n)"
            " order by n"
        ),
        key | {"events": [storable(event) for event in events]},
    )
    await connection.execute(
        text(
            "delete from upstream_events where tenant = :tenant and session_id = :session_id"
            " and at < now() - make_interval(secs => :kept_s)"
        ),
        key | {"kept_s": KEPT_S},
    )
    await notify(connection, [session_key(lease.tenant, lease.session_id)])


async def newest(connection: AsyncConnection, tenant: str, session_id: str) -> int:
    """Return the number of the last event that is kept; 0 if none is."""
    query = text(
        "select coalesce(max(number), 0) from upstream_events"
        " where tenant = :tenant and session_id = :session_id"
    )
    return int(await connection.scalar(query, {"tenant": tenant, "session_id": session_id}) or 0)


async def read(connection: AsyncConnection, tenant: str, session_id: str, after: int) -> list[Raw]:
    """Return up to `ROWS_MAX` events after a number, in the order in which they came."""
    rows = await connection.execute(
        text(
            "select number, event, extract(epoch from clock_timestamp() - at) as age_s from upstream_events"
            " where tenant = :tenant and session_id = :session_id and number > :after"
            " order by number limit :rows"
        ),
        {"tenant": tenant, "session_id": session_id, "after": after, "rows": ROWS_MAX},
    )
    return [Raw(row.number, row.event, float(row.age_s)) for row in rows]
