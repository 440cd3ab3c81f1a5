from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.store import leases
from app.store.leases import Free, Lease
from tests.store.rows import add_attachment

pytestmark = pytest.mark.anyio


async def add_replica(connection: AsyncConnection, replica_id: str, *, left_s: float) -> None:
    await connection.execute(
        text("insert into replicas (id, expires_at) values (:id, now() + make_interval(secs => :left))"),
        {"id": replica_id, "left": left_s},
    )


async def claimed(engine: AsyncEngine, replica_id: str = "mine", limit: int = 50) -> list[Lease]:
    async with engine.begin() as connection:
        return await leases.claim(connection, replica_id, limit)


async def test_no_attachment_is_ever_claimed_by_two(engine: AsyncEngine) -> None:
    """D-020: many claimers at once, each attachment has one holder and its term rose once."""
    names = [f"s{number}" for number in range(400)]
    async with engine.begin() as connection:
        for name in names:
            await add_attachment(connection, session_id=name, replica_id=None, term=7)
        for number in range(8):
            await leases.renew(connection, f"r{number}")

    async def claim_all(replica_id: str) -> list[Lease]:
        found: list[Lease] = []
        while fresh := await claimed(engine, replica_id, limit=2):
            found += fresh
        return found

    taken = await asyncio.gather(*(claim_all(f"r{number}") for number in range(8)))
    assert sorted(names) == sorted(lease.session_id for each in taken for lease in each)
    assert {8} == {lease.term for each in taken for lease in each}
    async with engine.connect() as connection:
        rows = await connection.execute(text("select session_id, replica_id, term from attachments"))
        holders = {row.session_id: (row.replica_id, row.term) for row in rows}
    said = {lease.session_id: (f"r{number}", 8) for number, each in enumerate(taken) for lease in each}
    assert said == holders


