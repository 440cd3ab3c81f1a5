"""How soon an allowed call reaches its webhook: `python -m bench.confirm [--sessions N] [--calls N]`.

Three `serve` processes share one database and the simulator. A person allows one held call after the other,
through any replica; a call waits for our gate or for upstream's, which has to take the verdict and show it on
the stream before the call may run. Measured from sending `/confirm` and from its answer to the arrival of the
webhook's request, apart by gate and by whether the replica that was asked is the one that runs the session.
Prints one JSON object; negative times are of webhooks that were asked before `/confirm` had answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop
from aiohttp import web

from app.simulator.server import Server, running
from app.simulator.world import World
from bench.load import attach
from bench.stage import Stage, free_port, staged, until

REPLICAS: Final = 3
LIMIT_S: Final = 60.0
GATES: Final = {"refund": "ours", "bash": "upstream"}
"""The two tools, by whose gate holds them."""


def script(calls: int) -> dict[str, Any]:
    """One turn of so many calls, one after the other, of both tools by turns."""
    refund = {"tool": "custom", "name": "refund", "input": {}}
    bash = {"tool": "builtin", "name": "bash", "input": {"command": "ls"}, "permission": "ask"}
    steps = [{"do": "call", "calls": [(refund, bash)[n % 2]]} for n in range(calls)]
    return {"name": "confirm", "environment": "self_hosted", "turns": [{"steps": [*steps, {"do": "end"}]}]}


async def measure(stage: Stage, server: Server, sessions: int, calls: int) -> dict[str, Any]:
    arrived: dict[str, float] = {}

    async def take(request: web.Request) -> web.Response:
        now = time.perf_counter()
        arrived[(await request.json())["data"]["call_id"]] = now
        return web.json_response({"content": "done"})

    app, port = web.Application(), free_port()
    app.router.add_post("/", take)
    tools = web.AppRunner(app, access_log=None)
    await tools.setup()
    await web.TCPSite(tools, "127.0.0.1", port).start()
    for _ in range(REPLICAS):
        await stage.add()
    for name, gate in GATES.items():
        body = {"url": f"http://127.0.0.1:{port}/", "gate": "ask" if gate == "ours" else "upstream"}
        status, shown = await stage.request("PUT", f"/tools/{name}", body)
        assert status == 201, shown
    held = [server.create(script(calls)) for _ in range(sessions)]
    await attach(stage, server, held, limit_s=LIMIT_S)
    for session in held:
        server.say(session.id)
    taken = await _allow_all(stage, arrived, sessions * calls)
    await tools.cleanup()
    return {
        "replicas": REPLICAS,
        **{
            f"{gate}_{where}_since_{since}": {
                "calls": len(ms),
                "p50_ms": round(statistics.median(ms), 1),
                "p99_ms": round(ms[len(ms) * 99 // 100], 1),
            }
            for (gate, where, since), ms in sorted((key, sorted(each)) for key, each in taken.items())
        },
    }


async def _allow_all(
    stage: Stage, arrived: dict[str, float], total: int
) -> dict[tuple[str, str, str], list[float]]:
    """Allow each call that is seen to wait; return the milliseconds by gate, who was asked and since what."""
    taken: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    choice = random.Random(0)  # noqa: S311 - which replica is asked is no secret
    while len(arrived) < total:
        status, page = await stage.request("GET", "/confirmations?limit=200&wait_s=5")
        assert status == 200, page
        rows = await stage.database.ask("select session_id, replica_id from attachments")
        owners = {row["session_id"]: row["replica_id"] for row in rows}
        for call in page["data"]:
            if call["decision"] is not None:
                continue
            replica = choice.choice(stage.replicas)
            path, body = f"/sessions/{call['session_id']}/confirm", {"tool_use_id": call["id"]}
            sent = time.perf_counter()
            status, shown = await stage.request("POST", path, body | {"result": "allow"}, replica=replica)
            answered = time.perf_counter()
            assert status == 200, shown
            await until(partial(arrived.__contains__, call["id"]), limit_s=LIMIT_S)
            where = "same_replica" if owners[call["session_id"]] == replica.id else "another_replica"
            for since, at in (("sending", sent), ("the_answer", answered)):
                taken[GATES[call["tool"]], where, since].append((arrived[call["id"]] - at) * 1000)
    return taken


async def run(folder: Path, sessions: int, calls: int) -> dict[str, Any]:
    async with running(World(seed=time.time_ns(), pace=0)) as server, staged(folder, server.url) as stage:
        return await measure(stage, server, sessions, calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--calls", type=int, default=40, help="per session")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bascule-bench-") as folder:
        Path(folder).chmod(0o711)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = runner.run(run(Path(folder), options.sessions, options.calls))
            sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
