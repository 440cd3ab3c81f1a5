"""A tool behind a webhook: checks each delivery as a receiver would, and answers as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from standardwebhooks import Webhook, WebhookVerificationError

Reply = Callable[["Delivery"], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Delivery:
    """One request, verified. `id` is the `webhook-id`."""

    id: str
    attempt: int
    body: bytes
    data: dict[str, Any]
    headers: dict[str, str]

    @property
    def call_id(self) -> str:
        value: str = self.data["call_id"]
        return value


class Receiver:
    """Deliveries in the order of their arrival. `reply` answers; by default with the input's JSON as text."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.secrets: list[str] = []
        self.deliveries: list[Delivery] = []
        self.reply: Reply = echo
        self.changed = asyncio.Condition()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert any(_is_signed(secret, body, headers) for secret in self.secrets), "not signed by our secret"
        data = json.loads(body)["data"]
        delivery = Delivery(headers["webhook-id"], int(headers["bascule-attempt"]), body, data, headers)
        async with self.changed:
            self.deliveries.append(delivery)
            self.changed.notify_all()
        return await self.reply(delivery)

    async def until(self, fact: Callable[[], Any], *, limit_s: float = 10.0) -> None:
        async with asyncio.timeout(limit_s), self.changed:
            await self.changed.wait_for(fact)

    @property
    def called(self) -> list[str]:
        return [delivery.call_id for delivery in self.deliveries]


def _is_signed(secret: str, body: bytes, headers: dict[str, str]) -> bool:
    try:
        Webhook(secret).verify(body, headers)
    except WebhookVerificationError:
        return False
    return True


async def echo(delivery: Delivery) -> web.StreamResponse:
    text = json.dumps(delivery.data["input"], ensure_ascii=False)
    return web.json_response({"content": f"got {text}"})


@contextlib.asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver("")
    app = web.Application()
    app.router.add_post("/{name}", receiver.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    receiver.url = f"http://{host}:{port}/tool"
    try:
        yield receiver
    finally:
        await runner.cleanup()
