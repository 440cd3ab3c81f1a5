"""What a reconnect costs: `python -m bench.reconnect [--events 100 10000]`.

A session has a long past: finished calls, and one that waits for a person. Its stream is cut, and what the
client then asks of upstream is counted in requests, and in bytes on the wire, until it is live again. The
same history serves Bascule, once after a cut and once after a restart of its process, and the official Python
SDK's runner, in an environment of its own. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import uvloop
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.logs import set_up_logs
from app.replica import replica
from app.settings import Settings
from app.simulator.refusal import Json
from app.simulator.server import Server, running
from app.simulator.session import Session
from app.simulator.world import World
from app.store import attachments, tools
from app.store.database import create_engine
from app.store.embedded import EmbeddedPostgres
from app.store.migrate import migrate
from app.store.secrets import Secrets
from app.store.wakeups import Wakeups
from app.webhooks.egress import Egress
from bench.proxy import Link
from tests.interop.environments import python_of

INTEROP: Final = Path(__file__).parents[1] / "tests" / "interop"
TENANT: Final = "default"
CALL_EVERY_S: Final = 60.0
"""The time between the calls of the past; a reconnect reads the last 120 s of it again."""
LIMIT_S: Final = 120.0
QUIET_S: Final = 3.0
"""So long without a request, and the client has all that it wants."""


class Clock:
    """The simulator's time: `ago_s` before now."""

    def __init__(self, ago_s: float) -> None:
        self.ago_s = ago_s

    def __call__(self) -> float:
        return time.time() - self.ago_s


