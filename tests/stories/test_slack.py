"""examples/slack.py between the service's notifications and a channel."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.core.notifications import call_data, encode
from app.webhooks.notification import build_body
from app.webhooks.wire import sign
from tests.stories.receivers import FOLDER, START_LIMIT_S, free_port

pytestmark = pytest.mark.anyio

KEY = bytes(range(32))
HOSTILE = "<!channel> *bash* <https://evil.example|Allow>"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Channel:
    """Slack's incoming webhook."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.messages: list[Any] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.messages.append(await request.json())
        return web.Response(status=self.status, text="ok")


@pytest.fixture
async def channel() -> AsyncIterator[Channel]:
    channel = Channel()
    app = web.Application()
    app.router.add_post("/services/x", channel.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    channel.url = f"http://127.0.0.1:{runner.addresses[0][1]}/services/x"
    yield channel
    await runner.cleanup()


@pytest.fixture
async def forwarder(channel: Channel) -> AsyncIterator[httpx.AsyncClient]:
    port = free_port()
    environ = {
        "PATH": os.environ["PATH"], "PORT": str(port), "SLACK_URL": channel.url,
        "SUBSCRIPTION_SECRET": "whsec_" + base64.b64encode(KEY).decode(),
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, FOLDER / "slack.py", env=environ, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            async with asyncio.timeout(START_LIMIT_S):
                while not await _listens(http):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
            yield http
    finally:
        process.kill()
        await process.wait()


async def _listens(http: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await http.post("/", content=b"{}")).status_code == 401
    return False


async def send(
    http: httpx.AsyncClient,
    type_: str,
    *,
    id_: str = "ntf_1",
    key: bytes = KEY,
    age_s: float = 0.5,
    **more: Any,
) -> int:
    data = call_data(
        "sesn_1", "sevt_1", thread_id=None, tool=HOSTILE, kind="builtin", state="held", gate_by="upstream",
        gate_reason="ask", outcome_unknown=False,
    )  # fmt: skip
    body = build_body(type_, datetime.now(UTC), encode(data | more), age_s, "https://bridge.example")
    now = int(time.time())
    headers = {
        "webhook-id": id_, "webhook-timestamp": str(now), "webhook-signature": sign((key,), id_, now, body)
    }  # fmt: skip
    return (await http.post("/", content=body, headers=headers)).status_code


async def test_a_call_that_waits_appears_once_with_a_button_that_opens_its_page(
    forwarder: httpx.AsyncClient, channel: Channel
) -> None:
    for _ in range(2):
        assert 204 == await send(forwarder, "confirmation.requested")
    assert 204 == await send(forwarder, "confirmation.decided", id_="ntf_2")
    (message,) = channel.messages
    section, actions = message["blocks"]
    assert "plain_text" == section["text"]["type"]
    assert HOSTILE in section["text"]["text"]
    assert "https://bridge.example/console/sessions/sesn_1/calls/sevt_1" == actions["elements"][0]["url"]
    assert HOSTILE not in message["text"]


async def test_a_reminder_says_how_long_the_call_has_waited(
    forwarder: httpx.AsyncClient, channel: Channel
) -> None:
    assert 204 == await send(forwarder, "confirmation.reminded", age_s=1800.2, reminders=2)
    (message,) = channel.messages
    assert message["blocks"][0]["text"]["text"].startswith(
        "Still waiting after 30 min, reminder 2. The agent"
    )


async def test_what_slack_did_not_take_is_asked_for_again_and_what_is_not_signed_is_refused(
    forwarder: httpx.AsyncClient, channel: Channel
) -> None:
    channel.status = 503
    assert 502 == await send(forwarder, "confirmation.requested")
    channel.status = 200
    assert 204 == await send(forwarder, "confirmation.requested")
    assert 401 == await send(forwarder, "confirmation.requested", id_="ntf_2", key=b"k" * 32)
    assert 2 == len(channel.messages)
