"""Text while it is written, as somebody who polls sees it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server, running
from app.simulator.world import World
from app.store.database import create_engine
from tests.runner.scripts import live, turn
from tests.runner.service import Service, replicating, serving

pytestmark = pytest.mark.anyio

LAG_S = 1.0


def start(upstream: Server, session_id: str, message_id: str) -> None:
    event = {"type": "event_start", "event": {"type": "agent.message", "id": message_id}}
    upstream.emit(session_id, event)


def grow(upstream: Server, session_id: str, message_id: str, part: str) -> None:
    delta = {"type": "content_delta", "index": 0, "content": {"type": "text", "text": part}}
    upstream.emit(session_id, {"type": "event_delta", "event_id": message_id, "delta": delta})


def finish(upstream: Server, session_id: str, message_id: str, whole: str) -> None:
    content = [{"type": "text", "text": whole}]
    upstream.emit(session_id, {"type": "agent.message", "id": message_id, "content": content})


async def test_a_message_can_be_read_while_it_is_written(service: Service) -> None:
    """A-042: within a second of its first delta, marked as partial."""
    session = service.upstream.create("custom")
    await live(service, session.id)
    start(service.upstream, session.id, "m1")
    grow(service.upstream, session.id, "m1", "Hel")
    shown = await service.until(
        f"/sessions/{session.id}/messages/m1", lambda shown: shown["text"] == "Hel", limit_s=LAG_S
    )
    assert ("partial", None, None, False) == tuple(
        shown[name] for name in ("state", "processed_at", "seq", "is_stale")
    )
    assert [{"type": "text", "text": "Hel"}] == shown["content"]


async def test_each_poll_shows_more_of_the_same_text(service: Service) -> None:
    """A-043: every partial is a prefix of the next, and after the final every poll is final."""
    session = service.upstream.create("custom")
    await live(service, session.id)
    path = f"/sessions/{session.id}/messages/m1"
    start(service.upstream, session.id, "m1")
    whole = ""
    seen: list[str] = []
    async with asyncio.timeout(10):
        while len(set(seen)) < 4:
            part = f"{len(seen)} "
            whole += part
            grow(service.upstream, session.id, "m1", part)
            answer = await service.http.get(path)
            seen.append(answer.json()["text"] if answer.status_code == 200 else "")
    shown = await service.until(path, lambda shown: shown["text"] == whole)
    assert "partial" == shown["state"]
    finish(service.upstream, session.id, "m1", whole)
    shown = await service.until(path, lambda shown: shown["state"] == "final")
    assert (whole, 1) == (shown["text"], shown["seq"])
    assert shown["processed_at"] is not None
    assert all(later.startswith(earlier) for earlier, later in pairwise([*seen, whole]))


async def test_many_deltas_are_few_writes(engine: AsyncEngine, migrated_url: str) -> None:
    """A-045: 2,000 deltas in two seconds; each write takes a number of the table's sequence."""
    word = "x" * 2_000
    script = turn({"do": "message", "text": word, "deltas": 2_000, "pause_s": 0.001})
    async with serving(engine, migrated_url, world=World(pace=1)) as service:
        session = service.upstream.create(script)
        await live(service, session.id)
        loop = asyncio.get_running_loop()
        before, began = await writes(engine), loop.time()
        service.upstream.say(session.id)
        path = f"/sessions/{session.id}/text"
        seen = await service.until(path, lambda shown: shown["data"] and shown["data"][0]["text"])
        assert "partial" == seen["data"][0]["state"]
        shown = await service.until(path, lambda shown: shown["data"][0]["state"] == "final", limit_s=30)
        took_s = loop.time() - began
        assert word == shown["data"][0]["text"]
        assert 3 <= await writes(engine) - before <= 4 * took_s + 3


async def writes(engine: AsyncEngine) -> int:
    """How many rows were ever written to `messages`, updates by insert included."""
    async with engine.connect() as connection:
        value: int = await connection.scalar(text("select last_value from messages_position_seq"))
    return value


async def test_a_preview_of_an_earlier_run_is_stale_until_its_message_comes(
    engine: AsyncEngine, migrated_url: str
) -> None:
    """A-053: it can still be read, takes no deltas without a new start, and becomes final."""
    async with running(World(pace=0)) as upstream:
        session = upstream.create("custom")
        path = f"/sessions/{session.id}/messages/m1"
        first = create_engine(migrated_url, connections_max=5)
        async with replicating(first, migrated_url, upstream.url) as http:
            service: Any = Service(http, upstream, None, first)  # type: ignore[arg-type]
            await live(service, session.id)
            start(upstream, session.id, "m1")
            grow(upstream, session.id, "m1", "Hel")
            await service.until(path, lambda shown: shown["text"] == "Hel")
        async with replicating(engine, migrated_url, upstream.url) as http:
            service = Service(http, upstream, None, engine)  # type: ignore[arg-type]
            shown = await service.until(
                f"/sessions/{session.id}", lambda shown: shown["status"] == "live" and shown["term"] == 2
            )
            shown = await service.get(path)
            assert ("partial", True, "Hel") == (shown["state"], shown["is_stale"], shown["text"])
            grow(upstream, session.id, "m1", "lo")
            finish(upstream, session.id, "m2", "other")
            await service.until(
                f"/sessions/{session.id}/messages/m2", lambda shown: shown["state"] == "final"
            )
            assert shown == await service.get(path)
            finish(upstream, session.id, "m1", "Hello")
            shown = await service.until(path, lambda shown: shown["state"] == "final")
            assert (False, "Hello", 2) == (shown["is_stale"], shown["text"], shown["seq"])
