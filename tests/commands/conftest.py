from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from app.__main__ import app
from app.simulator.server import Server, running
from app.simulator.world import World
from tests.console.service import ADMIN_KEY, Site, serving
from tests.runner.receiver import Receiver, receiving
from tests.store.conftest import anyio_backend, engine, migrated_url

__all__ = ["anyio_backend", "engine", "migrated_url"]


@dataclass(frozen=True)
class Terminal:
    """Runs commands, in a thread: the service that they ask is served by this one."""

    environ: dict[str, str]

    async def run(self, *words: str, **environ: str) -> Result:
        runner = CliRunner(env=self.environ | environ)
        return await asyncio.to_thread(runner.invoke, app, words)


@pytest.fixture
async def upstream() -> AsyncIterator[Server]:
    async with running(World(pace=0)) as server:
        yield server


@pytest.fixture
async def tool() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def site(engine: AsyncEngine, migrated_url: str, upstream: Server) -> AsyncIterator[Site]:
    # A command has this process's standard output to itself.
    with capture_logs():
        async with serving(engine, migrated_url, upstream_url=upstream.url) as site:
            yield site


@pytest.fixture
def terminal(site: Site) -> Terminal:
    return Terminal({"BASCULE_URL": site.base, "BASCULE_KEY": ADMIN_KEY})


@pytest.fixture
async def idle(engine: AsyncEngine, migrated_url: str) -> AsyncIterator[Terminal]:
    """Asks a service without a fleet, which leaves rows as tests wrote them."""
    with capture_logs():
        async with serving(engine, migrated_url) as site:
            yield Terminal({"BASCULE_URL": site.base, "BASCULE_KEY": ADMIN_KEY})
