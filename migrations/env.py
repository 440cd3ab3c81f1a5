"""Runs the migrations over the service's own URL and driver.

A migration waits at most four seconds for a lock and runs at most a minute per statement, so that one can run
while an older version serves.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, text

from app.store.tables import metadata


def run(connection: Connection) -> None:
    """Migrate over a connection that the caller opened."""
    connection.execute(text("set lock_timeout = '4s'"))
    connection.execute(text("set statement_timeout = '60s'"))
    connection.commit()
    context.configure(connection=connection, target_metadata=metadata, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
