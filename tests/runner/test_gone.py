"""A tool whose endpoint answers 410."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tests.runner.receiver import Delivery, echo
from tests.runner.scripts import Gate, bash, custom, in_state, live, turn
from tests.runner.service import Service

pytestmark = pytest.mark.anyio


async def gone(delivery: Delivery) -> web.StreamResponse:
    return web.Response(status=410, text="moved away")


def said(call: Any) -> str:
    text: str = call["result"]["content"][0]["text"]
    return text


async def call_once(service: Service, name: str = "lookup") -> Any:
    """Let an agent call the tool; return the call once it is posted."""
    session = service.upstream.create(turn(custom(name)))
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "posted")
    return call


async def until_disabled(service: Service, name: str = "lookup") -> Any:
    """Call the tool until its runs know that it is disabled; return the call that was told so."""
    async with asyncio.timeout(15):
        while "is disabled" not in said(call := await call_once(service, name)):
            pass
    return call


async def test_a_410_disables_the_tool_until_it_is_put_again(service: Service) -> None:
    await service.register("lookup")
    service.tool.reply = gone
    call = await call_once(service)
    assert call["result"]["is_error"]
    assert 'The tool "lookup" answered with HTTP status 410: moved away' == said(call)
    shown = await service.get("/tools/lookup")
    assert (False, "gone", 2) == (shown["enabled"], shown["disabled_reason"], shown["version"])
    assert shown["disabled_at"] == shown["updated_at"]
    assert shown == (await service.get("/tools"))["data"][0]
    call = await until_disabled(service)
    assert call["result"]["is_error"]
    assert "is disabled since its endpoint answered that it is gone" in said(call)
    service.tool.reply = echo
    await service.register("lookup")
    shown = await service.get("/tools/lookup")
    assert (True, None, None) == (shown["enabled"], shown["disabled_reason"], shown["disabled_at"])
    async with asyncio.timeout(15):
        while (await call_once(service))["result"]["is_error"]:
            pass


@pytest.mark.parametrize("change", [{"timeout_s": 5}, {"url": "moved"}])
async def test_a_410_to_an_earlier_registration_leaves_the_tool_alone(
    service: Service, change: dict[str, Any]
) -> None:
    """The operator mended it while the request was under way."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    gate = Gate()

    async def reply(delivery: Delivery) -> web.StreamResponse:
        await gate(delivery)
        return await gone(delivery)

    service.tool.reply = reply
    await live(service, session.id)
    service.upstream.say(session.id)
    await service.tool.until(lambda: gate.inside)
    body = {"url": service.tool.url} | change
    if change.get("url"):
        body["url"] = service.tool.url.replace("/tool", "/moved")
    assert 200 == (await service.http.put("/tools/lookup", json=body)).status_code
    gate.open()
    (call,) = await in_state(service, session.id, "posted")
    assert "410" in said(call)
    shown = await service.get("/tools/lookup")
    assert (True, None, 2) == (shown["enabled"], shown["disabled_reason"], shown["version"])


async def test_a_tool_that_its_operator_disabled_says_so(service: Service) -> None:
    await service.register("lookup", enabled=False)
    shown = await service.get("/tools/lookup")
    assert (False, None, None) == (shown["enabled"], shown["disabled_reason"], shown["disabled_at"])
    assert "disabled by its operator" in said(await call_once(service))


async def test_calls_that_wait_for_a_person_wait_on_when_their_tool_is_gone(service: Service) -> None:
    """C-061: a held call is decided as before; allowed, it is answered and not delivered."""
    session = service.upstream.create(turn(bash()))
    await service.register("bash")
    service.tool.reply = gone
    await live(service, session.id)
    service.upstream.say(session.id)
    (held,) = await in_state(service, session.id, "held")
    await until_disabled(service, "bash")
    called = list(service.tool.called)
    await in_state(service, session.id, "held")
    body = {"tool_use_id": held["id"], "result": "allow"}
    assert 200 == (await service.http.post(f"/sessions/{session.id}/confirm", json=body)).status_code
    (call,) = await in_state(service, session.id, "posted")
    assert "disabled" in said(call)
    assert called == service.tool.called
