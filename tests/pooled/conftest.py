"""The service behind a real PgBouncer: `engine` leads through it, `migrated_url` straight to the server.

The suites of other folders run here again with these fixtures: a module that imports one of theirs is enough.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store.database import create_engine
from tests.pooled import pgbouncer
from tests.store.conftest import anyio_backend, migrated_url
from tests.store.rows import CONNECTIONS_MAX, emptied

__all__ = ["anyio_backend", "migrated_url"]

FOLDER = Path(__file__).parent

# Where PgBouncer is missing only the test that says so is left.
collect_ignore = (
    [path.name for path in FOLDER.glob("test_*.py") if path.name != "test_installed.py"]
    if pgbouncer.program() is None
    else []
)


@pytest.fixture(scope="session")
def pooler_program() -> str:
    program = pgbouncer.program()
    assert program is not None
    return program


@pytest.fixture(scope="session")
def pooled_url(pooler_program: str, migrated_url: str) -> Iterator[str]:
    """The way to the database of `migrated_url` through the pooler."""
    with pgbouncer.running(pooler_program, migrated_url) as url:
        assert urlsplit(url).path == urlsplit(migrated_url).path
        yield url


@pytest.fixture
async def engine(migrated_url: str, pooled_url: str) -> AsyncIterator[AsyncEngine]:
    async with emptied(migrated_url):
        pass
    engine = create_engine(pooled_url, connections_max=CONNECTIONS_MAX, is_behind_pooler=True)
    try:
        yield engine
    finally:
        await engine.dispose()
