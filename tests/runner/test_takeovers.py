"""Leases change hands: what the old holder may still do, how soon the new one is there, and at what pace."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core import protocol as p
from app.runner.callbacks import Callbacks
from app.runner.deliveries import Deliveries
from app.runner.errands import Errands
from app.runner.fleet import STARTS_PER_S
from app.runner.tasks import Parts, Tasks
from app.simulator.server import Server, running
from app.simulator.world import World
from app.store import leases
from app.store.leases import Lease
from app.store.writer import Writer
from app.upstream.client import UpstreamClient
from app.upstream.headers import Credential
from app.upstream.transport import Timeouts, open_session
from app.webhooks.delivery import Deliverer
from app.webhooks.egress import Egress
from tests.runner.process import serving_child
from tests.runner.receiver import Delivery, Receiver
from tests.runner.scripts import Gate, asked, custom, in_state, live, results, turn
from tests.runner.service import Service
from tests.runner.test_restarts import Start, Stopping, replica, tool, upstream
from tests.store.rows import SECRETS, add_attachment, until

__all__ = ["replica", "tool", "upstream"]

pytestmark = pytest.mark.anyio


async def expire(engine: AsyncEngine, *, left_s: float = -1.0) -> None:
    """What the passing of time does to the lease of a replica that does not renew."""
    async with engine.begin() as connection:
        await connection.execute(
            text("update replicas set expires_at = now() + make_interval(secs => :left)"), {"left": left_s}
        )


async def test_an_answer_to_the_old_holder_is_thrown_away_once_the_call_was_delivered_again(
    migrated_url: str, engine: AsyncEngine, replica: Start, upstream: Server, tool: Receiver
) -> None:
    """D-022, D-021: the holder is frozen past its lease; the posted result is the one that was stored."""
    session = upstream.create(turn(custom("lookup")))
    gates = [Gate(), Gate()]

    async def reply(delivery: Delivery) -> web.StreamResponse:
        await gates[delivery.attempt - 1](delivery)
        return web.json_response({"content": f"attempt {delivery.attempt}"})

    tool.reply = reply
    async with serving_child(migrated_url, upstream.url) as child:
        holder = Service(child.http, upstream, tool, engine)
        await holder.register("lookup", retry="safe")
        await live(holder, session.id)
        upstream.say(session.id)
        await tool.until(lambda: gates[0].inside)
        child.process.send_signal(signal.SIGSTOP)
        await expire(engine)
        async with replica() as successor:
            await tool.until(lambda: gates[1].inside)
            gates[0].open()
            child.process.send_signal(signal.SIGCONT)
            # The old holder wakes, finds its term over, and gives its stream up.
            await upstream.until(lambda: upstream.streams.count == 1)
            await in_state(holder, session.id, "dispatched")
            gates[1].open()
            (call,) = await in_state(successor, session.id, "posted")
            assert 2 == (await successor.get(f"/sessions/{session.id}"))["term"]
    first, second = tool.deliveries
    assert (first.id, first.body) == (second.id, second.body)
    assert "attempt 2" == call["result"]["content"][0]["text"]
    ((sent,),) = results(upstream, session.id).values()
    assert call["result"]["content"] == sent["content"]
    assert 1 == len(asked(upstream, session.id, "send"))


async def test_no_send_starts_that_would_outlast_the_lease(migrated_url: str, engine: AsyncEngine) -> None:
    """D-023: not with less trust left than its timeout; a successor therefore meets no send under way."""
    assert Timeouts().send_s <= leases.SEND_S
    left_s = leases.SEND_S - 0.01
    inbox: asyncio.Queue[p.Notice] = asyncio.Queue()
    failures: list[BaseException] = []
    async with running(World(pace=0)) as upstream, open_session(10) as requests:
        session = upstream.create(turn(custom("lookup")))
        upstream.say(session.id)
        (call_id,) = upstream.world.session(session.id).open_calls
        key = Credential("api_key", "sk-ant-api-test")
        client = UpstreamClient(upstream.url, key, streams=requests, requests=requests)
        deliverer = Deliverer(Egress([]), version="0")
        parts = Parts(
            "r1", engine, Writer(engine, "r1"), deliverer, Callbacks("http://here", SECRETS),
            lambda: left_s, lambda: 0.0,
        )  # fmt: skip
        lease = Lease("default", session.id, 1)
        tasks = Tasks(lease, parts, inbox, failures.append)
        errands = Errands(tasks, client, Deliveries(tasks), orphans=())
        result = b'{"type":"user.custom_tool_result","custom_tool_use_id":"%s","content":[]}'
        errands.do(p.Send(call_id, result % call_id.encode(), number=1))
        errands.do(p.Retrieve())  # which needs no trust, and so comes first
        assert isinstance(await asyncio.wait_for(inbox.get(), 5), p.Retrieved)
        assert not errands.are_sends_leaving
        assert [] == asked(upstream, session.id, "send")
        left_s = leases.SEND_S
        assert p.Sent(call_id) == await asyncio.wait_for(inbox.get(), 5)
        assert 1 == len(asked(upstream, session.id, "send"))
        tasks.is_lost = True  # the replica has renewed; the run's own lease may be another's all the same
        errands.do(p.Send(call_id, result % call_id.encode(), number=2))
        errands.do(p.Retrieve())
        assert isinstance(await asyncio.wait_for(inbox.get(), 5), p.Retrieved)
        await errands.leave()
        assert 1 == len(asked(upstream, session.id, "send"))
        await deliverer.close()
    assert [] == failures


async def test_a_holder_that_cannot_renew_stops_acting_before_its_lease_ends(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine
) -> None:
    """D-024: only the renewals fail. It works on at first, then gives up; one success restores all."""
    session, other = (upstream.create(turn(custom("lookup"))) for _ in range(2))
    async with replica() as service:
        await service.register("lookup")
        for one in (session, other):
            await live(service, one.id)
        async with engine.connect() as connection:
            row = await connection.execute(text("select expires_at from replicas for update"))
            expires_at = row.scalar_one()
            upstream.say(session.id)
            await in_state(service, session.id, "posted")
            await upstream.until(lambda: upstream.streams.count == 0, limit_s=15)
            assert await connection.scalar(text("select clock_timestamp() < :at"), {"at": expires_at})
            upstream.say(other.id)
        await in_state(service, other.id, "posted", limit_s=20)
        assert 2 == len(tool.called)
        assert [2, 2] == [(await service.get(f"/sessions/{one.id}"))["term"] for one in (session, other)]


async def test_one_renewal_in_time_restores_normal_work(
    replica: Start, upstream: Server, engine: AsyncEngine
) -> None:
    """D-024: a renewal failed, the next one did not, and the run goes on as if nothing had been."""
    session = upstream.create(turn(custom("lookup")))
    async with replica() as service:
        await service.register("lookup")
        await live(service, session.id)
        async with engine.connect() as connection:
            await connection.execute(text("select from replicas for update"))

            async def has_failed() -> bool:
                query = "select count(*) from pg_stat_activity where datname = current_database()"
                async with engine.connect() as other:
                    return bool(await other.scalar(text(f"{query} and wait_event_type = 'Lock'")))

            await until(has_failed)
        before = await expiry(engine)

        async def is_renewed() -> bool:
            return bool(await expiry(engine) > before)

        await until(is_renewed, limit_s=10)
        upstream.say(session.id)
        await in_state(service, session.id, "posted")
        assert 1 == (await service.get(f"/sessions/{session.id}"))["term"]
    assert 1 == len(asked(upstream, session.id, "stream"))


async def expiry(engine: AsyncEngine) -> Any:
    async with engine.connect() as connection:
        return await connection.scalar(text("select max(expires_at) from replicas"))


SKEW = "import time\n_true = time.time\ntime.time = lambda: _true() + {skew_s}\n"
"""What a machine with a wrong clock shows a process: put where Python runs it before anything else."""


async def test_clocks_that_disagree_change_no_lease(
    migrated_url: str, engine: AsyncEngine, upstream: Server, tool: Receiver, tmp_path: Path
) -> None:
    """D-025: two replicas five minutes apart; the one ahead takes nothing early, the one behind not late."""
    session = upstream.create(turn(custom("lookup")))
    paths = []
    for name, skew_s in (("behind", -150), ("ahead", 150)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(SKEW.format(skew_s=skew_s))
        paths.append(str(tmp_path / name))
    behind, ahead = ({"PYTHONPATH": path} for path in paths)
    async with serving_child(migrated_url, upstream.url, behind) as first:
        holder = Service(first.http, upstream, tool, engine)
        await holder.register("lookup")
        await live(holder, session.id)
        async with serving_child(migrated_url, upstream.url, ahead) as second:
            other = Service(second.http, upstream, tool, engine)
            before = await expiry(engine)

            async def is_renewed() -> bool:
                return bool((await expiry(engine) - before).total_seconds() > leases.RENEW_S)

            await until(is_renewed, limit_s=10)
            assert 1 == (await other.get(f"/sessions/{session.id}"))["term"]
            await first.kill()
            await expire(engine, left_s=2)
            await other.until(f"/sessions/{session.id}", lambda s: (s["term"], s["status"]) == (2, "live"))
            upstream.say(session.id)
            await in_state(other, session.id, "posted")
    (delivery,) = tool.deliveries
    assert 140 < int(delivery.headers["webhook-timestamp"]) - time.time() < 160  # its clock is really wrong
    assert 2 == len(asked(upstream, session.id, "stream"))


async def test_an_orderly_stop_hands_over_within_seconds(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """D-026: the other replica is live within 5 s, although a tool is still at work for the first."""
    sessions = [upstream.create(turn(custom("lookup"))) for _ in range(10)]
    tool.reply = gate = Gate()
    async with Stopping(replica) as first:
        await first.service.register("lookup")
        for session in sessions:
            await live(first.service, session.id)
        upstream.say(sessions[0].id)
        await tool.until(lambda: gate.inside)
        async with replica() as second:
            first.stop()
            for session in sessions:
                await second.until(
                    f"/sessions/{session.id}", lambda s: (s["term"], s["status"]) == (2, "live"), limit_s=5
                )
            assert 1 == gate.inside
            gate.open()
            (call,) = await in_state(second, sessions[0].id, "posted")
            assert (False, 1) == (call["result"]["is_error"], len(tool.called))
            await first.stopped()


async def test_those_that_are_left_share_what_a_stopped_replica_ran(replica: Start, upstream: Server) -> None:
    """D-026: the first to notice would run everything otherwise, for nothing moves a run again."""
    sessions = [upstream.create(turn(custom("lookup"))) for _ in range(12)]
    async with Stopping(replica) as first:
        for session in sessions:
            await live(first.service, session.id)
        async with replica() as second, replica():
            await first.stopped()
            again = [
                await second.until(
                    f"/sessions/{session.id}", lambda s: (s["term"], s["status"]) == (2, "live")
                )
                for session in sessions
            ]
    holders = Counter(one["replica"] for one in again)
    assert (2, True) == (len(holders), max(holders.values()) <= 8), holders


async def test_a_dead_replicas_sessions_are_taken_over_at_a_pace(
    replica: Start, upstream: Server, engine: AsyncEngine
) -> None:
    """D-029, by half: 250 at once, all live within a minute, and no second opens more than is allowed."""
    sessions = [upstream.create(turn(custom("lookup"))) for _ in range(250)]
    async with engine.begin() as connection:
        await connection.execute(
            text("insert into replicas (id, expires_at) values ('dead', now() - interval '1 s')")
        )
        for session in sessions:
            await add_attachment(connection, session_id=session.id, replica_id="dead", term=1)
    async with replica():
        await upstream.until(lambda: upstream.streams.count == len(sessions), limit_s=55)
    opened = sorted(r.at_us / 1e6 for r in upstream.world.requests if r.endpoint == "stream")
    assert len(sessions) == len(opened)
    busiest = max(sum(at <= other < at + 1 for other in opened) for at in opened)
    assert busiest <= 1.25 * STARTS_PER_S
