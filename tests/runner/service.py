"""The whole service in one process: api, fleet, real Postgres, the simulator on loopback, a receiver."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from app.main import Bridge, create_app
from app.replica import replica
from app.settings import Settings
from app.simulator.server import Server, running
from app.simulator.world import World
from app.store.wakeups import Wakeups
from app.webhooks.egress import Egress
from tests.runner.receiver import Receiver, receiving
from tests.store.rows import SECRETS

ADMIN_KEY = "an-admin-key-for-tests"
POLL_S = 0.02


@dataclass(frozen=True)
class Service:
    """`http` asks as the operator; `upstream` is the simulator's server, `tool` the receiver."""

    http: httpx.AsyncClient
    upstream: Server
    tool: Receiver
    engine: AsyncEngine

    async def register(self, *names: str, **policy: Any) -> None:
        """Register the receiver under these names, all with one secret."""
        for name in names:
            body = {"url": self.tool.url, **policy}
            answer = await self.http.put(f"/tools/{name}", json=body)
            assert answer.status_code in (200, 201), answer.text
            if answer.status_code == 201:
                self.tool.secrets.append(answer.json()["signing_secret"])

    async def attach(self, session_id: str, **body: Any) -> dict[str, Any]:
        answer = await self.http.post(f"/sessions/{session_id}/attach", json={"max_idle_s": None, **body})
        assert answer.status_code in (200, 202), answer.text
        return self._json(answer)

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def until(self, path: str, fact: Callable[[Any], Any], *, limit_s: float = 15.0) -> Any:
        """Poll a path as a user would until what it shows satisfies `fact`; return that."""
        shown: Any = None
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    answer = await self.http.get(path)
                    shown = answer.json()
                    if answer.status_code == 200 and fact(shown):
                        return shown
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(f"{path} still shows {shown}") from None

    async def calls(self, session_id: str) -> dict[str, dict[str, Any]]:
        shown = await self.get(f"/sessions/{session_id}/calls?limit=200")
        return {call["id"]: call for call in shown["data"]}

    @staticmethod
    def _json(answer: httpx.Response) -> dict[str, Any]:
        value: dict[str, Any] = answer.json()
        return value


@contextlib.asynccontextmanager
async def replicating(
    engine: AsyncEngine,
    url: str,
    upstream_url: str,
    *,
    api_key: str | None = "sk-ant-api-test",
    sweep_s: float = 0.0,
    collector_url: str | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """One replica with its api, on a database and an upstream that others may share."""
    settings = Settings(
        admin_key=SecretStr(ADMIN_KEY),
        anthropic_api_key=None if api_key is None else SecretStr(api_key),
        upstream_url=upstream_url,
        otel_exporter_otlp_endpoint=collector_url,
    ).model_copy(update={"sessions_sweep_s": sweep_s})
    wakeups = Wakeups(url, engine)
    egress = Egress([ipaddress.ip_network("127.0.0.0/8")])
    bridge = Bridge(
        settings=settings,
        engine=engine,
        secrets=SECRETS,
        wakeups=wakeups,
        check_url=lambda _: None,
        running=lambda: replica(settings, engine, SECRETS, wakeups, egress),
    )
    app = create_app(bridge)
    transport = httpx.ASGITransport(app=app)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://bascule", headers=headers) as http,
    ):
        yield http


@contextlib.asynccontextmanager
async def serving(engine: AsyncEngine, url: str, *, world: World | None = None) -> AsyncIterator[Service]:
    async with (
        receiving() as tool,
        running(world or World(pace=0)) as upstream,
        replicating(engine, url, upstream.url) as http,
    ):
        yield Service(http, upstream, tool, engine)
