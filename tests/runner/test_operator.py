"""What an operator sees, and what goes on by itself once he has mended it."""

from __future__ import annotations

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import running
from app.simulator.world import World
from tests.runner.service import Service, replicating

pytestmark = pytest.mark.anyio


async def test_a_session_waits_for_a_credential_instead_of_ending(
    engine: AsyncEngine, migrated_url: str
) -> None:
    async with running(World(pace=0)) as upstream:
        session = upstream.create("custom")
        path = f"/sessions/{session.id}"
        async with replicating(engine, migrated_url, upstream.url, api_key=None) as http:
            service = Service(http, upstream, None, engine)  # type: ignore[arg-type]
            await service.attach(session.id)
            shown = await service.until(path, lambda shown: "no_credential" in shown["flags"])
            assert shown["end_reason"] is None
        async with replicating(engine, migrated_url, upstream.url) as http:
            service = Service(http, upstream, None, engine)  # type: ignore[arg-type]
            shown = await service.until(path, lambda shown: shown["status"] == "live")
            assert "no_credential" not in shown["flags"]


async def test_a_session_without_a_credential_can_be_detached(engine: AsyncEngine, migrated_url: str) -> None:
    async with (
        running(World(pace=0)) as upstream,
        replicating(engine, migrated_url, upstream.url, api_key=None) as http,
    ):
        service = Service(http, upstream, None, engine)  # type: ignore[arg-type]
        session = upstream.create("custom")
        await service.attach(session.id)
        await http.post(f"/sessions/{session.id}/detach")
        await service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "detached")


async def test_an_unowned_call_says_what_to_do_and_goes_out_once_it_is_done(service: Service) -> None:
    """R-110, R-116, promise 5."""
    session = service.upstream.create("custom")
    await service.register("lookup_ordr")
    await service.attach(session.id)
    service.upstream.say(session.id)
    path = f"/sessions/{session.id}"
    await service.until(path, lambda shown: shown["flags"] == ["unowned_calls"])
    (call,) = (await service.calls(session.id)).values()
    shown = await service.get(f"{path}/calls/{call['id']}")
    assert "PUT /tools/lookup_order" in shown["detail"]

    await service.register("lookup_order")
    await service.until(f"{path}/calls/{call['id']}", lambda call: call["state"] == "posted")
    shown = await service.until(path, lambda shown: shown["flags"] == [])


async def test_the_attempts_of_a_call_end_when_they_end(service: Service) -> None:
    """A tool that is not running is seen at once, not when the call has given up."""
    session = service.upstream.create("custom")
    await service.http.put("/tools/lookup_order", json={"url": "http://127.0.0.1:1/", "timeout_s": 3})
    await service.attach(session.id)
    service.upstream.say(session.id)
    page = await service.until(f"/sessions/{session.id}/calls", lambda page: page["data"])
    path = f"/sessions/{session.id}/calls/{page['data'][0]['id']}"
    shown = await service.until(path, lambda call: len(call["deliveries"]) > 1)
    assert shown["state"] == "dispatched"
    assert shown["deliveries"][0]["code"] == "connect_failed"
    assert shown["deliveries"][0]["finished_at"] is not None


async def test_deliveries_posts_and_commits_are_measured(service: Service) -> None:
    session = service.upstream.create("custom")
    await service.register("lookup_order")
    await service.attach(session.id)
    service.upstream.say(session.id)
    path = f"/sessions/{session.id}"
    await service.until(path, lambda shown: shown["calls"].get("posted", 0) > 0)
    told = (await service.http.get("/metrics")).text
    for name in (
        'bascule_delivery_seconds_count{outcome="ok"}',
        'bascule_post_seconds_count{outcome="accepted"}',
        "bascule_commit_seconds_count",
        "bascule_leases_claimed_total",
    ):
        (line,) = [line for line in told.splitlines() if line.startswith(name + " ")]
        assert float(line.rpartition(" ")[2]) >= 1
