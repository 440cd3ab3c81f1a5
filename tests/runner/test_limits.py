"""Limits and long times: many calls of one tenant, waits, restarts, backups, and versions side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.settings import SettingsError, read_settings
from app.simulator.server import Server
from app.store.database import create_engine
from app.webhooks.delivery import Deliverer
from tests import postgres
from tests.runner.receiver import Delivery, Receiver
from tests.runner.scripts import Gate, asked, bash, custom, in_state, listed, live, results, turn
from tests.runner.service import Service, replicating
from tests.runner.test_restarts import Start, Stopping, replica, tool, upstream
from tests.store.rows import add_attachment, add_call, emptied, until
from tests.webhooks.conftest import (
    Log,
    Time,
    a_call,
    a_request,
    a_tool,
    delivering,
    receiving,
    reply,
    saying,
    silence,
)
from tests.webhooks.conftest import Receiver as Webhook

__all__ = ["replica", "tool", "upstream"]

pytestmark = pytest.mark.anyio

OK = reply(body=b'{"content":"done"}')


# ---- deliveries of one tenant


class Flood:
    """Deliveries of several tenants through one deliverer, to a tool that answers when it is told to."""

    def __init__(self, deliverer: Deliverer, url: str) -> None:
        self.begun: dict[str, list[int]] = {}
        self._deliverer = deliverer
        self._url = url
        self.tasks: list[asyncio.Task[bool]] = []

    def deliver(self, tenant: str, number: int, name: str = "echo") -> None:
        self.tasks.append(asyncio.create_task(self._deliver(tenant, number, name)))

    async def _deliver(self, tenant: str, number: int, name: str) -> bool:
        flood, at_once = self, 5 if name == "slow" else 100

        class Noting(Log):
            async def started(self, attempt: int) -> None:
                flood.begun.setdefault(tenant, []).append(number)

        tool = a_tool(self._url, name=name, timeout_s=120.0, concurrency=at_once)
        request = a_request(tool, a_call(id=f"sevt_{number}", tool=name), tenant=tenant)
        outcome = await self._deliverer.deliver(request, Noting())
        return not outcome.result.is_error


@contextlib.asynccontextmanager
async def flooding(opened: asyncio.Event, limit: int, time_: Time) -> AsyncIterator[tuple[Flood, Webhook]]:
    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await opened.wait()
        writer.write(OK)

    fakes = {"clock": time_.clock, "wall": time_.wall, "sleep": time_.sleep}
    async with (
        receiving(work) as receiver,
        delivering(tenant_deliveries_max=limit, **fakes) as deliverer,
    ):
        yield Flood(deliverer, receiver.url), receiver


async def test_a_tenants_deliveries_are_bounded_over_all_its_tools() -> None:
    """D-085: 20 of 100 run, 80 wait in order and lose no time, and another tenant's do not wait."""
    opened, time_ = asyncio.Event(), Time()
    async with flooding(opened, 20, time_) as (flood, receiver):
        for number in range(100):
            flood.deliver("ann", number, name=f"tool_{number % 5}")
        await receiver.wait_for(20)
        for number in range(5):
            flood.deliver("ben", number)
        await receiver.wait_for(25)
        assert (list(range(20)), list(range(5))) == (flood.begun["ann"], flood.begun["ben"])
        time_.now += 600.0
        opened.set()
        outcomes = await asyncio.gather(*flood.tasks)
    assert list(range(100)) == flood.begun["ann"]
    assert all(outcomes[20:])


async def test_a_busy_tool_keeps_no_place_of_its_tenant() -> None:
    """D-085: who waits for a slot of a tool does not hold up another tool's calls."""
    opened, time_ = asyncio.Event(), Time()
    async with flooding(opened, 20, time_) as (flood, receiver):
        for number in range(50):
            flood.deliver("ann", number, name="slow")
        await receiver.wait_for(5)
        for number in range(100, 115):
            flood.deliver("ann", number, name="quick")
        await receiver.wait_for(20)
        assert [*range(5), *range(100, 115)] == flood.begun["ann"]
        opened.set()
        assert all(await asyncio.gather(*flood.tasks))


def test_the_limit_of_a_tenant_is_a_setting() -> None:
    """D-085: BASCULE_TENANT_DELIVERIES_MAX."""
    assert 100 == read_settings({}).tenant_deliveries_max
    assert 20 == read_settings({"BASCULE_TENANT_DELIVERIES_MAX": "20"}).tenant_deliveries_max
    with pytest.raises(SettingsError, match="BASCULE_TENANT_DELIVERIES_MAX"):
        read_settings({"BASCULE_TENANT_DELIVERIES_MAX": "0"})


