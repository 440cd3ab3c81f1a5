"""What one hanging endpoint costs the others: `python -m bench.isolation [--queued N] [--rounds N]`.

One tenant has two tools on one machine. Calls of `lookup` are measured alone, and while calls of `stuck`,
whose endpoint takes requests and never answers, hold every slot of that tool with the rest queued behind. The
two kinds of rounds take turns in one run. Prints one JSON object: the medians of the rounds' percentiles and
the ratio of the p99s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import uvloop
from aiohttp import web
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.replica import replica
from app.settings import Settings
from app.simulator.server import Server, running
from app.simulator.world import World
from app.store import attachments, tools
from app.store.database import create_engine
from app.store.embedded import EmbeddedPostgres
from app.store.migrate import migrate
from app.store.secrets import Secrets
from app.store.wakeups import Wakeups
from app.webhooks.egress import Egress
from bench.calls import latencies_ms

TENANT: Final = "default"
LIMIT_S: Final = 120.0
STUCK_CALLS: Final = 50
"""How many calls of the hanging tool one session makes."""
SLOTS: Final = tools.Tool("stuck", "").concurrency
SESSIONS: Final = 10
CALLS: Final = 40


def script(tool: str, calls: int, parallel: int) -> dict[str, Any]:
    """One turn of so many calls of a tool."""
    call = {"tool": "custom", "name": tool, "input": {}}
    steps = [{"do": "call", "calls": [call] * parallel} for _ in range(calls // parallel)]
    return {"name": tool, "environment": "self_hosted", "turns": [{"steps": [*steps, {"do": "end"}]}]}


@dataclass
class Stage:
    """The service with its simulator, and how many requests hang at the endpoint of `stuck`."""

    engine: AsyncEngine
    secrets: Secrets
    server: Server
    hanging: list[web.Request]

    async def attach(self, scenario: dict[str, Any], count: int, concurrency: int) -> list[str]:
        """Attach so many sessions of a scenario; return their ids once they stream."""
        ids = [self.server.create(scenario).id for _ in range(count)]
        before = self.server.streams.count
        async with self.engine.begin() as connection:
            for session_id in ids:
                wanted = attachments.Settings(max_idle_s=None, concurrency=concurrency)
                await attachments.attach(connection, self.secrets, TENANT, session_id, wanted, {})
        await self.server.until(lambda: self.server.streams.count >= before + count, limit_s=LIMIT_S)
        return ids

    async def all_slots_hang(self) -> None:
        """Wait until the hanging tool has every delivery that it may have at once."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.hanging) < SLOTS:  # noqa: ASYNC110 - the endpoint has no event to set
                await asyncio.sleep(0.05)

    async def round(self) -> list[float]:
        """Let new sessions call `lookup`; return each call's milliseconds."""
        ids = await self.attach(script("lookup", CALLS, 4), SESSIONS, 8)
        for session_id in ids:
            self.server.say(session_id)
        answers = self.server.world.answers
        await self.server.until(lambda: all(len(answers(id_)) == CALLS for id_ in ids), limit_s=LIMIT_S)
        return sorted(ms for id_ in ids for ms in latencies_ms(self.server, id_))


@contextlib.asynccontextmanager
async def staged(url: str) -> AsyncIterator[Stage]:
    engine = create_engine(url, connections_max=10)
    async with engine.begin() as connection:  # the last stage's sessions have lost their upstream
        await connection.execute(text("drop schema public cascade"))
        await connection.execute(text("create schema public"))
    await migrate(engine)
    async with engine.begin() as connection:
        await connection.execute(text("insert into tenants (id) values ('default') on conflict do nothing"))
    secrets, hanging = Secrets([os.urandom(32)]), list[web.Request]()

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"content": "done"})

    async def hang(request: web.Request) -> web.Response:
        hanging.append(request)
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    app = web.Application()
    app.router.add_post("/lookup", answer)
    app.router.add_post("/stuck", hang)
    site = web.AppRunner(app, shutdown_timeout=0.1)
    await site.setup()
    await web.TCPSite(site, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{site.addresses[0][1]}"
    async with running(World(seed=time.time_ns(), pace=0)) as server:
        settings = Settings(anthropic_api_key=SecretStr("any"), upstream_url=server.url)
        wakeups = Wakeups(url, engine)
        egress = Egress([ip_network("127.0.0.0/8")])
        async with wakeups.running(), replica(settings, engine, secrets, wakeups, egress):
            for name in ("lookup", "stuck"):
                policy = {"timeout_s": 600.0, "retry": "never"}
                async with engine.begin() as connection:
                    await tools.put(
                        connection, secrets, TENANT, name,
                        url=f"{base}/{name}", description=None, policy=policy, headers={},
                    )  # fmt: skip
            yield Stage(engine, secrets, server, hanging)
            await site.cleanup()
    await engine.dispose()


async def measure(url: str, queued: int, rounds: int) -> dict[str, Any]:
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    for _ in range(rounds):
        async with staged(url) as stage:
            alone.append(await stage.round())
            stuck = script("stuck", STUCK_CALLS, STUCK_CALLS)
            ids = await stage.attach(stuck, -(-queued // STUCK_CALLS), STUCK_CALLS)
            for session_id in ids:
                stage.server.say(session_id)
            await stage.all_slots_hang()
            beside.append(await stage.round())
            assert len(stage.hanging) == SLOTS, "the hanging tool has more than its slots"
    figures = {
        name: {f"p{share}_ms": _median(taken, share) for share in (50, 99)}
        for name, taken in (("alone", alone), ("beside_a_hanging_endpoint", beside))
    }
    ratio = figures["beside_a_hanging_endpoint"]["p99_ms"] / figures["alone"]["p99_ms"]
    return {"queued": queued, "hanging": SLOTS, "rounds": rounds, "calls_per_round": SESSIONS * CALLS,
            **figures, "p99_ratio": round(ratio, 2)}  # fmt: skip


def _median(rounds: list[list[float]], share: int) -> float:
    return round(statistics.median(taken[len(taken) * share // 100] for taken in rounds), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queued", type=int, default=1000, help="calls of the hanging tool")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bascule-bench-") as folder:
        postgres = EmbeddedPostgres(Path(folder), environ=os.environ)
        url = postgres.start()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                work = measure(url, options.queued, options.rounds)
                sys.stdout.write(json.dumps(runner.run(work)) + "\n")
        finally:
            postgres.stop()


if __name__ == "__main__":
    main()
