from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tests import postgres
from tests.store.rows import emptied, migrate_once


@pytest.fixture(scope="session")
def migrated_url() -> Iterator[str]:
    with postgres.server() as server_url, postgres.database(server_url) as url:
        asyncio.run(migrate_once(url))
        yield url


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def engine(migrated_url: str) -> AsyncIterator[AsyncEngine]:
    async with emptied(migrated_url) as engine:
        yield engine