async def test_waiting_for_a_slot_takes_nothing_from_the_tools_time() -> None:
    """D-086: after ten minutes in the queue its 120 s begin with its first delivery."""
    time_ = Time()
    fakes = {"clock": time_.clock, "wall": time_.wall, "sleep": time_.sleep}
    async with receiving(saying(then=silence), OK) as receiver, delivering(**fakes) as deliverer:
        tool = a_tool(receiver.url, timeout_s=120.0, concurrency=1)
        first = asyncio.create_task(deliverer.deliver(a_request(tool), Log()))
        await receiver.wait_for(1)
        second = asyncio.create_task(deliverer.deliver(a_request(tool, a_call(id="sevt_2")), Log()))
        await asyncio.sleep(0)
        time_.now += 600.0
        first.cancel()
        assert not (await second).result.is_error
    assert int(time_.wall()) + 120 == int(receiver.requests[1].headers["bascule-deadline"])


async def test_a_call_that_waited_has_its_deadline_noted_from_its_delivery_on(
    service: Service, engine: AsyncEngine
) -> None:
    """D-086: with one slot for the tool, the second call's row says when its own time is up."""
    session = service.upstream.create(turn(custom("slow", "slow")))
    await service.register("slow", timeout_s=60, concurrency=1)
    service.tool.reply = gate = Gate()
    await live(service, session.id)
    service.upstream.say(session.id)
    _, waiting = await in_state(service, session.id, "dispatched", "dispatched")
    await service.tool.until(lambda: gate.inside)

    async def ask(expression: str) -> Any:
        async with engine.connect() as connection:
            query = text(f"select {expression} from deliveries where call_id = :id")
            return await connection.scalar(query, {"id": waiting["id"]})

    async def has_waited() -> bool:
        return bool(await ask("clock_timestamp() > started_at + interval '1.1 s'"))

    await until(has_waited)
    async with engine.begin() as connection:
        await connection.execute(text("update deliveries set deadline_at = now() - interval '10 min'"))
    gate.open()
    await in_state(service, session.id, "posted", "posted")
    assert 50 < await ask("extract(epoch from deadline_at - now())")
    assert 1 == gate.peak


# ---- versions, backups, restarts


async def test_a_state_of_a_later_version_is_left_alone(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine
) -> None:
    """D-088: neither failed nor started again, by this run or the next; its neighbours are served."""
    session = upstream.create(turn({**custom("strange"), "wait": False}, custom("known")))
    upstream.say(session.id)
    strange, _ = upstream.world.session(session.id).open_calls
    async with engine.begin() as connection:
        await add_attachment(connection, session_id=session.id, replica_id=None)
        await add_call(
            connection, strange, session_id=session.id, kind="custom", tool="strange", input="{}",
            state="under_review", permission=None, gate_by=None, gate_reason=None,
        )  # fmt: skip
    before = await stored(engine, strange)
    for term in (2, 3):
        async with replica() as service:
            await service.register("strange", "known")
            await service.until(
                f"/sessions/{session.id}", lambda s, t=term: (s["term"], s["status"]) == (t, "live")
            )
            await in_state(service, session.id, "under_review", "posted")
            assert {"under_review": 1, "posted": 1} == (await service.get(f"/sessions/{session.id}"))["calls"]
    assert before == await stored(engine, strange)
    assert ["known"] == [delivery.data["tool"] for delivery in tool.deliveries]
    assert strange not in results(upstream, session.id)


async def stored(engine: AsyncEngine, call_id: str) -> object:
    async with engine.connect() as connection:
        row = await connection.execute(text("select * from calls where id = :id"), {"id": call_id})
        return tuple(row.one())


@contextlib.asynccontextmanager
async def serving_on(url: str, upstream: Server, tool: Receiver) -> AsyncIterator[Service]:
    own = create_engine(url, connections_max=6)
    async with replicating(own, url, upstream.url) as http:
        yield Service(http, upstream, tool, own)


