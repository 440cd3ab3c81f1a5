"""The database, upstream, or a tool is away: nothing is lost, nothing runs twice, and others go on."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.retry import RECONNECT_CAP_S, RECONNECT_START_S, backoff_s
from app.simulator.server import running
from app.simulator.switches import FOREVER, Fault
from app.simulator.world import World
from app.store.database import create_engine
from tests.runner.proxy import Cut, Proxy, proxying
from tests.runner.receiver import Delivery, receiving
from tests.runner.scripts import Gate, asked, bash, custom, ended, in_state, listed, live, results, turn
from tests.runner.service import Service, replicating
from tests.store.rows import until

pytestmark = pytest.mark.anyio


# ---- the database


@dataclass(frozen=True)
class Cuttable:
    """A service whose every connection to the database leads through a proxy."""

    service: Service
    database: Proxy


@pytest.fixture
async def cuttable(engine: AsyncEngine, migrated_url: str) -> AsyncIterator[Cuttable]:
    async with proxying(migrated_url) as proxy, receiving() as tool, running(World(pace=0)) as upstream:
        own = create_engine(proxy.url, connections_max=8)
        async with replicating(own, proxy.url, upstream.url) as http:
            yield Cuttable(Service(http, upstream, tool, engine), proxy)
            proxy.mode = "pass"


def go_away(database: Proxy) -> None:
    """The database is gone until `mode` is `pass` again."""
    database.mode = "reset"
    database.reset()


async def turned_away(database: Proxy, count: int) -> None:
    """Wait until so many more connections were tried in vain."""
    goal = database.turned_away + count

    async def is_reached() -> bool:
        return database.turned_away >= goal

    await until(is_reached, limit_s=10)


async def confirm(service: Service, session_id: str, call_id: str, result: str = "allow") -> int:
    body = {"tool_use_id": call_id, "result": result}
    return (await service.http.post(f"/sessions/{session_id}/confirm", json=body)).status_code


async def test_an_outage_longer_than_the_lease_starts_nothing_and_loses_nothing(cuttable: Cuttable) -> None:
    """D-030, D-032: no delivery and no SEND without its row, 503 for who asks, and all is answered once."""
    service, database = cuttable.service, cuttable.database
    scripts = (turn(custom("a")), turn(custom("b")), turn(bash()))
    running_, late, held = (service.upstream.create(script) for script in scripts)
    await service.register("a", "b", "bash")
    service.tool.reply = gate = Gate()
    for session in (running_, late, held):
        await live(service, session.id)
    service.upstream.say(running_.id)
    service.upstream.say(held.id)
    await service.tool.until(lambda: gate.inside)
    (pending,) = await in_state(service, held.id, "held")
    go_away(database)
    service.upstream.say(late.id)
    answer = await service.http.get("/sessions")
    assert (503, True) == (answer.status_code, int(answer.headers["retry-after"]) > 0)
    assert 503 == await confirm(service, held.id, pending["id"])
    # Without a renewal the replica gives up its leases by its own clock, before they end.
    await service.upstream.until(lambda: service.upstream.streams.count == 0, limit_s=15)
    gate.open()
    await turned_away(database, 5)
    assert 1 == len(service.tool.called)
    assert [] == [r for r in service.upstream.world.requests if r.endpoint == "send"]
    database.mode = "pass"
    await in_state(service, running_.id, "posted", limit_s=25)
    await in_state(service, late.id, "posted")
    assert ["a", "b"] == [delivery.data["tool"] for delivery in service.tool.deliveries]
    for session in (running_, late):
        assert [1] == [len(each) for each in results(service.upstream, session.id).values()]
    await in_state(service, held.id, "held")
    assert {} == service.upstream.world.verdicts(held.id)
    assert 200 == await confirm(service, held.id, pending["id"])
    await in_state(service, held.id, "posted")


async def test_a_database_that_only_keeps_quiet_ends_the_runs_before_their_leases(
    cuttable: Cuttable, engine: AsyncEngine
) -> None:
    """D-024: the renewal hangs instead of failing; the replica goes by its own clock."""
    service, database = cuttable.service, cuttable.database
    session = service.upstream.create(turn(custom("a")))
    await service.register("a")
    await live(service, session.id)
    database.mode = "hold"
    await service.upstream.until(lambda: service.upstream.streams.count == 0, limit_s=15)
    async with engine.connect() as connection:
        assert await connection.scalar(text("select bool_and(now() < expires_at) from replicas"))
    database.mode = "pass"
    database.reset()
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted", limit_s=25)


async def test_a_blip_keeps_the_answer_in_memory(cuttable: Cuttable) -> None:
    """D-031: it is committed once the database is back; the same run goes on, and nobody is called again."""
    service, database = cuttable.service, cuttable.database
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup", retry="safe")
    service.tool.reply = gate = Gate()
    await live(service, session.id)
    service.upstream.say(session.id)
    await service.tool.until(lambda: gate.inside)
    go_away(database)
    gate.open()
    await turned_away(database, 12)
    assert {} == results(service.upstream, session.id)
    database.mode = "pass"
    await in_state(service, session.id, "posted")
    assert 1 == len(service.tool.called)
    assert 1 == (await service.get(f"/sessions/{session.id}"))["term"]
    assert 1 == len(asked(service.upstream, session.id, "stream"))


@pytest.mark.parametrize("is_committed", [True, False])
async def test_a_result_whose_commit_is_unknown_is_sent_once(cuttable: Cuttable, is_committed: bool) -> None:
    """D-033: the connection drops during COMMIT; the same rows are written again before anything leaves."""
    service = cuttable.service
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup", retry="safe")
    await live(service, session.id)
    cuttable.database.cut = cut = Cut(b"posting", is_committed)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "posted")
    assert cut.is_done
    assert 1 == len(service.tool.called)
    assert 1 == len(service.upstream.world.attempts(session.id)[call["id"]])


@pytest.mark.parametrize("is_committed", [True, False])
async def test_a_verdict_whose_commit_is_unknown_is_sent_once(cuttable: Cuttable, is_committed: bool) -> None:
    """D-033: who decided is told to ask again, and asking again changes nothing."""
    service = cuttable.service
    session = service.upstream.create(turn(bash()))
    await service.register("bash")
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "held")
    cuttable.database.cut = cut = Cut(b"sending", is_committed)
    assert 503 == await confirm(service, session.id, call["id"])
    assert cut.is_done
    assert 200 == await confirm(service, session.id, call["id"])
    await in_state(service, session.id, "posted")
    assert 1 == len(service.tool.called)
    assert 1 == len(service.upstream.world.verdicts(session.id)[call["id"]])
    sends = asked(service.upstream, session.id, "send")
    assert ["user.tool_confirmation", "user.tool_result"] == [one.body["events"][0]["type"] for one in sends]


# ---- upstream


async def test_an_outage_of_upstream_ends_nothing(service: Service) -> None:
    """D-034, R-254: results are stored, the hold stays, attempts keep their distance; then all goes on."""
    session = service.upstream.create(turn({**custom("slow", "quick"), "wait": False}, bash()))
    await service.register("slow", "quick")
    gates = {"slow": Gate(), "quick": Gate()}

    async def reply(delivery: Delivery) -> Any:
        return await gates[delivery.data["tool"]](delivery)

    service.tool.reply = reply
    await live(service, session.id, max_idle_s=1)
    service.upstream.say(session.id)
    await in_state(service, session.id, "dispatched", "dispatched", "held")
    await service.tool.until(lambda: all(gate.inside for gate in gates.values()))
    service.upstream.world.strike(Fault("refuse", status=503, count=FOREVER))
    service.upstream.world.end_streams(session.id, "cut")
    gates["quick"].open()
    await in_state(service, session.id, "dispatched", "posting", "held")
    gates["slow"].open()
    await in_state(service, session.id, "posting", "posting", "held")
    await service.upstream.until(lambda: len(asked(service.upstream, session.id, "stream")) >= 4)
    assert "reconnecting" == (await service.get(f"/sessions/{session.id}"))["status"]
    times = [request.at_us / 1e6 for request in asked(service.upstream, session.id, "stream")][1:]
    for number, (before, after) in enumerate(pairwise(times), start=2):
        assert after - before >= backoff_s(number, start_s=RECONNECT_START_S, cap_s=RECONNECT_CAP_S) / 2
    service.upstream.world.faults.clear()
    *_, held = await in_state(service, session.id, "posted", "posted", "held", limit_s=25)
    assert 2 == len(service.tool.called)
    assert [1, 1] == [len(each) for each in results(service.upstream, session.id).values()]
    assert "live" == (await service.get(f"/sessions/{session.id}"))["status"]
    assert 200 == await confirm(service, session.id, held["id"], "deny")
    assert ("ended", "idle") == await ended(service, session.id)


async def test_results_pile_up_while_only_sends_fail(service: Service) -> None:
    """D-035, R-202: the stream and deliveries go on."""
    session = service.upstream.create(turn(custom("a", "b", "c")))
    await service.register("a", "b", "c")
    await live(service, session.id)
    service.upstream.world.strike(Fault("refuse", endpoint="send", status=503, count=FOREVER))
    service.upstream.say(session.id)
    await in_state(service, session.id, "posting", "posting", "posting")
    service.upstream.emit(session.id, {"type": "agent.message", "content": [{"type": "text", "text": "x"}]})
    await service.until(f"/sessions/{session.id}/text", lambda shown: shown["data"])
    assert {} == results(service.upstream, session.id)
    service.upstream.world.faults.clear()
    await in_state(service, session.id, "posted", "posted", "posted")
    assert 3 == len(service.tool.called)
    assert [1, 1, 1] == [len(each) for each in results(service.upstream, session.id).values()]
    assert 1 == len(asked(service.upstream, session.id, "stream"))


async def test_a_send_in_doubt_waits_while_only_lists_fail(service: Service) -> None:
    """D-036, R-066, R-212: without a look nothing is repeated; what comes live is served."""
    doubtful, other = both = [service.upstream.create(turn(custom("lookup"))) for _ in range(2)]
    await service.register("lookup")
    for session in (doubtful, other):
        await live(service, session.id)
    service.upstream.world.strike(Fault("refuse", endpoint="list", status=500, count=FOREVER))
    service.upstream.world.strike(Fault("refuse", "send", doubtful.id, status=502))
    service.upstream.say(doubtful.id)
    await in_state(service, doubtful.id, "posting")
    service.upstream.say(other.id)
    await in_state(service, other.id, "posted")
    service.upstream.world.end_streams(other.id, "cut")
    # The looks, the read on the new connection, and its repetition: all in vain.
    lists = service.upstream.world.requests
    await service.upstream.until(
        lambda: all(3 <= sum(r.endpoint == "list" and r.session_id == s.id for r in lists) for s in both),
        limit_s=20,
    )
    assert 1 == len(asked(service.upstream, doubtful.id, "send"))
    assert "live" == (await service.get(f"/sessions/{other.id}"))["status"]
    service.upstream.world.faults.clear()
    await in_state(service, doubtful.id, "posted", limit_s=25)
    assert 2 == len(asked(service.upstream, doubtful.id, "send"))
    assert [1] == [len(each) for each in results(service.upstream, doubtful.id).values()]
    await listed(service.upstream, other.id, count=2)


# ---- a tool


def closed_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
async def wire(service: Service) -> AsyncIterator[Proxy]:
    """A proxy in front of the tool."""
    async with proxying(service.tool.url) as proxy:
        yield proxy


async def test_a_tool_that_is_down_gets_its_call_one_error_result(service: Service) -> None:
    """D-037, R-157: after its time, not before; the session goes on, and so do other tools."""
    session = service.upstream.create(turn(custom("down", "up"), custom("up")))
    await service.register("up")
    await service.register("down", timeout_s=2, url=f"http://127.0.0.1:{closed_port()}/tool")
    await live(service, session.id)
    service.upstream.say(session.id)
    await in_state(service, session.id, "dispatched", "posted")
    down, *_ = await in_state(service, session.id, "posted", "posted", "posted")
    shown = await service.get(f"/sessions/{session.id}/calls/{down['id']}")
    assert {"connect_failed"} == {delivery["code"] for delivery in shown["deliveries"]}
    assert (True, False) == (down["result"]["is_error"], down["outcome_unknown"])
    assert "has not run" in json.dumps(down["result"])
    assert [1, 1, 1] == [len(each) for each in results(service.upstream, session.id).values()]


@pytest.mark.parametrize("retry", ["connect_only", "safe"])
async def test_a_tool_that_is_back_in_time_answers(service: Service, wire: Proxy, retry: str) -> None:
    """D-038: one good result; the attempts before it reached nobody."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup", url=wire.url, retry=retry, timeout_s=60)
    await wire.shut()
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "dispatched")
    path = f"/sessions/{session.id}/calls/{call['id']}"
    await service.until(path, lambda shown: len(shown["deliveries"]) >= 3)
    await wire.open()
    (call,) = await in_state(service, session.id, "posted")
    (delivery,) = service.tool.deliveries
    assert (False, True) == (call["result"]["is_error"], delivery.attempt >= 3)
    assert [1] == [len(each) for each in results(service.upstream, session.id).values()]


