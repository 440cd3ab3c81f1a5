"""Runs a PgBouncer of the tests' own in transaction mode: two server connections, a Unix socket, no port.

Debian's package is only taken for its program; its service, if it runs, is neither used nor touched.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

POOL_SIZE = 2
CLIENTS_MAX = 400
PORT = 6432  # names the socket file; nothing listens on TCP
START_LIMIT_S = 10.0
STOP_LIMIT_S = 10.0
PLACES = ("/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/opt/homebrew/bin")
RESTARTS_MAX = 1_000
"""How often a pooler that is kept alive may end itself."""
ACCOUNTS = ("postgres", "nobody")


def program() -> str | None:
    """Return the path of PgBouncer, which packages put where only root looks."""
    return shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))


@contextlib.contextmanager
def running(pgbouncer: str, server_url: str, *, is_kept: bool = False) -> Iterator[str]:
    """Pool the server's connections and yield the URL that leads there; the path names the database.

    With `is_kept` it is started again whenever it ends. Before 1.20 it ends itself now and then, with
    "bad client state: 0", when a client cancels a query and goes away (its issue 801); Debian 12 has 1.18.
    """
    folder = Path(tempfile.mkdtemp(prefix="bascule-pooler-"))
    account = _account(server_url)
    try:
        _configure(folder, server_url)
        if account is not None:
            for path in (folder, *folder.iterdir()):
                os.chown(path, account.pw_uid, account.pw_gid)
        folder.chmod(0o711)
        pooler = _Pooler(pgbouncer, folder, account)
        pooler.start()
        keeper = threading.Thread(target=pooler.keep, daemon=True)
        try:
            _wait(pooler.process, folder)
            if is_kept:
                keeper.start()
            yield pooled_url(server_url, folder)
        finally:
            pooler.is_wanted = False
            pooler.process.kill()  # it keeps nothing
            if is_kept:
                keeper.join(STOP_LIMIT_S)
            pooler.process.kill()  # one that the keeper had just started
            pooler.process.wait(STOP_LIMIT_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Pooler:
    """A PgBouncer process, and those that follow it."""

    def __init__(self, pgbouncer: str, folder: Path, account: pwd.struct_passwd | None) -> None:
        self._command, self._folder, self._account = [pgbouncer, folder / "pgbouncer.ini"], folder, account
        self.is_wanted = True

    def start(self) -> None:
        account = self._account
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": os.environ["PATH"], "TZ": "UTC"},
                user=account and account.pw_uid,
                group=account and account.pw_gid,
                extra_groups=[] if account else None,
                start_new_session=True,  # Ctrl-C is for pytest
            )

    def keep(self) -> None:
        for _ in range(RESTARTS_MAX):
            self.process.wait()
            if not self.is_wanted:
                return
            self.start()


def pooled_url(url: str, folder: Path) -> str:
    """Return the URL of the same database and user by way of the pooler in `folder`."""
    parts = urlsplit(url)
    login = f"{parts.username}:{parts.password}" if parts.password else f"{parts.username}"
    way = urlencode({"host": str(folder), "port": PORT}, quote_via=quote, safe="/")
    return f"postgresql://{login}@{parts.path}?{way}"


def _configure(folder: Path, server_url: str) -> None:
    parts = urlsplit(server_url)
    host, port = _address(server_url)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    users = folder / "users"
    users.touch(0o600)
    # With the plain password it can both judge clients and log in by SCRAM.
    users.write_text(f'"{user}" "{password}"\n')
    (folder / "pgbouncer.ini").write_text(
        f"""
[databases]
* = host={host} port={port}

[pgbouncer]
unix_socket_dir = {folder}
listen_port = {PORT}
auth_type = {"scram-sha-256" if password else "trust"}
auth_file = {users}
pool_mode = transaction
default_pool_size = {POOL_SIZE}
max_client_conn = {CLIENTS_MAX}
"""
    )


def _address(server_url: str) -> tuple[str, int]:
    """Return the server's host, or the folder of its socket, and its port."""
    parts = urlsplit(server_url)
    options = parse_qs(parts.query)
    host = parts.hostname or options.get("host", ["127.0.0.1"])[0]
    return host, parts.port or int(options.get("port", ["5432"])[0])


def _account(server_url: str) -> pwd.struct_passwd | None:
    """Return who runs it for root, whom it refuses: the owner of the server's socket, who may open it."""
    if os.geteuid() != 0:
        return None
    host, _ = _address(server_url)
    if host.startswith("/") and (owner := Path(host).stat().st_uid) != 0:
        return pwd.getpwuid(owner)
    for name in ACCOUNTS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError(f"PgBouncer does not run as root, and none of {ACCOUNTS} exists")


def _wait(process: subprocess.Popen[bytes], folder: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(folder / f".s.PGSQL.{PORT}"))
            return
        time.sleep(0.02)
    raise RuntimeError(f"PgBouncer did not start; it said:\n{(folder / 'log').read_text()}")
