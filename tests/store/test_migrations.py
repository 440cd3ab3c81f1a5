from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

from app.store.database import create_engine
from app.store.migrate import is_current, migrate
from app.store.tables import metadata
from tests import postgres

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with postgres.server() as url:
        yield url


@pytest.fixture
def empty_url(server_url: str) -> Iterator[str]:
    with postgres.database(server_url) as url:
        yield url


def _differences(connection: Connection) -> list[object]:
    options = {"compare_type": True, "compare_server_default": True}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


async def test_the_migrations_build_exactly_the_tables(empty_url: str) -> None:
    engine = create_engine(empty_url, connections_max=2)
    try:
        assert not await is_current(engine)
        await migrate(engine)
        assert await is_current(engine)
        async with engine.connect() as connection:
            assert await connection.run_sync(_differences) == []
    finally:
        await engine.dispose()


async def test_several_processes_may_migrate_at_once(empty_url: str) -> None:
    engines = [create_engine(empty_url, connections_max=2) for _ in range(3)]
    try:
        # Threads, because a migration blocks its loop as another process would.
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, _migrate(empty_url)) for _ in engines))
        assert await is_current(engines[0])
    finally:
        for engine in engines:
            await engine.dispose()


async def test_a_schema_that_a_later_version_made_is_left_alone(empty_url: str) -> None:
    """D-088: during a rolling upgrade, and after one that is taken back, replicas of this version start."""
    engine = create_engine(empty_url, connections_max=2)
    try:
        await migrate(engine)
        async with engine.begin() as connection:
            await connection.execute(text("update alembic_version set version_num = '9999'"))
        await migrate(engine)
        assert await is_current(engine)
        async with engine.connect() as connection:
            assert "9999" == await connection.scalar(text("select version_num from alembic_version"))
    finally:
        await engine.dispose()


async def _migrate(url: str) -> None:
    engine = create_engine(url, connections_max=2)
    try:
        await migrate(engine)
    finally:
        await engine.dispose()
