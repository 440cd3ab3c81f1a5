"""Lends tests a real PostgreSQL: one server per test process, and a database of their own for each that asks.

`BASCULE_TEST_DATABASE_URL` names a server to use instead. `python -m tests.postgres [FOLDER]` is the keeper
behind `server()`: it prints the URL and serves until its standard input ends. So the server also stops when
a test process is interrupted or killed, which runs no fixture to its end.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from app.store.embedded import EmbeddedPostgres

ROOT = Path(__file__).parents[1]
# Small, and as durable as the real one: what tests prove about crashes must hold.
SETTINGS = {"shared_buffers": "16MB", "max_connections": "100", "max_wal_size": "128MB", "fsync": "on"}
STOP_LIMIT_S = 30.0
STATEMENT_LIMIT_S = 30.0


@contextlib.contextmanager
def server(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield the URL of a server; for a fixture of session scope."""
    if given := environ.get("BASCULE_TEST_DATABASE_URL"):
        yield given
        return
    with keeper() as (_, url):
        yield url


@contextlib.contextmanager
def database(server_url: str, *, template: str | None = None) -> Iterator[str]:
    """Yield the URL of a fresh database and drop it afterwards, whoever is still connected."""
    url = fresh_database(server_url, template=template)
    try:
        yield url
    finally:
        drop_database(url)


def fresh_database(server_url: str, *, template: str | None = None) -> str:
    """Create a database with a name of its own, a copy of `template` if given, and return its URL.

    `template` names a database that nobody is connected to.
    """
    name = f"test_{secrets.token_hex(8)}"
    _execute(server_url, f"CREATE DATABASE {name}" + (f' TEMPLATE "{template}"' if template else ""))
    return urlsplit(server_url)._replace(path=f"/{name}").geturl()


def drop_database(url: str) -> None:
    """Drop what `fresh_database` made."""
    parts = urlsplit(url)
    name = parts.path.removeprefix("/")
    assert name.startswith("test_"), f"{name} was not made by fresh_database()"
    _execute(parts._replace(path="/postgres").geturl(), f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@contextlib.contextmanager
def keeper(
    folder: Path | None = None, *, uid: int | None = None, environ: Mapping[str, str] = os.environ
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the keeper of a server in `folder` (a temporary one by default) and yield it with the URL.

    With `uid` the keeper, started by root, becomes that user before it starts the server.
    """
    arguments = [str(argument) for argument in (folder, uid) if argument is not None]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.postgres", *arguments],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for pytest; the keeper is told by the end of its input
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"the keeper ended with {process.wait(STOP_LIMIT_S)}, see its traceback")
            yield process, url
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait(STOP_LIMIT_S)


def _execute(url: str, statement: str) -> None:
    async def execute() -> None:
        connection = await asyncpg.connect(url, timeout=STATEMENT_LIMIT_S, command_timeout=STATEMENT_LIMIT_S)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    with ThreadPoolExecutor(1) as pool:  # the caller's thread may have a running loop
        pool.submit(asyncio.run, execute()).result()


def _keep(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder, settings=SETTINGS, environ=os.environ)
    try:
        print(postgres.start(), flush=True)
        sys.stdin.read()
    finally:
        postgres.stop()


def _main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if len(sys.argv) > 2:
        # Here and not when it is started: the user may be unable to reach the Python that runs this.
        os.setgroups([])
        os.setgid(int(sys.argv[2]))
        os.setuid(int(sys.argv[2]))
    if len(sys.argv) > 1:
        _keep(Path(sys.argv[1]))
        return
    # The server of root runs as another user, who must be able to enter the folder.
    folder = Path(tempfile.mkdtemp(prefix="bascule-test-"))
    folder.chmod(0o711)
    try:
        _keep(folder)
    finally:
        shutil.rmtree((folder / "postgres").resolve(), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
