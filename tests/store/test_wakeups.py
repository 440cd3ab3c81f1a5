from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import wakeups as module
from app.store.wakeups import Signal, Wakeups, notify, registry_key, session_key

pytestmark = pytest.mark.anyio

LIMIT_S = 5.0


async def working(wakeups: Wakeups) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not wakeups.works:  # noqa: ASYNC110 - it is no event
            await asyncio.sleep(0.01)


async def send(engine: AsyncEngine, *keys: str) -> None:
    async with engine.begin() as connection:
        await notify(connection, keys)


async def test_a_key_wakes_those_who_listen_for_it_and_those_who_listen_for_all(
    migrated_url: str, engine: AsyncEngine
) -> None:
    wakeups = Wakeups(migrated_url, engine)
    async with wakeups.running():
        await working(wakeups)
        one, other, registry = session_key("t", "s1"), session_key("t", "s2"), registry_key("t")
        with wakeups.listen(one) as mine, wakeups.listen(other) as theirs, wakeups.listen(None) as every:
            await send(engine, one, registry, one)
            assert await mine.wait(LIMIT_S)
            assert mine.take() == {one}
            assert await every.wait(LIMIT_S)
            assert every.take() == {one, registry}
            assert not await theirs.wait(0.05)
            assert not await mine.wait(0.0)


async def test_nobody_is_woken_before_the_commit(migrated_url: str, engine: AsyncEngine) -> None:
    wakeups = Wakeups(migrated_url, engine)
    async with wakeups.running():
        await working(wakeups)
        with wakeups.listen("t/s") as signal:
            async with engine.connect() as connection:
                await notify(connection, ["t/s"])
                assert not await signal.wait(0.05)
                await connection.rollback()
            assert not await signal.wait(0.05)


async def test_more_keys_than_a_payload_holds_wake_everybody(migrated_url: str, engine: AsyncEngine) -> None:
    wakeups = Wakeups(migrated_url, engine)
    async with wakeups.running():
        await working(wakeups)
        with wakeups.listen("t/unrelated") as signal:
            await send(engine, *(f"t/{'s' * 100}{number}" for number in range(200)))
            assert await signal.wait(LIMIT_S)
            assert signal.take() is None


async def test_a_lost_connection_is_opened_again_and_wakes_everybody(
    migrated_url: str, engine: AsyncEngine
) -> None:
    wakeups = Wakeups(migrated_url, engine)
    async with wakeups.running():
        await working(wakeups)
        with wakeups.listen("t/s") as signal:
            async with engine.begin() as connection:
                await connection.execute(
                    text(
                        "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
                        " and datname = current_database() and query ilike 'listen%'"
                    )
                )
            assert await signal.wait(LIMIT_S)
            assert signal.take() is None
            await working(wakeups)
            await send(engine, "t/s")
            assert await signal.wait(LIMIT_S)


async def test_a_path_that_carries_no_wake_ups_is_noticed(
    migrated_url: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a pooler: listening succeeds, and nothing ever arrives."""
    monkeypatch.setattr(module, "ECHO_LIMIT_S", 0.05)
    other = migrated_url.split("/test_")[0] + "/postgres" + migrated_url[migrated_url.index("?") :]
    wakeups = Wakeups(other, engine)
    async with wakeups.running():
        await asyncio.sleep(0.3)
        assert not wakeups.works


async def test_an_unreachable_server_is_tried_again_until_the_end(engine: AsyncEngine) -> None:
    wakeups = Wakeups("postgresql://x@127.0.0.1:1/x", engine)
    async with wakeups.running():
        await asyncio.sleep(0.05)
        assert not wakeups.works


async def test_a_signal_that_nobody_takes_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEYS_MAX", 3)
    signal = Signal()
    for number in range(4):
        signal.wake([f"t/{number}"])
    assert signal.take() is None
    signal.wake(["t/1"])
    assert signal.take() == {"t/1"}


async def test_listeners_that_left_are_forgotten(engine: AsyncEngine) -> None:
    wakeups = Wakeups("postgresql://nowhere", engine)
    with wakeups.listen("t/s"), wakeups.listen("t/s"):
        assert list(wakeups._by_key) == ["t/s"]
    assert wakeups._by_key == {}
