"""Clients that hold only our key send messages and interrupts, and are told what upstream said."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import running
from app.simulator.switches import FOREVER, Fault
from app.simulator.world import World
from app.store import sends, tables
from tests.runner.scripts import asked
from tests.runner.service import Service, replicating, serving
from tests.store.rows import until

pytestmark = pytest.mark.anyio

HELLO = {"type": "user.message", "content": "Where is order A-1042?"}
INTERRUPT = {"type": "user.interrupt"}


async def send(service: Service, session_id: str, *events: dict[str, Any]) -> httpx.Response:
    return await service.http.post(f"/sessions/{session_id}/events", json={"events": list(events)})


async def live(service: Service, scenario: str = "custom", **body: Any) -> str:
    session = service.upstream.create(scenario)
    await service.attach(session.id, **body)
    await service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "live")
    return str(session.id)


def messages(service: Service, session_id: str) -> list[str]:
    """The texts that upstream has been sent, in the order of the requests."""
    sent = [event for one in asked(service.upstream, session_id, "send") for event in one.body["events"]]
    return [event["content"][0]["text"] for event in sent if event["type"] == "user.message"]


async def are_stored(service: Service, number: int) -> bool:
    async with service.engine.connect() as connection:
        return await connection.scalar(select(func.count()).select_from(tables.sends)) == number


async def test_a_message_begins_a_turn_and_its_text_can_be_read(service: Service) -> None:
    await service.register("lookup_order")
    session_id = await live(service)
    answer = await send(service, session_id, HELLO)
    assert answer.status_code == 200, answer.text
    (event,) = answer.json()["events"]
    assert (event["type"], answer.json()["status"]) == ("user.message", "sent")
    await service.until(
        f"/sessions/{session_id}/text", lambda page: any("A-1042" in one["text"] for one in page["data"])
    )
    shown = await service.get(answer.headers["location"])
    assert shown == answer.json()


async def test_a_message_to_a_session_that_waits_for_calls_names_them(service: Service) -> None:
    session_id = await live(service, "gated")
    await send(service, session_id, HELLO)
    waiting = await service.until(f"/sessions/{session_id}/confirmations", lambda page: page["data"])
    answer = await send(service, session_id, {"type": "user.message", "content": "Hurry up."})
    assert (answer.status_code, answer.json()["code"]) == (409, "waiting_on_calls")
    assert answer.json()["calls"] == [waiting["data"][0]["id"]]


async def test_an_interrupt_ends_the_calls_that_are_held(service: Service) -> None:
    session_id = await live(service, "gated")
    await send(service, session_id, HELLO)
    waiting = await service.until(f"/sessions/{session_id}/confirmations", lambda page: page["data"])
    assert (await send(service, session_id, INTERRUPT)).status_code == 200
    path = f"/sessions/{session_id}/calls/{waiting['data'][0]['id']}"
    await service.until(path, lambda call: call["state"] == "interrupted")


async def test_a_session_that_ended_by_idleness_is_attached_again(service: Service) -> None:
    await service.register("lookup_order")
    session_id = await live(service, max_idle_s=0.3)
    service.upstream.emit(session_id, {"type": "session.status_idle", "stop_reason": {"type": "end_turn"}})
    path = f"/sessions/{session_id}"
    await service.until(path, lambda shown: shown["end_reason"] == "idle")
    assert (await send(service, session_id, HELLO)).status_code in (200, 202)
    await service.until(f"{path}/calls", lambda page: [c["state"] for c in page["data"]] == ["posted"])


async def test_a_detached_session_takes_nothing(service: Service) -> None:
    session_id = await live(service)
    await service.http.post(f"/sessions/{session_id}/detach")
    await service.until(f"/sessions/{session_id}", lambda shown: shown["status"] == "detached")
    answer = await send(service, session_id, HELLO)
    assert (answer.status_code, answer.json()["code"]) == (409, "not_attached")


async def test_what_upstream_refuses_comes_back_with_its_reason(service: Service) -> None:
    session_id = await live(service)
    answer = await send(service, session_id, {"type": "user.message", "content": [{"type": "redacted"}]})
    assert (answer.status_code, answer.json()["code"]) == (409, "refused_by_upstream")
    assert "cannot be sent" in answer.json()["message"]


async def test_a_message_whose_send_breaks_off_is_not_sent_twice(service: Service) -> None:
    session_id = await live(service)
    service.upstream.world.strike(Fault("drop_after", endpoint="send"))
    answer = await send(service, session_id, HELLO)
    assert (answer.status_code, answer.json()["code"]) == (409, "send_unknown")
    shown = await service.get(f"/sessions/{session_id}/sends/{answer.json()['send_id']}")
    assert shown["status"] == "unknown"
    assert messages(service, session_id) == ["Where is order A-1042?"]


async def test_a_message_waits_for_as_long_as_upstream_takes_no_requests(service: Service) -> None:
    session_id = await live(service)
    fault = Fault("refuse", endpoint="send", status=429, count=FOREVER, retry_after_s=1)
    service.upstream.world.strike(fault)
    answer = await send(service, session_id, HELLO)
    assert answer.status_code == 202
    service.upstream.world.faults.clear()
    await service.until(answer.headers["location"], lambda shown: shown["status"] == "sent")


async def test_messages_arrive_in_the_order_in_which_they_were_sent(service: Service) -> None:
    session_id = await live(service)
    said = [f"number {number}" for number in range(8)]
    service.upstream.world.strike(Fault("delay", endpoint="send", delay_s=0.3))
    async with asyncio.TaskGroup() as group:
        for number, text in enumerate(said, 1):
            group.create_task(send(service, session_id, {**HELLO, "content": text}))
            await until(lambda number=number: are_stored(service, number))
    await service.upstream.until(lambda: len(messages(service, session_id)) == len(said))
    assert messages(service, session_id) == said


async def test_so_many_sends_of_a_session_may_be_open(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sends, "OPEN_MAX", 1)
    session_id = await live(service)
    service.upstream.world.strike(Fault("refuse", endpoint="send", status=429, count=FOREVER))
    assert (await send(service, session_id, HELLO)).status_code == 202
    answer = await send(service, session_id, HELLO)
    assert (answer.status_code, answer.json()["code"]) == (409, "too_many_sends")


async def test_a_send_whose_session_is_over_says_so(service: Service) -> None:
    session_id = await live(service)
    service.upstream.world.strike(Fault("refuse", endpoint="send", status=429, count=FOREVER))
    answer = await send(service, session_id, HELLO)
    service.upstream.emit(session_id, {"type": "session.status_terminated"})
    shown = await service.until(answer.headers["location"], lambda shown: shown["status"] == "refused")
    assert shown["code"] == "session_ended"


async def test_another_replica_sends_what_the_first_could_not(engine: AsyncEngine, migrated_url: str) -> None:
    async with running(World(pace=0)) as upstream:
        async with replicating(engine, migrated_url, upstream.url) as http:
            service = Service(http, upstream, None, engine)  # type: ignore[arg-type]
            session_id = await live(service)
            upstream.world.strike(Fault("refuse", endpoint="send", status=429, count=FOREVER))
            answer = await send(service, session_id, HELLO)
            assert answer.status_code == 202
        upstream.world.faults.clear()
        async with replicating(engine, migrated_url, upstream.url) as http:
            service = Service(http, upstream, None, engine)  # type: ignore[arg-type]
            await service.until(answer.headers["location"], lambda shown: shown["status"] == "sent")


async def test_no_countdown_ends_a_session_that_has_something_to_send(
    engine: AsyncEngine, migrated_url: str
) -> None:
    async with serving(engine, migrated_url) as service:
        session_id = await live(service, max_idle_s=1)
        service.upstream.world.strike(Fault("refuse", endpoint="send", status=429, count=FOREVER))
        idle = {"type": "session.status_idle", "stop_reason": {"type": "end_turn"}}
        service.upstream.emit(session_id, idle)
        path = f"/sessions/{session_id}"
        await service.until(path, lambda shown: shown["idle_deadline"] is not None)
        assert (await send(service, session_id, HELLO)).status_code == 202
        shown = await service.until(path, lambda shown: shown["idle_deadline"] is None)
        assert shown["status"] == "live"
