"""What a call costs: `python -m bench.calls [--sessions N] [--calls N]`.

The whole service, the simulator and a receiver share this process and machine with an embedded PostgreSQL, so
calls per second is a joint figure; latency is from the moment the simulator emits a call to the moment it has
its result. Prints one JSON object. The comparison with the official runners comes with the last part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web
from pydantic import SecretStr
from sqlalchemy import text

from app.replica import replica
from app.settings import Settings
from app.simulator.script import burst
from app.simulator.server import Server, running
from app.simulator.world import World
from app.store import attachments, tools
from app.store.database import create_engine
from app.store.embedded import EmbeddedPostgres
from app.store.migrate import migrate
from app.store.secrets import Secrets
from app.store.wakeups import Wakeups
from app.webhooks.egress import Egress

TENANT = "default"
RUN_LIMIT_S = 300.0


@contextlib.asynccontextmanager
async def receiver() -> AsyncIterator[str]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"content": "done"})

    app = web.Application()
    app.router.add_post("/tool", answer)
    site = web.AppRunner(app)
    await site.setup()
    await web.TCPSite(site, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{site.addresses[0][1]}/tool"
    finally:
        await site.cleanup()


def latencies_ms(server: Server, session_id: str) -> list[float]:
    """From emission of each call to acceptance of its result, in milliseconds."""
    emitted: dict[str, int] = {}
    taken: list[float] = []
    for record in server.world.session(session_id).log:
        kind, event = record.event.get("type"), record.event
        if kind == "agent.custom_tool_use":
            emitted.setdefault(event["id"], record.at_us)
        elif kind == "user.custom_tool_result" and (begun := emitted.get(event["custom_tool_use_id"])):
            taken.append((record.at_us - begun) / 1000)
    return taken


async def measure(url: str, sessions: int, calls: int, parallel: int, retry: str) -> dict[str, Any]:
    engine = create_engine(url, connections_max=10)
    await migrate(engine)
    secrets = Secrets([os.urandom(32)])
    egress = Egress([ip_network("127.0.0.0/8")])
    async with receiver() as tool_url, running(World(seed=time.time_ns(), pace=0)) as server:
        settings = Settings(anthropic_api_key=SecretStr("any"), upstream_url=server.url)
        async with engine.begin() as connection:
            await connection.execute(
                text("insert into tenants (id) values ('default') on conflict do nothing")
            )
        wakeups = Wakeups(url, engine)
        async with wakeups.running(), replica(settings, engine, secrets, wakeups, egress):
            script = burst(calls, 0, parallel)
            ids = [server.create(script).id for _ in range(sessions)]
            async with engine.begin() as connection:
                await tools.put(
                    connection, secrets, TENANT, "lookup_order",
                    url=tool_url, description=None, policy={"retry": retry}, headers={},
                )  # fmt: skip
                for session_id in ids:
                    wanted = attachments.Settings(max_idle_s=None)
                    await attachments.attach(connection, secrets, TENANT, session_id, wanted, {})
            await server.until(lambda: server.streams.count >= sessions, limit_s=RUN_LIMIT_S)
            begun, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
            for session_id in ids:
                server.say(session_id)
            done = lambda: all(len(server.world.answers(id_)) == calls for id_ in ids)  # noqa: E731
            await server.until(done, limit_s=RUN_LIMIT_S)
            took_s = time.perf_counter() - begun
            cpu_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu
    await engine.dispose()
    taken = sorted(ms for id_ in ids for ms in latencies_ms(server, id_))
    total = sessions * calls
    return {
        "sessions": sessions,
        "calls": total,
        "parallel": parallel,
        "retry": retry,
        "calls_per_s": round(total / took_s, 1),
        "p50_ms": round(statistics.median(taken), 2),
        "p99_ms": round(taken[int(len(taken) * 0.99)], 2),
        "cpu_us_per_call_with_simulator_and_receiver": round(cpu_s / total * 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--calls", type=int, default=300, help="per session")
    parser.add_argument("--parallel", type=int, default=1, help="calls at a time in each session")
    parser.add_argument("--retry", default="connect_only", help="`safe` lets deliveries reuse connections")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bascule-bench-") as folder:
        postgres = EmbeddedPostgres(Path(folder), environ=os.environ)
        url = postgres.start()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                work = measure(url, options.sessions, options.calls, options.parallel, options.retry)
                sys.stdout.write(json.dumps(runner.run(work)) + "\n")
        finally:
            postgres.stop()


if __name__ == "__main__":
    main()
