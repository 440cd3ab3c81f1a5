"""Test calls of tools, from the api to the endpoint and back."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from app.core.calls import webhook_id
from tests.runner.receiver import Delivery
from tests.runner.service import Service

pytestmark = pytest.mark.anyio


async def test_a_test_call_shows_what_an_agent_would_get(service: Service) -> None:
    """Signed like any other, and told apart by its mark and an id that no call has."""
    secret = "AKIA0123456789"
    await service.register("lookup", url=f"{service.tool.url}?token={secret}")
    answer = await service.http.post("/tools/lookup/test", json={"input": {"n": 7}})
    assert 200 == answer.status_code, answer.text
    shown = answer.json()
    (delivery,) = service.tool.deliveries
    assert {
        "call_id": shown["id"], "session_id": "test", "thread_id": None, "tool": "lookup",
        "kind": "custom", "test": True, "input": {"n": 7},
    } == delivery.data  # fmt: skip
    body = json.loads(delivery.body)
    assert ("tool.call", True) == (body["type"], body["timestamp"].endswith("Z"))
    assert delivery.id not in (webhook_id("default", "test", shown["id"]), shown["id"])
    assert {"content": [{"type": "text", "text": 'got {"n": 7}'}], "is_error": False} == shown["result"]
    assert ("done", None, 200) == (shown["status"], shown["code"], shown["http_status"])
    assert service.tool.url == shown["url"]
    assert secret not in answer.text
    assert shown == await service.get(answer.headers["location"])
    assert [] == (await service.get("/tools/lookup/deliveries"))["data"]


async def test_a_test_of_a_tool_that_fails_is_made_once(service: Service) -> None:
    async def reply(delivery: Delivery) -> web.StreamResponse:
        return web.Response(status=503, text="no database", headers={"retry-after": "1"})

    await service.register("lookup", retry="safe", enabled=False)
    service.tool.reply = reply
    shown = (await service.http.post("/tools/lookup/test")).json()
    assert ("done", "http_status", 503) == (shown["status"], shown["code"], shown["http_status"])
    assert "failed with HTTP status 503: no database" in shown["result"]["content"][0]["text"]
    assert shown["result"]["is_error"]
    assert "no database" == shown["reply_excerpt"]
    assert 1 == len(service.tool.deliveries)


async def test_a_410_to_a_test_disables_nothing(service: Service) -> None:
    async def reply(delivery: Delivery) -> web.StreamResponse:
        return web.Response(status=410)

    await service.register("lookup")
    service.tool.reply = reply
    assert "gone" == (await service.http.post("/tools/lookup/test")).json()["code"]
    assert (await service.get("/tools/lookup"))["enabled"]
