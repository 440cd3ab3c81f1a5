"""What the log says of deliveries that were made."""

from __future__ import annotations

import pytest
from aiohttp import web

from tests.runner.receiver import Delivery
from tests.runner.scripts import custom, in_state, live, turn
from tests.runner.service import Service

pytestmark = pytest.mark.anyio


async def test_every_attempt_is_in_the_log_of_its_call_and_of_its_tool(service: Service) -> None:
    """The first reply echoes what only we and the tool know; the log does not show it."""
    secret = "AKIA0123456789"

    async def reply(delivery: Delivery) -> web.StreamResponse:
        if delivery.attempt == 1:
            text = f"no {secret} {delivery.headers['x-key']} {delivery.headers['webhook-signature']}"
            return web.Response(status=503, text=text)
        return web.json_response({"content": "done"})

    session = service.upstream.create(turn(custom("lookup")))
    url = f"{service.tool.url}?token={secret}"
    await service.register("lookup", url=url, retry="safe", headers={"X-Key": "Bearer hidden-value"})
    service.tool.reply = reply
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "posted")
    detail = await service.get(f"/sessions/{session.id}/calls/{call['id']}")
    log = await service.get("/tools/lookup/deliveries")
    failed = await service.get("/tools/lookup/deliveries?failed=true")
    first, second = detail["deliveries"]
    assert [second, first] == log["data"]
    assert [first] == failed["data"]
    assert (503, "http_status", 1) == (first["http_status"], first["code"], first["attempt"])
    assert (200, None, '{"content": "done"}') == (
        second["http_status"], second["code"], second["reply_excerpt"],
    )  # fmt: skip
    assert service.tool.url == first["url"]
    assert "no [redacted] [redacted]" in first["reply_excerpt"]
    for shown in (first, second):
        assert 0 <= shown["duration_ms"] < 15_000
        assert shown["started_at"] <= shown["finished_at"]
    told = str(detail) + str(log)
    assert not any(hidden in told for hidden in (secret, "hidden-value", "v1,"))
