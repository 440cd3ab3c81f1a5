"""Retention: removes what is past its age, in small transactions, beside everything that goes on.

A *delivery*, with what it sent and what came back, goes by an age of its own once its call is over, in
sessions that are served too. A *session* that ended, or was detached, goes with its calls, deliveries and
messages. Of a session that is served nothing else goes, so that the ids and states of its calls are there for
as long as history can list them. Calls that are not over stay, and with them their attachment: when the
session goes on, a known result is not computed again. Decisions and the audit stay. The answers that are kept
for idempotency keys go after their day, whatever else is kept for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.core.calls import END_STATES
from app.store.attachments import OVER_FOR_GOOD
from app.store.idempotency import KEPT_DAYS

EVERY_S: Final = 3600.0
"""How often a replica makes a pass; one that finds nothing due costs two look-ups in indexes."""
PASS_S_MAX: Final = 3000.0
"""A pass ends after this; the next one goes on."""
ROWS_MAX: Final = 1000
"""How many calls, messages or deliveries one statement looks at and removes."""
SESSIONS_MAX: Final = 50
"""How many sessions one transaction looks at."""
LOCK_LIMIT_MS: Final = 500
"""How long a statement waits for a row that somebody else has locked."""

_LOCK: Final = 7_226_285_438
"""The advisory lock under which one replica at a time prunes."""
# Every statement begins with rows of an index, at most so many, and reaches all others by their keys. No
# planner shall come to read a table as a whole instead.
_BEGIN: Final = text(
    f"select set_config('lock_timeout', '{LOCK_LIMIT_MS}ms', true),"
    " set_config('enable_seqscan', 'off', true), pg_try_advisory_xact_lock(:lock) as is_ours"
)

_OVER: Final = ", ".join(f"'{state}'" for state in sorted(END_STATES))
_FOR_GOOD: Final = ", ".join(f"'{reason}'" for reason in sorted(OVER_FOR_GOOD))


@dataclass(slots=True)
class Pruned:
    """How many rows a pass removed; `is_complete` is False when it ended before all was seen."""

    attachments: int = 0
    calls: int = 0
    messages: int = 0
    deliveries: int = 0
    bodies: int = 0
    callbacks: int = 0
    tool_tests: int = 0
    sends: int = 0
    idempotency_keys: int = 0
    is_complete: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """The rows removed, by table."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "is_complete"}


_Cursor = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """What one transaction removed. The next one looks from `cursor` on; None when nothing is left there."""

    removed: Mapping[str, int]
    cursor: _Cursor | None


async def prune(engine: AsyncEngine, *, sessions_days: int, deliveries_days: int) -> Pruned:
    """Make a pass: remove what is older than these ages by the database's time; 0 keeps it for ever.

    A session's age counts from its end, a delivery's from the end of its call. The pass pauses for as long as
    it works, gives way at once to another replica's, and may be cancelled at any point.

    Raises:
        DBAPIError: the database is away, or a row was locked for too long; the next pass goes on.
    """
    pruned = Pruned()
    end = asyncio.get_running_loop().time() + PASS_S_MAX
    pruned.is_complete = (
        await _walk(engine, _idempotency_keys, _FIRST_DELIVERY, KEPT_DAYS, pruned, end)
        and (
            not deliveries_days
            or (
                await _walk(engine, _tool_tests, _FIRST_DELIVERY, deliveries_days, pruned, end)
                and await _walk(engine, _sends, _FIRST_DELIVERY, deliveries_days, pruned, end)
                and await _walk(engine, _deliveries, _FIRST_DELIVERY, deliveries_days, pruned, end)
            )
        )
        and (not sessions_days or await _walk(engine, _sessions, _FIRST_SESSION, sessions_days, pruned, end))
    )
    return pruned


