"""Held calls expire by the database's time, whoever runs the session then."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server
from app.store.decisions import EXPIRY_MESSAGE
from tests.runner.receiver import Receiver
from tests.runner.scripts import asked, bash, custom, in_state, live, results, turn
from tests.runner.service import Service
from tests.runner.test_restarts import Start, Stopping, replica, tool, upstream

__all__ = ["replica", "tool", "upstream"]

pytestmark = pytest.mark.anyio

LONG = 3600


async def pass_time(engine: AsyncEngine) -> None:
    """What the passing of time does to held calls."""
    async with engine.begin() as connection:
        await connection.execute(text("update calls set gate_expires_at = now() where state = 'held'"))


async def holding(service: Service, scenario: dict[str, Any], name: str, **policy: Any) -> tuple[str, Any]:
    """Attach a session whose one call is held; return its id and the call."""
    session = service.upstream.create(scenario)
    await service.register(name, **policy)
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "held")
    return session.id, call


async def test_a_custom_call_expires_with_an_error_result_and_never_reaches_its_tool(
    service: Service,
) -> None:
    """In the time that the tool grants, and not much later."""
    session_id, held = await holding(service, turn(custom("lookup")), "lookup", gate="ask", expires_in_s=1)
    assert (held["gate"]["on_expiry"], held["gate"]["expires_at"] > held["created_at"]) == ("deny", True)
    (call,) = await in_state(service, session_id, "expired")
    assert (call["decision"]["via"], call["decision"]["result"]) == ("expiry", "deny")
    assert service.tool.called == []
    ((result,),) = results(service.upstream, session_id).values()
    assert (result["is_error"], result["content"][0]["text"]) == (True, EXPIRY_MESSAGE)
    late = {"tool_use_id": call["id"], "result": "allow"}
    answer = await service.http.post(f"/sessions/{session_id}/confirm", json=late)
    assert (answer.status_code, answer.json()["code"]) == (409, "expired")
    assert answer.json()["gate"]["expires_at"] <= answer.json()["decision"]["at"]


async def test_a_call_at_upstreams_gate_expires_with_a_deny_there(service: Service) -> None:
    session_id, held = await holding(service, turn(bash()), "bash", expires_in_s=LONG)
    await pass_time(service.engine)
    await in_state(service, session_id, "expired")
    (verdict,) = service.upstream.world.verdicts(session_id)[held["id"]]
    assert (verdict["result"], verdict["deny_message"]) == ("deny", EXPIRY_MESSAGE)
    assert (service.tool.called, len(asked(service.upstream, session_id, "send"))) == ([], 1)


async def test_a_call_that_is_kept_is_overdue_and_can_still_be_allowed(service: Service) -> None:
    session_id, held = await holding(
        service, turn(custom("lookup")), "lookup", gate="ask", expires_in_s=1, on_expiry="keep"
    )
    shown = await service.until(
        "/confirmations", lambda shown: shown["data"] and shown["data"][0]["gate"]["is_overdue"]
    )
    assert [call["id"] for call in shown["data"]] == [held["id"]]
    body = {"tool_use_id": held["id"], "result": "allow"}
    await service.http.post(f"/sessions/{session_id}/confirm", json=body)
    await in_state(service, session_id, "posted")


async def test_a_call_that_expired_while_nobody_ran_expires_when_somebody_does(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine
) -> None:
    async with Stopping(replica) as first:
        session_id, held = await holding(
            first.service, turn(custom("lookup")), "lookup", gate="ask", expires_in_s=LONG
        )
        first.stop()
        await upstream.until(lambda: upstream.streams.count == 0)
        await pass_time(engine)
    async with replica() as second:
        (call,) = await in_state(second, session_id, "expired")
    assert (call["id"], tool.called) == (held["id"], [])
    assert [1] == [len(one) for one in results(upstream, session_id).values()]


async def test_a_call_expires_once_where_two_replicas_run(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine
) -> None:
    async with replica() as first, replica():
        session_id, _ = await holding(first, turn(custom("lookup")), "lookup", gate="ask", expires_in_s=LONG)
        await pass_time(engine)
        await in_state(first, session_id, "expired")
        async with engine.connect() as connection:
            found = (await connection.execute(text("select via, status from decisions"))).all()
    assert [("expiry", "accepted")] == [tuple(row) for row in found]
    assert [1] == [len(one) for one in results(upstream, session_id).values()]
