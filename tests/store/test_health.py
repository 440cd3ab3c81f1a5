from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import health, leases, tools
from app.store.health import Health
from tests.store.batches import column
from tests.store.rows import SECRETS

pytestmark = pytest.mark.anyio

URL = "https://tools.example/hook"


async def put(engine: AsyncEngine, name: str = "lookup", url: str = URL) -> None:
    async with engine.begin() as connection:
        await tools.put(
            connection, SECRETS, "default", name, url=url, description=None, policy={}, headers={}
        )


async def note(engine: AsyncEngine, replica_id: str, state: str, **values: Any) -> None:
    """Write the view of a replica that lives."""
    seen: dict[str, Any] = {"url": URL, "since": 1_793_282_404.0, "last_error": "timeout", "failures": 10}
    seen |= values
    async with engine.begin() as connection:
        await leases.renew(connection, replica_id)
        await health.note(connection, replica_id, "default", "lookup", seen.pop("url"), state=state, **seen)


async def of(engine: AsyncEngine, *names: str) -> dict[str, Health]:
    async with engine.connect() as connection:
        return await health.of(connection, "default", names or ["lookup"])


async def test_the_worst_view_of_the_replicas_is_shown(engine: AsyncEngine) -> None:
    await put(engine)
    await put(engine, "other")
    assert {} == await of(engine, "lookup", "other")
    await note(engine, "r1", "half_open", failures=40)
    await note(engine, "r2", "open", failures=12, last_error="connect_failed")
    await note(engine, "r3", "open", failures=11)
    seen = (await of(engine, "lookup", "other")).pop("lookup")
    assert ("open", 12, "connect_failed") == (seen.state, seen.failures, seen.last_error)
    assert seen.since is not None
    assert 1_793_282_404.0 == seen.since.timestamp()


async def test_a_view_changes_in_place_and_goes_when_it_is_well_again(engine: AsyncEngine) -> None:
    await put(engine)
    await note(engine, "r1", "open")
    await note(engine, "r1", "half_open", failures=11)
    assert ["half_open"] == [seen.state for seen in (await of(engine)).values()]
    await note(engine, "r1", "closed", url="https://tools.example/elsewhere")
    assert ["half_open"] == [seen.state for seen in (await of(engine)).values()]
    await note(engine, "r1", "closed", since=None, last_error=None, failures=0)
    assert [] == await column(engine, "tool_health", "tool")


async def test_a_replica_that_is_dead_or_gone_has_no_view(engine: AsyncEngine) -> None:
    await put(engine)
    for replica_id in ("dead", "gone", "old"):
        await note(engine, replica_id, "open")
    async with engine.begin() as connection:
        await connection.execute(text("update replicas set expires_at = now() - interval '1 s'"))
        await connection.execute(
            text("update replicas set expires_at = now() - interval '2 h' where id = 'old'")
        )
        await leases.leave(connection, "gone")
        await leases.forget_dead(connection, older_than_s=3600)
    assert {} == await of(engine)
    assert ["dead"] == await column(engine, "tool_health", "replica_id")
    assert ["dead"] == await column(engine, "replicas", "id")


@pytest.mark.parametrize("change", ["moved", "removed"])
async def test_a_view_of_another_endpoint_is_forgotten(engine: AsyncEngine, change: str) -> None:
    await put(engine)
    await note(engine, "r1", "open")
    if change == "moved":
        await put(engine, url="https://tools.example/elsewhere")
    else:
        async with engine.begin() as connection:
            await tools.remove(connection, "default", "lookup")
    assert [] == await column(engine, "tool_health", "tool")


async def test_a_view_that_comes_after_the_tool_moved_is_not_shown(engine: AsyncEngine) -> None:
    await put(engine, url="https://tools.example/elsewhere")
    await note(engine, "r1", "open")
    assert {} == await of(engine)
