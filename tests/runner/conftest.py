from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.runner.service import Service, serving
from tests.store.conftest import anyio_backend, engine, migrated_url

__all__ = ["anyio_backend", "engine", "migrated_url"]


@pytest.fixture
async def service(engine: AsyncEngine, migrated_url: str) -> AsyncIterator[Service]:
    async with serving(engine, migrated_url) as service:
        yield service
