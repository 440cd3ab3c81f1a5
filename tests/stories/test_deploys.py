"""Deploys are quiet: rolling restarts under load with real processes, and one stop at a bad moment."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import running
from app.simulator.world import World
from app.store.database import create_engine
from bench.chaos import Options, run_fault
from tests.runner.receiver import receiving
from tests.runner.scripts import Gate, custom, in_state, live, results, turn
from tests.runner.service import Service, replicating

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

RESTARTS = 10
STOP_LIMIT_S = 40.0


async def test_ten_rolling_restarts_tell_no_agent_that_a_tool_may_have_run() -> None:
    """D-026: leases are taken over within 5 s, and every delivery under way finishes and is posted."""
    options = Options(replicas=2, sessions=12, calls_per_s=12.0, restarts=RESTARTS, settle_s=60.0)
    report = await run_fault("deploys", options)
    assert {} == report["violations"], json.dumps(report, indent=1)
    assert 0 == report["counts"].get("told_may_have_run", 0)
    assert RESTARTS == report["handover"]["all_leased_s"]["count"]


async def test_a_delivery_that_waits_for_its_slot_at_a_stop_is_made_by_the_next_replica(
    engine: AsyncEngine, migrated_url: str
) -> None:
    """D-026: the successor has read the call as dispatched before it learns that nothing had left."""
    async with receiving() as tool, running(World(pace=0)) as upstream:
        session = upstream.create(turn(custom("lookup", "lookup")))
        tool.reply = gate = Gate()

        async def serving(started: asyncio.Future[Service], stop: asyncio.Event) -> None:
            own = create_engine(migrated_url, connections_max=6)
            async with replicating(own, migrated_url, upstream.url) as http:
                started.set_result(Service(http, upstream, tool, engine))
                await stop.wait()

        async with contextlib.AsyncExitStack() as stack:

            async def replica() -> tuple[Service, asyncio.Event, asyncio.Task[None]]:
                started: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
                stop = asyncio.Event()
                task = asyncio.create_task(serving(started, stop))
                stack.push_async_callback(asyncio.wait, [task], timeout=STOP_LIMIT_S)
                stack.callback(stop.set)
                stack.callback(gate.open)
                return await started, stop, task

            first, stop, _ = await replica()
            await first.register("lookup", concurrency=1, retry="never")
            await live(first, session.id)
            upstream.say(session.id)
            await in_state(first, session.id, "dispatched", "dispatched")
            await tool.until(lambda: gate.inside)
            stop.set()
            await upstream.until(lambda: upstream.streams.count == 0)
            second, _, _ = await replica()
            await second.until(f"/sessions/{session.id}", lambda s: s["status"] == "live" and s["term"] == 2)
            gate.open()
            calls = await in_state(second, session.id, "posted", "posted")
        assert [False, False] == [call["outcome_unknown"] for call in calls]
        assert 2 == len(tool.called) == len(set(tool.called))
        assert [1, 1] == [len(one) for one in results(upstream, session.id).values()]
