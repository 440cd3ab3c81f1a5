"""Reminders: people are told again of a call that stays held. They decide nothing.

The first is due when the call has been held for what its tool grants, by the database's time, and the pause
doubles each time. A call's row carries when the next one is due, so that they go on where they were after a
restart, and no two replicas send the same one.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.notifications import call_data
from app.store import outbox

REMINDERS_MAX: Final = 5
"""Of a call, each time that it comes to be held: after 1, 2, 4, 8 and 16 times `remind_after_s`."""


async def remind(connection: AsyncConnection, replica_id: str, limit: int) -> int:
    """Tell subscribers of calls of the replica's sessions whose reminder is due; return of how many.

    That is `limit` at most, those that are due for the longest first. It never waits for a row that somebody
    else has locked.
    """
    # Locked by a statement of their own, as a decision locks its call: the next one sees what was decided.
    bounds = {"replica": replica_id, "limit": limit}
    due = (await connection.execute(_LOCK_DUE, bounds)).all()
    if not due:
        return 0
    rows = await connection.execute(
        _COUNT,
        {
            "tenants": [row.tenant for row in due],
            "session_ids": [row.session_id for row in due],
            "ids": [row.id for row in due],
            "most": REMINDERS_MAX,
        },
    )
    counted = rows.all()
    for row in counted:
        data = call_data(
            row.session_id, row.id, thread_id=row.thread_id, tool=row.tool, kind=row.kind, state=row.state,
            gate_by=row.gate_by, gate_reason=row.gate_reason, outcome_unknown=row.outcome_unknown,
        )  # fmt: skip
        more = {"reminders": row.gate_reminders}
        await outbox.put(connection, row.tenant, "confirmation.reminded", data | more, since=row.created_at)
    return len(counted)


# One whose time is over is as good as denied.
_IS_OPEN: Final = """
    c.state = 'held' and c.gate_remind_at <= now()
        and not coalesce(c.gate_on_expiry = 'deny' and c.gate_expires_at <= now(), false)
        and not exists (
            select from decisions d
            where d.tenant = c.tenant and d.session_id = c.session_id and d.call_id = c.id
                and d.status in ('accepted', 'sending'))
"""
_LOCK_DUE: Final = text(
    f"""
    select c.tenant, c.session_id, c.id from calls c
    join attachments a on a.tenant = c.tenant and a.session_id = c.session_id
    where {_IS_OPEN} and a.replica_id = :replica and a.status not in ('ended', 'detached')
    order by c.gate_remind_at limit :limit
    for no key update of c skip locked
    """
)
_COUNT: Final = text(
    f"""
    update calls c set gate_reminders = c.gate_reminders + 1,
        gate_remind_at = case when c.gate_reminders + 1 < :most
            then now() + make_interval(secs => c.gate_remind_after_s * power(2, c.gate_reminders)) end
    from unnest(cast(:tenants as text[]), cast(:session_ids as text[]), cast(:ids as text[]))
        as w(tenant, session_id, id)
    where c.tenant = w.tenant and c.session_id = w.session_id and c.id = w.id and {_IS_OPEN}
    returning c.tenant, c.session_id, c.id, c.thread_id, c.tool, c.kind, c.state, c.gate_by, c.gate_reason,
        c.outcome_unknown, c.created_at, c.gate_reminders
    """
)
