"""The stage of the chaos runs: a PostgreSQL of its own and replicas as processes, with the ways to hurt them.

Everything is on loopback and in one folder, and every process ends with the block that started it.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

import aiohttp
import asyncpg

from app.store import audit
from app.store.audit import Verified
from app.store.database import create_engine
from app.store.embedded import EmbeddedPostgres
from app.store.migrate import migrate
from bench.proxy import Link

ROOT: Final = Path(__file__).parents[1]
ADMIN_KEY: Final = "an-admin-key-for-chaos"
POSTGRES_SETTINGS: Final = {"max_connections": "300", "shared_buffers": "64MB", "max_wal_size": "256MB"}
START_LIMIT_S: Final = 90.0
STOP_LIMIT_S: Final = 60.0
"""A replica that was told to stop takes at most this long: 40 s by its own account."""
QUERY_LIMIT_S: Final = 20.0
POLL_S: Final = 0.05
LOG_LINES_MAX: Final = 2_000_000
SKEWED_CLOCK: Final = "import time\n_true = time.time\ntime.time = lambda: _true() + {skew_s}\n"
"""What Python runs first in a replica whose wall clock is wrong."""

_Value = TypeVar("_Value")


class DatabaseAwayError(Exception):
    """PostgreSQL did not answer a question of the bench."""


class Database:
    """An embedded PostgreSQL that can be restarted, crashed and frozen. `url` is its address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._postgres = EmbeddedPostgres(folder, settings=POSTGRES_SETTINGS, environ=os.environ)
        self._thread = ThreadPoolExecutor(1)  # an embedded server is for one thread
        self._frozen: list[int] = []
        self.url = ""

    async def start(self) -> None:
        """Start it, or make sure that it runs, and bring the schema up."""
        self.url = await self._aside(self._postgres.start)
        engine = create_engine(self.url, connections_max=2)
        try:
            await migrate(engine)
        finally:
            await engine.dispose()

    async def audited(self) -> list[Verified]:
        """Walk the audit chains."""
        engine = create_engine(self.url, connections_max=2)
        try:
            async with engine.connect() as connection:
                await connection.execution_options(isolation_level="REPEATABLE READ")
                return [await audit.verify(connection, one) for one in await audit.tenants(connection)]
        finally:
            await engine.dispose()

    async def restart(self, *, crash: bool) -> float:
        """Stop it, in order or by a crash, start it again, and return for how many seconds it was away."""
        began = time.monotonic()
        if crash:
            pid = self._pid()
            os.kill(pid, signal.SIGQUIT)  # "immediate": recovers from its log at the start
            await until(lambda: not _is_alive(pid), limit_s=STOP_LIMIT_S)
        await self._aside(self._postgres.stop)
        await self._aside(self._postgres.start)
        return time.monotonic() - began

    def processes(self) -> list[Path]:
        """The folders in /proc of the server and of every process of it, connections included."""
        pid = self._pid()
        return [Path(f"/proc/{each}") for each in (pid, *_children_of(pid))]

    def freeze(self) -> None:
        """Stop the server and every process of it, connections included, until `thaw`."""
        pid = self._pid()
        os.kill(pid, signal.SIGSTOP)  # first, so that it starts no more
        self._frozen = [pid, *_children_of(pid)]
        for each in self._frozen[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        for each in reversed(self._frozen):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)
        self._frozen = []

    async def stop(self) -> None:
        """Stop it for good."""
        self.thaw()
        await self._aside(self._postgres.stop)
        self._thread.shutdown()

    async def ask(self, statement: str, *values: Any) -> list[asyncpg.Record]:
        """Run one statement on a connection of its own.

        Raises:
            DatabaseAwayError: it does not answer now.
        """
        try:
            async with asyncio.timeout(QUERY_LIMIT_S):
                connection = await asyncpg.connect(self.url)
                try:
                    return list(await connection.fetch(statement, *values))
                finally:
                    connection.terminate()
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise DatabaseAwayError(str(error)) from error

    def _pid(self) -> int:
        file = (self._folder / "postgres").resolve() / "pgdata" / "postmaster.pid"
        return int(file.read_text().split("\n", 1)[0])

    async def _aside(self, act: Callable[[], _Value]) -> _Value:
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)


