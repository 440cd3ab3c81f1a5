"""Those who follow upstream's own events see each live one once, and hurt nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.runner import observers
from app.simulator.server import Server, running
from app.simulator.world import World
from app.store.observers import KEPT_S
from tests.api.reader import Event, Reader, reading
from tests.console.service import Site, serving
from tests.runner.receiver import Receiver, receiving
from tests.runner.scripts import results
from tests.runner.service import Service

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Stage:
    site: Site
    service: Service

    @property
    def upstream(self) -> Server:
        return self.service.upstream

    async def live(self) -> str:
        session = self.upstream.create("custom")
        await self.service.attach(session.id)
        await self.service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "live")
        return str(session.id)

    @contextlib.asynccontextmanager
    async def following(self, session_id: str) -> AsyncIterator[Reader]:
        """Follow the session's raw events, from when they are passed on."""
        path = f"/sessions/{session_id}/events"
        async with reading(self.site.http, path, include="upstream") as reader:
            await until(reader, lambda event: event.type == "observing")
            yield reader


@pytest.fixture
async def tool() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def stage(engine: AsyncEngine, migrated_url: str, tool: Receiver) -> AsyncIterator[Stage]:
    async with (
        running(World(pace=0)) as upstream,
        serving(engine, migrated_url, upstream_url=upstream.url) as site,
    ):
        service = Service(site.http, upstream, tool, engine)
        await service.register("lookup_order")
        yield Stage(site, service)


async def until(reader: Reader, is_last: Any) -> list[Event]:
    """The events up to the one that `is_last`."""
    found = []
    while True:
        found.append(await reader.next())
        if is_last(found[-1]):
            return found


def marks(events: list[Event]) -> list[str]:
    return [one.data["mark"] for one in events if one.type == "upstream" and "mark" in one.data]


def mark(stage: Stage, session_id: str, name: str, **more: Any) -> None:
    stage.upstream.emit(session_id, {"type": "session.usage", "mark": name, **more})


def is_mark(name: str) -> Any:
    return lambda event: event.type == "upstream" and event.data.get("mark") == name


async def test_the_feed_carries_what_comes_live_and_nothing_of_the_past(stage: Stage) -> None:
    """R-333."""
    session = stage.upstream.create("custom")
    for number in range(50):
        mark(stage, session.id, f"old {number}")
    await stage.service.attach(session.id)
    await stage.service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "live")
    async with stage.following(session.id) as reader:
        for name in ("one", "two", "three"):
            mark(stage, session.id, name)
        assert ["one", "two", "three"] == marks(await until(reader, is_mark("three")))


async def test_events_come_byte_for_byte_as_upstream_sent_them(stage: Stage) -> None:
    session_id = await stage.live()
    async with stage.following(session_id) as reader:
        mark(stage, session_id, "it", unknown={"deep": [1.50, "ü", None]})
        (*_, event) = await until(reader, is_mark("it"))
    assert event.data["unknown"] == {"deep": [1.50, "ü", None]}


async def test_an_event_that_a_second_stream_repeats_comes_once(stage: Stage) -> None:
    """R-334."""
    session_id = await stage.live()
    async with stage.following(session_id) as reader:
        mark(stage, session_id, "one")
        seen = await until(reader, is_mark("one"))
        session = stage.upstream.world.sessions[session_id]
        stage.upstream.world.switch(session_id, replay_on_connect=True)
        stage.upstream.world.end_streams(session_id, "cut")
        await stage.upstream.until(lambda: session.subscriptions and not session.subscriptions[-1].is_closed)
        mark(stage, session_id, "two")
        seen += await until(reader, is_mark("two"))
    assert ["one", "two"] == marks(seen)


async def test_a_call_that_only_history_shows_is_in_the_log_and_not_in_the_feed(stage: Stage) -> None:
    """R-335."""
    session = stage.upstream.create("custom")
    stage.upstream.say(session.id)
    await stage.upstream.until(lambda: session.calls)
    await stage.service.attach(session.id, tools=[])
    page = await stage.service.until(f"/sessions/{session.id}/calls", lambda page: page["data"])
    async with stage.following(session.id) as reader:
        mark(stage, session.id, "now")
        seen = await until(reader, is_mark("now"))
    raw = [one.data["id"] for one in seen if one.type == "upstream"]
    assert page["data"][0]["id"] not in raw


async def test_an_observer_that_leaves_takes_no_call_with_it(stage: Stage, tool: Receiver) -> None:
    """R-323."""
    session_id = await stage.live()
    arrived, may_answer = asyncio.Event(), asyncio.Event()
    echo = tool.reply

    async def wait(delivery: Any) -> Any:
        arrived.set()
        await may_answer.wait()
        return await echo(delivery)

    tool.reply = wait
    async with stage.following(session_id):
        stage.upstream.say(session_id)
        async with asyncio.timeout(10):
            await arrived.wait()
    may_answer.set()
    await stage.upstream.until(lambda: results(stage.upstream, session_id))


async def test_an_observer_that_never_reads_hinders_nothing_and_keeps_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-336."""
    monkeypatch.setattr(observers, "BUFFER_MAX", 10)
    session_id = await stage.live()
    async with stage.following(session_id):
        for number in range(500):
            mark(stage, session_id, f"{number} " + "x" * 10_000)
        stage.upstream.say(session_id)
        await stage.upstream.until(lambda: results(stage.upstream, session_id))


async def test_an_observer_who_is_too_far_behind_is_told_so(stage: Stage) -> None:
    """R-336."""
    session_id = await stage.live()
    async with stage.following(session_id) as reader, stage.site.engine.begin() as connection:
        await connection.execute(
            text(
                "insert into upstream_events (tenant, session_id, event, at)"
                f" values ('default', :id, '{{}}', now() - interval '{KEPT_S - 1} s')"
            ),
            {"id": session_id},
        )
        await connection.commit()
        mark(stage, session_id, "wake")
        (*_, end) = await until(reader, lambda event: event.type == "end")
    assert end.data["code"] == "too_slow"


async def test_neither_feed_nor_calls_show_what_is_secret(stage: Stage) -> None:
    """R-337."""
    session_id = await stage.live()
    (secret,) = stage.service.tool.secrets
    async with stage.following(session_id) as reader:
        stage.upstream.say(session_id)
        seen = await until(reader, lambda event: event.data.get("type") == "agent.message")
    told = repr(seen) + (await stage.site.http.get(f"/sessions/{session_id}/calls")).text
    assert "sk-ant-api-test" not in told
    assert secret.removeprefix("whsec_") not in told
    assert "authorization" not in told.lower()


async def test_nothing_is_kept_when_nobody_follows(stage: Stage) -> None:
    session_id = await stage.live()
    stage.upstream.say(session_id)
    await stage.upstream.until(lambda: results(stage.upstream, session_id))
    async with stage.site.engine.connect() as connection:
        assert 0 == await connection.scalar(text("select count(*) from upstream_events"))
