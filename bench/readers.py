"""What readers cost who wait: `python -m bench.readers [--readers N] [--sessions N] [--for-s S]`.

One `serve` process, the simulator, and so many readers of each of two kinds, one kind after the other: polls
of `/text` that wait for a message (`wait_s=30`), and streams of `/events`. First all of them wait while
nothing happens; then every session says one message, and what each reader hears is timed. Prints one JSON
object: the process's CPU as a share of one core, its memory, the database's busy connections at most, and how
late the message was heard.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
import uvloop

from app.simulator.server import Server, running
from app.simulator.world import World
from bench.load import attach
from bench.stage import ADMIN_KEY, Stage, staged, until

BUSY: Final = (
    "select count(*) as n from pg_stat_activity where datname = current_database() and state <> 'idle'"
)
LIMIT_S: Final = 120.0
QUIET: Final = 0.5
"""A replica that uses less of a core than this has answered all of them for the first time."""
TURN: Final = {
    "name": "readers",
    "environment": "self_hosted",
    "turns": [{"steps": [{"do": "message", "text": "Heard?", "deltas": 0}, {"do": "end"}]}],
}

Reader = Callable[[aiohttp.ClientSession, str, Callable[[], None]], Awaitable[float]]
"""Waits for the message of a session, saying when it has begun to; returns when it heard it."""


async def poll(http: aiohttp.ClientSession, session_id: str, begun: Callable[[], None]) -> float:
    begun()
    while True:
        async with http.get(f"/sessions/{session_id}/text", params={"wait_s": "30"}) as answer:
            if answer.status == 200 and (await answer.json())["data"]:
                return time.perf_counter()
        if answer.status == 503:
            await asyncio.sleep(float(answer.headers["retry-after"]))


async def stream(http: aiohttp.ClientSession, session_id: str, begun: Callable[[], None]) -> float:
    begun()
    while True:
        async with http.get(f"/sessions/{session_id}/events?after=0") as answer:
            async for line in answer.content:
                if line == b"event: message.final\n":
                    return time.perf_counter()
        await asyncio.sleep(1)


async def measure(
    stage: Stage, server: Server, read: Reader, readers: int, sessions: int, for_s: float
) -> dict[str, Any]:
    made = [server.create(TURN) for _ in range(sessions)]
    await attach(stage, server, made, limit_s=LIMIT_S)
    (replica,) = stage.replicas
    process = Path(f"/proc/{replica.process.pid}")
    waiting, most = 0, 0

    def begun() -> None:
        nonlocal waiting
        waiting += 1

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        replica.url, connector=connector, timeout=timeout, headers={"authorization": f"Bearer {ADMIN_KEY}"}
    ) as http:
        tasks = [asyncio.create_task(read(http, made[n % sessions].id, begun)) for n in range(readers)]
        await until(lambda: waiting == readers, limit_s=LIMIT_S)
        opening = time.perf_counter()
        while await _share(process, 2.0) > QUIET:  # they are being answered for the first time
            assert time.perf_counter() < opening + LIMIT_S, "the replica never came to rest"
        opened_s = time.perf_counter() - opening
        began, cpu = time.perf_counter(), cpu_s(process)
        while time.perf_counter() < began + for_s:
            rows = await stage.database.ask(BUSY)
            most = max(most, rows[0]["n"] - 1)  # without the one that asks
            await asyncio.sleep(0.1)  # between samples
        idle_share = (cpu_s(process) - cpu) / (time.perf_counter() - began)
        said = time.perf_counter()
        for session in made:
            server.say(session.id)
        async with asyncio.timeout(LIMIT_S):
            late = sorted((heard - said) * 1000 for heard in await asyncio.gather(*tasks))
    return {
        "readers": readers,
        "sessions": sessions,
        "opened_s": round(opened_s, 1),
        "cpu_share_while_waiting": round(idle_share, 3),
        "busy_connections_max": most,
        "rss_mb": rss_mb(process),
        "heard_p50_ms": round(statistics.median(late), 1),
        "heard_p99_ms": round(late[len(late) * 99 // 100], 1),
    }


async def _share(process: Path, for_s: float) -> float:
    began, before_s = time.perf_counter(), cpu_s(process)
    await asyncio.sleep(for_s)
    return (cpu_s(process) - before_s) / (time.perf_counter() - began)


def cpu_s(process: Path) -> float:
    """Return what a process, by its folder in /proc, has used of CPUs so far."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def rss_mb(process: Path) -> int:
    """Return the memory that a process holds now."""
    (line,) = [one for one in (process / "status").read_text().splitlines() if one.startswith("VmRSS")]
    return int(line.split()[1]) // 1024


async def run(folder: Path, readers: int, sessions: int, for_s: float) -> dict[str, Any]:
    figures = {}
    for name, read in (("polls", poll), ("streams", stream)):
        upstream = running(World(seed=time.time_ns(), pace=0))
        (folder / name).mkdir(mode=0o711)
        async with upstream as server, staged(folder / name, server.url) as stage:
            await stage.add()
            figures[name] = await measure(stage, server, read, readers, sessions, for_s)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=2_000)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--for-s", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bascule-bench-") as folder:
        Path(folder).chmod(0o711)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = runner.run(run(Path(folder), options.readers, options.sessions, options.for_s))
            sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
