"""Test calls of tools: a wish that any replica takes up, and what came of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables
from app.store.batches import storable
from app.store.wakeups import notify, session_key, wish_key

OPEN_MAX: Final = 20
"""So many tests of one tenant may be open at once."""
LOST_AFTER_S: Final = 60.0
"""A test that was taken up and has no outcome so long after its time is not waited for."""

_tests = tables.tool_tests


@dataclass(frozen=True, slots=True)
class Wish:
    """A test to make. `input` is JSON."""

    tenant: str
    id: str
    tool: str
    input: str
    requested_at: datetime


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a test came to; `result` is a JSON array of content blocks."""

    result: str
    is_error: bool
    code: str | None
    http_status: int | None
    duration_ms: int | None
    url: str | None
    reply_excerpt: str | None


@dataclass(frozen=True, slots=True)
class ToolTest:
    """A test as stored. `status` is `waiting`, `running`, `done`, or `lost` when its replica ended."""

    id: str
    tool: str
    status: str
    replica_id: str | None
    requested_at: datetime
    finished_at: datetime | None
    outcome: Outcome | None


class TooManyTestsError(Exception):
    """The tenant has `OPEN_MAX` tests that are not over."""


async def wish(connection: AsyncConnection, tenant: str, tool: str, input_: str, *, timeout_s: float) -> str:
    """Ask for a test call of a tool; return its id.

    Raises:
        TooManyTestsError: so many are open already.
    """
    is_open = (_tests.c.tenant == tenant, _tests.c.finished_at.is_(None), _tests.c.lost_at > func.now())
    count = await connection.scalar(select(func.count()).select_from(_tests).where(*is_open))
    if (count or 0) >= OPEN_MAX:
        raise TooManyTestsError
    id_ = "test_" + secrets.token_hex(12)
    lost_at = func.now() + func.make_interval(0, 0, 0, 0, 0, 0, timeout_s + LOST_AFTER_S)
    await connection.execute(
        insert(_tests).values(tenant=tenant, id=id_, tool=tool, input=input_, lost_at=lost_at)
    )
    await notify(connection, [wish_key(tenant, id_)])
    return id_


async def claim(connection: AsyncConnection, replica_id: str, limit: int) -> list[Wish]:
    """Take up to `limit` tests that nobody took, oldest first; never one twice."""
    rows = await connection.execute(
        text(
            """
            with free as (
                select tenant, id from tool_tests where replica_id is null and lost_at > now()
                order by requested_at limit :limit for update skip locked
            )
            update tool_tests t set replica_id = :replica from free
            where t.tenant = free.tenant and t.id = free.id
            returning t.tenant, t.id, t.tool, t.input, t.requested_at
            """
        ),
        {"replica": replica_id, "limit": limit},
    )
    return [Wish(row.tenant, row.id, row.tool, row.input, row.requested_at) for row in rows]


async def finish(connection: AsyncConnection, replica_id: str, wish_: Wish, outcome: Outcome) -> None:
    """Store what a test came to, and wake whoever waits for it."""
    await connection.execute(
        update(_tests)
        .where(_tests.c.tenant == wish_.tenant, _tests.c.id == wish_.id, _tests.c.replica_id == replica_id)
        .values(
            finished_at=func.now(), result=outcome.result, is_error=outcome.is_error, code=outcome.code,
            http_status=outcome.http_status, duration_ms=outcome.duration_ms, url=outcome.url,
            reply_excerpt=storable(outcome.reply_excerpt),
        )
    )  # fmt: skip
    await notify(connection, [session_key(wish_.tenant, wish_.id)])


async def get(connection: AsyncConnection, tenant: str, tool: str, test_id: str) -> ToolTest | None:
    query = select(_tests, (_tests.c.lost_at <= func.now()).label("is_lost")).where(
        _tests.c.tenant == tenant, _tests.c.tool == tool, _tests.c.id == test_id
    )
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else _test(row)


def _test(row: Row[Any]) -> ToolTest:
    outcome = None
    status = "lost" if row.is_lost else "waiting" if row.replica_id is None else "running"
    if row.finished_at is not None:
        status = "done"
        outcome = Outcome(
            row.result, row.is_error, row.code, row.http_status, row.duration_ms, row.url, row.reply_excerpt
        )
    return ToolTest(row.id, row.tool, status, row.replica_id, row.requested_at, row.finished_at, outcome)
