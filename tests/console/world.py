"""Everything at once, for the browser: a fleet, a simulated agent, a tool, and calls that wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server, running
from app.simulator.world import World
from tests.console.service import Site, serving
from tests.runner.receiver import Delivery, receiving

WAIT_LIMIT_S = 20.0
OPS = [
    {"name": "bash", "input": {"command": "rm -rf /srv/reports/2026-0[1-9]\nls /srv/reports", "timeout": 30}},
    {
        "name": "write",
        "input": {
            "file_path": "/srv/notes/cleanup.md",
            "content": "# Cleaned up\n\n- all but report\u202efdp.exe",
        },
    },
    {"name": "web_fetch", "input": {"url": "https://ex\u0430mple.com/export?to=mallory"}},
]


@dataclass(frozen=True)
class Desk:
    """An order desk: its session `orders` waits with one call of bash, and can ask for more."""

    site: Site
    upstream: Server
    orders: str

    async def held(self, count: int) -> None:
        """Wait until so many calls wait for a person."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while len((await self.site.http.get("/confirmations")).json()["data"]) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def more(self) -> str:
        """Let another session ask for three things at once; return its id."""
        calls = [{"tool": "builtin", "permission": "ask", **call} for call in OPS]
        said = "The backup job failed again. I will clear the old reports and write a note."
        steps: list[Any] = [{"do": "message", "text": said}, {"do": "call", "calls": calls}, {"do": "end"}]
        scenario = {"name": "ops", "environment": "self_hosted", "turns": [{"steps": steps}]}
        session_id: str = self.upstream.create(scenario).id
        await attach(self.site, session_id, "ops")
        self.upstream.say(session_id, "The disk of the report server is full.")
        return session_id


async def attach(site: Site, session_id: str, team: str) -> None:
    body = {"max_idle_s": None, "labels": {"team": team}}
    assert (await site.http.post(f"/sessions/{session_id}/attach", json=body)).status_code == 202


@contextlib.asynccontextmanager
async def desk(engine: AsyncEngine, url: str, *, pace: float = 0.3) -> AsyncIterator[Desk]:
    async def answer(delivery: Delivery) -> web.StreamResponse:
        words = {"lookup_order": "order A-1042 is 9 days late; 49.90 EUR were paid."}
        return web.json_response({"content": words.get(delivery.data["tool"], "refunded 49.90 EUR.")})

    async with (
        running(World(pace=pace)) as upstream,
        receiving() as tool,
        serving(engine, url, upstream_url=upstream.url) as site,
    ):
        tool.reply = answer
        for name in ("bash", "lookup_order"):
            body = {"url": tool.url, "description": "The order desk’s own service.", "expires_in_s": 7200}
            tool.secrets.append((await site.http.put(f"/tools/{name}", json=body)).json()["signing_secret"])
        orders = upstream.create("demo").id
        await attach(site, orders, "orders")
        upstream.say(orders, "Where is order A-1042? Refund it if it is late.")
        yield Desk(site, upstream, orders)
