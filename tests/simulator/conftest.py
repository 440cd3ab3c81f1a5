from collections.abc import AsyncIterator

import httpx
import pytest

from app.simulator.server import Server, running
from app.simulator.world import World
from tests.simulator.client import HEADERS


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def world() -> World:
    world = World(pace=0)
    world.advance(1_793_282_400.0)
    return world


@pytest.fixture
async def server(anyio_backend: str) -> AsyncIterator[Server]:
    async with running(World(pace=0)) as server:
        yield server


@pytest.fixture
async def api(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, headers=HEADERS, timeout=10) as client:
        yield client
