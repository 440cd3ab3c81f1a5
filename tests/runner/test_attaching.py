"""Attach and detach: an accepted wish is never lost, whoever dies, and whatever happened meanwhile."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.runner.fleet import Fleet
from app.simulator.server import Server
from app.store import attachments, tools
from app.store.wakeups import Wakeups
from app.upstream.client import UpstreamClient
from app.upstream.headers import Credential
from app.upstream.transport import open_session
from app.webhooks.delivery import Deliverer
from app.webhooks.egress import Egress
from tests.runner.receiver import Delivery, Receiver
from tests.runner.scripts import Gate, asked, bash, custom, ended, in_state, live, results, turn
from tests.runner.service import Service
from tests.runner.test_restarts import Start, replica, tool, upstream
from tests.store.rows import SECRETS, add_attachment, add_call, until

__all__ = ["replica", "tool", "upstream"]

pytestmark = pytest.mark.anyio


# ---- detach, and attach again


async def test_held_calls_are_let_go_at_a_detach_and_listed_after_the_next_attach(service: Service) -> None:
    """D-070: nothing is sent for them; one that was settled meanwhile is not listed again."""
    session = service.upstream.create(turn({**bash(), "calls": bash()["calls"] * 2}))
    await service.register("bash")
    await live(service, session.id)
    service.upstream.say(session.id)
    first, second = await in_state(service, session.id, "held", "held")
    await service.http.post(f"/sessions/{session.id}/detach")
    assert ("detached", "detached") == await ended(service, session.id)
    assert [] == (await service.get("/confirmations"))["data"]
    assert [] == asked(service.upstream, session.id, "send")
    verdict = {"type": "user.tool_confirmation", "tool_use_id": first["id"], "result": "deny"}
    service.upstream.world.send(session.id, {"events": [verdict]}, now=service.upstream.now)
    await service.attach(session.id)
    await in_state(service, session.id, "denied", "held")
    shown = (await service.get("/confirmations"))["data"]
    assert [(second["id"], second["created_at"])] == [(call["id"], call["created_at"]) for call in shown]
    assert [] == asked(service.upstream, session.id, "send")


async def test_two_attaches_at_once_are_one_run(service: Service) -> None:
    """D-071: one attachment, one lease, one stream."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    await asyncio.gather(*(service.attach(session.id) for _ in range(5)))
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted")
    assert 1 == len((await service.get("/sessions"))["data"])
    assert 1 == (await service.get(f"/sessions/{session.id}"))["term"]
    assert 1 == len(asked(service.upstream, session.id, "stream"))


async def test_other_settings_leave_a_live_run_alone(service: Service) -> None:
    """D-072: 409, and nothing changes."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    await live(service, session.id, max_idle_s=60)
    answer = await service.http.post(f"/sessions/{session.id}/attach", json={"max_idle_s": None})
    assert 409 == answer.status_code
    shown = await service.get(f"/sessions/{session.id}")
    assert (60, "live", 1) == (shown["settings"]["max_idle_s"], shown["status"], shown["term"])


async def test_an_attach_after_a_detach_takes_up_each_call_where_it_stood(
    service: Service, engine: AsyncEngine
) -> None:
    """D-073: posted is over, answered is posted, dispatched is delivered again with its id, queued runs."""
    stages = ("posted", "answered", "dispatched", "queued")
    session = service.upstream.create(turn(custom(*stages)))
    await service.register(*stages, retry="safe")
    service.upstream.say(session.id)
    ids = dict(zip(stages, service.upstream.world.session(session.id).open_calls, strict=True))
    content = [{"type": "text", "text": "kept"}]
    answer = {"type": "user.custom_tool_result", "custom_tool_use_id": ids["posted"], "content": content}
    service.upstream.world.send(session.id, {"events": [answer]}, now=service.upstream.now)
    async with engine.begin() as connection:
        await add_attachment(connection, session_id=session.id, status="detached", replica_id=None)
        for stage, call_id in ids.items():
            kept = {"result": '[{"type":"text","text":"kept"}]', "is_error": False}
            await add_call(
                connection, call_id, session_id=session.id, kind="custom", tool=stage, input="{}",
                state=stage, permission=None, gate_by=None, gate_reason=None, attempts=int(stage != "queued"),
                **(kept if stage in ("posted", "answered") else {}),
            )  # fmt: skip
    await service.attach(session.id)
    await in_state(service, session.id, *["posted"] * 4)
    assert {"dispatched": [2], "queued": [1]} == {
        name: [d.attempt for d in service.tool.deliveries if d.data["tool"] == name]
        for name in {d.data["tool"] for d in service.tool.deliveries}
    }
    assert [1] * 4 == [len(each) for each in results(service.upstream, session.id).values()]
    assert {ids[stage] for stage in stages[1:]} == {
        one.body["events"][0]["custom_tool_use_id"] for one in asked(service.upstream, session.id, "send")
    }


async def test_calls_made_after_an_idle_end_are_served_by_the_next_attach(service: Service) -> None:
    """D-074, R-264: its history is read first."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    await live(service, session.id, max_idle_s=1)
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted")
    assert ("ended", "idle") == await ended(service, session.id)
    service.upstream.say(session.id)
    await service.attach(session.id)
    await in_state(service, session.id, "posted", "posted")
    assert 2 == len(service.tool.called) == len(set(service.tool.called))
    endpoints = [one.endpoint for one in asked(service.upstream, session.id, "stream", "list", "send")]
    assert ["stream", "list", "send"] == endpoints[-3:]


