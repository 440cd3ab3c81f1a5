"""The service on a port of its own, for a browser, with a real database behind it."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from app import serve
from app.console.sign_in import sign_in_link
from app.main import Bridge, create_app
from app.replica import replica
from app.settings import Settings
from app.store import keys
from app.store.keys import Scope
from app.store.wakeups import Wakeups
from app.webhooks.egress import Egress
from tests.store.rows import SECRETS

ADMIN_KEY = "an-admin-key-for-tests"
ALL: tuple[Scope, ...] = ("tools", "sessions", "read", "confirm", "admin")


@dataclass(frozen=True)
class Site:
    """Where the service listens; `http` asks its API as the operator. `stack` closes its visitors."""

    base: str
    bridge: Bridge
    http: httpx.AsyncClient
    stack: contextlib.AsyncExitStack

    @property
    def engine(self) -> AsyncEngine:
        return self.bridge.engine

    async def visitor(self, key: str | None = None) -> httpx.AsyncClient:
        """A browser's worth of HTTP, signed in with the key if one is given."""
        client = httpx.AsyncClient(base_url=self.base, headers={"origin": self.base}, trust_env=False)
        visitor = await self.stack.enter_async_context(client)
        if key is not None:
            answer = await visitor.post("/console/sign-in", data={"key": key})
            assert answer.status_code == 303, answer.text
        return visitor

    async def link(self) -> str:
        return await sign_in_link(self.bridge, self.base)

    async def key(self, name: str, *scopes: Scope, tenant: str = "default") -> str:
        async with self.engine.begin() as connection:
            _, text = await keys.create(connection, tenant, name, scopes or ALL)
        return text


@contextlib.asynccontextmanager
async def serving(
    engine: AsyncEngine,
    url: str,
    *,
    upstream_url: str | None = None,
    public_url: str | None = None,
    sweep_s: float = 0.0,
) -> AsyncIterator[Site]:
    """Serve; with `upstream_url` a fleet runs, otherwise only pages and API do."""
    settings = Settings(
        admin_key=SecretStr(ADMIN_KEY),
        anthropic_api_key=SecretStr("sk-ant-api-test"),
        upstream_url=upstream_url or "http://127.0.0.1:9",
        public_url=public_url,
        port=0,
    ).model_copy(update={"sessions_sweep_s": sweep_s})
    wakeups = Wakeups(url, engine)
    egress = Egress([ipaddress.ip_network("127.0.0.0/8")])
    bridge = Bridge(settings, engine, SECRETS, wakeups, lambda _: None)
    if upstream_url is not None:
        running = lambda: replica(settings, engine, SECRETS, wakeups, egress)  # noqa: E731
        bridge = Bridge(settings, engine, SECRETS, wakeups, lambda _: None, running)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        serve.listening(settings, create_app(bridge)) as base,
        httpx.AsyncClient(base_url=base, headers=headers, trust_env=False) as http,
        contextlib.AsyncExitStack() as stack,
    ):
        yield Site(base, bridge, http, stack)
