"""A database for tests, and the rows that a runner would have written."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.store import tables
from app.store.database import create_engine
from app.store.migrate import migrate
from app.store.secrets import Secrets

SECRETS = Secrets([bytes(range(32))])
CONNECTIONS_MAX = 10


async def until(is_so: Callable[[], Awaitable[bool]], limit_s: float = 5.0) -> None:
    """Wait for a fact of the database."""
    async with asyncio.timeout(limit_s):
        while not await is_so():  # noqa: ASYNC110 - nothing in this process signals it
            await asyncio.sleep(0.01)


async def migrate_once(url: str) -> None:
    engine = create_engine(url, connections_max=2)
    try:
        await migrate(engine)
    finally:
        await engine.dispose()


@contextlib.asynccontextmanager
async def emptied(url: str) -> AsyncIterator[AsyncEngine]:
    """Yield an engine on the database, without any row."""
    engine = create_engine(url, connections_max=CONNECTIONS_MAX)
    try:
        async with engine.begin() as connection:
            # Without triggers: the audit's would keep its rows.
            await connection.execute(text("set local session_replication_role = replica"))
            for table in reversed(tables.metadata.sorted_tables):
                await connection.execute(text(f'delete from "{table.name}"'))
        yield engine
    finally:
        await engine.dispose()


async def pass_time(engine: AsyncEngine, seconds: float) -> None:
    """Let time pass for the signing secrets of the only tool: its stored times lie back by this."""
    async with engine.begin() as connection:
        row = (await connection.execute(select(tables.tools))).one()
        place = {"column": "tools.secrets", "row": (row.tenant, row.name)}
        keys = json.loads(SECRETS.decrypt(row.secrets, **place))
        for key in keys:
            key |= {name: key[name] - seconds for name in ("created_at", "expires_at") if name in key}
        sealed = SECRETS.encrypt(json.dumps(keys).encode(), **place)
        await connection.execute(update(tables.tools).values(secrets=sealed))


async def add_attachment(
    connection: AsyncConnection, tenant: str = "default", session_id: str = "sesn_1", **values: Any
) -> None:
    sealed = SECRETS.encrypt(b"{}", column="attachments.extra_headers", row=(tenant, session_id))
    row = {"settings": "{}", "extra_headers": sealed, "status": "live", "term": 1, "replica_id": "r1"}
    await connection.execute(
        insert(tables.attachments).values(tenant=tenant, session_id=session_id, **(row | values))
    )


async def add_call(
    connection: AsyncConnection,
    call_id: str,
    tenant: str = "default",
    session_id: str = "sesn_1",
    **values: Any,
) -> None:
    """Add a call held at upstream's gate, unless the values say otherwise."""
    row = {
        "kind": "builtin",
        "tool": "bash",
        "input": '{"command": "ls"}',
        "permission": "ask",
        "state": "held",
        "gate_by": "upstream",
        "gate_reason": "ask",
    }
    await connection.execute(
        insert(tables.calls).values(tenant=tenant, session_id=session_id, id=call_id, **(row | values))
    )


async def add_delivery(
    connection: AsyncConnection,
    call_id: str,
    tenant: str = "default",
    session_id: str = "sesn_1",
    **values: Any,
) -> None:
    """Add a delivery under way, unless the values say otherwise."""
    row = {"attempt": 1, "replica_id": "r1", "tool": "bash", "url": "https://tools.example/hook"}
    row |= {"deadline_at": datetime.now(UTC)}
    await connection.execute(
        insert(tables.deliveries).values(
            tenant=tenant, session_id=session_id, call_id=call_id, **(row | values)
        )
    )


async def add_message(
    connection: AsyncConnection,
    message_id: str,
    texts: Sequence[str] = (),
    tenant: str = "default",
    session_id: str = "sesn_1",
    **values: Any,
) -> None:
    """Add a final message of text blocks, unless the values say otherwise."""
    content = json.dumps([{"type": "text", "text": one} for one in texts])
    row = {"content": content, "term": 1, "state": "final", "processed_at": "2026-11-30T12:00:00Z"}
    await connection.execute(
        insert(tables.messages).values(tenant=tenant, session_id=session_id, id=message_id, **(row | values))
    )
