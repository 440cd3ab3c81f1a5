"""Faults that production brings, against real processes: `python -m bench.chaos FAULT [--sessions N] …`.

Several replicas (`python -m app serve`) share an embedded PostgreSQL and the simulator; agents call tools
of every `retry` policy, some gated, and people decide over HTTP. After the faults everything may settle.
Then the records of upstream, tools and database are compared (`bench.verdict`). Prints one JSON object and
exits with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import uvloop

from app.simulator.server import Server, running
from app.simulator.session import Session
from app.simulator.switches import Switches
from app.simulator.world import World
from app.store.leases import TTL_S
from bench import load
from bench.proxy import Link
from bench.stage import (
    DatabaseAwayError,
    Replica,
    Stage,
    percentile,
    staged,
    until,
    until_async,
)
from bench.verdict import judge

TAKEOVER_LIMIT_S: Final = 300.0
"""Long, because who takes over may be killed as well, again and again."""
LEASED_WITHIN_S: Final = 15.0
HANDED_OVER_WITHIN_S: Final = 5.0
WATCH_EVERY_S: Final = 0.1
ATTACH_LIMIT_S: Final = 120.0
WARM_UP_S: Final = 2.0
SETTLED_FOR: Final = 3
"""How many looks in a row must find nothing open."""


@dataclass(frozen=True)
class Options:
    """The scale of a run. Times are in seconds."""

    replicas: int = 3
    sessions: int = 200
    calls_per_s: float = 40.0
    seed: int = 1
    settle_s: float = 180.0
    kills: int = 100
    every_s: tuple[float, float] = (4.0, 12.0)
    """How long after one kill the next comes, drawn between these."""
    restarts: int = 10
    for_s: float = 300.0
    """How long PostgreSQL is restarted, or the network is bad."""
    restart_every_s: tuple[float, float] = (20.0, 40.0)
    freeze_s: float = 30.0
    pauses: int = 5
    pause_s: float = TTL_S + 5.0
    down_s: float = 60.0
    skew_s: float = 0.0
    """By how much the wall clocks of replicas are wrong, in either direction."""
    is_brief: bool = False
    """Leave out tools that take seconds."""
    folder: Path | None = None
    """Keep logs and data here; by default they go when the run is over."""


@dataclass
class Run:
    """What a fault acts on, and the figures that it leaves in `figures`."""

    options: Options
    stage: Stage
    server: Server
    switch: Upstream
    tools: load.Tools
    people: load.People
    agents: load.Agents
    random: random.Random
    figures: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Promises about time that were not kept, each in a sentence."""


class Upstream:
    """The simulator, which can be taken down and comes back on the same port with all that it knew."""

    def __init__(self, seed: int) -> None:
        # What would be a second answer is taken and shows, where the real API refuses it.
        switches = Switches(duplicate_answers="append", late_answers="refuse", late_confirmations="ignore")
        self.world = World(seed=seed, pace=1.0, switches=switches)
        self.server: Server
        self._port = 0
        self._stack = contextlib.AsyncExitStack()

    async def up(self) -> Server:
        self.server = await self._stack.enter_async_context(running(self.world, port=self._port))
        self._port = int(self.server.url.rpartition(":")[2])
        return self.server

    async def down(self) -> None:
        await self._stack.aclose()


