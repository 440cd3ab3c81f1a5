"""Leases: which replica runs which attachment, decided by the database's time.

A lease is a term, not an owner: a claim raises the attachment's term, every write of a run names it, and a
write that touches no row ends that run. One row per replica says until when its terms hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

TTL_S: Final = 12.0
"""How long a renewal holds."""
RENEW_S: Final = 3.0
"""How often a replica renews."""
MARGIN_S: Final = 2.0
"""A holder stops acting this much before its lease ends."""
RESTARTS_WINDOW_S: Final = 600.0
"""Restarts after a defect are counted over this time."""
SEND_S: Final = 6.0
"""How long a send may take; none starts unless that fits in the lease."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run one attachment."""

    tenant: str
    session_id: str
    term: int


class LeaseLostError(Exception):
    """Another replica holds the term: this run may write nothing more."""


async def renew(connection: AsyncConnection, replica_id: str) -> None:
    """Hold all leases of this replica for another `TTL_S`."""
    await connection.execute(
        text(
            "insert into replicas (id, expires_at) values (:id, now() + make_interval(secs => :ttl))"
            " on conflict (id) do update set expires_at = excluded.expires_at"
        ),
        {"id": replica_id, "ttl": TTL_S},
    )


@dataclass(frozen=True, slots=True)
class Free:
    """How many attachments nobody runs, and how many more the replica may hold until it has its share."""

    count: int
    room: int


async def free(connection: AsyncConnection, replica_id: str) -> Free:
    """Read what could be claimed. A share is what each would hold if the lively replicas held equally many.

    One that has missed a renewal is not counted: its leases hold, but it will hardly take more.
    """
    row = (
        await connection.execute(
            text(
                """
                with live as (select id from replicas where expires_at > now()),
                    lively as (
                        select 1 from replicas where expires_at > now() + make_interval(secs => :lively)
                    )
                select count(*) filter (where coalesce(a.replica_id not in (table live), true)) as free,
                    ceil(count(*)::numeric / greatest(1, (select count(*) from lively)))
                        - count(*) filter (where a.replica_id = :replica) as room
                from attachments a where a.status not in ('ended', 'detached')
                """
            ),
            {"replica": replica_id, "lively": TTL_S - 2 * RENEW_S},
        )
    ).one()
    return Free(row.free, max(0, int(row.room)))


async def claim(connection: AsyncConnection, replica_id: str, limit: int) -> list[Lease]:
    """Take up to `limit` attachments that nobody runs, raising their terms; never one twice."""
    rows = await connection.execute(
        text(
            """
            with free as (
                select a.tenant, a.session_id
                from attachments a
                -- A subquery, because the row is looked at again once it is locked: a join is not.
                where a.status not in ('ended', 'detached') and coalesce(
                    (select r.expires_at <= now() from replicas r where r.id = a.replica_id), true)
                order by a.updated_at
                limit :limit
                for no key update of a skip locked
            )
            update attachments a set replica_id = :replica, term = a.term + 1
            from free where a.tenant = free.tenant and a.session_id = free.session_id
            returning a.tenant, a.session_id, a.term
            """
        ),
        {"replica": replica_id, "limit": limit},
    )
    return [Lease(row.tenant, row.session_id, row.term) for row in rows]


async def held(connection: AsyncConnection, replica_id: str) -> set[Lease]:
    """Read which leases the replica holds by the database's account."""
    rows = await connection.execute(
        text(
            "select tenant, session_id, term from attachments where replica_id = :replica"
            " and status not in ('ended', 'detached')"
        ),
        {"replica": replica_id},
    )
    return {Lease(row.tenant, row.session_id, row.term) for row in rows}


async def release(connection: AsyncConnection, replica_id: str, lease: Lease) -> None:
    """Give a lease back, so that another replica need not wait for it to expire."""
    await connection.execute(
        text(
            "update attachments set replica_id = null where tenant = :tenant and session_id = :session_id"
            " and term = :term and replica_id = :replica"
        ),
        {
            "tenant": lease.tenant,
            "session_id": lease.session_id,
            "term": lease.term,
            "replica": replica_id,
        },
    )


async def count_restart(connection: AsyncConnection, lease: Lease) -> int:
    """Count a restart after a defect; return how many there were within `RESTARTS_WINDOW_S`."""
    is_recent = "restarted_at > now() - make_interval(secs => :window)"
    counted: int | None = await connection.scalar(
        text(
            f"update attachments set restarts = case when {is_recent} then restarts + 1 else 1 end,"
            f" restarted_at = case when {is_recent} then restarted_at else now() end"
            " where tenant = :tenant and session_id = :session_id and term = :term returning restarts"
        ),
        {
            "tenant": lease.tenant,
            "session_id": lease.session_id,
            "term": lease.term,
            "window": RESTARTS_WINDOW_S,
        },
    )
    return counted or 0


async def leave(connection: AsyncConnection, replica_id: str) -> None:
    """Forget the replica, at the end of an orderly stop; others may take over what it still held."""
    await connection.execute(_forget("id = :id"), {"id": replica_id})


async def forget_dead(connection: AsyncConnection, *, older_than_s: float) -> None:
    """Remove the rows of replicas that died long ago."""
    is_dead = "expires_at < now() - make_interval(secs => :age)"
    await connection.execute(_forget(is_dead), {"age": older_than_s})


def _forget(which: str) -> TextClause:
    """Remove replicas, with what they thought of the tools' health."""
    return text(
        f"with gone as (delete from replicas where {which} returning id)"
        " delete from tool_health where replica_id in (select id from gone)"
    )
