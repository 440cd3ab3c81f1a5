"""The catch-all on the wire."""

from __future__ import annotations

import pytest
from aiohttp import web

from tests.runner.receiver import Delivery
from tests.runner.scripts import Gate, custom, in_state, live, turn
from tests.runner.service import Service
from tests.runner.test_callbacks import later, taken

pytestmark = pytest.mark.anyio


async def test_an_unowned_call_is_delivered_under_its_own_name_once_the_catch_all_is_there(
    service: Service,
) -> None:
    session = service.upstream.create(turn(custom("foo", "bar")))
    await live(service, session.id)
    service.upstream.say(session.id)
    calls = await in_state(service, session.id, "unowned", "unowned")
    await service.register("%2A")
    await in_state(service, session.id, "posted", "posted")
    assert {"foo", "bar"} == {delivery.data["tool"] for delivery in service.tool.deliveries}
    shown = await service.get(f"/sessions/{session.id}/calls/{calls[0]['id']}")
    assert ("foo", ["*"]) == (shown["tool"], [delivery["tool"] for delivery in shown["deliveries"]])


async def test_a_fault_of_the_catch_all_is_told_under_the_name_that_the_agent_called(
    service: Service,
) -> None:
    session = service.upstream.create(turn(custom("foo")))
    await service.register("*", retry="never")

    async def fail(_: Delivery) -> web.StreamResponse:
        return web.Response(status=500)

    service.tool.reply = fail
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "posted")
    assert 'the tool "foo" failed' in call["result"]["content"][0]["text"]


async def test_a_name_registered_meanwhile_takes_what_waits_and_not_what_is_under_way(
    service: Service,
) -> None:
    step = custom("foo", "foo")
    step["calls"].append({"tool": "builtin", "name": "told", "input": {}, "permission": "allow"})
    session = service.upstream.create(turn(step))
    await service.register("*")
    service.tool.reply = gate = Gate()
    await live(service, session.id, concurrency=1)
    service.upstream.say(session.id)
    await service.tool.until(lambda: gate.inside)
    await service.register("foo", headers={"x-served-by": "foo"})
    # That the run knows the registry shows in a call that it answers at once.
    await service.register("told", enabled=False)
    await in_state(service, session.id, "dispatched", "queued", "posted")
    gate.open()
    await in_state(service, session.id, "posted", "posted", "posted")
    assert [None, "foo"] == [one.headers.get("x-served-by") for one in service.tool.deliveries]


async def test_what_is_reported_later_is_read_by_the_limits_of_the_catch_all(service: Service) -> None:
    await service.register("*", result_chars_max=100)
    service.tool.reply = later
    session_id, (job,) = await taken(service, service.upstream, service.tool, custom("foo"))
    await job.report({"content": "x" * 1000})
    (call,) = await in_state(service, session_id, "posted")
    assert "of 1000 characters" in call["result"]["content"][0]["text"]
