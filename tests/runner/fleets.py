"""Fleets without the api: with timeouts of their own, or as a process that can be killed."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import AsyncIterator

from sqlalchemy.ext.asyncio import AsyncEngine

from app.runner.fleet import Fleet
from app.simulator.server import Server, running
from app.simulator.world import World
from app.store.wakeups import Wakeups
from app.upstream.client import UpstreamClient
from app.upstream.headers import Credential
from app.upstream.transport import Timeouts, open_session
from app.webhooks.delivery import Deliverer
from app.webhooks.egress import Egress
from tests.store.rows import SECRETS


@contextlib.asynccontextmanager
async def fleeting(engine: AsyncEngine, url: str, *, timeouts: Timeouts) -> AsyncIterator[Server]:
    """Run one fleet with these timeouts against a simulator; yield the simulator."""
    async with (
        running(World(pace=0)) as upstream,
        open_session(100, for_streams=True) as streams,
        open_session(100) as requests,
    ):
        wakeups = Wakeups(url, engine)
        deliverer = Deliverer(Egress([ipaddress.ip_network("127.0.0.0/8")]), version="0")
        client = UpstreamClient(
            upstream.url,
            Credential("api_key", "sk-ant-api-test"),
            streams=streams,
            requests=requests,
            timeouts=timeouts,
        )
        fleet = Fleet("r1", engine, SECRETS, wakeups, deliverer, lambda *_: client)
        async with wakeups.running(), fleet.running():
            yield upstream
        await deliverer.close()
