"""Decides when a private PostgreSQL starts, recovers and stops, and shares it between processes.

The first to use it starts it and the last one stops it. The folder `postgres` in the data directory holds
the cluster, its password, log and socket, and two locks: `starting` is held while a server is started or
stopped, `in-use` by all who use it.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGINT
from typing import IO
from urllib.parse import quote

import asyncpg

from app.store.programs import (
    LOG_TAIL_CHARS,
    EmbeddedPostgresError,
    Programs,
    account_for,
    child_environ,
    command_of,
    link_elsewhere,
    open_private,
)

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]

DATABASE = ROLE = "bascule"
PORT = 5432  # names the socket file; nothing listens on TCP
SOCKET = f".s.PGSQL.{PORT}"

START_LIMIT_S = 120.0  # crash recovery counts
STOP_LIMIT_S = 60.0  # a fast stop writes a checkpoint
RETRY_LIMIT_S = 10.0  # a killed postmaster leaves children that hold its shared memory for a moment
LOGIN_LIMIT_S = 10.0
ANSWER_LIMIT_S = 2.0
POLL_S = 0.02
LOG_BYTES_MAX = 16 * 1024 * 1024
SOCKET_PATH_BYTES_MAX = 100  # Linux takes 107, macOS 103

_IN_THE_WAY = re.compile(r'lock file ".*" already exists|is still in use')
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._-]+")  # others may end a name in a URL or a list of folders
_SSL_REQUEST = b"\0\0\0\x08\x04\xd2\x16\x2f"


class _StillStartingError(EmbeddedPostgresError):
    """The limit passed, but the server works on."""


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
        self._home = self._data_dir / "postgres"
        self._programs = Programs(child_environ(environ))
        self._in_use: IO[bytes] | None = None
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
                self._in_use = self._in_use or open_private(self._home / "in-use", "ab")
                try:
                    fcntl.flock(self._in_use, fcntl.LOCK_SH)
                    self._run_until_ready()
                    self._ensure_database()
                except BaseException as error:
                    # A long recovery would begin again from its start if we ended it.
                    self._leave(may_shut_down=not isinstance(error, _StillStartingError))
                    raise
        except (OSError, subprocess.TimeoutExpired) as error:
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
        if self._in_use is not None:
            with self._starting():
                self._leave(may_shut_down=True)

    def url(self, database: str) -> str:
        """Return the URL of `database`, with its password; good for asyncpg and for SQLAlchemy."""
        assert self._socket_folder is not None, "start() comes first"
        password = (self._home / "password").read_text()
        place = f"{quote(database, safe='')}?host={self._socket_folder}&port={PORT}"
        return f"postgresql://{ROLE}:{password}@/{place}"

    def _settle(self) -> None:
        """Decide where the cluster lives and who runs it, and make its folder."""
        is_root = os.geteuid() == 0
        home = self._data_dir / "postgres"
        if not self._data_dir.is_dir():
            self._data_dir.mkdir(parents=True)
            self._data_dir.chmod(0o711 if is_root else 0o700)
        if is_root:
            if self._programs.account is None:
                self._programs = replace(self._programs, account=account_for(home / "pgdata"))
            if not os.path.lexists(home) and not self._programs.can_enter(self._data_dir):
                link_elsewhere(home)
        if home.is_symlink() and not home.is_dir():
            raise EmbeddedPostgresError(
                f"{home} points to {home.readlink()}, which is gone; restore that folder, or remove the link"
                " to begin with an empty database"
            )
        home.mkdir(exist_ok=True)
        self._home = home.resolve()
        if (owner := self._home.stat().st_uid) != os.geteuid():
            raise EmbeddedPostgresError(
                f"{self._home} belongs to user id {owner}; run as that user, or set BASCULE_DATA_DIR to"
                " another folder"
            )
        # Root keeps the folder itself, so that the server's account cannot plant links for root to follow.
        self._home.chmod(0o711 if is_root else 0o700)
        account = self._programs.account
        if account is not None and not self._programs.can_enter(self._home):
            raise EmbeddedPostgresError(
                f"PostgreSQL does not run as root, and user {account.name} cannot enter {self._home};"
                " set BASCULE_DATA_DIR to a folder that everybody may enter, or run as another user than root"
            )

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        end = time.monotonic() + START_LIMIT_S + STOP_LIMIT_S
        with open_private(self._home / "starting", "ab") as lock:
            while not _try_exclusive(lock):
                if time.monotonic() > end:
                    raise EmbeddedPostgresError(
                        f"{lock.name} is held by another process; end it and try again"
                    )
                time.sleep(POLL_S)
            yield

    def _leave(self, *, may_shut_down: bool) -> None:
        """Let go of the server; the caller holds the `starting` lock, so nobody joins meanwhile."""
        assert self._in_use is not None
        try:
            if _try_exclusive(self._in_use) and may_shut_down:
                self._shut_down()
        finally:
            self._in_use.close()
            if self._process is not None and self._process.poll() is None:
                self._process.returncode = 0  # it outlives us on purpose; Popen would warn of a lost child
            self._in_use = self._process = None

    def _run_until_ready(self) -> None:
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
            # One that starts, recovers or stops is waited for.
            if launched is None and (postmaster is None or not self._is_alive(postmaster.pid)):
                launched, log_from = self._launch()
            time.sleep(POLL_S)
        raise _StillStartingError(
            f"PostgreSQL in {self._home} is not ready after {START_LIMIT_S:.0f} s and goes on; its"
            " postgres.log tells why; start again later"
        )

    def _launch(self) -> tuple[subprocess.Popen[bytes], int]:
        """Start a server without waiting for it; return it and where in the log it begins."""
        cluster, folder, log = (self._home / name for name in ("pgdata", "socket", "postgres.log"))
        programs = self._programs.find(self._home)
        if not cluster.is_dir():
            self._programs.create_cluster(programs, self._home, role=ROLE)
        path = str(folder / SOCKET)
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX or not _PLAIN_PATH.fullmatch(path):
            folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="bascule-"))
        self._programs.make_folder(folder)
        for lock in (cluster / "postmaster.pid", folder / f"{SOCKET}.lock"):
            _disown(lock)
        settings = {
            **self._settings,
            "listen_addresses": "",
            "port": str(PORT),
            "unix_socket_directories": str(folder),
            "unix_socket_permissions": "0700",
            "log_error_verbosity": "terse",  # the details of a complaint quote rows
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
            log.replace(log.with_suffix(".log.1"))
        with open_private(log, "ab") as out:
            log_from = out.tell()
            self._process = self._programs.launch(programs / "postgres", "-D", cluster, *options, output=out)
        return self._process, log_from

    def _shut_down(self) -> None:
        postmaster = self._postmaster()
        if postmaster is None or not self._is_alive(postmaster.pid):
            return
        os.kill(postmaster.pid, SIGINT)  # "fast": SIGTERM would wait for its clients
        end = time.monotonic() + STOP_LIMIT_S
        while self._is_alive(postmaster.pid):
            if time.monotonic() > end:
                raise EmbeddedPostgresError(
                    f"PostgreSQL (process {postmaster.pid}) has not stopped after {STOP_LIMIT_S:.0f} s;"
                    f" {self._home / 'postgres.log'} tells why; the next start waits for it"
                )
            time.sleep(POLL_S)
        if self._home not in postmaster.socket_folder.parents:
            with contextlib.suppress(OSError):
                postmaster.socket_folder.rmdir()

    def _postmaster(self) -> _Postmaster | None:
        """Read who claims the cluster; whether that is still true is for `_is_alive` and `_answers`."""
        try:
            lines = (self._home / "pgdata" / "postmaster.pid").read_text().splitlines()
            pid, *_ = (int(line) for line in lines[:1])
        except (FileNotFoundError, ValueError):
            return None
        lines += [""] * 8  # it grows while the server starts
        return _Postmaster(pid, Path(lines[4]), is_ready=lines[7].strip() == "ready")

    def _is_alive(self, pid: int) -> bool:
        """Tell whether `pid` is the postmaster of our cluster, and not whoever got its number later."""
        if self._process is not None:
            self._process.poll()  # a zombie of ours would live on
        command = f"{command_of(pid)} "
        if f" -D {self._home / 'pgdata'} " in command:
            return True
        # Started by hand with a relative -D it may be ours: wait, rather than take its place.
        return Path(command.split(" ", 1)[0]).name == "postgres" and " -D /" not in command

    def _ensure_database(self) -> None:
        async def ensure() -> None:
            connection = await asyncpg.connect(self.url("postgres"), timeout=LOGIN_LIMIT_S)
            try:
                if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", DATABASE):
                    await connection.execute(f"CREATE DATABASE {DATABASE}")
            finally:
                await connection.close()

        try:
            with ThreadPoolExecutor(1) as pool:  # the caller's thread may have a running loop
                pool.submit(asyncio.run, ensure()).result()
        except (asyncpg.PostgresError, OSError) as error:
            raise EmbeddedPostgresError(
                f"cannot log in to PostgreSQL with {self._home / 'password'}: {error}; restore that file from"
                " a backup of the same data"
            ) from error

    def _log_since(self, offset: int) -> str:
        with (self._home / "postgres.log").open("rb") as log:
            log.seek(offset)
            return log.read().decode(errors="replace").strip()[-LOG_TAIL_CHARS:]


def _answers(socket_folder: Path) -> bool:
    """Tell whether a server answers; a connection alone may only sit in the queue of a stopped one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWER_LIMIT_S)
        probe.connect(str(socket_folder / SOCKET))
        probe.sendall(_SSL_REQUEST)
        return probe.recv(1) in (b"N", b"S")
    return False


def _disown(lock: Path) -> None:
    """Put our own process id into a lock file that a dead server left.

    Process ids are given again, above all in containers, and PostgreSQL refuses to start while the id in the
    file is alive, unless it is its own parent's. Removing the file instead would also remove the interlock on
    shared memory, which keeps two servers out of one cluster.
    """
    with contextlib.suppress(FileNotFoundError), open_private(lock, "r+b") as file:
        _, _, rest = file.read().partition(b"\n")
        file.seek(0)
        file.write(b"%d\n" % os.getpid() + rest)
        file.truncate()


def _try_exclusive(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
