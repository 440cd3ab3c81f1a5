"""What a pooler changes: wake-ups need a way past it, and nothing may stay behind on its connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.main import build_bridge, create_app
from app.settings import Settings
from app.store import wakeups as wakeups_module
from app.store.database import create_engine
from app.store.wakeups import Wakeups
from tests.pooled import pgbouncer
from tests.runner.service import Service, serving
from tests.store.rows import CONNECTIONS_MAX

pytestmark = pytest.mark.anyio

EFFECT_S_MAX = 2.0
"""No decision takes longer than this to have its effect, whatever becomes of wake-ups."""
SET_BY_POOLER = {"application_name"}
"""What PgBouncer sets itself to what the client that it serves has."""


@pytest.fixture
def own_url(pooler_program: str, migrated_url: str) -> Iterator[str]:
    """The way through a pooler whose server connections nobody used before."""
    with pgbouncer.running(pooler_program, migrated_url) as url:
        yield url


@pytest.fixture
async def own_engine(engine: AsyncEngine, own_url: str) -> AsyncIterator[AsyncEngine]:
    own = create_engine(own_url, connections_max=CONNECTIONS_MAX, is_behind_pooler=True)
    try:
        yield own
    finally:
        await own.dispose()


async def held_call(service: Service) -> tuple[str, str]:
    """Let an agent ask for a call that waits for a person; return its session and id."""
    session = service.upstream.create("gated")
    await service.register("bash")
    await service.attach(session.id)
    await service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "live")
    service.upstream.say(session.id)
    held = await service.until(f"/sessions/{session.id}/confirmations", lambda shown: shown["data"])
    return session.id, held["data"][0]["id"]


async def allowed(service: Service, session_id: str, call_id: str) -> float:
    """Allow the call and wait until its webhook has it; return how many seconds that took."""
    began = time.monotonic()
    body = {"tool_use_id": call_id, "result": "allow"}
    answer = await service.http.post(f"/sessions/{session_id}/confirm", json=body)
    assert answer.status_code == 200, answer.text
    path = f"/sessions/{session_id}/calls/{call_id}"
    await service.until(path, lambda call: call["state"] not in ("held", "queued"))
    took_s = time.monotonic() - began
    await service.until(path, lambda call: call["state"] == "posted")
    assert service.tool.called == [call_id]
    return took_s


async def test_the_direct_url_carries_wake_ups_past_the_pooler(
    own_url: str, engine: AsyncEngine, migrated_url: str
) -> None:
    settings = Settings(
        database_url=SecretStr(own_url),
        database_direct_url=SecretStr(migrated_url),
        secret_key=SecretStr("A" * 43 + "="),
        admin_key=SecretStr("an-admin-key-for-tests"),
        upstream_url="http://127.0.0.1:1",
    )
    assert settings.is_behind_pooler
    app = create_app(build_bridge(settings, own_url))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bascule") as http,
        asyncio.timeout(10),
    ):
        while (shown := (await http.get("/readyz")).json())["wakeups"] != "working":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert {"status": "ready", "database": "ok", "schema": "current", "wakeups": "working"} == shown


async def test_the_pooler_itself_carries_no_wake_up(own_engine: AsyncEngine, own_url: str) -> None:
    """C-032: listening seems to succeed; the self-test tells."""
    wakeups = Wakeups(own_url, own_engine)
    async with wakeups._listening():
        assert not await wakeups._echo_returns()
    assert not wakeups.works


async def test_without_wake_ups_everything_works_by_polling(own_engine: AsyncEngine, own_url: str) -> None:
    """C-032: whole turns, and a decision has its effect in time."""
    async with serving(own_engine, own_url) as service:
        session_id, call_id = await held_call(service)
        assert await allowed(service, session_id, call_id) < EFFECT_S_MAX
        ready = await service.http.get("/readyz")
        assert (200, "polling") == (ready.status_code, ready.json()["wakeups"])


async def test_a_decision_in_the_gap_of_a_killed_listener_waits_for_the_poll_at_most(
    engine: AsyncEngine, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-032: and nobody listens again before it has had its effect."""
    monkeypatch.setattr(wakeups_module, "BACKOFF_S_MIN", 600.0)
    monkeypatch.setattr(wakeups_module, "BACKOFF_S_MAX", 600.0)
    async with serving(engine, migrated_url) as service:
        await service.until("/readyz", lambda shown: shown["wakeups"] == "working")
        session_id, call_id = await held_call(service)
        async with engine.begin() as connection:
            killed = await connection.scalars(
                text(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where datname = current_database() and query ilike 'listen%'"
                )
            )
            assert [True] == list(killed)
        assert await allowed(service, session_id, call_id) < EFFECT_S_MAX
        assert "polling" == (await service.get("/readyz"))["wakeups"]


async def test_nothing_is_left_on_a_server_connection(
    own_engine: AsyncEngine, own_url: str, migrated_url: str
) -> None:
    """C-050: no prepared statement, setting, lock, cursor or listener, after whole turns."""
    async with serving(own_engine, migrated_url) as service:
        session_id, call_id = await held_call(service)
        await allowed(service, session_id, call_id)
        await asyncio.gather(*(service.get("/sessions") for _ in range(100)))
    found = await left_behind(own_url)
    assert pgbouncer.POOL_SIZE == len(found)
    for left in found.values():
        assert left.pop("settings") <= SET_BY_POOLER
        assert {"statements": 0, "locks": 0, "cursors": 0, "channels": 0} == left


async def left_behind(url: str) -> dict[int, dict[str, Any]]:
    """Look at what each server connection of the pooler still has, by its process id."""
    query = """
        select pg_backend_pid() as pid,
            (select count(*) from pg_prepared_statements where name <> '') as statements,
            (select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory') as locks,
            (select count(*) from pg_cursors where name <> '') as cursors,
            (select count(*) from pg_listening_channels()) as channels,
            (select array_agg(name) from pg_settings
                where source = 'session' and setting <> reset_val) as settings
    """
    connections = [await asyncpg.connect(url, statement_cache_size=0) for _ in range(pgbouncer.POOL_SIZE)]
    try:
        # Transactions that are open together have a server connection each.
        transactions = [connection.transaction() for connection in connections]
        for transaction in transactions:
            await transaction.start()
        rows = [dict(await connection.fetchrow(query)) for connection in connections]
        for transaction in transactions:
            await transaction.rollback()
    finally:
        for connection in connections:
            await connection.close()
    return {row.pop("pid"): {**row, "settings": set(row["settings"] or ())} for row in rows}
