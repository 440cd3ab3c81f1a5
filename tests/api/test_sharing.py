"""One read for all who want it at once, and never one that began before somebody asked."""

from __future__ import annotations

import asyncio

import pytest

from app.api import sharing
from app.api.sharing import Shared

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Source:
    """Counts its reads; each waits until it is let go."""

    def __init__(self) -> None:
        self.reads = 0
        self.begun = asyncio.Event()
        self.free = asyncio.Event()

    async def read(self) -> int:
        self.reads += 1
        number = self.reads
        self.begun.set()
        await self.free.wait()
        return number


async def test_those_who_ask_at_once_share_a_read_and_whoever_comes_later_gets_a_newer_one() -> None:
    shared: Shared[str, int] = Shared()
    source = Source()
    first = [asyncio.create_task(shared.get("k", source.read)) for _ in range(5)]
    await source.begun.wait()
    later = asyncio.create_task(shared.get("k", source.read))
    other = asyncio.create_task(shared.get("another", source.read))
    source.free.set()
    assert [1] * 5 == await asyncio.gather(*first)
    assert {2, 3} == {await later, await other}


async def test_a_failure_reaches_all_who_share_it_and_the_next_read_is_made() -> None:
    shared: Shared[str, int] = Shared()

    async def fail() -> int:
        raise OSError

    tasks = [asyncio.create_task(shared.get("k", fail)) for _ in range(2)]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [OSError, OSError] == [type(one) for one in done]
    source = Source()
    source.free.set()
    assert 1 == await shared.get("k", source.read)


async def test_one_who_goes_away_takes_the_read_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "GATHER_S", 0.0)
    shared: Shared[str, int] = Shared()
    source = Source()
    one, two = (asyncio.create_task(shared.get("k", source.read)) for _ in range(2))
    await source.begun.wait()
    one.cancel()
    source.free.set()
    assert 1 == await two
