"""Deliveries side by side, and results on their way upstream."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.script import burst
from app.simulator.switches import Fault
from tests.runner.receiver import Delivery, Receiver, echo, receiving
from tests.runner.scripts import Gate, asked, bash, custom, ended, in_state, live, results, turn
from tests.runner.service import Service
from tests.store.rows import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def other_tool() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


async def test_deliveries_of_one_turn_overlap(service: Service) -> None:
    """R-178: all three are under way before any has answered, and each is posted by itself."""
    session = service.upstream.create(turn(custom("a", "b", "c")))
    await service.register("a", "b", "c")
    service.tool.reply = gate = Gate()
    await live(service, session.id)
    service.upstream.say(session.id)
    await service.tool.until(lambda: len(service.tool.deliveries) == 3)
    gate.open()
    await in_state(service, session.id, "posted", "posted", "posted")
    assert 3 == gate.peak
    sends = [one for one in asked(service.upstream, session.id, "send") if "result" in str(one.body)]
    assert [1, 1, 1] == [len(one.body["events"]) for one in sends]


async def test_one_at_a_time_is_strict_order(service: Service) -> None:
    """R-179: the next delivery starts once the one before was posted."""
    session = service.upstream.create(turn(custom("a", "b", "c")))
    await service.register("a", "b", "c")
    posted: list[int] = []

    async def note(delivery: Delivery) -> web.StreamResponse:
        posted.append(len(results(service.upstream, session.id)))
        return await echo(delivery)

    service.tool.reply = note
    await live(service, session.id, concurrency=1)
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted", "posted", "posted")
    assert [0, 1, 2] == posted


async def test_the_end_of_the_session_is_handled_while_a_webhook_hangs(service: Service) -> None:
    """R-024, R-283: the stream is closed and the held call is over at once; the started one finishes."""
    session = service.upstream.create(turn({**custom("lookup"), "wait": False}, bash()))
    await service.register("lookup", "bash")
    service.tool.reply = gate = Gate()
    await live(service, session.id)
    service.upstream.say(session.id)
    await in_state(service, session.id, "dispatched", "held")
    await service.tool.until(lambda: gate.inside)
    service.upstream.emit(session.id, {"type": "session.status_terminated"})
    await in_state(service, session.id, "dispatched", "session_ended", limit_s=2)
    await service.upstream.until(lambda: service.upstream.streams.count == 0)
    assert 1 == gate.inside
    gate.open()
    assert ("ended", "terminated") == await ended(service, session.id)
    await in_state(service, session.id, "posted", "session_ended")


async def test_a_burst_is_recorded_at_once_and_worked_off_within_its_bound(
    service: Service, engine: AsyncEngine
) -> None:
    """R-031: 1,000 calls arrive together; reading goes on, 8 run at a time, each is answered once."""
    session = service.upstream.create(burst(1_000, 0, parallel=1_000))
    await service.register("lookup_order")
    service.tool.reply = gate = Gate()
    await live(service, session.id, concurrency=8)
    service.upstream.say(session.id)
    shown = await service.until(
        f"/sessions/{session.id}", lambda shown: sum(shown["calls"].values()) == 1_000, limit_s=10
    )
    assert {"dispatched": 8, "queued": 992} == {k: n for k, n in shown["calls"].items() if n}
    service.upstream.emit(session.id, {"type": "agent.message", "content": [{"type": "text", "text": "x"}]})
    await service.until(f"/sessions/{session.id}/text", lambda shown: shown["data"])
    gate.open()
    await service.until(
        f"/sessions/{session.id}", lambda shown: shown["calls"].get("posted") == 1_000, limit_s=25
    )
    assert 8 == gate.peak
    assert 1_000 == len(service.tool.called) == len(set(service.tool.called))
    assert {1} == {len(one) for one in results(service.upstream, session.id).values()}
    assert 1_000 == len(results(service.upstream, session.id))
    async with engine.connect() as connection:
        assert 1_000 == await connection.scalar(text("select count(*) from deliveries"))


async def test_a_hanging_tool_delays_no_other_session(service: Service, other_tool: Receiver) -> None:
    """R-181: 50 calls of another session run while this one's slots are all taken."""
    slow = service.upstream.create(turn(custom(*["slow"] * 8)))
    quick = service.upstream.create(burst(50, 0, 50))
    await service.register("slow")
    await register_elsewhere(service.http, other_tool, "lookup_order")
    service.tool.reply = gate = Gate()
    for session in (slow, quick):
        await live(service, session.id)
    service.upstream.say(slow.id)
    await service.tool.until(lambda: gate.inside == 8)
    service.upstream.say(quick.id)
    await service.until(f"/sessions/{quick.id}", lambda shown: shown["calls"].get("posted") == 50, limit_s=10)
    assert 8 == gate.inside
    gate.open()
    await in_state(service, slow.id, *["posted"] * 8)


