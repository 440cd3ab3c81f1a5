from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.database import create_engine
from app.store.migrate import is_current, migrate
from app.store.tables import metadata
from tests import postgres

MIGRATIONS = Path(__file__).parents[2] / "migrations"

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


class Shape(NamedTuple):
    """A schema as statements feel it: the type of each column, whether an insert must name it, and what
    refuses or ties rows."""

    types: dict[tuple[str, str], str]
    required: set[tuple[str, str]]
    rules: set[tuple[str, str]]


async def test_each_migration_only_adds(empty_url: str) -> None:
    """D-088: whatever the version before reads and writes, it still can, while both serve."""
    engine = create_engine(empty_url, connections_max=1)
    try:
        async with engine.connect() as connection:
            revisions = await connection.run_sync(_revisions)
            before = await _shape(connection)
            for revision in revisions:
                await connection.run_sync(_upgrade, revision)
                after = await _shape(connection)
                tables = {table for table, _ in before.types}
                assert before.types.items() <= after.types.items(), f"{revision} takes columns away"
                for name in ("required", "rules"):
                    new = getattr(after, name) - getattr(before, name)
                    assert not {one for one in new if one[0] in tables}, f"{revision} asks more of rows"
                before = after
        assert len(revisions) > 20
    finally:
        await engine.dispose()


def _config(connection: Connection) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS))
    return config


def _revisions(connection: Connection) -> list[str]:
    script = ScriptDirectory.from_config(_config(connection))
    return [one.revision for one in script.walk_revisions()][::-1]


def _upgrade(connection: Connection, revision: str) -> None:
    command.upgrade(_config(connection), revision)
    connection.commit()


async def _shape(connection: AsyncConnection) -> Shape:
    columns = await connection.execute(
        text(
            "select table_name, column_name, udt_name, is_nullable = 'NO' and column_default is null"
            " from information_schema.columns where table_schema = 'public'"
        )
    )
    rows = columns.all()
    # Those that refuse rows: unique and excluding indexes, checks, foreign keys and triggers.
    rules = await connection.execute(
        text(
            "select conrelid::regclass::text, conname from pg_constraint"
            " where connamespace = 'public'::regnamespace and contype <> 'n'"
            " union all select indrelid::regclass::text, indexrelid::regclass::text from pg_index"
            " where indisunique and not indisprimary and indrelid in"
            " (select oid from pg_class where relnamespace = 'public'::regnamespace)"
            " union all select tgrelid::regclass::text, tgname from pg_trigger where not tgisinternal"
        )
    )
    shape = Shape(
        {(table, column): kind for table, column, kind, _ in rows},
        {(table, column) for table, column, _, is_required in rows if is_required},
        {(table, rule) for table, rule in rules},
    )
    await connection.rollback()
    return shape


async def _migrate(url: str) -> None:
    engine = create_engine(url, connections_max=2)
    try:
        await migrate(engine)
    finally:
        await engine.dispose()
