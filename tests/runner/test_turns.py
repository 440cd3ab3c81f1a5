"""Whole turns through the real parts: simulator, runner, webhook, store, api."""

from __future__ import annotations

import pytest

from tests.runner.service import Service

pytestmark = pytest.mark.anyio


async def test_a_custom_call_crosses_the_bridge_and_the_text_can_be_read(service: Service) -> None:
    """R-001, R-021: one delivery, one result upstream, the agent's last message as text."""
    session = service.upstream.create("custom")
    await service.register("lookup_order")
    await service.attach(session.id)
    await service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "live")
    service.upstream.say(session.id)
    shown = await service.until(f"/sessions/{session.id}/text", lambda shown: shown["data"])
    assert [m["state"] for m in shown["data"]][-1] == "final"
    calls = await service.calls(session.id)
    assert [call["state"] for call in calls.values()] == ["posted"]
    assert service.tool.called == list(calls)
    assert {id_: len(a) for id_, a in service.upstream.world.answers(session.id).items()} == dict.fromkeys(
        calls, 1
    )


async def test_a_gated_call_waits_for_confirm(service: Service) -> None:
    """R-141: held, allowed through the api, delivered once, posted once."""
    session = service.upstream.create("gated")
    await service.register("bash")
    await service.attach(session.id)
    service.upstream.say(session.id)
    held = await service.until(f"/sessions/{session.id}/confirmations", lambda shown: shown["data"])
    call_id = held["data"][0]["id"]
    assert service.tool.called == []
    answer = await service.http.post(
        f"/sessions/{session.id}/confirm", json={"tool_use_id": call_id, "result": "allow"}
    )
    assert answer.status_code == 200, answer.text
    await service.until(f"/sessions/{session.id}/calls/{call_id}", lambda call: call["state"] == "posted")
    assert service.tool.called == [call_id]
    assert len(service.upstream.world.verdicts(session.id)[call_id]) == 1
