"""Brings a database to this version's schema, and says when it is behind."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Schema:
    """Which revision a database is at, None before the first, and which this version needs (`head`).

    `is_known` is False when this version has never heard of the revision.
    """

    revision: str | None
    head: str | None
    is_known: bool

    @property
    def is_later(self) -> bool:
        """Whether a later version has migrated the database, as in a rolling upgrade."""
        return self.revision is not None and not self.is_known

    @property
    def is_current(self) -> bool:
        """Whether this version can serve with it."""
        return self.is_later or (self.revision is not None and self.revision == self.head)


async def read_schema(engine: AsyncEngine) -> Schema:
    """Return where the database stands."""
    async with engine.connect() as connection:
        return await connection.run_sync(_schema)


def _schema(connection: Connection) -> Schema:
    script = ScriptDirectory.from_config(_config())
    revision = MigrationContext.configure(connection).get_current_revision()
    known = {one.revision for one in script.walk_revisions()}
    return Schema(revision, script.get_current_head(), revision in known)


def _upgrade(connection: Connection) -> None:
    is_later = _schema(connection).is_later
    connection.rollback()  # Alembic commits only what it began itself
    if not is_later:
        command.upgrade(_config(connection), "head")


async def is_current(engine: AsyncEngine) -> bool:
    """Whether the database is at this version's schema, or ahead of it by a rolling upgrade."""
    return (await read_schema(engine)).is_current


def new_revision(connection: Connection, message: str) -> None:
    """Write a migration from the difference between the database and `app.store.tables`."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    number = f"{int(head or 0) + 1:04d}"
    command.revision(_config(connection), message=message, autogenerate=True, rev_id=number)