@dataclass(eq=False)
class Replica:
    """One `serve` process. `id` is what the database calls it; `links` are its ways out, if they can fail."""

    id: str
    number: int
    url: str
    process: asyncio.subprocess.Process
    log: Path
    links: dict[str, Link] = field(default_factory=dict)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Stage:
    """Replicas over one database and one upstream. `replicas` are those that live."""

    def __init__(
        self, folder: Path, database: Database, upstream_url: str, *, with_links: bool, skew_s: float
    ) -> None:
        self.database = database
        self.replicas: list[Replica] = []
        self.fallen: list[str] = []
        """Replicas that ended without being told to, each in a sentence."""
        self.http: aiohttp.ClientSession
        self._folder = folder
        self._upstream_url = upstream_url
        self._with_links = with_links
        self._skew_s = skew_s
        self._starting = asyncio.Lock()
        self._secret = base64.b64encode(os.urandom(32)).decode()
        self._logs: list[Path] = []
        self._all: list[Replica] = []

    async def add(self) -> Replica:
        """Start a replica and wait until it is ready."""
        async with self._starting:  # one at a time: a new row in the database tells its name
            before = await self._ids()
            number = len(self._logs)
            links = await self._links()
            port = free_port()
            log = self._folder / f"replica-{number}.log"
            self._logs.append(log)
            environ = {
                "PATH": os.environ["PATH"],
                "HOME": os.environ.get("HOME", "/"),
                "ANTHROPIC_API_KEY": "sk-ant-api-chaos",
                "BASCULE_DATABASE_URL": self._database_url(links),
                "BASCULE_UPSTREAM_URL": links["upstream"].url if links else self._upstream_url,
                "BASCULE_SECRET_KEY": self._secret,
                "BASCULE_ADMIN_KEY": ADMIN_KEY,
                "BASCULE_WEBHOOK_ALLOW": "127.0.0.0/8",
                "BASCULE_PORT": str(port),
                "BASCULE_LOG_FORMAT": "json",
            }
            if self._skew_s:
                environ["PYTHONPATH"] = self._clock_of(number)
            with log.open("wb") as out:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "app", "serve", cwd=ROOT, env=environ, stdout=out, stderr=out
                )
            replica = Replica("", number, f"http://127.0.0.1:{port}", process, log, links)
            self._all.append(replica)
            await self.ready(replica, limit_s=START_LIMIT_S)
            (replica.id,) = await self._ids() - before
            self.replicas.append(replica)
            return replica

    def _clock_of(self, number: int) -> str:
        """A path that puts the wall clocks of one replica after the other before, right and behind."""
        path = self._folder / f"clock-{number}"
        path.mkdir()
        skew_s = (-self._skew_s, 0.0, self._skew_s)[number % 3]
        (path / "sitecustomize.py").write_text(SKEWED_CLOCK.format(skew_s=skew_s))
        return str(path)

    async def ready(self, replica: Replica, *, limit_s: float) -> None:
        """Wait until a replica says that it can serve."""
        await until_async(lambda: self._is_ready(replica), limit_s=limit_s)

    async def kill(self, replica: Replica) -> None:
        """End a replica by `kill -9`."""
        self._drop(replica)
        with contextlib.suppress(ProcessLookupError):
            replica.process.kill()
        await replica.process.wait()

    async def terminate(self, replica: Replica) -> int:
        """Tell a replica to stop, wait until it has, and return its exit status.

        Raises:
            TimeoutError: it took longer than `STOP_LIMIT_S`.
        """
        self._drop(replica)
        replica.process.terminate()
        async with asyncio.timeout(STOP_LIMIT_S):
            return await replica.process.wait()

    def note_fallen(self) -> None:
        """Write down which replicas ended by themselves."""
        for replica in [each for each in self.replicas if each.process.returncode is not None]:
            self._drop(replica)
            self.fallen.append(f"replica {replica.number} ended with {replica.process.returncode}")

    async def request(
        self, method: str, path: str, body: Any = None, *, replica: Replica | None = None
    ) -> tuple[int, Any]:
        """Ask a replica, the first by default, and return status and JSON.

        Raises:
            aiohttp.ClientError, TimeoutError: it did not answer.
        """
        url = (replica or self.replicas[0]).url
        async with self.http.request(method, url + path, json=body) as answer:
            return answer.status, await answer.json(content_type=None)

    def log_lines(self) -> Iterator[dict[str, Any]]:
        """Read what the replicas logged, oldest replica first."""
        count = 0
        for log in self._logs:
            with log.open(errors="replace") as lines:
                for line in lines:
                    if (count := count + 1) > LOG_LINES_MAX:
                        return
                    try:
                        yield {**json.loads(line), "file": log.name}
                    except ValueError:
                        yield {"level": "text", "event": line.strip()[:200], "file": log.name}

    def troubles(self) -> dict[str, int]:
        """Count the log's warnings and errors by level and event."""
        counted: collections.Counter[str] = collections.Counter()
        for line in self.log_lines():
            if line.get("level") in ("warning", "error", "critical", "text"):
                counted[f"{line['level']} {line.get('event')}"] += 1
        return dict(counted.most_common(40))

    async def close(self) -> None:
        """End every replica, and everything that belongs to one."""
        for replica in self._all:
            if replica.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    replica.process.kill()
            await replica.process.wait()
            for link in replica.links.values():
                await link.close()
        self.replicas.clear()

    def _drop(self, replica: Replica) -> None:
        if replica in self.replicas:
            self.replicas.remove(replica)

    async def _is_ready(self, replica: Replica) -> bool:
        if replica.process.returncode is not None:
            raise RuntimeError(f"a replica did not start:\n{replica.log.read_text()[-2000:]}")
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self.http.get(replica.url + "/readyz") as answer:
                return answer.status == 200
        return False

    async def _ids(self) -> set[str]:
        return {row["id"] for row in await self.database.ask("select id from replicas")}

    async def _links(self) -> dict[str, Link]:
        if not self._with_links:
            return {}
        place = urlsplit(self._upstream_url)
        assert place.hostname is not None
        assert place.port is not None
        path = parse_qs(urlsplit(self.database.url).query)
        return {
            "upstream": await Link.open((place.hostname, place.port)),
            "postgres": await Link.open(f"{path['host'][0]}/.s.PGSQL.{path['port'][0]}"),
        }

    def _database_url(self, links: dict[str, Link]) -> str:
        if not links:
            return self.database.url
        parts = urlsplit(self.database.url)
        host, port = links["postgres"].address
        login = f"{parts.username}:{quote(parts.password or '', safe='')}"
        return f"postgresql://{login}@{host}:{port}{parts.path}"


