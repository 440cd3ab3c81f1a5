"""D-090: what a statement reads does not grow with what is over, counted in the server's buffers.

Each operation is carried out once for its statements, which are then explained as they are carried out again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from sqlalchemy import event, insert, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.core.calls import Gate, Result
from app.core.notifications import EVENTS
from app.core.protocol import Progress
from app.store import (
    attachments,
    calls,
    decisions,
    deliveries,
    messages,
    notifications,
    precedents,
    reminders,
    runs,
    tables,
)
from app.store.batches import AttemptEnd, AttemptStart, Batch, write
from app.store.calls import Filter
from app.store.leases import Lease, claim, renew
from tests.store.batches import a_call, a_tool, final, partial
from tests.store.rows import SECRETS, add_attachment, add_call, emptied

FEW, MANY = 100, 20_000
OTHERS: Final = 20
LEASE: Final = Lease("default", "sesn_1", 1)
KEY: Final = ("default", "sesn_1")

Operation = Callable[[AsyncConnection, int], Awaitable[Any]]
"""Something that a run or a request does with the database, when so much is over."""


async def _write(connection: AsyncConnection, *batches: Batch) -> None:
    assert not await write(connection, "r1", batches)


def _first() -> Batch:
    held = a_call("new2", state="held", gate=Gate("upstream", "ask", "ask"), permission="ask")
    return Batch(
        LEASE,
        calls=[a_call("new1", state="dispatched", attempts=1), held],
        bodies=[("new1", b"{}", None)],
        started=[AttemptStart("new1", 1, a_tool())],
        messages=[partial("mnew")],
        progress=Progress("live", cursor_at=7.0),
        has_events=True,
    )


def _last() -> Batch:
    posted = a_call("new1", state="posted", attempts=1, result=Result(b"[]", is_error=False), posted=True)
    return Batch(
        LEASE,
        calls=[posted],
        ended=[AttemptEnd("new1", 1, 200, None, b"{}")],
        messages=[final("mnew")],
        dropped=["mgone"],
        progress=Progress("live", cursor_at=8.0),
        has_events=True,
        wish_seen=1,
    )


async def _tell(connection: AsyncConnection) -> None:
    """A start with an end of another call, told to a subscription."""
    row = {"tenant": "default", "name": "s", "url": "https://hooks.example", "secret": b"", "headers": b""}
    await connection.execute(insert(tables.subscriptions).values(**row, events=sorted(EVENTS)))
    await _write(connection, _first())
    await _write(connection, _last())


OPERATIONS: Final[dict[str, Operation]] = {
    "commit a call's start": lambda c, n: _write(c, _first()),
    "commit a call's end": lambda c, n: _write(c, _last()),
    "commit both and tell": lambda c, n: _tell(c),
    "look for notifications": lambda c, n: notifications.claim(c, SECRETS, "r1", 50),
    "load a run": lambda c, n: runs.load(c, SECRETS, LEASE),
    "recall calls": lambda c, n: runs.recall(c, LEASE, ["c1", f"c{n}"]),
    "read decisions": lambda c, n: runs.decided(c, LEASE),
    "read wishes": lambda c, n: runs.wishes(c, "r1"),
    "read expiries": lambda c, n: decisions.due(c, "r1", 200),
    "remind": lambda c, n: reminders.remind(c, "r1", 200),
    "read orphans": lambda c, n: runs.orphans(c, LEASE, ["open1"]),
    "renew": lambda c, n: renew(c, "r1"),
    "claim": lambda c, n: claim(c, "r2", 50),
    "GET session": lambda c, n: attachments.get(c, *KEY),
    "GET sessions": lambda c, n: attachments.page(c, "default", after=None, limit=50),
    "GET confirmations": lambda c, n: calls.waiting(c, "default", after=0, limit=50),
    "GET confirmations of a session": lambda c, n: calls.waiting(
        c, "default", session_id="sesn_1", after=0, limit=50
    ),
    "GET confirmations with every filter": lambda c, n: calls.waiting(
        c, "default", after=0, limit=50, only=Filter("bash", "ask", 0.0, "admin")
    ),
    "show how a tool was decided": lambda c, n: precedents.of_tools(c, "default", ["t", "other"]),
    "show how an input was decided": lambda c, n: precedents.of_inputs(c, "default", [("t", "sha256:1")]),
    "GET call": lambda c, n: calls.get(c, *KEY, "open1"),
    "GET deliveries": lambda c, n: deliveries.of_call(c, *KEY, "c1"),
    "GET deliveries of a tool": lambda c, n: deliveries.of_tool(c, "default", "t", before=None, limit=50),
    "GET failed deliveries of a tool": lambda c, n: deliveries.of_tool(
        c, "default", "t", before=(datetime.now(UTC), "", "", 0), limit=50, only_failed=True
    ),
    "GET text after the last": lambda c, n: messages.finals(c, *KEY, after_seq=n - 2, limit=50),
    "GET previews": lambda c, n: messages.partials(c, *KEY),
    "GET message": lambda c, n: messages.get(c, *KEY, "m1"),
    "POST confirm": lambda c, n: decisions.decide(
        c, *KEY, "open1", result="allow", deny_message=None, by="k", via="api"
    ),
    "POST detach": lambda c, n: attachments.detach(c, *KEY),
}
GROWS: Final[dict[str, str]] = {}
"""What is known to read more and more, and why. An operation that is mended must leave this list."""


LOOKUPS: Final = {"GET sessions": 3 * (1 + OTHERS)}
"""What looking up several rows may touch; when few are over, reading a small table as a whole is less."""

ROWS: Final = (
    """calls (tenant, session_id, id, kind, tool, input, state, result)
    select 'default', s, 'c' || n, 'custom', 't', repeat('x', 200), 'posted', '[]'""",
    """messages (tenant, session_id, id, state, content, term, seq)
    select 'default', s, 'm' || n, 'final', repeat('x', 200), 1, n""",
    """deliveries (tenant, session_id, call_id, attempt, replica_id, tool, deadline_at, started_at, code)
    select 'default', s, 'c' || n, 1, 'r', 't', now(), now() - make_interval(secs => n), 'timeout'""",
    """audit (tenant, sequence, at, kind, actor, via, session_id, call_id, subject, input_digest, result,
    previous, hash) select 'default', coalesce((select max(sequence) from audit), 1000000)
    + row_number() over (), now(), 'decision.recorded', 'k', 'api', s, 'c' || n,
    case n % 2 when 0 then 't' else 'u' end, 'sha256:' || n % 7, 'allow', '', ''""",
    "bodies (tenant, session_id, call_id, body) select 'default', s, 'c' || n, 'x'",
)
"""What is over: of each session `s` and number `n` a row of each kind."""


@pytest.fixture(scope="module")
def buffers(migrated_url: str) -> dict[str, tuple[int, int]]:
    """How many buffers each operation touches when few and when many calls and messages are over."""
    few, many = (asyncio.run(_measured(migrated_url, size)) for size in (FEW, MANY))
    return {name: (few[name], many[name]) for name in OPERATIONS}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=GROWS[name])) if name in GROWS else name
        for name in OPERATIONS
    ],
)
def test_what_is_over_costs_nothing_any_more(buffers: dict[str, tuple[int, int]], name: str) -> None:
    """D-090: two hundred times as much of it adds a level or so to each index, and no more."""
    few, many = buffers[name]
    assert many <= 3 * max(few, LOOKUPS.get(name, 0)) + 20


async def _measured(url: str, size: int) -> dict[str, int]:
    async with emptied(url) as engine:
        await _fill(engine, size)
        return {name: await _buffers(engine, operation, size) for name, operation in OPERATIONS.items()}


async def _fill(engine: AsyncEngine, size: int) -> None:
    """One session with so many finished calls and messages and two open calls; others that share as many."""
    async with engine.begin() as connection:
        await renew(connection, "r1")
        for session_id in ("sesn_1", *(f"other{number}" for number in range(OTHERS))):
            await add_attachment(connection, session_id=session_id, message_seq=size, wish_seen=1)
        of_mine = f"select 'sesn_1' as s, n from generate_series(1, {size}) n"
        of_others = f"select 'other' || n % {OTHERS}, n from generate_series(1, {size}) n"
        for of in (of_mine, of_others):
            for insert in ROWS:
                await connection.execute(text(f"insert into {insert} from ({of}) w(s, n)"))
        await add_call(connection, "open1", gate_remind_after_s=60.0, gate_remind_at=text("now()"))
        await add_call(connection, "open2", state="dispatched")
        await connection.execute(text("update calls set result = null where id in ('open1', 'open2')"))
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text("vacuum analyze"))


async def _buffers(engine: AsyncEngine, operation: Operation, size: int) -> int:
    told: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        told.append((statement, parameters))

    async with engine.connect() as connection:
        if operation is OPERATIONS["commit a call's end"]:
            await _write(connection, _first())
        await connection.begin_nested()
        event.listen(engine.sync_engine, "before_cursor_execute", note)
        try:
            await operation(connection, size)
        finally:
            event.remove(engine.sync_engine, "before_cursor_execute", note)
        await connection.execute(text("rollback to savepoint sa_savepoint_1"))
        plans = [await _plan(connection, statement, parameters) for statement, parameters in told]
        await connection.rollback()
    assert plans
    return sum(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in plans)


async def _plan(connection: AsyncConnection, statement: str, parameters: Any) -> dict[str, Any]:
    explained = f"explain (analyze, buffers, timing off, format json) {statement}"
    rows = await connection.exec_driver_sql(explained, parameters)
    told = rows.scalar_one()
    plan: dict[str, Any] = (told if isinstance(told, list) else json.loads(told))[0]["Plan"]
    return plan