async def register_elsewhere(http: httpx.AsyncClient, tool: Receiver, name: str) -> None:
    answer = await http.put(f"/tools/{name}", json={"url": tool.url})
    assert answer.status_code == 201
    tool.secrets.append(answer.json()["signing_secret"])


@pytest.mark.parametrize(
    ("fault", "sends"),
    [
        pytest.param(Fault("refuse", endpoint="send", status=503, count=2), 3, id="refused, R-201"),
        pytest.param(Fault("refuse_after", endpoint="send", status=502), 1, id="accepted with a 502, R-209"),
        pytest.param(Fault("refuse_after", endpoint="send", status=500), 1, id="accepted with a 500, R-209"),
        pytest.param(Fault("drop_after", endpoint="send"), 1, id="accepted and cut, R-209"),
        pytest.param(Fault("drop", endpoint="send"), 2, id="cut before it was accepted, R-210"),
    ],
)
async def test_a_result_arrives_once_whatever_becomes_of_its_send(
    service: Service, fault: Fault, sends: int
) -> None:
    """R-201, R-209, R-210: history is looked at before anything is sent again, and then the same bytes."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    await live(service, session.id)
    service.upstream.say(session.id)
    service.upstream.world.strike(fault)
    (call,) = await in_state(service, session.id, "posted", limit_s=25)
    assert call["posted"]
    assert 1 == len(service.tool.called)
    assert [1] == [len(one) for one in results(service.upstream, session.id).values()]
    tried = service.upstream.world.attempts(session.id)[call["id"]]
    assert sends == len(tried)
    assert [tried[0].body] * sends == [one.body for one in tried]
    kinds = "".join(one.endpoint[0] for one in asked(service.upstream, session.id, "send", "list"))
    assert "ss" not in kinds


async def test_a_result_that_waits_is_not_delivered_again_when_the_stream_breaks(service: Service) -> None:
    """R-214: the post goes on over reconnects; upstream holds one result in the end."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    await live(service, session.id)
    service.upstream.world.strike(Fault("refuse", endpoint="send", status=503))
    service.upstream.say(session.id)
    await in_state(service, session.id, "posting")
    service.upstream.world.end_streams(session.id, "cut")
    await in_state(service, session.id, "posted", limit_s=20)
    assert 1 == len(service.tool.called)
    assert [1] == [len(one) for one in results(service.upstream, session.id).values()]


async def test_no_database_connection_is_held_while_a_tool_works(
    service: Service, engine: AsyncEngine
) -> None:
    """More hanging deliveries than the pool has connections, and the service goes on."""
    session = service.upstream.create(turn(custom(*["slow"] * 24)))
    await service.register("slow")
    service.tool.reply = gate = Gate()
    await live(service, session.id, concurrency=24)
    service.upstream.say(session.id)
    await service.tool.until(lambda: gate.inside == 24)

    async def is_idle() -> bool:
        return bool(engine.sync_engine.pool.checkedout() == 0)  # type: ignore[attr-defined]

    await until(is_idle)
    gate.open()
    await in_state(service, session.id, *["posted"] * 24)
