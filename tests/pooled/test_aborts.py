"""Requests that are cut off at any point leave no connection and no transaction behind."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store.database import create_engine
from tests.pooled import pgbouncer
from tests.runner.service import Service, serving
from tests.store.rows import CONNECTIONS_MAX, add_attachment, add_call, emptied, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

REQUESTS = 1000
AT_ONCE = 30
SEED = 7
SPANS = (0.1, 1, 20)
"""Up to how many times the duration of the slowest request one is let go on; cutting off slows the others."""


@pytest.mark.parametrize("is_pooled", [True, False])
async def test_a_thousand_aborted_requests_leave_nothing_checked_out(
    migrated_url: str, pooler_program: str, is_pooled: bool
) -> None:
    """C-031: some are cut off twice, in the middle of their clean-up too.

    An old pooler ends itself meanwhile and is started again: the service outlives that too.
    """
    async with emptied(migrated_url) as direct:
        if not is_pooled:
            await abort_requests(direct, migrated_url)
            return
    with pgbouncer.running(pooler_program, migrated_url, is_kept=True) as url:
        pooled = create_engine(url, connections_max=CONNECTIONS_MAX, is_behind_pooler=True)
        try:
            await abort_requests(pooled, migrated_url)
        finally:
            await pooled.dispose()


async def abort_requests(engine: AsyncEngine, url: str) -> None:
    chance = random.Random(SEED)
    async with serving(engine, url) as service:
        async with engine.begin() as connection:
            await add_attachment(connection, session_id="sesn_held", replica_id=None, status="detached")
            await add_attachment(connection, session_id="sesn_1", replica_id=None, status="detached")
            await add_call(connection, "tu1")
        span_s = await slowest(service)
        gate = asyncio.Semaphore(AT_ONCE)
        endings = await asyncio.gather(
            *(
                aborted(
                    service, gate, number, chance.uniform(0, chance.choice(SPANS) * span_s), chance.random()
                )
                for number in range(REQUESTS)
            )
        )
        # Otherwise they were cut off too late, or too early, to say anything.
        assert 200 < endings.count("cut") < REQUESTS
        await until(lambda: is_idle(engine), limit_s=15.0)
        # Every connection of the pool can still be had.
        together = [await engine.connect() for _ in range(CONNECTIONS_MAX)]
        for connection in together:
            await connection.close()
        assert (await service.http.get("/sessions")).status_code == 200


async def slowest(service: Service) -> float:
    """Return how many seconds the slowest of as many requests takes, after the first of each kind."""

    async def timed(number: int) -> float:
        began = time.monotonic()
        await request(service.http, number)
        return time.monotonic() - began

    for _ in range(2):
        took = await asyncio.gather(*(timed(number) for number in range(AT_ONCE)))
    return max(took)


async def aborted(service: Service, gate: asyncio.Semaphore, number: int, when_s: float, twice: float) -> str:
    """Send a request and cut it off after a while, one in three a second time soon after."""
    async with gate:
        task = asyncio.create_task(request(service.http, number))
        await asyncio.wait([task], timeout=when_s)
        if task.cancel() and twice < 1 / 3:
            for _ in range(int(twice * 30)):
                await asyncio.sleep(0)
            task.cancel()
        ended = (await asyncio.gather(task, return_exceptions=True))[0]
        assert isinstance(ended, httpx.Response | asyncio.CancelledError), ended
        return "cut" if isinstance(ended, asyncio.CancelledError) else "answered"


async def request(http: httpx.AsyncClient, number: int) -> httpx.Response:
    match number % 8:
        case 0:
            return await http.get("/sessions")
        case 1:
            return await http.get("/sessions/sesn_1")
        case 2:
            return await http.get("/confirmations")
        case 3:
            return await http.get("/sessions/sesn_1/text")
        case 4:
            return await http.put(f"/tools/t{number % 5}", json={"url": "https://tool.example/"})
        case 5:
            body = {"tool_use_id": f"tu{number % 3}", "result": "allow"}
            return await http.post("/sessions/sesn_1/confirm", json=body)
        case 6:
            return await http.post(f"/sessions/sesn_new{number}/attach", json={})
        case _:
            return await http.post(f"/sessions/sesn_new{number - 1}/detach")


async def is_idle(engine: AsyncEngine) -> bool:
    """Whether no connection is out, and no session is in a transaction but the one that looks."""
    checked_out: int = engine.pool.checkedout()  # type: ignore[attr-defined]
    if checked_out:
        return False
    async with engine.connect() as connection:
        busy = await connection.scalar(
            text(
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and pid <> pg_backend_pid() and (state like 'idle in transaction%'"
                " or state = 'active' and xact_start < now() - interval '1 second')"
            )
        )
    return not busy
