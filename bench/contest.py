"""What a call costs, against what a user would run instead: `python -m bench.contest --sessions 50`.

Contestants take turns, round after round, each a process of its own before the same `bench.world` (upstream
and tool in one fast process): Bascule's `serve` over PostgreSQL with fsync on, the official Python and
TypeScript SDKs' runners whose tool posts to the same webhook, and the floor, a bare loop that commits twice.
Prints a table, and with `--json` writes what was measured: medians of the rounds and their spread. All share
the machine, so calls per second is a joint figure; the CPU of the contestant, and of PostgreSQL for it, is
its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp
import uvloop

from bench.stage import ADMIN_KEY, ROOT, Database, free_port, percentile, until_async
from tests.interop.environments import python_of

FOLDER: Final = ROOT / "bench" / "contestants"
NAMES: Final = ("bascule", "python-sdk", "typescript-sdk", "floor")
READY_S: Final = 60.0
RUN_S: Final = 300.0
POLL_S: Final = 0.05
TICKS: Final = os.sysconf("SC_CLK_TCK")
LOAD: Final = ("sessions", "calls", "parallel", "delay_ms", "rounds", "retry")
FIGURES: Final = ("p50_ms", "p99_ms", "calls_per_s", "cpu_us_per_call", "postgres_us_per_call")


def cpu_s(pids: Sequence[int]) -> float:
    """The CPU time of processes, with that of their children that ended."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(field) for field in fields[11:15])
    return total / TICKS