class Meter:
    """Counts what one session's client asks for and what goes over the wire."""

    def __init__(self, server: Server, link: Link) -> None:
        self._server = server
        self._link = link
        self.reset()

    def reset(self) -> None:
        """Count from here."""
        self._mark = len(self._server.world.requests)
        self._back, self._out = self._link.bytes_back, self._link.bytes_out

    def asked(self, endpoint: str) -> int:
        """How many requests to an endpoint were answered well."""
        found = list(self._server.world.requests)[self._mark :]
        return sum(each.endpoint == endpoint and each.status == 200 for each in found)

    async def settled(self) -> None:
        """Wait until the stream and the history were asked for, and then nothing more."""
        await self._server.until(lambda: self.asked("stream") and self.asked("list"), limit_s=LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            before = -1
            while before != (now := len(self._server.world.requests) + self._link.bytes_back):
                before = now
                await asyncio.sleep(QUIET_S)

    def report(self) -> dict[str, Any]:
        """Return the figures since `reset`."""
        requests = list(self._server.world.requests)[self._mark :]
        return {
            "requests": len(requests),
            "by_endpoint": dict(Counter(str(each.endpoint) for each in requests)),
            "bytes_received": self._link.bytes_back - self._back,
            "bytes_sent": self._link.bytes_out - self._out,
        }


def past(server: Server, clock: Clock, events: int) -> Session:
    """Create a session with about so many events, up to now; its last call waits for a person."""
    few = [len(_played(server, clock, calls).primary.log.entries) for calls in (2, 3)]
    calls = max(1, events // (few[1] - few[0]))
    clock.ago_s = calls * CALL_EVERY_S
    return _played(server, clock, calls)


def _played(server: Server, clock: Clock, calls: int) -> Session:
    order = {"tool": "custom", "name": "lookup_order", "input": {"order_id": "A-1042"}}
    asks = {"tool": "builtin", "name": "bash", "input": {"command": "ls"}, "permission": "ask"}
    steps = [{"do": "call", "calls": [order]}] * calls
    last = {"do": "call", "calls": [asks]}
    turn = {"steps": [*steps, last, {"do": "end"}]}
    session = server.create({"name": "past", "environment": "self_hosted", "turns": [turn]})
    server.say(session.id)
    for _ in range(calls):
        (call_id,) = session.waiting_ids()
        content = [{"type": "text", "text": "A-1042 is shipped, and arrives on Tuesday."}]
        event: Json = {
            "type": "user.custom_tool_result",
            "custom_tool_use_id": call_id,
            "content": content,
            "is_error": False,
        }
        clock.ago_s -= CALL_EVERY_S
        server.world.send(session.id, {"events": [event]}, now=server.now)
    return session


@contextlib.asynccontextmanager
async def metered(events: int) -> AsyncIterator[tuple[Session, Link, Meter]]:
    """A simulator with one long session behind a link that counts."""
    clock = Clock((events + 10) * CALL_EVERY_S)
    async with running(World(seed=events, pace=0), clock=clock) as server:
        session = past(server, clock, events)
        place = server.url.removeprefix("http://").split(":")
        link = await Link.open((place[0], int(place[1])))
        try:
            yield session, link, Meter(server, link)
        finally:
            await link.close()


async def bascule(engine: AsyncEngine, url: str, secrets: Secrets, events: int) -> dict[str, Any]:
    """Measure a replica: its first attach, a cut, and a restart."""
    async with metered(events) as (session, link, meter):
        settings = Settings(anthropic_api_key=SecretStr("any"), upstream_url=link.url)
        async with engine.begin() as connection:
            await connection.execute(
                text("insert into tenants (id) values ('default') on conflict do nothing")
            )
            wanted = attachments.Settings(max_idle_s=None)
            await attachments.attach(connection, secrets, TENANT, session.id, wanted, {})
            for name in ("lookup_order", "bash"):
                await tools.put(
                    connection, secrets, TENANT, name,
                    url="http://127.0.0.1:9/tool", description=None, policy={}, headers={},
                )  # fmt: skip

        def serving() -> contextlib.AbstractAsyncContextManager[Any]:
            return replica(settings, engine, secrets, wakeups, Egress([ip_network("127.0.0.0/8")]))

        wakeups = Wakeups(url, engine)
        async with wakeups.running():
            async with serving():
                await meter.settled()
                first = meter.report()
                after_cut = await _reconnected(link, meter)
            meter.reset()
            async with serving():
                await meter.settled()
                after_restart = meter.report()
        async with engine.begin() as connection:
            await connection.execute(text("update attachments set status = 'detached'"))
        return {
            "events": len(session.primary.log.entries),
            "first_attach": first,
            "after_a_cut": after_cut,
            "after_a_restart": after_restart,
        }


async def sdk(python: Path, events: int) -> dict[str, Any]:
    """Measure the SDK's runner: its start and a cut; a restart of its process is a start."""
    async with metered(events) as (session, link, meter):
        process = await asyncio.create_subprocess_exec(
            str(python), str(INTEROP / "sdk_driver.py"), "runner", link.url, session.id,
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            await meter.settled()
            first = meter.report()
            after_cut = await _reconnected(link, meter)
            assert process.returncode is None, "the runner ended"
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        return {
            "events": len(session.primary.log.entries),
            "first_attach": first,
            "after_a_cut": after_cut,
            "after_a_restart": first,
        }


async def _reconnected(link: Link, meter: Meter) -> dict[str, Any]:
    meter.reset()
    link.cut()
    await meter.settled()
    return meter.report()


async def measure(url: str, sizes: list[int], python: Path) -> dict[str, Any]:
    engine = create_engine(url, connections_max=10)
    await migrate(engine)
    secrets = Secrets([os.urandom(32)])
    found = []
    for events in sizes:
        ours, theirs = await bascule(engine, url, secrets, events), await sdk(python, events)
        found.append({"bascule": ours, "sdk": theirs, "bytes_ratio_after_a_cut": _ratio(ours, theirs)})
    await engine.dispose()
    return {"reconnect": found}


def _ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    received: Callable[[dict[str, Any]], int] = lambda each: each["after_a_cut"]["bytes_received"]  # noqa: E731
    return round(received(theirs) / received(ours), 1)


def main() -> None:
    """Measure each size and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, nargs="+", default=[100, 10_000], help="in the past")
    options = parser.parse_args()
    set_up_logs(Settings(log_level="warning"))  # to stderr
    python = python_of("sdk", INTEROP / "requirements-sdk.lock")
    with tempfile.TemporaryDirectory(prefix="bascule-bench-") as folder:
        Path(folder).chmod(0o711)
        postgres = EmbeddedPostgres(Path(folder), environ=os.environ)
        url = postgres.start()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                report = runner.run(measure(url, options.events, python))
        finally:
            postgres.stop()
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
