from __future__ import annotations

import socket
import traceback

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import database
from app.store.database import create_engine, is_unavailable

pytestmark = pytest.mark.anyio

LIMITS = {"statement_timeout": "15s", "lock_timeout": "5s", "idle_in_transaction_session_timeout": "30s"}


@pytest.mark.parametrize("is_behind_pooler", [False, True])
async def test_every_transaction_is_limited_by_the_server(migrated_url: str, is_behind_pooler: bool) -> None:
    """C-031: with a pooler too, where nothing may be set for longer than a transaction."""
    engine = create_engine(migrated_url, connections_max=2, is_behind_pooler=is_behind_pooler)
    try:
        for _ in range(2):
            async with engine.connect() as connection:
                for name, value in LIMITS.items():
                    assert await connection.scalar(text(f"show {name}")) == value
    finally:
        await engine.dispose()


async def test_behind_a_pooler_nothing_outlives_a_transaction(migrated_url: str) -> None:
    engine = create_engine(migrated_url, connections_max=1, is_behind_pooler=True)
    try:
        async with engine.connect() as connection:
            await connection.execute(text("select 1"))
            await connection.rollback()
            prepared = "select count(*) from pg_prepared_statements where name like '__bascule%'"
            assert await connection.scalar(text(prepared)) <= 1
            raw = await connection.get_raw_connection()
            assert await raw.driver_connection.fetchval("show search_path") == '"$user", public'
        async with engine.connect() as connection:
            raw = await connection.get_raw_connection()
            assert await raw.driver_connection.fetchval("show lock_timeout") == "0"
    finally:
        await engine.dispose()


async def test_what_ends_connections_counts_as_unavailable(engine: AsyncEngine) -> None:
    with pytest.raises(DBAPIError) as caught:
        async with engine.begin() as connection:
            await connection.execute(text("select pg_terminate_backend(pg_backend_pid())"))
    assert is_unavailable(caught.value)
    async with engine.connect() as connection:
        assert await connection.scalar(text("select 1")) == 1


async def test_limits_count_as_unavailable_and_mistakes_do_not(engine: AsyncEngine) -> None:
    for statement, is_so in (
        ("select pg_sleep(5)", True),
        ("select 1/0", False),
        ("select 'a'::int", False),
        ("nonsense", False),
    ):
        async with engine.connect() as connection:
            await connection.execute(text("set local statement_timeout = '20ms'"))
            with pytest.raises(DBAPIError) as caught:
                await connection.execute(text(statement))
            assert is_unavailable(caught.value) is is_so, statement
    assert is_unavailable(ConnectionRefusedError())
    assert is_unavailable(TimeoutError())
    assert is_unavailable(PoolTimeoutError())
    assert is_unavailable(asyncpg.InterfaceError("connection is closed"))
    assert is_unavailable(asyncpg.CannotConnectNowError("starting up"))
    assert not is_unavailable(ValueError())


@pytest.mark.parametrize(
    ("statement", "values"),
    [
        ("insert into numbers values (7, :text)", {"text": "a 'canary'\nand more"}),
        ("select cast(:text as text)::uuid", {"text": "canary"}),
        ("select cast(:text as text)", {"text": "canary \ud800"}),
        ("select cast(:text as int)", {"text": {"canary": 1}}),
    ],
)
async def test_an_error_of_the_database_quotes_no_value(
    engine: AsyncEngine, statement: str, values: dict[str, object]
) -> None:
    """R-337: errors are logged, with all that caused them."""
    async with engine.connect() as connection:
        await connection.execute(text("create temporary table numbers (n int check (n < 7), t text)"))
        with pytest.raises(DBAPIError) as caught:
            await connection.execute(text(statement), values)
    told = "".join(traceback.format_exception(caught.value))
    assert "canary" not in told
    assert "Error" in told


async def test_a_server_that_is_not_there_is_noticed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "CONNECT_LIMIT_S", 0.2)
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    engine = create_engine(f"postgresql://x@127.0.0.1:{port}/x", connections_max=2)
    try:
        with pytest.raises(Exception) as caught:
            async with engine.connect():
                pass
        assert is_unavailable(caught.value)
    finally:
        await engine.dispose()
        silent.close()