async def cut_while_at_work(service: Service, wire: Proxy, retry: str) -> dict[str, Any]:
    """The tool does its work, and the connection breaks before it can say so; return the call at the end."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup", url=wire.url, retry=retry)
    echo, gate = service.tool.reply, Gate()
    service.tool.reply = gate
    await live(service, session.id)
    service.upstream.say(session.id)
    await service.tool.until(lambda: gate.inside)
    service.tool.reply = echo
    wire.reset()
    (call,) = await in_state(service, session.id, "posted")
    assert [1] == [len(each) for each in results(service.upstream, session.id).values()]
    return dict(call)


async def test_a_tool_that_acted_is_asked_again_with_the_same_id(service: Service, wire: Proxy) -> None:
    """D-039: so it can give its first outcome."""
    call = await cut_while_at_work(service, wire, "safe")
    first, second = service.tool.deliveries
    assert (first.id, first.body, [1, 2]) == (second.id, second.body, [first.attempt, second.attempt])
    assert not call["result"]["is_error"]


@pytest.mark.parametrize("retry", ["never", "connect_only"])
async def test_a_tool_that_acted_is_not_asked_again_unless_it_says_so(
    service: Service, wire: Proxy, retry: str
) -> None:
    """D-039: the agent is told that it may have run."""
    call = await cut_while_at_work(service, wire, retry)
    assert 1 == len(service.tool.deliveries)
    assert (True, True) == (call["result"]["is_error"], call["outcome_unknown"])
    assert "may have run" in json.dumps(call["result"])
