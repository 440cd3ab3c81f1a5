"""Sessions attach themselves, and those that ended by idleness wake: by webhook, and by the list."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api.hooks import HOOK_BYTES_MAX
from app.core.signatures import signature
from app.simulator.server import Server, running
from app.simulator.session import Session
from app.simulator.switches import Fault
from app.simulator.world import World
from app.store import tables
from tests.runner.scripts import asked
from tests.runner.service import Service, replicating
from tests.store.rows import until

pytestmark = pytest.mark.anyio

KEY = b"k" * 32
WHSEC = "whsec_" + base64.b64encode(KEY).decode()
IDLE = {"type": "session.status_idle", "stop_reason": {"type": "end_turn"}}


@pytest.fixture
async def upstream() -> AsyncIterator[Server]:
    async with running(World(pace=0)) as server:
        yield server


@pytest.fixture
async def service(engine: AsyncEngine, migrated_url: str, upstream: Server) -> AsyncIterator[Service]:
    """A replica whose credential `default` takes webhooks."""
    async with replicating(engine, migrated_url, upstream.url, api_key=None) as http:
        service = Service(http, upstream, None, engine)  # type: ignore[arg-type]  # no tool is called
        await credential(service, "default")
        yield service


async def credential(service: Service, name: str, key: str = WHSEC, **headers: str) -> None:
    body = {"type": "api_key", "secret": "sk-one", "webhook_signing_key": key}
    answer = await service.http.put(f"/credentials/{name}", json=body, headers=headers)
    assert (answer.status_code, answer.json()["takes_webhooks"]) == (201, True), answer.text


async def rule(service: Service, name: str = "every", **body: Any) -> None:
    answer = await service.http.put(f"/attach-rules/{name}", json=body)
    assert answer.status_code in (200, 201), answer.text


async def hook(
    service: Service,
    session_id: str,
    type_: str = "session.status_idled",
    *,
    key: bytes = KEY,
    webhook_id: str = "whe_1",
) -> httpx.Response:
    body = json.dumps({"type": "event", "id": webhook_id, "data": {"type": type_, "id": session_id}}).encode()
    stamp = int(time.time())
    headers = {
        "authorization": "",
        "content-type": "application/json",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(stamp),
        "webhook-signature": signature(key, webhook_id, stamp, body),
    }
    return await service.http.post("/hooks/anthropic", content=body, headers=headers)


async def asleep(service: Service) -> Session:
    """A session that was served, and ended by idleness."""
    session = service.upstream.create("custom")
    await service.attach(session.id, max_idle_s=0.2)
    await service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "live")
    service.upstream.emit(session.id, IDLE)
    await service.until(f"/sessions/{session.id}", lambda shown: shown["end_reason"] == "idle")
    return session


async def served(service: Service, session_id: str) -> Any:
    return await service.until(f"/sessions/{session_id}", lambda shown: shown["status"] == "live")


async def count(service: Service, table: str) -> int:
    async with service.engine.connect() as connection:
        return await connection.scalar(select(func.count()).select_from(tables.metadata.tables[table])) or 0


async def test_a_webhook_wakes_a_session_that_ended_by_idleness(service: Service) -> None:
    session = await asleep(service)
    before = await service.get(f"/sessions/{session.id}")
    assert 204 == (await hook(service, session.id)).status_code
    shown = await service.until(f"/sessions/{session.id}", lambda shown: shown["term"] > before["term"])
    assert shown["settings"] == before["settings"]


async def test_a_call_that_came_while_nobody_served_the_session_is_found(service: Service) -> None:
    session = await asleep(service)
    service.upstream.say(session.id)
    await hook(service, session.id)
    await service.until(f"/sessions/{session.id}/calls", lambda page: page["data"])


async def test_a_repeated_webhook_is_taken_once(service: Service) -> None:
    session = await asleep(service)
    await hook(service, session.id)
    await service.until(f"/sessions/{session.id}", lambda shown: shown["end_reason"] is None)
    ended = await service.until(f"/sessions/{session.id}", lambda shown: shown["end_reason"] == "idle")
    assert 204 == (await hook(service, session.id)).status_code
    assert ended["term"] == (await service.get(f"/sessions/{session.id}"))["term"]
    assert 1 == await count(service, "hooks")


@pytest.mark.parametrize("type_", ["session.deleted", "session.status_terminated", "vault.updated"])
async def test_what_is_over_or_not_about_a_session_wakes_nobody(service: Service, type_: str) -> None:
    session = await asleep(service)
    assert 204 == (await hook(service, session.id, type_)).status_code
    assert "idle" == (await service.get(f"/sessions/{session.id}"))["end_reason"]
    assert 0 == await count(service, "hooks")


async def test_a_session_that_was_detached_stays_so(service: Service) -> None:
    session = service.upstream.create("custom")
    await service.attach(session.id)
    await served(service, session.id)
    await service.http.post(f"/sessions/{session.id}/detach")
    await service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "detached")
    assert 204 == (await hook(service, session.id)).status_code
    assert "detached" == (await service.get(f"/sessions/{session.id}"))["status"]


async def test_a_webhook_that_nobody_signed_is_refused(service: Service) -> None:
    session = await asleep(service)
    answer = await hook(service, session.id, key=b"x" * 32)
    assert (answer.status_code, answer.json()["code"]) == (401, "unverified_webhook")
    assert "idle" == (await service.get(f"/sessions/{session.id}"))["end_reason"]


async def test_a_signed_body_that_is_no_webhook_is_taken_and_forgotten(service: Service) -> None:
    body, stamp = b"[" * 10_000, int(time.time())
    headers = {
        "webhook-id": "whe_2",
        "webhook-timestamp": str(stamp),
        "webhook-signature": signature(KEY, "whe_2", stamp, body),
    }
    answer = await service.http.post("/hooks/anthropic", content=body, headers=headers)
    assert answer.status_code == 204


async def test_a_long_body_is_refused_before_any_key_is_tried(service: Service) -> None:
    answer = await service.http.post("/hooks/anthropic", content=b"x" * (HOOK_BYTES_MAX + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_another_tenants_webhook_wakes_nothing_of_ours(service: Service) -> None:
    """Promise 6."""
    session = await asleep(service)
    made = await service.http.post("/keys", json={"name": "o", "scopes": ["admin"], "tenant": "other"})
    theirs = b"t" * 32
    key = "whsec_" + base64.b64encode(theirs).decode()
    await credential(service, "default", key, authorization=f"Bearer {made.json()['key']}")
    assert 204 == (await hook(service, session.id, key=theirs)).status_code
    assert "idle" == (await service.get(f"/sessions/{session.id}"))["end_reason"]


async def test_a_rule_attaches_a_new_session_of_its_agent(service: Service) -> None:
    session, other = service.upstream.create("custom"), service.upstream.create("gated")
    labels = {"by": "rule"}
    await rule(service, agent_id=session.agent["id"], settings={"max_idle_s": None, "labels": labels})
    await hook(service, session.id, "session.status_run_started", webhook_id="whe_1")
    await hook(service, other.id, "session.status_run_started", webhook_id="whe_2")
    shown = await served(service, session.id)
    assert (shown["settings"]["max_idle_s"], shown["settings"]["labels"]) == (None, labels)
    await until(lambda: no_sightings(service))
    assert 404 == (await service.http.get(f"/sessions/{other.id}")).status_code


async def no_sightings(service: Service) -> bool:
    return await count(service, "sightings") == 0


async def test_only_what_upstream_says_attaches(service: Service) -> None:
    """A signed webhook about a session that upstream does not know is a hint that led nowhere."""
    await rule(service)
    await hook(service, "sesn_nobody")
    await until(lambda: no_sightings(service))
    assert 404 == (await service.http.get("/sessions/sesn_nobody")).status_code


async def test_without_a_rule_nobody_asks_about_sessions(service: Service) -> None:
    session = service.upstream.create("custom")
    await hook(service, session.id)
    assert (await count(service, "hooks"), await count(service, "sightings")) == (1, 0)


async def test_a_disabled_rule_attaches_nothing(service: Service) -> None:
    session = service.upstream.create("custom")
    await rule(service, enabled=False)
    await hook(service, session.id)
    assert 0 == await count(service, "sightings")


async def test_a_look_that_fails_is_taken_up_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.store.sightings.AGAIN_S", 0.2)
    session = service.upstream.create("custom")
    service.upstream.world.strike(Fault("refuse", endpoint="retrieve", session_id=session.id, status=503))
    await rule(service)
    await hook(service, session.id)
    await served(service, session.id)


async def test_the_list_attaches_what_no_webhook_told(
    engine: AsyncEngine, migrated_url: str, upstream: Server
) -> None:
    async with replicating(engine, migrated_url, upstream.url, sweep_s=1) as http:
        service = Service(http, upstream, None, engine)  # type: ignore[arg-type]
        old = upstream.create("gated")
        await rule(service, settings={"max_idle_s": None})
        new = upstream.create("custom")
        upstream.say(new.id)
        await served(service, new.id)
        assert 404 == (await http.get(f"/sessions/{old.id}")).status_code


async def test_the_list_wakes_what_no_webhook_told(
    engine: AsyncEngine, migrated_url: str, upstream: Server
) -> None:
    async with replicating(engine, migrated_url, upstream.url, sweep_s=1) as http:
        service = Service(http, upstream, None, engine)  # type: ignore[arg-type]
        session = await asleep(service)
        upstream.say(session.id)
        await service.until(f"/sessions/{session.id}/calls", lambda page: page["data"])


async def test_a_session_that_sleeps_on_is_not_woken_by_each_list(
    engine: AsyncEngine, migrated_url: str, upstream: Server
) -> None:
    async with replicating(engine, migrated_url, upstream.url, sweep_s=0.5) as http:
        service = Service(http, upstream, None, engine)  # type: ignore[arg-type]
        session = await asleep(service)
        opened = len(asked(upstream, session.id, "stream"))
        lists = lambda: [one for one in upstream.world.requests if one.endpoint == "sessions"]  # noqa: E731
        await upstream.until(lambda: len(lists()) >= 3)
        assert opened == len(asked(upstream, session.id, "stream"))


async def test_nobody_reads_the_list_of_a_workspace_where_nothing_sleeps(
    engine: AsyncEngine, migrated_url: str, upstream: Server
) -> None:
    async with replicating(engine, migrated_url, upstream.url, sweep_s=0.2) as http:
        service = Service(http, upstream, None, engine)  # type: ignore[arg-type]
        session = upstream.create("custom")
        await service.attach(session.id)
        await served(service, session.id)
        assert 0 == await count(service, "sweeps")
        assert not [one for one in upstream.world.requests if one.endpoint == "sessions"]