async def test_a_backup_that_is_restored_answers_nothing_twice(
    migrated_url: str, upstream: Server, tool: Receiver
) -> None:
    """D-089: three calls were answered since; one was not, and is delivered again with its id."""
    steps = [[custom("first")], [custom("a", "b", "c"), custom("at_work")]]
    turns = [{"steps": [*each, {"do": "end"}]} for each in steps]
    session = upstream.create({"name": "t", "environment": "self_hosted", "turns": turns})
    echo, gate = tool.reply, Gate()

    async def answer(delivery: Delivery) -> web.StreamResponse:
        return await (gate if delivery.data["tool"] == "at_work" else echo)(delivery)

    tool.reply = answer
    async with emptied(migrated_url):
        pass
    with copied(migrated_url) as url:
        async with serving_on(url, upstream, tool) as service:
            await service.register("first", "a", "b", "c", "at_work", retry="safe")
            await live(service, session.id)
            upstream.say(session.id)
            await in_state(service, session.id, "posted")
        with copied(url) as backup:
            async with Stopping(lambda: serving_on(url, upstream, tool)) as after:
                upstream.say(session.id)
                await in_state(after.service, session.id, *["posted"] * 4, "dispatched")
                await tool.until(lambda: gate.inside)
                after.stop()
                await upstream.until(lambda: upstream.streams.count == 0)
                gate.open()
            sends = len(asked(upstream, session.id, "send"))
            async with serving_on(backup, upstream, tool) as service:
                await service.until(f"/sessions/{session.id}", lambda s: s["calls"] == {"posted": 2})
    names = [delivery.data["tool"] for delivery in tool.deliveries]
    assert ["first", "a", "b", "c", "at_work", "at_work"] == names
    assert tool.deliveries[-1].id == tool.deliveries[-2].id
    assert sends + 1 == len(asked(upstream, session.id, "send"))
    assert [1] * 5 == [len(each) for each in results(upstream, session.id).values()]


@contextlib.contextmanager
def copied(url: str) -> Iterator[str]:
    """A copy of a database that nobody is connected to."""
    copy = postgres.fresh_database(url, template=urlsplit(url).path.removeprefix("/"))
    try:
        yield copy
    finally:
        postgres.drop_database(copy)


async def test_a_call_that_waited_over_many_restarts_is_released_once(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine
) -> None:
    """D-059, scaled: held for three days, with a restart and a reconnect each time."""
    session = upstream.create(turn(bash()))
    upstream.say(session.id)
    for term in range(1, 7):
        async with replica() as service:
            if term == 1:
                await service.register("bash")
                await service.attach(session.id)
            await service.until(
                f"/sessions/{session.id}", lambda s, t=term: (s["term"], s["status"]) == (t, "live")
            )
            (call,) = await in_state(service, session.id, "held")
            if term == 1:
                await age(engine, "3 days")
                continue
            count = len(asked(upstream, session.id, "list"))
            upstream.world.end_streams(session.id, "cut")
            await listed(upstream, session.id, count + 1)
            shown = (await service.get("/confirmations"))["data"]
            assert [(call["id"], call["created_at"])] == [(one["id"], one["created_at"]) for one in shown]
            if term == 6:
                body = {"tool_use_id": call["id"], "result": "allow"}
                assert (
                    200 == (await service.http.post(f"/sessions/{session.id}/confirm", json=body)).status_code
                )
                await in_state(service, session.id, "posted")
    assert [call["id"]] == tool.called
    assert 1 == len(upstream.world.verdicts(session.id)[call["id"]])
    kinds = [one.body["events"][0]["type"] for one in asked(upstream, session.id, "send")]
    assert ["user.tool_confirmation", "user.tool_result"] == kinds


async def test_all_resume_by_themselves_after_everything_had_stopped(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine
) -> None:
    """D-091, scaled: two replicas stop with calls open, and an hour later two others start."""
    at_work, waiting, later = (upstream.create(turn(custom("echo"), bash())) for _ in range(3))
    tool.reply = gate = Gate()
    async with Stopping(replica) as first, Stopping(replica) as second:
        service = first.service
        await service.register("echo", "bash")
        for session in (at_work, waiting, later):
            await live(service, session.id)
        upstream.say(at_work.id)
        upstream.say(waiting.id)
        await tool.until(lambda: gate.inside == 2)
        first.stop()
        second.stop()
        await upstream.until(lambda: upstream.streams.count == 0)
        upstream.say(later.id)
        gate.open()
    await age(engine, "1 hour")
    async with replica() as service, replica():
        for session in (at_work, waiting, later):
            (_, held) = await in_state(service, session.id, "posted", "held")
            body = {"tool_use_id": held["id"], "result": "allow"}
            await service.http.post(f"/sessions/{session.id}/confirm", json=body)
        for session in (at_work, waiting, later):
            for call in await in_state(service, session.id, "posted", "posted"):
                assert (False, False) == (call["result"]["is_error"], call["outcome_unknown"])
            assert [1, 1] == [len(each) for each in results(upstream, session.id).values()]
    assert 6 == len(tool.called) == len(set(tool.called))


async def age(engine: AsyncEngine, interval: str) -> None:
    """Let that much time have passed for all that is stored."""
    columns = {
        "calls": ("created_at", "updated_at"),
        "deliveries": ("started_at", "finished_at", "deadline_at"),
        "attachments": ("created_at", "updated_at", "last_event_at", "idle_deadline"),
    }
    async with engine.begin() as connection:
        for table, names in columns.items():
            earlier = ", ".join(f"{name} = {name} - interval '{interval}'" for name in names)
            await connection.execute(text(f"update {table} set {earlier}"))