async def test_a_session_that_is_over_is_not_attached_again(service: Service) -> None:
    """D-075: 409 without another stream."""
    session = service.upstream.create(turn(custom("lookup")))
    await live(service, session.id)
    service.upstream.emit(session.id, {"type": "session.status_terminated"})
    assert ("ended", "terminated") == await ended(service, session.id)
    answer = await service.http.post(f"/sessions/{session.id}/attach", json={})
    assert 409 == answer.status_code
    assert answer.json()["type"].endswith("session_ended")
    assert 1 == len(asked(service.upstream, session.id, "stream"))


async def test_a_session_without_events_is_live_and_has_no_countdown(service: Service) -> None:
    """D-076: no idle was seen."""
    session = service.upstream.create(turn(custom("lookup")))
    assert [] == service.upstream.world.history(session.id)
    await service.register("lookup")
    await live(service, session.id, max_idle_s=1)
    shown = await service.get(f"/sessions/{session.id}")
    assert ("live", None, {}) == (shown["status"], shown["idle_deadline"], shown["calls"])
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted")


# ---- wishes, and nobody left who had taken them up


@pytest.mark.parametrize("holder", [None, "dead"])
async def test_an_accepted_attach_survives_the_replica_that_accepted_it(
    engine: AsyncEngine, replica: Start, upstream: Server, tool: Receiver, holder: str | None
) -> None:
    """D-077: killed before it was claimed, or after that and before the first connect."""
    session = upstream.create(turn(custom("lookup")))
    async with engine.begin() as connection:
        settings = attachments.Settings(max_idle_s=None)
        await attachments.attach(connection, SECRETS, "default", session.id, settings, {})
        if holder is not None:
            values = {"holder": holder}
            await connection.execute(text("update attachments set replica_id = :holder, term = 1"), values)
            await connection.execute(
                text("insert into replicas (id, expires_at) values (:holder, now() + interval '1 s')"), values
            )
    async with replica() as service:
        await service.register("lookup")
        await service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "live")
        upstream.say(session.id)
        await in_state(service, session.id, "posted")
        assert (1 if holder is None else 2) == (await service.get(f"/sessions/{session.id}"))["term"]
    assert 1 == len(tool.called)


async def test_an_accepted_detach_survives_the_replica_that_accepted_it(
    engine: AsyncEngine, replica: Start, upstream: Server, tool: Receiver
) -> None:
    """D-078: the next run ends as detached, and starts no delivery: neither what waits nor what is new."""
    session = upstream.create(turn(custom("waiting", "new")))
    upstream.say(session.id)
    waiting, _ = upstream.world.session(session.id).open_calls
    async with engine.begin() as connection:
        await add_attachment(connection, session_id=session.id, replica_id="dead")
        await add_call(
            connection, waiting, session_id=session.id, kind="custom", tool="waiting", input="{}",
            state="queued", permission=None, gate_by=None, gate_reason=None,
        )  # fmt: skip
        assert isinstance(await attachments.detach(connection, "default", session.id), attachments.Accepted)
    async with replica() as service:
        await service.register("waiting", "new")
        assert ("detached", "detached") == await ended(service, session.id)
        await in_state(service, session.id, "queued")
    assert [] == tool.called
    assert [] == asked(upstream, session.id, "stream", "send")


# ---- tenants and credentials


