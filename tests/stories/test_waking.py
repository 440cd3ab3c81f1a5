"""Sessions that nobody attaches, told of by webhooks that come twice, out of order, or never."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.hooks import HookPlan, hooking
from app.simulator.server import Server, running
from app.simulator.world import World
from tests.console.service import Site, serving
from tests.runner.receiver import receiving
from tests.runner.scripts import results

pytestmark = pytest.mark.anyio

KEY = "whsec_" + base64.b64encode(b"k" * 32).decode()
SESSIONS = 10
TURNS = 2
POLL_S = 0.05
LIMIT_S = 45.0


def answered(upstream: Server, session_ids: list[str], turns: int) -> bool:
    return all(len(results(upstream, id_)) >= turns for id_ in session_ids)


async def all_asleep(site: Site) -> None:
    """Wait until nothing is served any more: every session ended by idleness."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            shown: Any = (await site.http.get("/sessions?limit=200")).json()["data"]
            if shown and all(one["end_reason"] == "idle" for one in shown):
                return
            await asyncio.sleep(POLL_S)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("lost", [0.0, 0.5])
async def test_no_turn_is_missed_by_sessions_that_attach_themselves(
    engine: AsyncEngine, migrated_url: str, lost: float
) -> None:
    """The list, read every second here, stands behind the webhooks that are lost."""
    async with (
        receiving() as tool,
        running(World(pace=0)) as upstream,
        serving(engine, migrated_url, upstream_url=upstream.url, sweep_s=1.0 if lost else 0.0) as site,
    ):
        registered = await site.http.put("/tools/lookup_order", json={"url": tool.url})
        tool.secrets.append(registered.json()["signing_secret"])
        body = {"type": "api_key", "secret": "sk-two", "webhook_signing_key": KEY}
        assert (await site.http.put("/credentials/hooked", json=body)).status_code == 201
        settings = {"credential": "hooked", "max_idle_s": 0.2}
        await site.http.put("/attach-rules/all", json={"settings": settings})
        plan = HookPlan(f"{site.base}/hooks/anthropic", KEY, lost=lost, twice=0.5, shuffle_s=0.2, seed=7)
        async with hooking(upstream.world, plan) as hooks:
            ids = [upstream.create("custom").id for _ in range(SESSIONS)]
            for turn in range(1, TURNS + 1):
                for session_id in ids:
                    upstream.say(session_id)
                await upstream.until(lambda turn=turn: answered(upstream, ids, turn), limit_s=LIMIT_S)
                await all_asleep(site)
            assert hooks.sent
        assert dict.fromkeys(ids, TURNS) == {i: len(results(upstream, i)) for i in ids}
        calls = {delivery.id for delivery in tool.deliveries}
        assert len(tool.deliveries) == len(calls) == SESSIONS * TURNS
