"""One replica goes, another comes: what was begun is finished by the rules."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server, running
from app.simulator.switches import Fault
from app.simulator.world import World
from app.store.database import create_engine
from tests.runner.process import Child, serving_child
from tests.runner.receiver import Delivery, Receiver, receiving
from tests.runner.scripts import Gate, asked, bash, custom, in_state, live, results, turn
from tests.runner.service import Service, replicating

pytestmark = pytest.mark.anyio


@pytest.fixture
async def tool() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def upstream() -> AsyncIterator[Server]:
    async with running(World(pace=0)) as server:
        yield server


Start = Callable[[], contextlib.AbstractAsyncContextManager[Service]]


@pytest.fixture
def replica(engine: AsyncEngine, migrated_url: str, upstream: Server, tool: Receiver) -> Start:
    """Starts replicas on one database, one upstream and one tool; each has connections of its own."""

    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Service]:
        own = create_engine(migrated_url, connections_max=6)
        async with replicating(own, migrated_url, upstream.url) as http:
            yield Service(http, upstream, tool, engine)

    return start


class Stopping:
    """A replica that stops while the test goes on."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._started: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve())
        self.service = await self._started
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stopped()

    def stop(self) -> None:
        self._stop.set()

    async def stopped(self) -> None:
        self.stop()
        await asyncio.wait_for(self._task, 20)

    async def _serve(self) -> None:
        async with self._start() as service:
            self._started.set_result(service)
            await self._stop.wait()


# ---- an orderly stop