@dataclass
class Keyed:
    """A fleet that serves every tenant, with the credential that `key` names when a run starts."""

    upstream: Server
    tool: Receiver
    engine: AsyncEngine
    key: str = "sk-ant-old"

    async def attach(self, tenant: str, session_id: str) -> None:
        settings = attachments.Settings(max_idle_s=None)
        async with self.engine.begin() as connection:
            done = await attachments.attach(connection, SECRETS, tenant, session_id, settings, {})
        assert isinstance(done, attachments.Accepted)

    async def register(self, tenant: str, *names: str) -> None:
        async with self.engine.begin() as connection:
            for name in names:
                put = await tools.put(
                    connection, SECRETS, tenant, name, url=self.tool.url, description=None, policy={},
                    headers={},
                )  # fmt: skip
                assert put.signing_secret is not None
                self.tool.secrets.append(put.signing_secret)

    async def states(self, tenant: str) -> dict[str, str]:
        async with self.engine.connect() as connection:
            query = text("select tool, state from calls where tenant = :tenant")
            return {row.tool: row.state for row in await connection.execute(query, {"tenant": tenant})}

    async def reason(self) -> str | None:
        async with self.engine.connect() as connection:
            found: str | None = await connection.scalar(text("select end_reason from attachments"))
            return found


@pytest.fixture
async def keyed(
    engine: AsyncEngine, migrated_url: str, upstream: Server, tool: Receiver
) -> AsyncIterator[Keyed]:
    keyed = Keyed(upstream, tool, engine)
    async with open_session(100, for_streams=True) as streams, open_session(100) as requests:

        def client_for(*_: Any) -> UpstreamClient:
            credential = Credential("api_key", keyed.key)
            return UpstreamClient(upstream.url, credential, streams=streams, requests=requests)

        wakeups = Wakeups(migrated_url, engine)
        deliverer = Deliverer(Egress([ipaddress.ip_network("127.0.0.0/8")]), version="0")
        fleet = Fleet("r1", engine, SECRETS, wakeups, deliverer, client_for)
        async with wakeups.running(), fleet.running():
            yield keyed
        await deliverer.close()


async def test_two_tenants_on_one_session_answer_each_its_own_calls(keyed: Keyed) -> None:
    """D-079, R-203: two streams; of the name that both registered one result is accepted."""
    session = keyed.upstream.create(turn(custom("a", "b", "both")))

    async def sign(delivery: Delivery) -> web.StreamResponse:
        return web.json_response({"content": delivery.id})

    keyed.tool.reply = sign
    await keyed.register("ann", "a", "both")
    await keyed.register("ben", "b", "both")
    for tenant in ("ann", "ben"):
        await keyed.attach(tenant, session.id)
    await keyed.upstream.until(lambda: keyed.upstream.streams.count == 2)
    keyed.upstream.say(session.id)

    async def is_settled() -> bool:
        states = [await keyed.states(tenant) for tenant in ("ann", "ben")]
        return all(len(one) == 3 and set(one.values()) <= {"posted", "answered_elsewhere"} for one in states)

    await until(is_settled, limit_s=15)
    ann, ben = await keyed.states("ann"), await keyed.states("ben")
    assert ("posted", "answered_elsewhere") == (ann["a"], ben["a"])
    assert ("answered_elsewhere", "posted") == (ann["b"], ben["b"])
    assert {"posted", "answered_elsewhere"} == {ann["both"], ben["both"]}
    assert [1, 1, 1] == [len(each) for each in results(keyed.upstream, session.id).values()]
    assert ["a", "b", "both", "both"] == sorted(one.data["tool"] for one in keyed.tool.deliveries)
    assert 4 == len({delivery.id for delivery in keyed.tool.deliveries})


async def test_a_result_that_waits_for_a_credential_is_posted_with_the_next_one(keyed: Keyed) -> None:
    """D-080, R-206: the old one is refused while the tool is at work; the new one posts what it answered."""
    session = keyed.upstream.create(turn(custom("lookup")))
    keyed.upstream.world.keys = frozenset({"sk-ant-old"})
    await keyed.register("default", "lookup")
    keyed.tool.reply = gate = Gate()
    await keyed.attach("default", session.id)
    await keyed.upstream.until(lambda: keyed.upstream.streams.count)
    keyed.upstream.say(session.id)
    await keyed.tool.until(lambda: gate.inside)
    keyed.upstream.world.keys = frozenset({"sk-ant-new"})
    gate.open()

    async def is_refused() -> bool:
        return await keyed.reason() == "auth_failed"

    await until(is_refused, limit_s=10)
    assert {"lookup": "answered"} == await keyed.states("default")
    keyed.key = "sk-ant-new"
    await keyed.attach("default", session.id)

    async def is_posted() -> bool:
        return await keyed.states("default") == {"lookup": "posted"}

    await until(is_posted, limit_s=10)
    assert 1 == len(keyed.tool.called)
    assert [1] == [len(each) for each in results(keyed.upstream, session.id).values()]
    assert 2 == len(asked(keyed.upstream, session.id, "stream"))
