"""What a replica and its database need: `python -m bench.sizing [--sessions N] [--calls N] [--for-s S]`.

One `serve` process, the simulator, a tool, and so many attached sessions: first nothing happens, then every
one makes so many calls, one after the other, without a pause. Prints one JSON object: memory of the replica
empty, with the sessions and after their calls; its CPU while they are idle, as a share of one core; and of
each call its CPU, its PostgreSQL's, and the room that it takes in the database, indexes included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import uvloop
from aiohttp import web

from app.simulator.script import burst
from app.simulator.server import running
from app.simulator.world import World
from bench.load import attach
from bench.readers import cpu_s, rss_mb
from bench.stage import staged, until_async

LIMIT_S: Final = 600.0
SIZE: Final = "select pg_database_size(current_database()) as n"
POSTED: Final = "select count(*) as n from calls where state = 'posted'"


@contextlib.asynccontextmanager
async def answering() -> AsyncIterator[str]:
    """Lend the URL of a tool that answers at once."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"content": "order A-1042 has shipped"})

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def run(folder: Path, sessions: int, calls: int, for_s: float) -> dict[str, Any]:
    world = World(seed=time.time_ns(), pace=0)
    async with running(world) as server, answering() as tool, staged(folder, server.url) as stage:
        replica = await stage.add()
        process = Path(f"/proc/{replica.process.pid}")
        status, shown = await stage.request("PUT", "/tools/lookup_order", {"url": tool})
        assert status == 201, shown
        empty_mb = rss_mb(process)

        made = [server.create(burst(calls, 0, parallel=1)) for _ in range(sessions)]
        await attach(stage, server, made, limit_s=LIMIT_S)
        began, idle_s = time.perf_counter(), cpu_s(process)
        await asyncio.sleep(for_s)
        idle_share = (cpu_s(process) - idle_s) / (time.perf_counter() - began)
        idle_mb = rss_mb(process)

        database = stage.database.processes()
        (before,) = await stage.database.ask(SIZE)
        began, used_s, postgres_s = time.perf_counter(), cpu_s(process), sum(map(cpu_s, database))
        for session in made:
            server.say(session.id)

        async def are_posted() -> bool:
            (row,) = await stage.database.ask(POSTED)
            return bool(row["n"] == sessions * calls)

        await until_async(are_posted, limit_s=LIMIT_S)
        took_s = time.perf_counter() - began
        (after,) = await stage.database.ask(SIZE)
        count = sessions * calls
        return {
            "sessions": sessions,
            "calls": count,
            "rss_mb_empty": empty_mb,
            "rss_mb_with_sessions": idle_mb,
            "rss_mb_after_calls": rss_mb(process),
            "cpu_share_while_idle": round(idle_share, 3),
            "calls_per_s": round(count / took_s, 1),
            "cpu_us_per_call": round((cpu_s(process) - used_s) / count * 1e6),
            "postgres_cpu_us_per_call": round((sum(map(cpu_s, database)) - postgres_s) / count * 1e6),
            "database_bytes_per_call": round((after["n"] - before["n"]) / count),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1_000)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--for-s", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bascule-bench-") as folder:
        Path(folder).chmod(0o711)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = runner.run(run(Path(folder), options.sessions, options.calls, options.for_s))
            sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
