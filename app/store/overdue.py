"""Calls that have not moved for longer than they should: a healthy process can hide a stuck session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.calls import END_STATES

LATE_S: Final = 300.0
"""How long after its time is over a call may still be open; one without a deadline, since it last moved."""
DECISION_S: Final = 3_600.0
"""How long a call may wait for a person, or for somebody to own it."""
SHOWN_MAX: Final = 20

Reason = Literal["awaiting_decision", "unowned", "past_deadline", "not_moving"]

_OVER: Final = ", ".join(f"'{state}'" for state in sorted(END_STATES))
_QUERY: Final = text(
    f"""
    select c.session_id, c.id, c.tool, c.state, c.since, c.reason from (
        select c.session_id, c.id, c.tool, c.state, c.position,
            case when c.state in ('held', 'unowned') then c.created_at
                else coalesce(d.deadline_at, c.updated_at) end as since,
            case c.state when 'held' then 'awaiting_decision' when 'unowned' then 'unowned'
                when 'dispatched' then 'past_deadline' else 'not_moving' end as reason,
            row_number() over (partition by c.session_id order by c.position) as place
        from calls c
        left join lateral (
            select max(d.deadline_at) as deadline_at from deliveries d where c.state = 'dispatched'
                and d.tenant = c.tenant and d.session_id = c.session_id and d.call_id = c.id
        ) d on true
        where c.tenant = :tenant and c.session_id = any(cast(:session_ids as text[]))
            and c.state not in ({_OVER})
            and case when c.state in ('held', 'unowned')
                then c.created_at < now() - make_interval(secs => :decision_s)
                else coalesce(d.deadline_at, c.updated_at) < now() - make_interval(secs => :late_s) end
    ) c where c.place <= :shown_max order by c.session_id, c.position
    """
)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A call that should have moved on; `since` is when its time was over, or when it last moved or came."""

    call_id: str
    tool: str
    state: str
    reason: Reason
    since: datetime


async def overdue(
    connection: AsyncConnection, tenant: str, session_ids: Sequence[str]
) -> Mapping[str, tuple[Overdue, ...]]:
    """Return such calls by session, oldest first, at most `SHOWN_MAX` of each."""
    values = {
        "tenant": tenant, "session_ids": list(session_ids), "late_s": LATE_S, "decision_s": DECISION_S,
        "shown_max": SHOWN_MAX,
    }  # fmt: skip
    found: dict[str, tuple[Overdue, ...]] = {}
    for row in await connection.execute(_QUERY, values):
        one = Overdue(row.id, row.tool, row.state, row.reason, row.since)
        found[row.session_id] = (*found.get(row.session_id, ()), one)
    return found