class Takeovers:
    """Watches attachments whose replica is gone until each is leased again and has its stream.

    Times are in seconds since the replica went: of each attachment, and of each replica's last one. Where the
    successor went as well before it had opened the stream, that is counted apart, as `disturbed`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._by_id = {session.id: session for session in run.agents.sessions}
        self._tasks: list[asyncio.Task[None]] = []
        self.leased_s: list[float] = []
        self.streaming_s: list[float] = []
        self.all_leased_s: list[float] = []
        self.all_streaming_s: list[float] = []
        self.disturbed_s: list[float] = []

    async def held_by(self, replica: Replica) -> dict[str, int]:
        """The sessions that the replica serves, with their terms."""
        rows = await self._run.stage.database.ask(
            "select session_id, term from attachments where replica_id = $1", replica.id
        )
        return {row["session_id"]: row["term"] for row in rows}

    async def busiest(self) -> tuple[Replica, dict[str, int]]:
        """The replica that serves most, and what it serves."""
        by_replica = [(await self.held_by(each), each) for each in self._run.stage.replicas]
        held, replica = max(by_replica, key=lambda each: len(each[0]))
        return replica, held

    def watch(self, held: dict[str, int], since: float) -> None:
        """Begin to watch; `since` is when the replica went, by the monotonic clock."""
        self._tasks.append(asyncio.create_task(self._watch(held, since)))

    async def all(self) -> None:
        """Wait until all that is watched was taken over; over `TAKEOVER_LIMIT_S` is a broken promise."""
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, TimeoutError):
                self._run.broken.append(f"a takeover was not over after {TAKEOVER_LIMIT_S} s")
            elif ended is not None:
                raise ended
        self._tasks.clear()

    def figures(self) -> dict[str, Any]:
        """Return what was measured, as JSON."""
        names = ("leased_s", "streaming_s", "all_leased_s", "all_streaming_s", "disturbed_s")
        return {name: _spread(getattr(self, name)) for name in names}

    async def _watch(self, held: dict[str, int], since: float) -> None:
        unleased, silent = set(held), set(held)
        is_disturbed = False
        async with asyncio.timeout(TAKEOVER_LIMIT_S):
            while silent:
                await asyncio.sleep(WATCH_EVERY_S)
                try:
                    terms = await self._terms(silent)
                except DatabaseAwayError:
                    continue
                took_s = time.monotonic() - since
                taken = {id_ for id_ in unleased if terms[id_] > held[id_]}
                self.leased_s += [took_s] * len(taken)
                unleased -= taken
                if taken and not unleased:
                    self.all_leased_s.append(took_s)
                back = {id_ for id_ in silent - unleased if load.open_streams(self._by_id[id_])}
                again = {id_ for id_ in back if terms[id_] > held[id_] + 1}
                self.disturbed_s += [took_s] * len(again)
                self.streaming_s += [took_s] * len(back - again)
                is_disturbed = is_disturbed or bool(again)
                silent -= back
        if held and not is_disturbed:
            self.all_streaming_s.append(took_s)

    async def _terms(self, ids: Iterable[str]) -> dict[str, int]:
        """The terms of leases; an attachment that is free counts as its last holder's."""
        rows = await self._run.stage.database.ask(
            "select session_id, term - (replica_id is null)::int as term from attachments"
            " where session_id = any($1)",
            list(ids),
        )
        return {row["session_id"]: row["term"] for row in rows}


def _spread(values: list[float]) -> dict[str, Any]:
    return {
        "count": len(values),
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": percentile(values, 1.0),
    }


