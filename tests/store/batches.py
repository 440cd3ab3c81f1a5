"""Values that batches carry, for tests of what the store makes of them."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.calls import Call
from app.core.protocol import Snapshot
from app.core.tools import SigningSecret, Tool
from app.store.leases import Lease
from tests.store.rows import add_attachment

MINE = Lease("default", "sesn_1", 1)
OTHER = Lease("default", "sesn_2", 1)


async def held_by_r1(engine: AsyncEngine, *leases: Lease) -> None:
    async with engine.begin() as connection:
        for lease in leases:
            await add_attachment(connection, lease.tenant, lease.session_id, term=lease.term)


async def column(engine: AsyncEngine, table: str, expression: str, order: str = "1") -> list[Any]:
    async with engine.connect() as connection:
        found = await connection.scalars(text(f"select {expression} from {table} order by {order}"))
        return list(found.all())


def a_call(call_id: str, **values: Any) -> Call:
    row: dict[str, Any] = {"kind": "custom", "tool": "lookup", "input": b'{"a":1}', "state": "queued"}
    return Call(call_id, **(row | values))


def a_tool(**values: Any) -> Tool:
    return Tool("lookup", "https://tool.example", (SigningSecret(b"k"),), **values)


def final(message_id: str, text_: str = "done") -> Snapshot:
    return Snapshot(message_id, "final", _content(text_), processed_at="2026-11-30T12:00:00Z")


def partial(message_id: str, text_: str = "do") -> Snapshot:
    return Snapshot(message_id, "partial", _content(text_))


def _content(text_: str) -> bytes:
    return json.dumps([{"type": "text", "text": text_}]).encode()
