"""The delivery log as read by the api: of one call, and of one tool; and the wish for one more delivery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from sqlalchemy import Row, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import attachments, calls, tables
from app.store.paging import Page
from app.store.wakeups import notify, session_key, wish_key

OF_CALL_MAX: Final = 1000
"""The most attempts of one call that are shown, newest kept."""

AGAIN_MAX: Final = 32
"""So many calls of one session may wait to be delivered again."""

_deliveries = tables.deliveries
_PLACE: Final = (
    _deliveries.c.started_at, _deliveries.c.session_id, _deliveries.c.call_id, _deliveries.c.attempt
)  # fmt: skip
# All but the reply itself, which may hold anything.
_SHOWN: Final = [column for column in _deliveries.c if column.name != "reply"]

Place = tuple[datetime, str, str, int]
"""Where a delivery stands in its tool's log."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One attempt to call a webhook. `code` is null when a result was read, or when nothing is known yet.

    `url` is whole, with what may be secret in it. `duration_ms` is what the attempt itself took;
    `reply_excerpt` is the beginning of the reply without secrets.
    """

    session_id: str
    call_id: str
    attempt: int
    tool: str
    url: str | None
    replica_id: str
    started_at: datetime
    finished_at: datetime | None
    duration_ms: int | None
    http_status: int | None
    code: str | None
    reply_excerpt: str | None

    @property
    def place(self) -> Place:
        return self.started_at, self.session_id, self.call_id, self.attempt


async def of_call(
    connection: AsyncConnection, tenant: str, session_id: str, call_id: str
) -> Sequence[Delivery]:
    """Return the deliveries of a call in their order."""
    query = (
        select(*_SHOWN)
        .where(
            _deliveries.c.tenant == tenant,
            _deliveries.c.session_id == session_id,
            _deliveries.c.call_id == call_id,
        )
        .order_by(_deliveries.c.attempt.desc())
        .limit(OF_CALL_MAX)
    )
    rows = (await connection.execute(query)).all()
    return [_delivery(row) for row in reversed(rows)]


async def of_tool(
    connection: AsyncConnection,
    tenant: str,
    tool: str,
    *,
    before: Place | None,
    limit: int,
    only_failed: bool = False,
) -> Page[Delivery]:
    """Return the tool's deliveries, newest first, from the place `before` on; `only_failed` has a code."""
    query = select(*_SHOWN).where(_deliveries.c.tenant == tenant, _deliveries.c.tool == tool)
    if only_failed:
        query = query.where(_deliveries.c.code.is_not(None))
    if before is not None:
        query = query.where(tuple_(*_PLACE) < before)
    query = query.order_by(*(column.desc() for column in _PLACE)).limit(limit + 1)
    rows = (await connection.execute(query)).all()
    return Page([_delivery(row) for row in rows[:limit]], len(rows) > limit)


RefusalCode = Literal[
    "session_not_found",
    "session_ended",
    "not_attached",
    "call_not_found",
    "not_redeliverable",
    "too_many_wishes",
]


@dataclass(frozen=True, slots=True)
class Refused:
    """No further delivery: a code of `app.api.problems`, and the call's state."""

    code: RefusalCode
    state: str | None = None


async def redeliver(
    connection: AsyncConnection, tenant: str, session_id: str, call_id: str
) -> Refused | None:
    """Ask the session's runner to deliver a call once more whose tool has promised a result.

    Any other call is at its webhook now, will be by itself, or must not be.
    """
    attachment = await attachments.lock(connection, tenant, session_id)
    if attachment is None:
        return Refused("session_not_found")
    if attachment.status in attachments.NOT_ATTACHED:
        is_over = attachment.end_reason in attachments.OVER_FOR_GOOD
        return Refused("session_ended" if is_over else "not_attached")
    call = await calls.get(connection, tenant, session_id, call_id)
    if call is None:
        return Refused("call_not_found")
    if not call.awaits_callback:
        return Refused("not_redeliverable", call.state)
    if call_id in attachment.again:
        return None
    if len(attachment.again) >= AGAIN_MAX:
        return Refused("too_many_wishes", call.state)
    a = tables.attachments
    await connection.execute(
        update(a)
        .where(a.c.tenant == tenant, a.c.session_id == session_id)
        .values(again=[*attachment.again, call_id], wish=a.c.wish + 1)
    )
    await notify(connection, [session_key(tenant, session_id), wish_key(tenant, session_id)])
    return None


def _delivery(row: Row[Any]) -> Delivery:
    return Delivery(
        session_id=row.session_id,
        call_id=row.call_id,
        attempt=row.attempt,
        tool=row.tool,
        url=row.url,
        replica_id=row.replica_id,
        started_at=row.started_at,
        finished_at=row.finished_at,
        duration_ms=row.duration_ms,
        http_status=row.http_status,
        code=row.code,
        reply_excerpt=row.reply_excerpt,
    )