class Doubles:
    """Measures how long a session had more than one stream at a time."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        self._sessions = list(sessions)
        self._since: dict[str, float] = {}
        self.longest_s = 0.0

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            now = time.monotonic()
            for session in self._sessions:
                if load.open_streams(session) > 1:
                    self.longest_s = max(self.longest_s, now - self._since.setdefault(session.id, now))
                else:
                    self._since.pop(session.id, None)
            await asyncio.sleep(WATCH_EVERY_S)


# ---- the faults


async def kills(run: Run) -> None:
    """`kill -9` of replicas, by turns any one and the one that serves most; each is replaced at once."""
    takeovers = Takeovers(run)
    starting: set[asyncio.Task[Replica]] = set()
    kills_of_servers = 0
    for number in range(run.options.kills):
        await until(lambda: run.stage.replicas, limit_s=TAKEOVER_LIMIT_S)
        victim, held = await takeovers.busiest()
        if number % 2:
            victim = run.random.choice(run.stage.replicas)
            held = await takeovers.held_by(victim)
        kills_of_servers += bool(held)
        since = time.monotonic()
        await run.stage.kill(victim)
        takeovers.watch(held, since)
        starting.add(asyncio.create_task(run.stage.add()))
        await asyncio.sleep(run.random.uniform(*run.options.every_s))
    await asyncio.gather(*starting)
    await takeovers.all()
    run.figures |= {"kills": run.options.kills, "kills_of_servers": kills_of_servers}
    run.figures |= {"takeover": takeovers.figures()}
    slowest = percentile(takeovers.leased_s, 0.99) or 0.0
    if slowest > LEASED_WITHIN_S:
        run.broken.append(f"p99 from a kill to the next lease is {slowest} s, over {LEASED_WITHIN_S} s")


async def deploys(run: Run) -> None:
    """Rolling restarts: a new replica starts, the one that serves most gets SIGTERM and drains."""
    takeovers = Takeovers(run)
    stopping: list[asyncio.Task[int]] = []
    inside: list[int] = []
    for _ in range(run.options.restarts):
        await run.stage.add()
        busiest, held = await takeovers.busiest()
        inside.append(run.tools.inside)
        stopping.append(asyncio.create_task(run.stage.terminate(busiest)))
        takeovers.watch(held, time.monotonic())
        await takeovers.all()
    statuses = await asyncio.gather(*stopping)
    abandoned = await run.stage.database.ask("select call_id from deliveries where code = 'abandoned'")
    run.figures |= {
        "restarts": run.options.restarts,
        "deliveries_under_way": inside,
        "handover": takeovers.figures(),
    }
    if slow := [round(s, 1) for s in takeovers.all_leased_s if s > HANDED_OVER_WITHIN_S]:
        run.broken.append(f"leases were taken over after {slow} s, over {HANDED_OVER_WITHIN_S} s")
    if slow := [round(s, 1) for s in takeovers.all_streaming_s if s > HANDED_OVER_WITHIN_S]:
        run.broken.append(f"streams were open again after {slow} s, over {HANDED_OVER_WITHIN_S} s")
    if any(statuses):
        run.broken.append(f"replicas stopped with {statuses}")
    if abandoned:
        run.broken.append(f"{len(abandoned)} deliveries were abandoned, such as {abandoned[0]['call_id']}")


async def blackout(run: Run) -> None:
    """All replicas are killed at once; after a while as many others start."""
    for victim in list(run.stage.replicas):
        await run.stage.kill(victim)
    await asyncio.sleep(run.options.down_s)
    for _ in range(run.options.replicas):
        await run.stage.add()
    run.figures |= {"down_s": run.options.down_s}


async def postgres(run: Run) -> None:
    """PostgreSQL is restarted again and again, in order and by a crash by turns."""
    away: list[float] = []
    end = time.monotonic() + run.options.for_s
    while time.monotonic() < end:
        await asyncio.sleep(run.random.uniform(*run.options.restart_every_s))
        away.append(await run.stage.database.restart(crash=len(away) % 2 == 1))
    run.figures |= {"restarts": len(away), "away_s_max": round(max(away), 2)}


async def freeze(run: Run) -> None:
    """PostgreSQL stands still with all connections open."""
    run.stage.database.freeze()
    try:
        await asyncio.sleep(run.options.freeze_s)
    finally:
        run.stage.database.thaw()
    run.figures |= {"frozen_s": run.options.freeze_s}


async def pause(run: Run) -> None:
    """A replica is stopped for longer than its lease, others take over, and it wakes among them."""
    takeovers = Takeovers(run)
    for _ in range(run.options.pauses):
        victim, held = await takeovers.busiest()
        run.stage.replicas.remove(victim)  # no requests go to it
        since = time.monotonic()
        victim.pause()
        try:
            await _leased_again(run, held)
            left_s = run.options.pause_s - (time.monotonic() - since)
            await asyncio.sleep(max(0.0, left_s))
        finally:
            victim.resume()
        await run.stage.ready(victim, limit_s=TAKEOVER_LIMIT_S)
        run.stage.replicas.append(victim)
        takeovers.watch(held, since)
        await takeovers.all()
    run.figures |= {"pauses": run.options.pauses, "pause_s": run.options.pause_s}


async def _leased_again(run: Run, held: dict[str, int]) -> None:
    async def are_taken() -> bool:
        rows = await run.stage.database.ask(
            "select session_id, term from attachments where session_id = any($1)", list(held)
        )
        return all(row["term"] > held[row["session_id"]] for row in rows)

    await until_async(are_taken, limit_s=TAKEOVER_LIMIT_S)


async def upstream(run: Run) -> None:
    """Upstream refuses connections."""
    await run.switch.down()
    try:
        await asyncio.sleep(run.options.down_s)
    finally:
        run.server = await run.switch.up()
    began = time.monotonic()
    await until(
        lambda: all(load.open_streams(session) for session in run.agents.sessions), limit_s=TAKEOVER_LIMIT_S
    )
    run.figures |= {
        "down_s": run.options.down_s,
        "streams_open_after_s": round(time.monotonic() - began, 2),
    }


async def webhook(run: Run) -> None:
    """The tools are slow, busy, failing and gone, each for a while."""
    modes: tuple[load.Mode, ...] = ("slow", "busy", "failing")
    for mode in modes:
        run.tools.mode = mode
        await asyncio.sleep(run.options.down_s / 4)
    run.tools.mode = "well"
    await asyncio.sleep(run.options.down_s / 16)
    await run.tools.close()
    try:
        await asyncio.sleep(run.options.down_s / 4)
    finally:
        await run.tools.open()
    run.figures |= {"down_s": run.options.down_s}


async def network(run: Run) -> None:
    """Links between a replica and upstream or PostgreSQL are slow, cut and quiet."""
    done: dict[str, int] = {}
    end = time.monotonic() + run.options.for_s
    while time.monotonic() < end:
        replica = run.random.choice(run.stage.replicas)
        name = run.random.choice(sorted(replica.links))
        fault, act = run.random.choice(_NETWORK)
        link = replica.links[name]
        try:
            await act(link, run.random)
        finally:
            link.heal()
        done[f"{name} {fault}"] = done.get(f"{name} {fault}", 0) + 1
        await asyncio.sleep(run.random.uniform(0.5, 3))
    run.figures |= {"faults": dict(sorted(done.items()))}


async def _latency(link: Link, chance: random.Random) -> None:
    link.latency_s = chance.uniform(0.1, 0.8)
    await asyncio.sleep(chance.uniform(3, 8))


async def _cut(link: Link, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 4)):
        link.cut()
        await asyncio.sleep(chance.uniform(0.05, 1))


async def _refuse(link: Link, chance: random.Random) -> None:
    link.is_refusing = True
    link.cut()
    await asyncio.sleep(chance.uniform(1, 8))


async def _half_open(link: Link, chance: random.Random) -> None:
    link.is_quiet = True
    await asyncio.sleep(chance.uniform(2, 25))
    if chance.random() < 0.5:
        link.cut()


_NETWORK: Final[list[tuple[str, Callable[[Link, random.Random], Awaitable[None]]]]] = [
    ("latency", _latency),
    ("cut", _cut),
    ("refused", _refuse),
    ("half-open", _half_open),
]

FAULTS: Final[dict[str, Callable[[Run], Awaitable[None]]]] = {
    each.__name__: each
    for each in (kills, blackout, deploys, postgres, freeze, pause, upstream, webhook, network)
}


# ---- a run


async def run_fault(name: str, options: Options) -> dict[str, Any]:
    """Put up the stage, let the fault act, let everything settle, and return the report.

    The report's `violations` is empty if every promise was kept.
    """
    with tempfile.TemporaryDirectory(prefix="bascule-chaos-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o711)  # the server of root runs as another user, who must be able to enter
        return await _run_in(folder, name, options)


async def _run_in(folder: Path, name: str, options: Options) -> dict[str, Any]:
    began = time.monotonic()
    switch = Upstream(options.seed)
    tools = load.Tools(options.seed)
    tools.is_brief = options.is_brief
    server = await switch.up()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(switch.down)
        await tools.open()
        stack.push_async_callback(tools.close)
        stage = await stack.enter_async_context(
            staged(folder, server.url, with_links=name == "network", skew_s=options.skew_s)
        )
        people = load.People(stage, options.seed)
        agents = load.Agents(server, options.sessions, options.calls_per_s, options.seed)
        chance = random.Random(options.seed)  # noqa: S311 - a seed makes the same run again
        run = Run(options, stage, server, switch, tools, people, agents, chance)
        doubles = Doubles(agents.sessions)
        for _ in range(options.replicas):
            await stage.add()
        await load.register(stage, tools.url)
        await load.attach(stage, server, agents.sessions, limit_s=ATTACH_LIMIT_S)
        async with agents.talking(), people.deciding(), doubles.watching():
            await asyncio.sleep(WARM_UP_S)
            await FAULTS[name](run)
            agents.is_over = True
            settled_s = await _settle(run)
        stage.note_fallen()
        rows = await stage.database.ask("select id, session_id, tool, state, result from calls")
        findings = judge(agents.sessions, tools, people, rows)
        for chain in await stage.database.audited():
            findings.counts["audit_rows"] += chain.rows
            if chain.fault is not None:
                findings.accuse("audit_broken", f"{chain.tenant}: {chain.fault}")
        for sentence in [*run.broken, *stage.fallen]:
            findings.accuse("broken", sentence)
        if settled_s is None:
            findings.accuse("broken", f"not everything had settled after {options.settle_s} s")
        if name == "deploys" and (told := findings.counts["told_may_have_run"]):
            findings.accuse("broken", f"{told} agents were told that a tool may have run")
        return {
            "fault": name,
            "replicas": options.replicas,
            "sessions": options.sessions,
            "seed": options.seed,
            **run.figures,
            **findings.report(),
            "confirm_statuses": dict(people.statuses),
            "two_streams_s_max": round(doubles.longest_s, 1),
            "settled_after_s": settled_s,
            "log": stage.troubles(),
            "took_s": round(time.monotonic() - began, 1),
        }


async def _settle(run: Run) -> float | None:
    """Wait until no agent waits and nothing is open in the database; None if that does not come."""
    began = time.monotonic()
    quiet = 0
    while time.monotonic() < began + run.options.settle_s:
        run.stage.note_fallen()
        is_quiet = run.agents.are_quiet
        if is_quiet:
            try:
                is_quiet = not await run.stage.database.ask(_OPEN)
            except DatabaseAwayError:
                is_quiet = False
        quiet = quiet + 1 if is_quiet else 0
        if quiet >= SETTLED_FOR:
            return round(time.monotonic() - began, 1)
        await asyncio.sleep(0.5)
    return None


_OPEN: Final = (
    "select 1 from calls where state in ('held', 'queued', 'dispatched', 'answered', 'posting', 'unowned')"
    " limit 1"
)


async def _until_told(fault: str, options: Options) -> dict[str, Any]:
    """Run a fault; on SIGTERM end what was started first."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run_fault(fault, options)


def _options() -> tuple[str, Options]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("fault", choices=list(FAULTS))
    defaults = Options()
    for each in fields(Options):
        default = getattr(defaults, each.name)
        flag = "--" + each.name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, nargs=2, type=float, default=default)
        else:
            parser.add_argument(flag, type=Path if default is None else type(default), default=default)
    given = vars(parser.parse_args())
    fault = given.pop("fault")
    return fault, Options(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    )


def main() -> None:
    """Run one fault, print its report, and exit with 1 if a promise was broken."""
    fault, options = _options()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            report = runner.run(_until_told(fault, options))
        except asyncio.CancelledError:
            sys.exit("told to stop; nothing was judged")
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if report["violations"] else 0)


if __name__ == "__main__":
    main()