async def _walk(
    engine: AsyncEngine,
    step: Callable[[AsyncConnection, int, _Cursor], Awaitable[_Step]],
    cursor: _Cursor | None,
    days: int,
    pruned: Pruned,
    end: float,
) -> bool:
    """Take steps, oldest rows first; return whether all of them were taken."""
    clock = asyncio.get_running_loop().time
    while cursor is not None:
        began = clock()
        if began > end:
            return False
        async with engine.begin() as connection:
            if not (await connection.execute(_BEGIN, {"lock": _LOCK})).one().is_ours:
                return False
            done = await step(connection, days, cursor)
        for table, count in done.removed.items():
            setattr(pruned, table, getattr(pruned, table) + count)
        cursor = done.cursor
        if cursor is not None:
            await asyncio.sleep(clock() - began)
    return True


_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_DELIVERY: Final = (_LONG_AGO,)
_DELIVERIES: Final = text(
    f"""
    with looked as materialized (
        select d.ctid as place, d.tenant, d.session_id, d.call_id, d.started_at from deliveries d
        where d.started_at < now() - make_interval(days => :days) and d.started_at >= :cursor
        order by d.started_at limit :rows
    ), due as materialized (
        select l.* from looked l left join lateral (
            select c.state, c.updated_at from calls c
            where c.tenant = l.tenant and c.session_id = l.session_id and c.id = l.call_id limit 1
        ) c on true
        where c.state is null
            or c.state in ({_OVER}) and c.updated_at < now() - make_interval(days => :days)
    ), gone as (
        delete from deliveries where ctid = any(array(select place from due)) returning 1
    ), gone_bodies as (
        delete from bodies where ctid = any(array(
            select b.place from due cross join lateral (
                select b.ctid as place from bodies b
                where b.tenant = due.tenant and b.session_id = due.session_id and b.call_id = due.call_id
                limit 1
            ) b
        )) returning 1
    ), gone_callbacks as (
        delete from callbacks using due where callbacks.tenant = due.tenant
            and callbacks.session_id = due.session_id and callbacks.call_id = due.call_id returning 1
    )
    select count(*) as looked, max(looked.started_at) as last, (select count(*) from gone) as deliveries,
        (select count(*) from gone_bodies) as bodies,
        (select count(*) from gone_callbacks) as callbacks
    from looked
    """
)


async def _deliveries(connection: AsyncConnection, days: int, cursor: _Cursor) -> _Step:
    values = {"days": days, "cursor": cursor[0], "rows": ROWS_MAX}
    row = (await connection.execute(_DELIVERIES, values)).one()
    removed = {"deliveries": row.deliveries, "bodies": row.bodies, "callbacks": row.callbacks}
    if row.looked < ROWS_MAX:
        return _Step(removed, None)
    # The last one's time is looked at again, as others may share it: once, if all of those stay.
    is_stuck = row.last == cursor[0] and not row.deliveries
    return _Step(removed, (row.last + timedelta(microseconds=1) if is_stuck else row.last,))


def _by_age(table: str, age: str) -> Callable[[AsyncConnection, int, _Cursor], Awaitable[_Step]]:
    """Steps that remove all rows of a table whose time `age` is past."""
    statement = text(
        f"""
        delete from {table} where ctid = any(array(
            select t.ctid from {table} t where t.{age} < now() - make_interval(days => :days)
            order by t.{age} limit :rows
        ))
        """
    )

    async def step(connection: AsyncConnection, days: int, cursor: _Cursor) -> _Step:
        removed = (await connection.execute(statement, {"days": days, "rows": ROWS_MAX})).rowcount
        return _Step({table: removed}, cursor if removed == ROWS_MAX else None)

    return step


_tool_tests = _by_age("tool_tests", "requested_at")
_sends = _by_age("sends", "created_at")
_idempotency_keys = _by_age("idempotency_keys", "created_at")


