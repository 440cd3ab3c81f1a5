"""Sessions go upstream with the credential that their tenant stored, and go on with a new one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server, running
from app.simulator.world import World
from tests.runner.scripts import asked, custom, turn
from tests.runner.service import Service, replicating

pytestmark = pytest.mark.anyio


@pytest.fixture
async def upstream() -> AsyncIterator[Server]:
    async with running(World(pace=0)) as server:
        yield server


@pytest.fixture
async def service(engine: AsyncEngine, migrated_url: str, upstream: Server) -> AsyncIterator[Service]:
    """A replica whose environment has no credential."""
    async with replicating(engine, migrated_url, upstream.url, api_key=None) as http:
        yield Service(http, upstream, None, engine)  # type: ignore[arg-type]  # no tool is called


async def put(service: Service, name: str = "team", **body: Any) -> None:
    body = {"type": "api_key", "secret": "sk-one"} | body
    answer = await service.http.put(f"/credentials/{name}", json=body)
    assert answer.status_code in (200, 201), answer.text


def used(service: Service, session_id: str) -> list[str | None]:
    """With what the session's requests came, each once, in order."""
    return list(dict.fromkeys(one.auth for one in asked(service.upstream, session_id, "stream", "retrieve")))


async def live(service: Service, session_id: str) -> Any:
    return await service.until(f"/sessions/{session_id}", lambda shown: shown["status"] == "live")


async def test_a_session_is_served_with_the_credential_that_it_names(service: Service) -> None:
    await put(service, type="bearer", secret="tok-two")
    session = service.upstream.create(turn(custom("lookup")))
    await service.attach(session.id, credential="team")
    await live(service, session.id)
    assert ["bearer"] == used(service, session.id)


async def test_a_session_of_another_tenant_is_served_with_that_tenants(service: Service) -> None:
    key = {"name": "o", "scopes": ["admin", "sessions", "read"], "tenant": "other"}
    made = await service.http.post("/keys", json=key)
    other = {"authorization": f"Bearer {made.json()['key']}"}
    body = {"type": "api_key", "secret": "sk-other"}
    assert 201 == (await service.http.put("/credentials/default", json=body, headers=other)).status_code
    session = service.upstream.create(turn(custom("lookup")))
    answer = await service.http.post(f"/sessions/{session.id}/attach", json={}, headers=other)
    assert 202 == answer.status_code
    service.http.headers.update(other)
    await live(service, session.id)


async def test_a_session_goes_on_with_a_credential_that_is_replaced(service: Service) -> None:
    await put(service)
    session = service.upstream.create(turn(custom("lookup")))
    await service.attach(session.id, credential="team")
    term = (await live(service, session.id))["term"]
    await put(service, type="bearer", secret="tok-two")
    path = f"/sessions/{session.id}"
    await service.until(path, lambda _: used(service, session.id) == ["x-api-key", "bearer"])
    shown = await live(service, session.id)
    assert (term + 1, None) == (shown["term"], shown["end_reason"])


async def test_a_session_whose_credential_is_deleted_waits_for_another(service: Service) -> None:
    await put(service)
    session = service.upstream.create(turn(custom("lookup")))
    await service.attach(session.id, credential="team")
    await live(service, session.id)
    assert 204 == (await service.http.delete("/credentials/team")).status_code
    path = f"/sessions/{session.id}"
    await service.until(path, lambda shown: "no_credential" in shown["flags"])
    await put(service)
    await service.until(path, lambda shown: shown["status"] == "live" and not shown["flags"])


async def test_a_credential_may_lead_to_another_upstream(service: Service) -> None:
    async with running(World(pace=0)) as elsewhere:
        await put(service, upstream_url=elsewhere.url)
        session = elsewhere.create(turn(custom("lookup")))
        await service.attach(session.id, credential="team")
        await live(service, session.id)
    assert [] == asked(service.upstream, session.id, "stream")
