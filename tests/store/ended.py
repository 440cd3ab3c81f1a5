"""Sessions that are over, and their age, for tests of what is removed when."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.store import tables
from tests.store.rows import add_attachment, add_call, add_message

AGES = {"sessions_days": 90, "deliveries_days": 30}
TABLES = ("attachments", "calls", "messages", "deliveries", "bodies", "callbacks", "decisions")


async def add_delivered(
    connection: AsyncConnection, call_id: str, session_id: str = "s", **values: Any
) -> None:
    """Add a posted call with a body, two attempts and a report of its tool."""
    key = {"tenant": "default", "session_id": session_id, "call_id": call_id}
    await add_call(connection, call_id, session_id=session_id, **({"state": "posted"} | values))
    await connection.execute(insert(tables.bodies).values(**key, body=b"{}"))
    await connection.execute(insert(tables.callbacks).values(**key, body=b"{}", content_type="text/plain"))
    for attempt in (1, 2):
        row = {"attempt": attempt, "replica_id": "r1", "tool": "bash", "deadline_at": text("now()")}
        await connection.execute(insert(tables.deliveries).values(**key, **row, reply=b"{}"))


async def add_session(connection: AsyncConnection, session_id: str = "s", **values: Any) -> None:
    """Add a session that ended by idleness, with a call of two deliveries, a decision and two messages."""
    row = {"status": "ended", "end_reason": "idle", "replica_id": None, "message_seq": 1} | values
    await add_attachment(connection, session_id=session_id, **row)
    await add_delivered(connection, "c1", session_id)
    decision = {"id": f"dec_{session_id}", "session_id": session_id, "call_id": "c1", "result": "allow"}
    told = {"status": "accepted", "decided_by": "k", "via": "api"}
    await connection.execute(insert(tables.decisions).values(tenant="default", **decision, **told))
    await add_message(connection, "m1", ["done"], session_id=session_id, seq=1)
    await add_message(connection, "m2", ["do"], session_id=session_id, state="partial", processed_at=None)


async def age(engine: AsyncEngine, days: float, where: str = "true") -> None:
    """Make everything of the sessions as old as this."""
    when = f"now() - interval '{days} days'"
    async with engine.begin() as connection:
        for table in ("attachments", "calls", "messages"):
            await connection.execute(text(f"update {table} set updated_at = {when} where {where}"))
        await connection.execute(text(f"update deliveries set started_at = {when} where {where}"))


async def rows(engine: AsyncEngine) -> dict[str, int]:
    async with engine.connect() as connection:
        return {
            table: await connection.scalar(text(f"select count(*) from {table}")) or 0 for table in TABLES
        }
