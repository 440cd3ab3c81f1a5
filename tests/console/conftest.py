from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.console.browser import LEFT_OUT, browsing, is_ci, program
from tests.console.service import Site, serving
from tests.store.conftest import anyio_backend, engine, migrated_url

__all__ = ["anyio_backend", "engine", "migrated_url"]


@pytest.fixture
async def site(engine: AsyncEngine, migrated_url: str) -> AsyncIterator[Site]:
    async with serving(engine, migrated_url) as site:
        yield site


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    if program() is None:
        if is_ci(os.environ):
            pytest.fail(f"{LEFT_OUT}, and CI=true forbids that")
        pytest.skip(LEFT_OUT)
    async with browsing() as browser:
        yield browser
