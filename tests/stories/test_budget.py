"""A network blip, and the budget that keeps results from waiting behind reconnects (C-018)."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator

import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.main import Bridge, create_app
from app.replica import replica
from app.settings import Settings
from app.simulator.requests import Request
from app.simulator.server import running
from app.simulator.world import World
from app.store.wakeups import Wakeups
from app.webhooks.egress import Egress
from tests.runner.receiver import receiving
from tests.runner.scripts import Gate, custom, turn
from tests.runner.service import ADMIN_KEY, Service
from tests.store.rows import SECRETS, until

pytestmark = pytest.mark.anyio

LIMIT_S = 25.0


class Hours:
    """Time for the budget: `speed` times as fast as the clock on the wall; None skips whole minutes."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.speed: float | None = None
        self._engine = engine

    async def sleep(self, seconds: float) -> None:
        real_s = seconds / self.speed if self.speed else 0.0
        if self.speed is None:
            seconds = 60.0
        async with self._engine.begin() as connection:
            await connection.execute(
                text("update budgets set updated_at = updated_at - make_interval(secs => :s)"),
                {"s": seconds - real_s},
            )
        await asyncio.sleep(real_s)


@contextlib.asynccontextmanager
async def serving(engine: AsyncEngine, url: str, hours: Hours, *, per_min: int) -> AsyncIterator[Service]:
    """One replica whose upstream has a budget."""
    async with receiving() as tool, running(World(pace=0)) as upstream:
        settings = Settings(
            admin_key=SecretStr(ADMIN_KEY),
            anthropic_api_key=SecretStr("sk-ant-api-test"),
            upstream_url=upstream.url,
            upstream_requests_per_min=per_min,
        )
        wakeups = Wakeups(url, engine)
        egress = Egress([ipaddress.ip_network("127.0.0.0/8")])
        bridge = Bridge(
            settings=settings,
            engine=engine,
            secrets=SECRETS,
            wakeups=wakeups,
            check_url=lambda _: None,
            running=lambda: replica(settings, engine, SECRETS, wakeups, egress, budget_sleep=hours.sleep),
        )
        app = create_app(bridge)
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app=app), base_url="http://bascule", headers=headers
            ) as http,
        ):
            yield Service(http, upstream, tool, engine)


async def attached(service: Service, count: int) -> list[str]:
    """Attach so many sessions with a turn of one call ahead; return them when all are live."""
    sessions = [service.upstream.create(turn(custom("lookup"))).id for _ in range(count)]
    for session_id in sessions:
        await service.attach(session_id)
    await service.upstream.until(
        lambda: answered(service, "list") >= set(sessions) and service.upstream.streams.count == count,
        limit_s=LIMIT_S,
    )
    return sessions


def since(service: Service, mark: int, *endpoints: str) -> list[Request]:
    return [one for one in list(service.upstream.world.requests)[mark:] if one.endpoint in endpoints]


def answered(service: Service, endpoint: str, mark: int = 0) -> set[str | None]:
    return {one.session_id for one in since(service, mark, endpoint) if one.status == 200}


def mark_of(service: Service) -> int:
    return len(service.upstream.world.requests)


async def test_answers_then_reconnects_then_sweeps_at_60_a_minute(
    engine: AsyncEngine, migrated_url: str
) -> None:
    """50 streams drop at once while 50 results wait, and 3 sessions have something to look for."""
    hours = Hours(engine)
    async with serving(engine, migrated_url, hours, per_min=60) as service:
        gate = service.tool.reply = Gate()
        await service.register("lookup", concurrency=64)
        *dropped, one, two, three = await attached(service, 53)
        for session_id in dropped:
            service.upstream.say(session_id)
        await service.tool.until(lambda: gate.inside == 50, limit_s=LIMIT_S)

        hours.speed = 20.0  # eighteen tokens a second
        began = mark_of(service)
        gate.open()
        await until(lambda: are_waiting(engine, 35), limit_s=LIMIT_S)
        mark = mark_of(service)
        for session_id in (one, two, three):
            reason = {"type": "requires_action", "event_ids": ["sevt_nobody_knows"]}
            service.upstream.emit(session_id, {"type": "session.status_idle", "stop_reason": reason})
        for session_id in dropped:
            service.upstream.world.end_streams(session_id, "cut")
        await service.upstream.until(lambda: len(answered(service, "send", began)) == 50, limit_s=LIMIT_S)
        assert [] == since(service, mark, "stream", "list", "retrieve")

        hours.speed = 40.0
        sweeping = {one, two, three}
        await service.upstream.until(lambda: answered(service, "list", mark) >= sweeping, limit_s=LIMIT_S)
        after = since(service, mark, "stream", "list")
        first_sweep = next(place for place, each in enumerate(after) if each.session_id in sweeping)
        before = after[:first_sweep]
        assert set(dropped) == {each.session_id for each in before if each.endpoint == "stream"}
        posted = [each for id_ in dropped for each in service.upstream.world.answers(id_).values()]
        assert [1] * 50 == [len(each) for each in posted]


async def are_waiting(engine: AsyncEngine, count: int) -> bool:
    """Whether at least so many results are stored and meant to be posted."""
    async with engine.connect() as connection:
        found = await connection.scalar(text("select count(*) from calls where state = 'posting'"))
        return int(found or 0) >= count


async def test_200_streams_that_drop_at_once_do_not_hold_up_a_result(
    engine: AsyncEngine, migrated_url: str
) -> None:
    """At the default of 600 a minute, it passes hundreds of requests that were there before it."""
    hours = Hours(engine)
    async with serving(engine, migrated_url, hours, per_min=600) as service:
        gate = service.tool.reply = Gate()
        await service.register("lookup")
        sessions = await attached(service, 200)
        service.upstream.say(sessions[0])
        await service.tool.until(lambda: gate.inside == 1)

        hours.speed = 5.0
        mark = mark_of(service)
        for session_id in sessions:
            service.upstream.world.end_streams(session_id, "cut")
        await service.upstream.until(lambda: len(since(service, mark, "stream")) >= 60, limit_s=LIMIT_S)
        opened = mark_of(service)
        gate.open()
        await service.upstream.until(lambda: since(service, opened, "send"), limit_s=LIMIT_S)
        passed = len(since(service, opened, "stream", "list", "retrieve"))
        waiting = 400 - len(since(service, mark, "stream", "list"))
        assert waiting >= 200
        assert passed <= 40

        hours.speed = None
        await service.upstream.until(
            lambda: answered(service, "list", mark) == set(sessions), limit_s=LIMIT_S
        )
