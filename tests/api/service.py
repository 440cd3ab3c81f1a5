"""The whole application over its own transport, with a real database behind it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from app.main import Bridge, create_app
from app.settings import Settings
from app.store.secrets import Secrets
from app.store.wakeups import Wakeups
from tests.store.rows import SECRETS

ADMIN_KEY = "an-admin-key-for-tests"
AS_ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}

SETTINGS = Settings(admin_key=SecretStr(ADMIN_KEY), address_failures_per_min=0)
"""Tests fail to present good keys more often than anybody should."""


@dataclass(frozen=True)
class Service:
    """`http` sends as the operator unless a request names another key."""

    http: httpx.AsyncClient
    engine: AsyncEngine
    wakeups: Wakeups
    app: FastAPI

    async def key(self, *scopes: str, tenant: str = "default") -> dict[str, str]:
        """Create a key and return the header that presents it."""
        body = {"name": "test", "scopes": scopes or ["tools", "sessions", "read", "confirm", "admin"]}
        answer = await self.http.post("/keys", json=body | {"tenant": tenant})
        assert answer.status_code == 201, answer.text
        return {"authorization": f"Bearer {answer.json()['key']}"}


def _https_only(url: str) -> str | None:
    return None if url.startswith("https://") else "must begin with https://"


@contextlib.asynccontextmanager
async def served(
    engine: AsyncEngine,
    url: str,
    check_url: Callable[[str], str | None] = _https_only,
    *,
    secrets: Secrets = SECRETS,
    settings: Settings = SETTINGS,
) -> AsyncIterator[Service]:
    wakeups = Wakeups(url, engine)
    bridge = Bridge(
        settings=settings,
        engine=engine,
        secrets=secrets,
        wakeups=wakeups,
        check_url=check_url,
    )
    app = create_app(bridge)
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://bascule", headers=AS_ADMIN) as http,
    ):
        yield Service(http, engine, wakeups, app)


def problem(answer: httpx.Response) -> tuple[int, str]:
    """Return a problem's status and code, and check its form."""
    body: dict[str, Any] = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert body["status"] == answer.status_code
    assert body["request_id"] == answer.headers["x-request-id"]
    assert body["type"].endswith(body["code"])
    assert body["title"]
    assert body["detail"].endswith((".", "?"))
    return answer.status_code, body["code"]
