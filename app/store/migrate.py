"""Brings a database to this version's schema, and says when it is behind."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

_LOCK = 7_226_285_437
"""The advisory lock under which one process at a time migrates."""


def _config(connection: Connection | None = None) -> Config:
    config = Config(attributes={"connection": connection} if connection else {})
    config.set_main_option("script_location", str(Path(__file__).parents[2] / "migrations"))
    return config


async def migrate(engine: AsyncEngine) -> None:
    """Run what is missing; several processes may call this at once.

    A schema that a later version has brought ahead is left alone: a replica of this one may start beside it.
    """
    async with engine.connect() as connection:
        await connection.execute(text("select pg_advisory_lock(:lock)"), {"lock": _LOCK})
        await connection.commit()
        try:
            await connection.run_sync(_upgrade)
        finally:
            await connection.rollback()
            await connection.execute(text("select pg_advisory_unlock(:lock)"), {"lock": _LOCK})
            await connection.commit()


async def is_current(engine: AsyncEngine) -> bool:
    """Whether the database is at this version's schema, or ahead of it by a rolling upgrade."""
    script = ScriptDirectory.from_config(_config())
    async with engine.connect() as connection:
        current = await connection.run_sync(_revision)
    return current == script.get_current_head() or _is_ahead(script, current)


def _upgrade(connection: Connection) -> None:
    config = _config(connection)
    current = _revision(connection)
    connection.rollback()  # Alembic commits only what it began itself
    if not _is_ahead(ScriptDirectory.from_config(config), current):
        command.upgrade(config, "head")


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _is_ahead(script: ScriptDirectory, revision: str | None) -> bool:
    return revision is not None and revision not in {one.revision for one in script.walk_revisions()}


def new_revision(connection: Connection, message: str) -> None:
    """Write a migration from the difference between the database and `app.store.tables`."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    number = f"{int(head or 0) + 1:04d}"
    command.revision(_config(connection), message=message, autogenerate=True, rev_id=number)
