"""`bascule serve`: find the database, bring it to this version, and serve until told to stop."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import asyncpg
import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic import SecretStr
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.console.sign_in import sign_in_link
from app.logs import logger, set_up_logs
from app.main import build_bridge, create_app
from app.settings import (
    ADMIN_KEY_FILE,
    SECRET_KEY_BYTES,
    SECRET_KEY_FILE,
    Settings,
    secret_keys,
    unknown_variables,
)
from app.store import audit
from app.store.audit import Verified
from app.store.database import create_engine
from app.store.embedded import EmbeddedPostgres, EmbeddedPostgresError
from app.store.migrate import is_current, migrate, new_revision
from app.store.secrets import Secrets
from app.traces import can_trace

STOP_LIMIT_S: Final = 40
"""How long requests that are under way may take after a signal."""
BACKLOG: Final = 2048
START_POLL_S: Final = 0.01
CONNECTIONS_FOR_COMMAND: Final = 2

T = TypeVar("T")

log = logger(__name__)


class CannotServeError(Exception):
    """The service cannot start; the message names what is wrong and the remedy."""


def serve(settings: Settings, environ: Mapping[str, str]) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        CannotServeError: something that it needs is missing.
    """
    if settings.traces_url is not None and not can_trace():
        raise CannotServeError(
            "OTEL_EXPORTER_OTLP_ENDPOINT asks for traces, for which packages are missing;"
            " install bascule[otel], or unset the variable"
        )
    set_up_logs(settings)
    for name in unknown_variables(environ):
        log.warning("unknown_setting", variable=name, remedy="see docs/settings.md")
    # The server raises the signal that stopped it once more: by default that would end the process before
    # the embedded database is stopped.
    signal.signal(signal.SIGTERM, _leave)
    with (
        contextlib.suppress(KeyboardInterrupt),
        database(settings, environ) as url,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        if settings.is_embedded:
            settings = with_stored_keys(settings)
        runner.run(_serve(settings, url))


@contextlib.contextmanager
def database(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    """Lend the URL of the database: the one that is set, or an embedded server's while the block runs.

    Raises:
        CannotServeError: the embedded server does not start.
    """
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value()
        return
    postgres = EmbeddedPostgres(settings.data_dir, environ=environ)
    try:
        url = postgres.start()
    except EmbeddedPostgresError as error:
        raise CannotServeError(str(error)) from error
    try:
        yield url
    finally:
        postgres.stop()


async def migrate_database(settings: Settings, url: str, *, revision: str | None = None) -> None:
    """Bring the database to this version's schema, or write a migration named `revision` instead.

    Raises:
        CannotServeError: the database cannot be used.
    """
    engine = create_engine(
        _direct(settings, url), connections_max=CONNECTIONS_FOR_COMMAND, is_behind_pooler=False
    )
    try:
        await migrate(engine)
        if revision is not None:
            async with engine.connect() as connection:
                await connection.run_sync(new_revision, revision)
    except (SQLAlchemyError, OSError, asyncpg.PostgresError) as error:
        raise _unusable(error) from error
    finally:
        await engine.dispose()


def with_secrets(
    settings: Settings, environ: Mapping[str, str], work: Callable[[AsyncEngine, Secrets], Awaitable[T]]
) -> T:
    """Do something with the database and the keys that seal its secrets, beside replicas that may serve.

    Raises:
        CannotServeError: the database cannot be used.
    """
    with database(settings, environ) as url:
        if settings.is_embedded:
            settings = with_stored_keys(settings)
        return asyncio.run(_with_secrets(settings, url, work))


async def verify_audit(settings: Settings, url: str, tenant: str | None) -> list[Verified]:
    """Walk the audit chain of one tenant, or of all.

    Raises:
        CannotServeError: the database cannot be used, or has no audit yet.
    """
    engine = create_engine(
        _direct(settings, url), connections_max=CONNECTIONS_FOR_COMMAND, is_behind_pooler=False
    )
    try:
        async with engine.connect() as connection:
            # One moment: rows that are appended meanwhile are not missing from what was read before.
            await connection.execution_options(isolation_level="REPEATABLE READ")
            named = await audit.tenants(connection) if tenant is None else [tenant]
            return [await audit.verify(connection, one) for one in named]
    except (SQLAlchemyError, OSError, asyncpg.PostgresError) as error:
        raise _unusable(error) from error
    finally:
        await engine.dispose()


def with_stored_keys(settings: Settings) -> Settings:
    """Return the settings with the keys that are kept in the data directory beside the embedded database.

    A key that is set stays; one that is not is read from its file, which is made with the first start.
    """
    keys: dict[str, SecretStr] = {}
    if settings.secret_key is None:
        new = base64.b64encode(secrets.token_bytes(SECRET_KEY_BYTES)).decode()
        keys["secret_key"] = SecretStr(_stored(settings.data_dir / SECRET_KEY_FILE, new))
    if settings.admin_key is None:
        new = secrets.token_hex(SECRET_KEY_BYTES)
        keys["admin_key"] = SecretStr(_stored(settings.data_dir / ADMIN_KEY_FILE, new))
    return settings.model_copy(update=keys)


async def _with_secrets(
    settings: Settings, url: str, work: Callable[[AsyncEngine, Secrets], Awaitable[T]]
) -> T:
    assert settings.secret_key is not None, "with_stored_keys makes it, or the settings require it"
    engine = create_engine(
        _direct(settings, url), connections_max=CONNECTIONS_FOR_COMMAND, is_behind_pooler=False
    )
    try:
        await _require_current_schema(engine)
        return await work(engine, Secrets(secret_keys(settings.secret_key)))
    except (SQLAlchemyError, OSError, asyncpg.PostgresError) as error:
        raise _unusable(error) from error
    finally:
        await engine.dispose()


def _leave(*_: object) -> NoReturn:
    raise SystemExit(0)


async def _serve(settings: Settings, url: str) -> None:
    if settings.is_embedded or settings.migrate:
        await migrate_database(settings, url)
    bridge = build_bridge(settings, url)
    try:
        await _require_current_schema(bridge.engine)
        if settings.anthropic_api_key is None:
            log.warning("no_api_key", remedy="set ANTHROPIC_API_KEY: no session can be served without it")
        with _socket(settings) as sock:
            log.info("listening", url=_url(settings, sock))
            if settings.is_embedded:
                log.info("admin_key", file=str(settings.data_dir / ADMIN_KEY_FILE))
                # To the terminal and no log: whoever opens it is the operator.
                link = await sign_in_link(bridge, _console_base(settings, sock.getsockname()[1]))
                sys.stdout.write(f"The console, for the next 15 minutes and once: {link}\n")
                sys.stdout.flush()
            server = _Server(_config(create_app(bridge)), bridge.stopping)
            await server.serve(sockets=[sock])
        if not server.started:
            raise CannotServeError("the service could not start; the log says why")
    finally:
        await bridge.engine.dispose()


@contextlib.asynccontextmanager
async def listening(settings: Settings, app: FastAPI) -> AsyncIterator[str]:
    """Serve an application while the block runs and yield its URL; signals stay the caller's.

    Raises:
        CannotServeError: the port is taken, or the application does not start.
    """
    with _socket(settings) as sock:
        server = _Quiet(_config(app), app.state.bridge.stopping)
        task = asyncio.create_task(server.serve(sockets=[sock]), name="http")
        try:
            while not server.started:
                if task.done():
                    raise CannotServeError("the service could not start; the log says why")
                await asyncio.sleep(START_POLL_S)
            yield _url(settings, sock)
        finally:
            server.should_exit = True
            await asyncio.wait([task], timeout=STOP_LIMIT_S)


class _Server(uvicorn.Server):
    """Lets nothing wait on once it was told to stop: leases go only after the last request has ended."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)


class _Quiet(_Server):
    """Leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=STOP_LIMIT_S,
    )


def _socket(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        sock = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
        # Connections inherit it. asyncio's own loop would not set it for them, and every answer wait 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotServeError(
                f"port {settings.port} of {settings.host} is taken; does another Bascule run? Stop it, or set"
                " BASCULE_PORT to a free port"
            ) from error
        reason = str(error.strerror).partition(" (")[0]  # what follows repeats the address
        raise CannotServeError(
            f"cannot listen on port {settings.port} of {settings.host}: {reason};"
            " set BASCULE_PORT to a free port, or BASCULE_HOST to an address of this machine"
        ) from error


def _console_base(settings: Settings, port: int) -> str:
    """Return where people reach the service that listens on this port."""
    return settings.model_copy(update={"port": port}).base_url


def _url(settings: Settings, sock: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{sock.getsockname()[1]}"


async def _require_current_schema(engine: AsyncEngine) -> None:
    try:
        is_ready = await is_current(engine)
    except (SQLAlchemyError, OSError, asyncpg.PostgresError) as error:
        raise _unusable(error) from error
    if not is_ready:
        raise CannotServeError(
            "the database has an older schema than this version needs; run `bascule migrate` first,"
            " or set BASCULE_MIGRATE=1 to let `bascule serve` do it"
        )


def _direct(settings: Settings, url: str) -> str:
    # Locks of a session and settings of a connection do not survive a pooler.
    direct = settings.database_direct_url
    return url if direct is None else direct.get_secret_value()


def _unusable(error: Exception) -> CannotServeError:
    # Only the first line: the others repeat the statement.
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return CannotServeError(
        f"the database cannot be used: {reason}; check BASCULE_DATABASE_URL and that the server runs"
    )


def _stored(path: Path, new: str) -> str:
    """Return what the file holds; the first process to ask makes it with `new`, readable by its user only."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text(encoding="utf-8").strip()
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(new + "\n")
        file.flush()
        os.fsync(file.fileno())
    return new
