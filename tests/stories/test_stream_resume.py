"""A reader that is cut off again and again, and comes back to another replica: nothing lost, nothing twice.

Two replicas serve one database, and their sessions talk and call tools meanwhile. Every reader keeps the last
id that it saw, as a browser does. `-m nightly` makes 10,000 cuts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server
from app.store.database import create_engine
from tests.api.reader import Event, reading
from tests.console.service import serving
from tests.runner.receiver import Receiver
from tests.runner.scripts import custom, live, turn
from tests.runner.service import Service
from tests.runner.test_restarts import Start, tool, upstream

__all__ = ["tool", "upstream"]

pytestmark = pytest.mark.anyio

SESSIONS: Final = 4
STEPS: Final = 6
"""Messages of a turn, each with two calls behind it."""


@pytest.fixture
def replica(engine: AsyncEngine, migrated_url: str, upstream: Server, tool: Receiver) -> Start:
    """Starts replicas that listen on ports of their own: a stream needs a wire."""

    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Service]:
        own = create_engine(migrated_url, connections_max=6)
        async with serving(own, migrated_url, upstream_url=upstream.url) as site:
            yield Service(site.http, upstream, tool, engine)

    return start


@dataclass
class Told:
    """What a reader was told: how often each change, and what is true of each thing by the last one."""

    last_id: str = "0"
    changes: Counter[str] = field(default_factory=Counter)
    latest: dict[tuple[str, str], Any] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        if event.type in ("message.partial", "message.discarded", "end"):
            return
        assert event.id is not None
        assert int(event.id) > int(self.last_id), "ids rise"
        self.last_id = event.id
        self.changes[event.id] += 1
        kind = "call" if event.type == "confirmation" else event.type
        self.latest[kind, event.data.get("id", "")] = event.data


async def test_a_reader_that_is_cut_off_misses_nothing_and_hears_nothing_twice(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """In a few cuts."""
    await resume(replica, upstream, tool, cuts=120)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_ten_thousand_cuts_lose_nothing(replica: Start, upstream: Server, tool: Receiver) -> None:
    await resume(replica, upstream, tool, cuts=10_000)


async def resume(replica: Start, upstream: Server, tool: Receiver, *, cuts: int) -> None:
    """Let readers be cut off, so often in all; then compare what they were told with what is."""
    chance = random.Random(cuts)
    steps = [
        step
        for n in range(STEPS)
        for step in ({"do": "message", "text": f"Step {n}. " * 20, "deltas": 4}, custom("echo", "echo"))
    ]
    async with replica() as one, replica() as other:
        await one.register("echo")
        sessions = [upstream.create(turn(*steps)).id for _ in range(SESSIONS)]
        for session_id in sessions:
            await live(one, session_id, max_idle_s=None)
        left = iter(range(cuts))
        readers = [
            asyncio.create_task(read(chance, (one, other), session_id, left)) for session_id in sessions
        ]
        talking = asyncio.create_task(talk(one, upstream, sessions, readers))
        told = await asyncio.gather(*readers)
        await talking
        for session_id, said in zip(sessions, told, strict=True):
            await rest(other, session_id, said)
            await compare(one, session_id, said)
        print(f"{cuts} cuts, {sum(len(said.changes) for said in told)} changes: none lost, none repeated")


async def talk(
    service: Service, upstream: Server, sessions: list[str], readers: list[asyncio.Task[Told]]
) -> None:
    """Keep the agents busy for as long as somebody reads."""
    finals = 0
    while not all(reader.done() for reader in readers):
        finals += STEPS
        is_over = partial(_is_at, finals)
        for session_id in sessions:
            upstream.say(session_id)
        for session_id in sessions:
            path = f"/sessions/{session_id}/text?after={finals - 1}"
            await service.until(path, is_over, limit_s=60)
            posted = f"/sessions/{session_id}"
            await service.until(posted, lambda shown: set(shown["calls"]) == {"posted"}, limit_s=60)


def _is_at(finals: int, shown: dict[str, Any]) -> bool:
    return bool(shown["next_after"] >= finals)


async def read(
    chance: random.Random, served: tuple[Service, Service], session_id: str, left: Iterator[int]
) -> Told:
    """Read from either replica, be cut off after some events, and come back, until all cuts are made."""
    told = Told()
    for _ in left:
        at = served[chance.random() < 0.5]
        headers = {"last-event-id": told.last_id}
        async with reading(at.http, f"/sessions/{session_id}/events", headers=headers) as reader:
            for _ in range(chance.randrange(4)):
                try:
                    told.take(await reader.next(limit_s=0.2))
                except TimeoutError:
                    break
    return told


async def rest(service: Service, session_id: str, told: Told) -> None:
    """Read what is left; all of it is there, so that silence is the end."""
    headers = {"last-event-id": told.last_id}
    async with reading(service.http, f"/sessions/{session_id}/events", headers=headers) as reader:
        while True:
            try:
                told.take(await reader.next(limit_s=1.5))
            except TimeoutError:
                return


async def compare(service: Service, session_id: str, told: Told) -> None:
    """What was told last of each thing is what is there, and no change was told twice."""
    assert {1} == set(told.changes.values())
    for kind, path in (("call", "calls"), ("message.final", "messages")):
        stored, cursor = [], None
        while True:
            query = f"?limit=200{f'&cursor={cursor}' if cursor else ''}"
            page = await service.get(f"/sessions/{session_id}/{path}{query}")
            stored += page["data"]
            if (cursor := page["next_cursor"]) is None:
                break
        assert {one["id"]: one for one in stored} == {
            id_: one for (of, id_), one in told.latest.items() if of == kind
        }