class Process:
    """A child process, whose output is kept in a file."""

    def __init__(self, log: Path, *command: str, **environ: str) -> None:
        with log.open("wb") as out:
            self._child = subprocess.Popen(  # noqa: S603 - the contestants are ours to run
                command, cwd=ROOT, stdout=out, stderr=out, env={**os.environ, **environ}
            )
        self.log, self.pid = log, self._child.pid

    def check(self) -> None:
        """Raise if it has ended by a fault."""
        if self._child.poll() not in (None, 0):
            raise RuntimeError(f"{self.log.name} ended:\n{self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        self._child.terminate()
        self._child.wait(60)


@contextlib.asynccontextmanager
async def world(folder: Path, calls: int, parallel: int, delay_ms: float) -> AsyncIterator[str]:
    log = folder / f"world-{free_port()}.log"
    given = (f"--calls={calls}", f"--parallel={parallel}", f"--delay-ms={delay_ms}")
    process = Process(log, sys.executable, "-m", "bench.world", *given)
    try:
        await until_async(_aside(lambda: log.read_text().startswith("http")), limit_s=READY_S)
        yield log.read_text().strip()
    finally:
        process.stop()


def _aside(fact: Any) -> Any:
    async def is_so() -> bool:
        return bool(fact())

    return is_so


class Contest:
    """The rounds of one shape of load. `database` is a running PostgreSQL."""

    def __init__(self, options: argparse.Namespace, folder: Path, database: Database) -> None:
        self.options, self.folder, self.database = options, folder, database
        self.http: aiohttp.ClientSession

    async def round(self, name: str) -> dict[str, float]:
        """Run one contestant once."""
        options = self.options
        ids = [f"sesn_{name.replace('-', '_')}{free_port()}n{number}" for number in range(options.sessions)]
        async with world(self.folder, options.calls, options.parallel, options.delay_ms) as url:
            process = await self._start(name, url, ids)
            try:
                return await self._measured(url, process, ids, uses_postgres=name in ("bascule", "floor"))
            finally:
                process.stop()

    async def _start(self, name: str, url: str, ids: list[str]) -> Process:
        log = self.folder / f"{name}-{free_port()}.log"
        match name:
            case "python-sdk":
                python = python_of("sdk", ROOT / "tests" / "interop" / "requirements-sdk.lock")
                return Process(log, str(python), str(FOLDER / "python_sdk.py"), url, *ids)
            case "typescript-sdk":
                if not (FOLDER / "node_modules").exists():
                    install = ["npm", "ci", "--no-audit", "--no-fund"]
                    subprocess.run(install, cwd=FOLDER, check=True)  # noqa: ASYNC221, S603 - ours; nothing else runs yet
                return Process(log, "node", str(FOLDER / "typescript_sdk.mjs"), url, *ids)
            case "floor":
                return Process(log, sys.executable, str(FOLDER / "floor.py"), url, self.database.url, *ids)
            case _:
                return await self._bascule(log, url, ids)

    async def _bascule(self, log: Path, url: str, ids: list[str]) -> Process:
        # The sessions of earlier rounds are left behind: nobody plays them any more.
        await self.database.ask("update attachments set status = 'detached' returning session_id")
        port = free_port()
        process = Process(
            log, sys.executable, "-m", "app", "serve",
            ANTHROPIC_API_KEY="any", BASCULE_DATABASE_URL=self.database.url, BASCULE_UPSTREAM_URL=url,
            BASCULE_SECRET_KEY="A" * 43 + "=", BASCULE_ADMIN_KEY=ADMIN_KEY, BASCULE_PORT=str(port),
            BASCULE_WEBHOOK_ALLOW="127.0.0.0/8", BASCULE_LOG_LEVEL="warning",
        )  # fmt: skip
        base, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {ADMIN_KEY}"}

        async def is_ready() -> bool:
            process.check()
            with contextlib.suppress(aiohttp.ClientError):
                async with self.http.get(f"{base}/readyz") as answer:
                    return answer.status == 200
            return False

        await until_async(is_ready, limit_s=READY_S)
        tool = {"url": f"{url}/tool", "retry": self.options.retry}
        async with self.http.put(f"{base}/tools/lookup_order", json=tool, headers=headers) as answer:
            answer.raise_for_status()
        for id_ in ids:
            wish = {"max_idle_s": 5, "concurrency": 32}
            async with self.http.post(f"{base}/sessions/{id_}/attach", json=wish, headers=headers) as answer:
                answer.raise_for_status()
        return process

    async def _measured(
        self, url: str, process: Process, ids: list[str], *, uses_postgres: bool
    ) -> dict[str, float]:
        async def report() -> dict[str, Any]:
            process.check()
            async with self.http.get(f"{url}/_report") as answer:
                found: dict[str, Any] = await answer.json()
                return found

        async def streams() -> bool:
            return (await report())["streaming"] == len(ids)

        await until_async(streams, limit_s=READY_S)
        await asyncio.sleep(self.options.settle_s)
        postgres = [int(path.name) for path in self.database.processes()]
        before, database_before = cpu_s([process.pid]), cpu_s(postgres)
        async with self.http.post(f"{url}/_go"):
            pass
        total = len(ids) * self.options.calls
        while (found := await report())["done"] < total:  # noqa: ASYNC110 - it is another process that knows
            await asyncio.sleep(POLL_S)
        spent, of_database = cpu_s([process.pid]) - before, cpu_s(postgres) - database_before
        async with self.http.get(f"{url}/_latencies") as answer:
            taken: list[float] = await answer.json()
        return {
            "p50_ms": statistics.median(taken),
            "p99_ms": percentile(taken, 0.99) or 0.0,
            "calls_per_s": total / found["took_s"],
            "cpu_us_per_call": spent / total * 1e6,
            "postgres_us_per_call": of_database / total * 1e6 if uses_postgres else 0.0,
        }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.contestants}
    with tempfile.TemporaryDirectory(prefix="bascule-contest-") as name:
        folder = Path(name)
        database = Database(folder / "postgres")
        await database.start()
        try:
            contest = Contest(options, folder, database)
            async with aiohttp.ClientSession() as contest.http:
                for number in range(options.rounds):
                    turns = options.contestants if number % 2 == 0 else options.contestants[::-1]
                    for contestant in turns:
                        async with asyncio.timeout(RUN_S):
                            found[contestant].append(await contest.round(contestant))
        finally:
            await database.stop()
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(  # noqa: ASYNC221 - all is measured by then
            ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607 - the one of whoever measures
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}",
        "load": {
            name: getattr(options, name)
            for name in ("sessions", "calls", "parallel", "delay_ms", "rounds", "retry")
        },
        "median": {name: {f: _median(rounds, f) for f in FIGURES} for name, rounds in found.items()},
        "spread": {name: {f: _spread(rounds, f) for f in FIGURES} for name, rounds in found.items()},
    }


def _median(rounds: list[dict[str, float]], figure: str) -> float:
    return round(statistics.median(one[figure] for one in rounds), 3)


def _spread(rounds: list[dict[str, float]], figure: str) -> list[float]:
    values = [one[figure] for one in rounds]
    return [round(min(values), 3), round(max(values), 3)]


def table(found: dict[str, Any]) -> str:
    """The medians as a table, each with the ratio of Bascule's to it."""
    lines = [
        "| | p50 ms | p99 ms | calls/s | CPU us/call | PostgreSQL us/call |",
        "|---|---|---|---|---|---|",
    ]
    ours = found["median"].get("bascule")
    for name, figures in found["median"].items():
        cells = []
        for figure in FIGURES:
            value = figures[figure]
            ratio = f" ({ours[figure] / value:.2f}×)" if ours and value and name != "bascule" else ""
            cells.append(f"{value:,.1f}{ratio}" if value else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--calls", type=int, default=200, help="of each session")
    parser.add_argument("--parallel", type=int, default=1, help="calls at a time in each session")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="how long the tool takes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=1.0)
    parser.add_argument(
        "--retry", default="safe", help="`safe` lets deliveries reuse connections, as the others do"
    )
    parser.add_argument("--contestants", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(options))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(table(found) + "\n")


if __name__ == "__main__":
    main()
