"""A scripted upstream on loopback, and clients that talk to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from app.upstream.client import UpstreamClient
from app.upstream.headers import Credential
from app.upstream.transport import open_session
from tests.upstream.wire import Wire, serve

API_KEY = Credential("api_key", "sk-ant-secret-0123456789")

MakeClient = Callable[..., UpstreamClient]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def wire(anyio_backend: str) -> AsyncIterator[Wire]:
    async with serve() as server:
        yield server


@pytest.fixture
async def make_client(anyio_backend: str, wire: Wire) -> AsyncIterator[MakeClient]:
    """Make clients of the scripted upstream; keyword arguments are the client's."""
    async with AsyncExitStack() as stack:
        streams = await stack.enter_async_context(open_session(8, for_streams=True))
        requests = await stack.enter_async_context(open_session(8))

        def make(
            base_url: str = wire.url, credential: Credential = API_KEY, **options: object
        ) -> UpstreamClient:
            options = {"streams": streams, "requests": requests, **options}
            return UpstreamClient(base_url, credential, **options)  # type: ignore[arg-type]

        yield make


@pytest.fixture
async def client(make_client: MakeClient) -> UpstreamClient:
    return make_client()