@contextlib.asynccontextmanager
async def staged(
    folder: Path, upstream_url: str, *, with_links: bool = False, skew_s: float = 0.0
) -> AsyncIterator[Stage]:
    """Lend a stage without replicas. With links each replica's ways out lead through proxies of its own.

    Their wall clocks differ by `skew_s` from the true time, in either direction or not at all by turns.
    """
    database = Database(folder)
    stage = Stage(folder, database, upstream_url, with_links=with_links, skew_s=skew_s)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        await database.start()
        async with aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)
        ) as stage.http:
            try:
                yield stage
            finally:
                await stage.close()
    finally:
        await database.stop()


async def until(fact: Callable[[], Any], *, limit_s: float) -> None:
    """Wait until something that nothing signals is so.

    Raises:
        TimeoutError: it is not so after `limit_s`.
    """
    async with asyncio.timeout(limit_s):
        while not fact():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


async def until_async(fact: Callable[[], Awaitable[Any]], *, limit_s: float) -> None:
    """As `until`, for a fact that has to be asked for."""
    async with asyncio.timeout(limit_s):
        while not await fact():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which `share` of them lie, None if there are none; rounded to 10 ms."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2) if ordered else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(FileNotFoundError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return True


def _children_of(pid: int) -> list[int]:
    told = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="],  # noqa: S607
        check=True, capture_output=True, text=True, timeout=QUERY_LIMIT_S,
    )  # fmt: skip
    pairs = (line.split() for line in told.stdout.splitlines())
    return [int(child) for child, parent in pairs if int(parent) == pid]
