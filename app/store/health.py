"""The health of tools: each replica's view, written when it changes, and what they come to together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import outbox, tables

_BADNESS: Final = {"half_open": 1, "open": 2}

_health = tables.tool_health


@dataclass(frozen=True, slots=True)
class Health:
    """How a tool's endpoint is seen. `since` is the first failure after the last success."""

    state: str = "closed"
    since: datetime | None = None
    last_error: str | None = None
    failures: int = 0


async def note(
    connection: AsyncConnection,
    replica_id: str,
    tenant: str,
    tool: str,
    url: str,
    *,
    state: str,
    since: float | None,
    last_error: str | None,
    failures: int,
) -> None:
    """Write the replica's view of the tool; `since` is in seconds since 1970. A closed one leaves no row.

    Subscribers are told when the first living replica sees it down, and when the last one sees it well.
    """
    t = tables.tools
    # Replicas that see it go down, or come back, at the same time tell it one after the other.
    await connection.execute(
        select(t.c.name).where(t.c.tenant == tenant, t.c.name == tool).with_for_update(key_share=True)
    )
    moment = None if since is None else datetime.fromtimestamp(since, UTC).isoformat(timespec="milliseconds")
    told = {
        "tool": tool, "state": state, "since": moment and moment.replace("+00:00", "Z"),
        "last_error": last_error, "failures": failures,
    }  # fmt: skip
    if state == "closed":
        is_mine = (
            _health.c.tenant == tenant, _health.c.tool == tool,
            _health.c.replica_id == replica_id, _health.c.url == url,
        )  # fmt: skip
        gone = await connection.execute(delete(_health).where(*is_mine))
        if gone.rowcount and tool not in await of(connection, tenant, [tool]):
            await outbox.put(connection, tenant, "tool.unhealthy", told)
        return
    if state == "open" and tool not in await of(connection, tenant, [tool]):
        await outbox.put(connection, tenant, "tool.unhealthy", told)
    values = {
        "url": url, "state": state, "since": func.to_timestamp(since), "last_error": last_error,
        "failures": failures, "updated_at": func.now(),
    }  # fmt: skip
    await connection.execute(
        upsert(_health)
        .values(tenant=tenant, tool=tool, replica_id=replica_id, **values)
        .on_conflict_do_update(index_elements=["tenant", "tool", "replica_id"], set_=values)
    )


async def of(connection: AsyncConnection, tenant: str, names: Collection[str]) -> dict[str, Health]:
    """Return the tools that a living replica sees as down, each by the worst view: the rest are well."""
    t, r = tables.tools, tables.replicas
    rows = await connection.execute(
        select(_health.c.tool, _health.c.state, _health.c.since, _health.c.last_error, _health.c.failures)
        .join(t, (t.c.tenant == _health.c.tenant) & (t.c.name == _health.c.tool) & (t.c.url == _health.c.url))
        .join(r, r.c.id == _health.c.replica_id)
        .where(_health.c.tenant == tenant, _health.c.tool.in_(names), r.c.expires_at > func.now())
    )
    merged: dict[str, Health] = {}
    for row in rows:
        view = Health(row.state, row.since, row.last_error, row.failures)
        known = merged.get(row.tool)
        if known is None or _rank(view) > _rank(known):
            merged[row.tool] = view
    return merged


def _rank(health: Health) -> tuple[int, int]:
    return _BADNESS.get(health.state, 0), health.failures
