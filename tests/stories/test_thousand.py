"""A thousand calls, fifty of which wait for a person, from the first message to the last word."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from app.simulator.script import burst
from app.simulator.server import Server
from tests.runner.scripts import live, results
from tests.runner.service import Service

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CALLS = 1_000
GATED = 50
PARALLEL = 20


async def decide(service: Service) -> dict[str, str]:
    """Decide on whatever waits, allow and deny by turns, until all was decided; return the verdicts."""
    given: dict[str, str] = {}
    while len(given) < GATED:
        shown = await service.until("/confirmations", lambda shown: shown["data"], limit_s=60)
        for call in shown["data"]:
            result = given.get(call["id"]) or ("allow" if len(given) % 2 else "deny")
            body = {"tool_use_id": call["id"], "result": result, "input_digest": call["input_digest"]}
            answer = await service.http.post(f"/sessions/{call['session_id']}/confirm", json=body)
            assert answer.status_code in (200, 202), answer.text
            given[call["id"]] = result
    return given


async def test_a_thousand_calls_are_answered_once_each(service: Service) -> None:
    """R-031, R-121, R-122: judged by the simulator's log and the receiver's, not by our own."""
    session = service.upstream.create(burst(CALLS, GATED, parallel=PARALLEL))
    await service.register("lookup_order", "bash")
    await live(service, session.id)
    loop = asyncio.get_running_loop()
    began = loop.time()
    service.upstream.say(session.id)
    given = await asyncio.wait_for(decide(service), 60)
    await service.until(
        f"/sessions/{session.id}/text",
        lambda shown: shown["data"] and f"All {CALLS} calls are done." in shown["data"][-1]["text"],
        limit_s=60,
    )
    took_s = loop.time() - began
    print(f"{CALLS} calls, {GATED} of them confirmed, {PARALLEL} at a time: {took_s:.1f} s")
    assert took_s < 60

    denied = {call_id for call_id, result in given.items() if result == "deny"}
    made = {call.id for call in service.upstream.world.session(session.id).calls.values()}
    assert (CALLS, GATED, GATED // 2) == (len(made), len(given), len(denied))
    assert dict.fromkeys(made - denied, 1) == Counter(sent(service.upstream, session.id, "result"))
    assert dict.fromkeys(given, 1) == Counter(sent(service.upstream, session.id, "confirmation"))
    verdicts = service.upstream.world.verdicts(session.id)
    assert given == {call_id: one["result"] for call_id, (one,) in verdicts.items()}
    assert {1} == {len(each) for each in results(service.upstream, session.id).values()}
    assert dict.fromkeys(made - denied, 1) == Counter(service.tool.called)
    assert len(made - denied) == len({delivery.id for delivery in service.tool.deliveries})
    shown = await service.until(
        f"/sessions/{session.id}",
        lambda shown: {"posted": CALLS - len(denied), "denied": len(denied)} == shown["calls"],
    )
    assert "live" == shown["status"]
    assert [] == (await service.get("/confirmations"))["data"]


def sent(upstream: Server, session_id: str, kind: str) -> list[str]:
    """The calls that accepted sends of this kind named, in the order of the simulator's log of requests."""
    named: list[str] = []
    for request in upstream.world.requests:
        if (request.endpoint, request.session_id, request.status) == ("send", session_id, 200):
            events = [event for event in request.body["events"] if event["type"].endswith(kind)]
            named += [event.get("tool_use_id") or event["custom_tool_use_id"] for event in events]
    return named