async def test_a_claim_takes_at_most_its_limit_and_the_longest_waiting_first(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await leases.renew(connection, "mine")
        for name in ("a", "b", "c"):
            await add_attachment(connection, session_id=name, replica_id=None)
        await connection.execute(
            text("update attachments set updated_at = now() - interval '1 h' where session_id = 'c'")
        )
    assert ["c"] == [lease.session_id for lease in await claimed(engine, limit=1)]
    assert 2 == len(await claimed(engine, limit=50))


async def test_a_share_is_what_equal_replicas_would_hold(engine: AsyncEngine) -> None:
    """Seven attachments and three lively replicas: three each; a dead and a late one do not count."""
    async with engine.begin() as connection:
        for name in ("mine", "full", "empty"):
            await leases.renew(connection, name)
        await add_replica(connection, "dead", left_s=-1)
        await add_replica(connection, "late", left_s=leases.TTL_S - 2 * leases.RENEW_S)
        for number, holder in enumerate(("mine", "full", "full", "full", "dead", None, None)):
            await add_attachment(connection, session_id=f"s{number}", replica_id=holder)
        await add_attachment(connection, session_id="over", replica_id=None, status="ended")
        shares = [await leases.free(connection, name) for name in ("mine", "full", "empty")]
    assert [Free(3, 2), Free(3, 0), Free(3, 3)] == shares


async def test_a_live_replica_keeps_its_attachments_and_an_expired_one_loses_them(
    engine: AsyncEngine,
) -> None:
    """What a dead replica held is free once its row has expired, or when it has none."""
    async with engine.begin() as connection:
        await add_replica(connection, "alive", left_s=5)
        await add_replica(connection, "dead", left_s=-0.001)
        for name in ("alive", "dead", "unknown"):
            await add_attachment(connection, session_id=f"of_{name}", replica_id=name, term=3)
    taken = await claimed(engine)
    assert {"of_dead", "of_unknown"} == {lease.session_id for lease in taken}
    assert {4} == {lease.term for lease in taken}


async def test_a_renewal_holds_for_its_time_by_the_databases_clock(engine: AsyncEngine) -> None:
    """The end is reckoned from the transaction's own `now()`, and nothing else: no local time goes in."""
    left = text("select expires_at - now() from replicas where id = 'r'")
    async with engine.begin() as connection:
        await leases.renew(connection, "r")
        assert timedelta(seconds=leases.TTL_S) == await connection.scalar(left)
        await connection.execute(text("update replicas set expires_at = now() - interval '1 h'"))
        await leases.renew(connection, "r")
        assert timedelta(seconds=leases.TTL_S) == await connection.scalar(left)


async def test_a_claim_over_its_own_expired_lease_is_a_new_term(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_attachment(connection, replica_id="r", term=1)
        await add_replica(connection, "r", left_s=-1)
    assert [Lease("default", "sesn_1", 2)] == await claimed(engine, "r")


async def test_a_released_lease_is_free_at_once(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await leases.renew(connection, "r1")
        await add_attachment(connection)
        await leases.release(connection, "r1", Lease("default", "sesn_1", 1))
    assert [Lease("default", "sesn_1", 2)] == await claimed(engine)


@pytest.mark.parametrize(("replica_id", "term"), [("r1", 0), ("other", 1), ("r1", 2)])
async def test_only_the_holder_of_the_term_can_release_it(
    engine: AsyncEngine, replica_id: str, term: int
) -> None:
    """A run that lost its lease cannot give its successor's away."""
    async with engine.begin() as connection:
        await leases.renew(connection, "r1")
        await add_attachment(connection)
        await leases.release(connection, replica_id, Lease("default", "sesn_1", term))
    assert [] == await claimed(engine)


async def test_a_replica_that_left_holds_nothing(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await leases.renew(connection, "r1")
        await add_attachment(connection)
        await leases.leave(connection, "r1")
    assert 1 == len(await claimed(engine))


@pytest.mark.parametrize("status", ["ended", "detached"])
async def test_an_attachment_that_is_over_is_nobodys(engine: AsyncEngine, status: str) -> None:
    async with engine.begin() as connection:
        await add_attachment(connection, replica_id=None, status=status)
    assert [] == await claimed(engine)


async def test_a_claim_passes_over_what_is_being_written(engine: AsyncEngine) -> None:
    """A commit under way keeps its attachment, and nobody waits for it."""
    async with engine.begin() as connection:
        await leases.renew(connection, "mine")
        await add_attachment(connection, session_id="busy", replica_id=None)
        await add_attachment(connection, session_id="free", replica_id=None)
    async with engine.begin() as writing:
        await writing.execute(text("select from attachments where session_id = 'busy' for no key update"))
        async with asyncio.timeout(2):
            assert ["free"] == [lease.session_id for lease in await claimed(engine)]
    assert ["busy"] == [lease.session_id for lease in await claimed(engine)]


async def test_restarts_are_counted_over_a_window(engine: AsyncEngine) -> None:
    """R-053: five within ten minutes are five; a later one begins at one."""
    lease = Lease("default", "sesn_1", 1)
    async with engine.begin() as connection:
        await add_attachment(connection)
        counts = [await leases.count_restart(connection, lease) for _ in range(3)]
        await connection.execute(
            text("update attachments set restarted_at = now() - make_interval(secs => :window)"),
            {"window": leases.RESTARTS_WINDOW_S},
        )
        counts.append(await leases.count_restart(connection, lease))
        counts.append(await leases.count_restart(connection, Lease("default", "sesn_1", 2)))
    assert [1, 2, 3, 1, 0] == counts


async def test_only_the_long_dead_are_forgotten(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_replica(connection, "alive", left_s=5)
        await add_replica(connection, "dead", left_s=-5)
        await add_replica(connection, "long_dead", left_s=-90)
        await leases.forget_dead(connection, older_than_s=60)
        left = await connection.scalars(text("select id from replicas order by id"))
        assert ["alive", "dead"] == left.all()
