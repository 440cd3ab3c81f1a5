"""Tools whose endpoint is down, as operators and agents see them."""

from __future__ import annotations

import time

import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import running
from app.simulator.world import World
from app.webhooks import breaker
from tests.runner.receiver import Delivery, echo, receiving
from tests.runner.scripts import Gate, bash, custom, in_state, live, turn
from tests.runner.service import Service, replicating
from tests.runner.test_gone import call_once, said

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two failures are enough, and a probe follows soon."""
    monkeypatch.setattr(breaker, "FAILURES_MIN", 2)
    monkeypatch.setattr(breaker, "SUSTAINED_S", 0.0)
    monkeypatch.setattr(breaker, "PAUSE_START_S", 0.2)


@pytest.fixture
def long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PAUSE_START_S", 60.0)


async def down(delivery: Delivery) -> web.StreamResponse:
    return web.Response(status=500, text="no database")


async def fail(service: Service, name: str = "lookup", **policy: object) -> None:
    await service.register(name, retry="never", **policy)
    service.tool.reply = down
    for _ in range(2):
        assert (await call_once(service, name))["result"]["is_error"]


@pytest.mark.usefixtures("long_pause")
async def test_calls_of_a_tool_that_is_down_are_answered_at_once(service: Service) -> None:
    """C-061: a clear error, nothing sent, and everybody can see it."""
    await service.register("other")
    await fail(service, when_unhealthy="answer")
    shown = await service.get("/tools/lookup")
    assert ("open", "http_status 500", 2) == (
        shown["health"]["state"], shown["health"]["last_error"], shown["health"]["failures"],
    )  # fmt: skip
    assert shown["created_at"] <= shown["health"]["since"]
    listed = {tool["name"]: tool["health"]["state"] for tool in (await service.get("/tools"))["data"]}
    assert {"lookup": "open", "other": "closed"} == listed
    call = await call_once(service)
    assert "is down since" in said(call)
    assert "Nothing was sent" in said(call)
    assert call["id"] not in service.tool.called
    (attempt,) = (await service.get("/tools/lookup/deliveries?limit=1"))["data"]
    assert (call["id"], "unhealthy", None) == (attempt["call_id"], attempt["code"], attempt["http_status"])


async def test_a_call_waits_until_the_tool_is_back(service: Service) -> None:
    await fail(service)
    service.tool.reply = echo
    call = await call_once(service)
    assert not call["result"]["is_error"]
    assert 1 == service.tool.called.count(call["id"])
    shown = await service.get("/tools/lookup")
    assert {"state": "closed", "since": None, "last_error": None, "failures": 0} == shown["health"]


async def test_the_probe_is_seen_while_it_is_under_way(service: Service) -> None:
    await fail(service)
    service.tool.reply = gate = Gate()
    session = service.upstream.create(turn(custom("lookup", "lookup", "lookup")))
    await live(service, session.id)
    service.upstream.say(session.id)
    await service.tool.until(lambda: gate.inside)
    await service.until("/tools/lookup", lambda shown: shown["health"]["state"] == "half_open")
    assert 1 == gate.peak
    gate.open()
    await in_state(service, session.id, "posted", "posted", "posted")


@pytest.mark.usefixtures("long_pause")
async def test_calls_that_wait_for_a_person_wait_on_while_the_tool_is_down(service: Service) -> None:
    """C-061: held approvals are unaffected."""
    session = service.upstream.create(turn(bash()))
    await fail(service, "bash", when_unhealthy="answer")
    await live(service, session.id)
    service.upstream.say(session.id)
    (held,) = await in_state(service, session.id, "held")
    body = {"tool_use_id": held["id"], "result": "allow"}
    assert 200 == (await service.http.post(f"/sessions/{session.id}/confirm", json=body)).status_code
    (call,) = await in_state(service, session.id, "posted")
    assert "is down since" in said(call)


@pytest.mark.usefixtures("long_pause")
async def test_a_call_that_waits_does_not_hold_up_a_stop_and_is_delivered_afterwards(
    migrated_url: str, engine: AsyncEngine
) -> None:
    """Nothing was sent, so the next replica sends it, and the agent is not told that it may have run."""
    async with running(World(pace=0)) as upstream, receiving() as tool:
        async with replicating(engine, migrated_url, upstream.url) as http:
            service = Service(http, upstream, tool, engine)
            await fail(service, timeout_s=300)
            session = upstream.create(turn(custom("lookup")))
            await live(service, session.id)
            upstream.say(session.id)
            await in_state(service, session.id, "dispatched")
            tool.reply = echo
            began = time.monotonic()
        assert time.monotonic() - began < 10
        async with replicating(engine, migrated_url, upstream.url) as http:
            service = Service(http, upstream, tool, engine)
            (call,) = await in_state(service, session.id, "posted")
    assert not call["result"]["is_error"]
    assert 1 == tool.called.count(call["id"])
