"""People are told again of calls that stay held, whoever runs the session then."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server
from app.store.reminders import REMINDERS_MAX
from tests.runner.scripts import custom, in_state, live, turn
from tests.runner.service import Service
from tests.runner.subscriber import Subscriber, subscribing
from tests.runner.test_restarts import Start, replica, tool, upstream
from tests.store.rows import until

__all__ = ["replica", "tool", "upstream"]

pytestmark = pytest.mark.anyio

REMINDED = "confirmation.reminded"


@pytest.fixture
async def subscriber() -> AsyncIterator[Subscriber]:
    async with subscribing() as subscriber:
        yield subscriber


async def pass_time(engine: AsyncEngine) -> None:
    """What the passing of time does to reminders that are to come."""
    async with engine.begin() as connection:
        await connection.execute(text("update calls set gate_remind_at = now()"))


async def holding(service: Service, remind_after_s: int) -> tuple[str, str]:
    """Attach a session whose one call is held; return their ids."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup", gate="ask", remind_after_s=remind_after_s)
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "held")
    return session.id, call["id"]


async def test_a_call_that_stays_held_is_told_again_with_its_age_and_its_page(
    service: Service, subscriber: Subscriber
) -> None:
    await subscriber.subscribe(service.http, events=[REMINDED])
    session_id, call_id = await holding(service, remind_after_s=1)
    await subscriber.until(lambda: len(subscriber.notices) == 2)
    first, second = subscriber.notices
    assert [1, 2] == [notice.data["reminders"] for notice in (first, second)]
    assert 1 <= first.data["age_s"] < second.data["age_s"] - 0.9
    assert ("lookup", "held", "tool_asks") == (
        first.data["tool"],
        first.data["state"],
        first.data["gate"]["reason"],
    )
    assert first.data["url"].endswith(f"/console/sessions/{session_id}/calls/{call_id}")
    assert [] == service.tool.called


async def test_a_call_that_was_decided_is_not_told_again(service: Service, subscriber: Subscriber) -> None:
    """Told instead is what fell due later, of another call."""
    await subscriber.subscribe(service.http, events=[REMINDED])
    session_id, call_id = await holding(service, remind_after_s=3600)
    body = {"tool_use_id": call_id, "result": "allow"}
    assert 200 == (await service.http.post(f"/sessions/{session_id}/confirm", json=body)).status_code
    _, other = await holding(service, remind_after_s=3600)
    await pass_time(service.engine)
    await subscriber.until(lambda: subscriber.notices)
    assert [other] == [notice.data["call_id"] for notice in subscriber.notices]


async def test_two_replicas_remind_once_and_go_on_after_a_restart(
    replica: Start, upstream: Server, subscriber: Subscriber, engine: AsyncEngine
) -> None:
    async with replica() as first, replica():
        await subscriber.subscribe(first.http, events=[REMINDED])
        await holding(first, remind_after_s=3600)
        await pass_time(engine)
        await subscriber.until(lambda: subscriber.notices)
    async with replica() as later:
        for n in range(2, REMINDERS_MAX + 1):
            await pass_time(engine)
            await subscriber.until(lambda n=n: len(subscriber.notices) == n)  # type: ignore[misc]
        await until(lambda: _is_quiet(later))
    assert list(range(1, REMINDERS_MAX + 1)) == [notice.data["reminders"] for notice in subscriber.notices]


async def _is_quiet(service: Service) -> bool:
    return int((await service.get("/subscriptions/all"))["pending"]) == 0