_FIRST_SESSION: Final = (_LONG_AGO, "", "")
_SESSIONS: Final = text(
    f"""
    select a.tenant, a.session_id, a.updated_at, coalesce(a.end_reason in ({_FOR_GOOD}), false) as is_for_good
    from attachments a
    where a.status in ('ended', 'detached') and a.updated_at < now() - make_interval(days => :days)
        and (a.updated_at, a.tenant, a.session_id) > (:after, :tenant, :session_id)
    order by a.updated_at, a.tenant, a.session_id limit :sessions
    for update skip locked
    """
)
_THESE: Final = (
    "unnest(cast(:tenants as text[]), cast(:session_ids as text[]), cast(:for_good as boolean[]))"
    " as s(tenant, session_id, is_for_good)"
)
# History does not show that a rejected call is over: without its row it would be delivered once more.
_CALLS: Final = text(
    f"""
    with due as materialized (
        select c.* from {_THESE} cross join lateral (
            select c.ctid as place, c.tenant, c.session_id, c.id from calls c
            where c.tenant = s.tenant and c.session_id = s.session_id
                and c.state in ({_OVER}) and (c.state <> 'rejected' or s.is_for_good)
            limit :rows
        ) c limit :rows
    ), gone as (
        delete from calls where ctid = any(array(select place from due)) returning 1
    ), gone_deliveries as (
        delete from deliveries where ctid = any(array(
            select d.place from due cross join lateral (
                select d.ctid as place from deliveries d
                where d.tenant = due.tenant and d.session_id = due.session_id and d.call_id = due.id offset 0
            ) d
        )) returning 1
    ), gone_bodies as (
        delete from bodies where ctid = any(array(
            select b.place from due cross join lateral (
                select b.ctid as place from bodies b
                where b.tenant = due.tenant and b.session_id = due.session_id and b.call_id = due.id limit 1
            ) b
        )) returning 1
    ), gone_callbacks as (
        delete from callbacks using due where callbacks.tenant = due.tenant
            and callbacks.session_id = due.session_id and callbacks.call_id = due.id returning 1
    )
    select (select count(*) from gone) as calls, (select count(*) from gone_deliveries) as deliveries,
        (select count(*) from gone_bodies) as bodies,
        (select count(*) from gone_callbacks) as callbacks
    """
)
_MESSAGES: Final = text(
    f"""
    delete from messages where ctid = any(array(
        select m.place from {_THESE} cross join lateral (
            select m.ctid as place from messages m
            where m.tenant = s.tenant and m.session_id = s.session_id limit :rows
        ) m limit :rows
    ))
    """
)
_ATTACHMENTS: Final = text(
    f"""
    delete from attachments a using {_THESE}
    where a.tenant = s.tenant and a.session_id = s.session_id and (
        select true from calls c where c.tenant = a.tenant and c.session_id = a.session_id limit 1
    ) is null
    """
)


async def _sessions(connection: AsyncConnection, days: int, cursor: _Cursor) -> _Step:
    after, tenant, session_id = cursor
    values = {
        "days": days, "after": after, "tenant": tenant, "session_id": session_id, "sessions": SESSIONS_MAX
    }  # fmt: skip
    rows = (await connection.execute(_SESSIONS, values)).all()
    if not rows:
        return _Step({}, None)
    these = {
        "tenants": [row.tenant for row in rows],
        "session_ids": [row.session_id for row in rows],
        "for_good": [row.is_for_good for row in rows],
    }
    removed = dict((await connection.execute(_CALLS, {**these, "rows": ROWS_MAX})).one()._mapping)
    removed["messages"] = (await connection.execute(_MESSAGES, {**these, "rows": ROWS_MAX})).rowcount
    if ROWS_MAX in (removed["calls"], removed["messages"]):
        return _Step(removed, cursor)
    removed["attachments"] = (await connection.execute(_ATTACHMENTS, these)).rowcount
    last = rows[-1]
    is_end = len(rows) < SESSIONS_MAX
    return _Step(removed, None if is_end else (last.updated_at, last.tenant, last.session_id))