async def test_a_held_call_is_held_since_the_same_moment_after_a_restart(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """R-134, D-027: one hold, its time unchanged; an allow then releases it."""
    session = upstream.create(turn(bash()))
    async with replica() as service:
        await service.register("bash")
        await live(service, session.id)
        upstream.say(session.id)
        (before,) = await in_state(service, session.id, "held")
    async with replica() as service:
        await service.until(f"/sessions/{session.id}", lambda s: s["status"] == "live" and s["term"] == 2)
        shown = await service.get("/confirmations")
        assert [(before["id"], before["created_at"])] == [(c["id"], c["created_at"]) for c in shown["data"]]
        body = {"tool_use_id": before["id"], "result": "allow"}
        answer = await service.http.post(f"/sessions/{session.id}/confirm", json=body)
        assert 200 == answer.status_code
        await in_state(service, session.id, "posted")
    assert [before["id"]] == tool.called


async def test_a_delivery_under_way_at_a_stop_finishes_and_the_next_replica_posts_it(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """R-325, D-026: the lease goes at once, the result is left, and the agent hears of no doubt."""
    session = upstream.create(turn(custom("lookup")))
    tool.reply = gate = Gate()
    async with Stopping(replica) as first:
        await first.service.register("lookup")
        await live(first.service, session.id)
        upstream.say(session.id)
        await tool.until(lambda: gate.inside)
        first.stop()
        await upstream.until(lambda: upstream.streams.count == 0)
        async with replica() as second:
            await second.until(f"/sessions/{session.id}", lambda s: s["status"] == "live" and s["term"] == 2)
            await in_state(second, session.id, "dispatched")
            gate.open()
            (call,) = await in_state(second, session.id, "posted")
    assert not call["result"]["is_error"]
    assert not call["outcome_unknown"]
    assert 1 == len(tool.called)
    assert [1] == [len(one) for one in results(upstream, session.id).values()]


async def test_a_result_that_came_during_the_stop_is_posted_by_the_next_replica(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """R-325: nobody served the session in between."""
    session = upstream.create(turn(custom("lookup")))
    tool.reply = gate = Gate()
    async with Stopping(replica) as first:
        await first.service.register("lookup")
        await live(first.service, session.id)
        upstream.say(session.id)
        await tool.until(lambda: gate.inside)
        first.stop()
        await upstream.until(lambda: upstream.streams.count == 0)
        gate.open()
        await first.stopped()
    assert {} == results(upstream, session.id)
    async with replica() as second:
        (call,) = await in_state(second, session.id, "posted")
    assert (False, False, 1) == (call["result"]["is_error"], call["outcome_unknown"], call["attempts"])
    assert 1 == len(tool.called)


async def test_a_delivery_that_outlives_its_lease_leaves_its_result(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine
) -> None:
    """Promise 2: deliveries are fenced by their attempt; a known result is never thrown away."""
    session = upstream.create(turn(custom("lookup")))
    tool.reply = gate = Gate()
    async with replica() as service:
        await service.register("lookup")
        await live(service, session.id)
        upstream.say(session.id)
        await tool.until(lambda: gate.inside)
        # Another replica takes over, as after a renewal that came too late; this one is well again.
        async with engine.begin() as connection:
            await connection.execute(
                text("insert into replicas (id, expires_at) values ('other', now() + interval '1 min')")
            )
            await connection.execute(text("update attachments set replica_id = 'other', term = term + 1"))
        gate.open()
        await upstream.until(lambda: upstream.streams.count == 0)
        (call,) = await in_state(service, session.id, "answered", limit_s=3)
        async with engine.begin() as connection:
            await connection.execute(text("delete from replicas where id = 'other'"))
        await in_state(service, session.id, "posted")
    assert (False, False, 1) == (call["result"]["is_error"], call["outcome_unknown"], call["attempts"])
    assert 1 == len(tool.called)


# ---- kill -9


async def test_what_a_killed_process_had_begun_is_finished_by_the_rules(
    migrated_url: str, engine: AsyncEngine, replica: Start, upstream: Server, tool: Receiver
) -> None:
    """D-002, D-004, D-007, D-008: queued, dispatched, posting with and without effect, and D-010: held."""
    by_name: dict[str, Callable[[Delivery], Awaitable[Any]]] = {}
    echo, gate = tool.reply, Gate()

    async def reply(delivery: Delivery) -> Any:
        return await by_name.get(delivery.data["tool"], echo)(delivery)

    tool.reply = reply
    by_name |= dict.fromkeys(("unsafe", "safe"), gate)
    calls = custom("landed", "lost", "unsafe", "safe", "late")
    session = upstream.create(turn({**calls, "wait": False}, bash()))
    async with serving_child(migrated_url, upstream.url) as child:
        await prepare(child, tool)
        child_service = Service(child.http, upstream, tool, engine)
        await live(child_service, session.id, concurrency=2)
        # Two sends that never get their answer: one was accepted, one was not.
        upstream.world.strike(Fault("delay_after", endpoint="send", delay_s=20))
        upstream.world.strike(Fault("delay", endpoint="send", delay_s=20))
        upstream.say(session.id)
        await in_state(
            child_service, session.id, "posting", "posting", "dispatched", "dispatched", "queued", "held"
        )
        await tool.until(lambda: gate.inside == 2)
        await upstream.until(lambda: len(asked(upstream, session.id, "send")) == 2)
        before = await child_service.calls(session.id)
        await child.kill()
    landed = set(results(upstream, session.id))
    by_name.clear()
    async with engine.begin() as connection:
        await connection.execute(text("update replicas set expires_at = now() - interval '1 s'"))
    async with replica() as service:
        ended = await in_state(service, session.id, *["posted"] * 5, "held", limit_s=30)
    by_tool = {call["tool"]: call for call in ended}
    deliveries = {name: [d for d in tool.deliveries if d.data["tool"] == name] for name in by_tool}
    counts = {"landed": 1, "lost": 1, "unsafe": 1, "safe": 2, "late": 1, "bash": 0}
    assert counts == {name: len(each) for name, each in deliveries.items()}
    assert 1 == len(landed)
    assert {1} == {len(one) for one in results(upstream, session.id).values()}
    first, second = deliveries["safe"]
    assert (first.id, first.body) == (second.id, second.body)
    assert [1, 2] == [first.attempt, second.attempt]
    assert (True, True) == (by_tool["unsafe"]["outcome_unknown"], by_tool["unsafe"]["result"]["is_error"])
    assert "may have run" in json.dumps(by_tool["unsafe"]["result"])
    for name in ("landed", "lost", "safe", "late"):
        assert not by_tool[name]["result"]["is_error"], name
        assert not by_tool[name]["outcome_unknown"], name
    held = by_tool["bash"]
    assert before[held["id"]]["created_at"] == held["created_at"]


async def prepare(child: Child, tool: Receiver) -> None:
    for name in ("landed", "lost", "unsafe", "late", "bash", "safe"):
        retry = "safe" if name == "safe" else "connect_only"
        answer = await child.http.put(f"/tools/{name}", json={"url": tool.url, "retry": retry})
        assert answer.status_code == 201, answer.text
        tool.secrets.append(answer.json()["signing_secret"])


async def test_a_result_that_was_stored_is_only_posted(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine
) -> None:
    """Promise 2, D-006: a call that is `answered` is not delivered again, by whichever replica."""
    session = upstream.create(turn(custom("lookup")))
    tool.reply = Gate()
    async with replica() as service:
        await service.register("lookup")
        await live(service, session.id)
    upstream.say(session.id)
    (call_id,) = upstream.world.session(session.id).open_calls
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "insert into calls (tenant, session_id, id, kind, tool, input, state, attempts, result,"
                " is_error) values ('default', :session, :id, 'custom', 'lookup', '{}', 'answered', 1,"
                """ '[{"type":"text","text":"kept"}]', false)"""
            ),
            {"session": session.id, "id": call_id},
        )
    async with replica() as service:
        await in_state(service, session.id, "posted")
    assert [] == tool.called
    (sent,) = results(upstream, session.id)[call_id]
    assert [{"type": "text", "text": "kept"}] == sent["content"]


# ---- two replicas


async def test_two_replicas_serve_each_call_once(replica: Start, upstream: Server, tool: Receiver) -> None:
    """D-020: six sessions, two replicas: each session has one stream and each call one delivery."""
    sessions = [upstream.create(turn(custom(*["lookup"] * 5))) for _ in range(6)]
    async with replica() as first, replica() as second:
        await first.register("lookup")
        for number, session in enumerate(sessions):
            await live((first, second)[number % 2], session.id)
        for session in sessions:
            upstream.say(session.id)
        for session in sessions:
            await in_state(second, session.id, *["posted"] * 5)
            assert 1 == len(asked(upstream, session.id, "stream"))
            assert [1] * 5 == [len(one) for one in results(upstream, session.id).values()]
    assert 30 == len(tool.called) == len(set(tool.called))


async def test_a_request_takes_effect_whichever_replica_gets_it(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """D-028: tool, confirm, poll and detach through the replica that does not hold the lease."""
    session = upstream.create(turn(bash(), custom("late")))
    async with replica() as holder:
        await holder.register("bash")
        await live(holder, session.id)
        upstream.say(session.id)
        (call,) = await in_state(holder, session.id, "held")
        async with replica() as other:
            body = {"tool_use_id": call["id"], "result": "allow"}
            answer = await other.http.post(f"/sessions/{session.id}/confirm", json=body)
            assert (200, "accepted") == (answer.status_code, answer.json()["decision"]["status"])
            await in_state(other, session.id, "posted", "unowned")
            await other.register("late")
            await in_state(other, session.id, "posted", "posted", limit_s=2.5)
            await other.http.post(f"/sessions/{session.id}/detach")
            await other.until(f"/sessions/{session.id}", lambda s: s["status"] == "detached", limit_s=2.5)
            assert 1 == (await other.get(f"/sessions/{session.id}"))["term"]
    assert 2 == len(tool.called)
