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
CANCELS_SINCE = (1, 20)
"""Those before end with "bad client state: 0" now and then when a client cancels a query and goes away."""
ACCOUNTS = ("postgres", "nobody")


def program() -> str | None:
    """Return the path of PgBouncer, which packages put where only root looks."""
    return shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))


def survives_cancels(pgbouncer: str) -> bool:
    """Return whether this PgBouncer outlives many cancel requests; the source is its issue 801."""
    shown = subprocess.run([pgbouncer, "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(int(part) for part in shown.split()[1].split(".")[:2])
    return version >= CANCELS_SINCE


@contextlib.contextmanager
def running(pgbouncer: str, server_url: str) -> Iterator[str]:
    """Pool the server's connections and yield the URL that leads there; the path names the database."""
    folder = Path(tempfile.mkdtemp(prefix="bascule-pooler-"))
    account = _account(server_url)
    try:
        _configure(folder, server_url)
        if account is not None:
            for path in (folder, *folder.iterdir()):
                os.chown(path, account.pw_uid, account.pw_gid)
        folder.chmod(0o711)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [pgbouncer, folder / "pgbouncer.ini"],
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
        try:
            _wait(process, folder)
            yield pooled_url(server_url, folder)
        finally:
            process.kill()  # it keeps nothing
            process.wait(STOP_LIMIT_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
