"""Figures of the database as a whole, for an operator: each is a count over rows that an index holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.calls import END_STATES
from app.store.budgets import CAPACITY_MIN, CAPACITY_SHARE

_OVER: Final = ", ".join(f"'{state}'" for state in sorted(END_STATES))


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts, ages in seconds (0 for nothing), and the rest of the tightest budget, from 0 to 1."""

    sessions: Mapping[str, int]
    calls: Mapping[str, int]
    flags: Mapping[str, int]
    waiting: int
    waiting_age_s: float
    event_age_s: float
    notifications: int
    budget_left: float


async def read(connection: AsyncConnection) -> Figures:
    """Return the figures."""
    one = (await connection.execute(_ONE)).one()
    return Figures(
        sessions=await _counts(connection, _SESSIONS),
        calls=await _counts(connection, _CALLS),
        flags=await _counts(connection, _FLAGS),
        waiting=one.waiting,
        waiting_age_s=float(one.waiting_age_s),
        event_age_s=float(one.event_age_s),
        notifications=one.notifications,
        budget_left=float(one.budget_left),
    )


async def _counts(connection: AsyncConnection, statement: TextClause) -> dict[str, int]:
    return {row.name: row.n for row in await connection.execute(statement)}


_SERVED: Final = "a.status not in ('ended', 'detached')"
_SESSIONS: Final = text(
    f"""
    select a.status as name, count(*) as n from attachments a where {_SERVED} group by 1
    """
)
_CALLS: Final = text(
    f"""
    select state as name, count(*) as n from calls where state not in ({_OVER}) group by 1
    """
)
_FLAGS: Final = text(
    f"""
    select f as name, count(*) as n from attachments a, unnest(a.flags) f where {_SERVED} group by 1
    """
)
_HELD: Final = f"""
    from calls c join attachments a on a.tenant = c.tenant and a.session_id = c.session_id
    where c.state = 'held' and {_SERVED} and not exists (
        select from decisions d where d.tenant = c.tenant and d.session_id = c.session_id
            and d.call_id = c.id and d.status in ('accepted', 'sending'))
"""
_ONE: Final = text(
    f"""
    with held as (select c.created_at {_HELD}), silent as (
        select a.last_event_at from attachments a
        where a.status = 'live' and exists (
            select from calls c where c.tenant = a.tenant and c.session_id = a.session_id
                and c.state not in ({_OVER}, 'held', 'unowned'))
    )
    select
        (select count(*) from held) as waiting,
        coalesce((select extract(epoch from now() - min(created_at)) from held), 0) as waiting_age_s,
        coalesce((select extract(epoch from now() - min(last_event_at)) from silent), 0) as event_age_s,
        (select count(*) from notifications) as notifications,
        coalesce((select min(least(1, greatest(0, (tokens + per_s * age_s) / capacity))) from (
            select tokens, extract(epoch from now() - updated_at) as age_s, rate_per_min / 60 as per_s,
                greatest(rate_per_min * {CAPACITY_SHARE}, {CAPACITY_MIN}) as capacity from budgets) b), 1)
            as budget_left
    """
)
