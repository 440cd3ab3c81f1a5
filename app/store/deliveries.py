"""The delivery log as read by the api: of one call, and of one tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables
from app.store.paging import Page

OF_CALL_MAX: Final = 1000
"""The most attempts of one call that are shown, newest kept."""

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
