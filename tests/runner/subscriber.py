"""A subscriber: checks each notification as a receiver would, and answers as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import httpx
from aiohttp import web
from standardwebhooks import Webhook

from app.core.notifications import EVENTS


@dataclass(frozen=True)
class Notice:
    """One request, verified. `id` is the `webhook-id`."""

    id: str
    attempt: int
    type: str
    data: dict[str, Any]
    body: bytes
    headers: dict[str, str]


Reply = Callable[[Notice], Awaitable[web.StreamResponse]]


async def thanks(notice: Notice) -> web.StreamResponse:
    return web.Response(status=204)


class Subscriber:
    """Notices in the order of their arrival. `reply` answers; by default it takes them."""

    def __init__(self) -> None:
        self.url = ""
        self.secret = ""
        self.notices: list[Notice] = []
        self.reply: Reply = thanks
        self.changed = asyncio.Condition()

    async def subscribe(
        self, http: httpx.AsyncClient, *, name: str = "all", events: Collection[str] = EVENTS, **more: Any
    ) -> None:
        """Subscribe to these events through the api."""
        body = {"url": self.url, "events": sorted(events), **more}
        answer = await http.put(f"/subscriptions/{name}", json=body)
        assert answer.status_code in (200, 201), answer.text
        self.secret = answer.json().get("signing_secret", self.secret)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        Webhook(self.secret).verify(body, headers)
        told = json.loads(body)
        attempt = int(headers["bascule-attempt"])
        notice = Notice(headers["webhook-id"], attempt, told["type"], told["data"], body, headers)
        async with self.changed:
            self.notices.append(notice)
            self.changed.notify_all()
        return await self.reply(notice)

    async def until(self, fact: Callable[[], Any], *, limit_s: float = 10.0) -> None:
        async with asyncio.timeout(limit_s), self.changed:
            await self.changed.wait_for(fact)

    @property
    def types(self) -> Counter[str]:
        return Counter(notice.type for notice in self.notices)


@contextlib.asynccontextmanager
async def subscribing() -> AsyncIterator[Subscriber]:
    subscriber = Subscriber()
    app = web.Application()
    app.router.add_post("/hook", subscriber.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    subscriber.url = f"http://{host}:{port}/hook"
    try:
        yield subscriber
    finally:
        await runner.cleanup()
