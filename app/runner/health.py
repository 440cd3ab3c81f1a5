"""Stores how this replica sees a tool's endpoint."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncEngine

from app.logs import logger
from app.store.database import is_unavailable
from app.store.health import note
from app.webhooks.health import Health

log = logger(__name__)


async def store_health(engine: AsyncEngine, replica_id: str, tenant: str, tool: str, health: Health) -> bool:
    """Store the replica's view; return False when the database is away."""
    try:
        async with engine.begin() as connection:
            await note(
                connection, replica_id, tenant, tool, health.url, state=health.state, since=health.since,
                last_error=health.last_error, failures=health.failures,
            )  # fmt: skip
    except Exception as error:
        if not is_unavailable(error):
            raise
        log.warning("tool_health_not_stored", tool=tool, state=health.state, error=repr(error))
        return False
    return True
