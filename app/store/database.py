"""Connections to PostgreSQL: how they are opened, bounded, and what counts as the database being away."""

from __future__ import annotations

import re
from typing import Any, Final

import asyncpg
from sqlalchemy import Connection, ExceptionContext, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

CONNECT_LIMIT_S: Final = 5.0
POOL_WAIT_LIMIT_S: Final = 5.0
COMMAND_LIMIT_S: Final = 20.0
"""Our own limit on a statement, for when the network swallows the server's answer."""
STATEMENT_LIMIT_S: Final = 15.0
LOCK_LIMIT_S: Final = 5.0
IDLE_IN_TRANSACTION_LIMIT_S: Final = 30.0
CONNECTION_AGE_S_MAX: Final = 1800

# Classes of SQLSTATE that say "not now" about any statement: connection, resources, operator, deadlock,
# serialization, and the limits above.
_UNAVAILABLE_CLASSES: Final = ("08", "53", "57", "58", "40")
_LOCK_NOT_AVAILABLE: Final = "55P03"
_IDLE_IN_TRANSACTION: Final = "25P03"
# Where complaints quote values: "Failing row contains (…)", `invalid input syntax for type uuid: "…"`,
# "invalid input for query argument $1: …".
_VALUES: Final = re.compile(r"\nDETAIL:.*|: [\"'].*|(argument \$\d+): .*", re.DOTALL)


def create_engine(
    url: str,
    *,
    connections_max: int,
    is_behind_pooler: bool = False,
    lock_limit_s: float = LOCK_LIMIT_S,
) -> AsyncEngine:
    """Return an engine whose pool holds at most `connections_max` connections.

    `url` is what libpq reads: `postgresql://…`, with `?host=/folder` for a Unix socket and `?sslmode=…`.
    Behind a pooler that shares connections between transactions nothing may be prepared or set for longer
    than a transaction.
    """
    arguments: dict[str, Any] = {"timeout": CONNECT_LIMIT_S, "command_timeout": COMMAND_LIMIT_S}
    server_settings = {"application_name": "bascule"}
    adapter: dict[str, Any] = {}
    if is_behind_pooler:
        arguments["statement_cache_size"] = 0
        adapter["prepared_statement_cache_size"] = 0
        # Without a name: asyncpg closes a named one with its next statement, which may reach another server
        # connection, and then each transaction leaves a statement behind.
        adapter["prepared_statement_name_func"] = lambda: ""
    else:
        server_settings |= _server_limits(lock_limit_s)

    async def connect() -> Any:
        return await asyncpg.connect(url, server_settings=server_settings, **arguments)

    engine = create_async_engine(
        "postgresql+asyncpg://",
        connect_args={"async_creator_fn": connect, **adapter},
        pool_size=connections_max,
        max_overflow=0,
        pool_timeout=POOL_WAIT_LIMIT_S,
        pool_recycle=CONNECTION_AGE_S_MAX,
        pool_use_lifo=True,
        hide_parameters=True,
    )
    event.listen(engine.sync_engine, "handle_error", _hide_values)
    if is_behind_pooler:
        limits = _server_limits(lock_limit_s).items()
        limit = "select " + ", ".join(f"set_config('{name}', '{value}', true)" for name, value in limits)

        @event.listens_for(engine.sync_engine, "begin")
        def limit_transaction(connection: Connection) -> None:
            connection.exec_driver_sql(limit)

    return engine


def is_unavailable(error: BaseException) -> bool:
    """Whether the error means that the database cannot be used now, and that trying later makes sense."""
    if isinstance(error, PoolTimeoutError | asyncpg.InterfaceError | OSError):
        return True
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    state = _sqlstate(error)
    if state is not None:
        return state.startswith(_UNAVAILABLE_CLASSES) or state in (_LOCK_NOT_AVAILABLE, _IDLE_IN_TRANSACTION)
    return isinstance(error, SQLAlchemyError) and isinstance(
        error.__cause__, OSError | asyncpg.InterfaceError
    )


def is_lock_timeout(error: BaseException) -> bool:
    """Whether a statement gave up waiting for somebody else's lock."""
    return _sqlstate(error) == _LOCK_NOT_AVAILABLE


def _hide_values(context: ExceptionContext) -> None:
    """Leave the values out of what the database says of a failure: errors are logged, rows are not."""
    original = context.original_exception
    for error in (context.sqlalchemy_exception, original, original.__cause__):
        if isinstance(error, asyncpg.PostgresError):
            error.detail = None
        if error is not None and error.args and isinstance(error.args[0], str):
            error.args = (_VALUES.sub(r"\1", error.args[0]), *error.args[1:])


def _server_limits(lock_limit_s: float) -> dict[str, str]:
    limits_s = {
        "statement_timeout": STATEMENT_LIMIT_S,
        "lock_timeout": lock_limit_s,
        "idle_in_transaction_session_timeout": IDLE_IN_TRANSACTION_LIMIT_S,
    }
    return {name: f"{int(limit_s * 1000)}ms" for name, limit_s in limits_s.items()}


def _sqlstate(error: BaseException) -> str | None:
    if isinstance(error, DBAPIError):
        return getattr(error.orig, "sqlstate", None)
    return getattr(error, "sqlstate", None)
