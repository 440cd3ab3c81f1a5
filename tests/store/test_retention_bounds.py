"""How retention goes about it: one replica at a time, in small transactions, by indexes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.store import retention
from app.store.retention import prune
from tests.store.batches import column
from tests.store.ended import AGES, TABLES, add_delivered, add_session, age, rows
from tests.store.rows import add_message

pytestmark = pytest.mark.anyio


async def test_one_replica_prunes_at_a_time(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_session(connection)
    await age(engine, 91)
    async with engine.begin() as other:
        await other.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": retention._LOCK})
        pruned = await prune(engine, **AGES)
        assert not pruned.is_complete
        assert not any(pruned.counts.values())
    assert (await prune(engine, **AGES)).is_complete


async def test_two_pruners_at_once_remove_everything_once(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_MAX", 3)
    monkeypatch.setattr(retention, "SESSIONS_MAX", 2)
    async with engine.begin() as connection:
        for number in range(9):
            await add_session(connection, f"s{number}")
    await age(engine, 91)
    both = await asyncio.gather(*(prune(engine, **AGES) for _ in range(2)))
    passes = [*both, await prune(engine, **AGES)]
    removed = {"attachments": 9, "calls": 9, "messages": 18, "deliveries": 18, "bodies": 9}
    assert removed == {table: sum(one.counts[table] for one in passes) for table in removed}
    assert {**dict.fromkeys(TABLES, 0), "decisions": 9} == await rows(engine)


async def test_a_pass_takes_small_transactions_and_ends(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than fits in one transaction, among rows that stay and share their time."""
    monkeypatch.setattr(retention, "ROWS_MAX", 5)
    monkeypatch.setattr(retention, "SESSIONS_MAX", 2)
    async with engine.begin() as connection:
        for number in range(4):
            await add_session(connection, f"kept{number}")
            await add_delivered(connection, "open", f"kept{number}", state="answered")
        await add_session(connection, "big")
        for number in range(12):
            await add_delivered(connection, f"x{number}", "big")
            await add_message(connection, f"x{number}", session_id="big", seq=number + 2)
    await age(engine, 91)
    async with _deletes_noted(engine) as biggest:
        pruned = await prune(engine, **AGES)
    assert pruned.is_complete
    assert biggest.pop("deliveries") <= 5 * 2  # a call goes with its attempts, and here there are two
    assert {"attachments", "calls", "messages", "bodies", "callbacks"} == set(biggest)
    assert max(biggest.values()) <= 5
    assert {"kept0", "kept1", "kept2", "kept3"} == set(await column(engine, "attachments", "session_id"))
    assert ["open"] * 4 == await column(engine, "calls", "id")
    assert {"messages": 0, "deliveries": 8, "bodies": 4}.items() <= (await rows(engine)).items()


@pytest.mark.parametrize("is_analyzed", [False, True])
async def test_nothing_that_is_not_due_is_read(engine: AsyncEngine, is_analyzed: bool) -> None:
    """The plans reach rows by index alone, and with nothing due no table's rows at all."""
    async with engine.begin() as connection:
        await _many(connection)
        if is_analyzed:
            for table in TABLES:
                await connection.execute(text(f"analyze {table}"))
    statements = {
        "deliveries": (retention._DELIVERIES, {"days": 30, "cursor": retention._LONG_AGO, "rows": 1000}),
        "sessions": (
            retention._SESSIONS,
            {"days": 90, "after": retention._LONG_AGO, "tenant": "", "session_id": "", "sessions": 50},
        ),
    }
    some = {"tenants": ["default"] * 50, "session_ids": [f"s{n}" for n in range(50)], "for_good": [True] * 50}
    for name in ("calls", "messages", "attachments"):
        statements[name] = (getattr(retention, f"_{name.upper()}"), {**some, "rows": 1000})
    for name, (statement, values) in statements.items():
        async with engine.connect() as connection:
            await connection.execute(retention._BEGIN, {"lock": retention._LOCK})
            known = {key: value for key, value in values.items() if f":{key}" in statement.text}
            explain = text(f"explain (analyze, buffers, format json) {statement.text}")
            told = await connection.scalar(explain, known)
            await connection.rollback()
        plan = (told if isinstance(told, list) else json.loads(str(told)))[0]["Plan"]
        assert not [node for node in _nodes(plan) if node["Node Type"] == "Seq Scan"], name
        if name in ("deliveries", "sessions"):
            assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= 10, name


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for inner in plan.get("Plans", []) for node in _nodes(inner))]


async def _many(connection: AsyncConnection) -> None:
    """Two hundred sessions, half of them ended yesterday, with fifty calls and messages each."""
    await connection.execute(
        text(
            "insert into attachments (tenant, session_id, settings, extra_headers, status, updated_at)"
            " select 'default', 's' || n, '{}', '', case when n % 2 = 0 then 'ended' else 'live' end,"
            " now() - interval '1 day' from generate_series(1, 200) n"
        )
    )
    of_each = "from generate_series(1, 200) s, generate_series(1, 50) n"
    await connection.execute(
        text(
            "insert into calls (tenant, session_id, id, kind, tool, input, state)"
            f" select 'default', 's' || s, 'c' || n, 'custom', 't', '{{}}', 'posted' {of_each}"
        )
    )
    await connection.execute(
        text(
            "insert into messages (tenant, session_id, id, state, content, term, seq)"
            f" select 'default', 's' || s, 'm' || n, 'final', '[]', 1, n {of_each}"
        )
    )
    await connection.execute(
        text(
            "insert into deliveries (tenant, session_id, call_id, attempt, replica_id, tool, deadline_at)"
            f" select 'default', 's' || s, 'c' || n, 1, 'r', 't', now() {of_each}"
        )
    )


@contextlib.asynccontextmanager
async def _deletes_noted(engine: AsyncEngine) -> AsyncIterator[dict[str, int]]:
    """Note meanwhile, and yield in the end, the most rows of each table that one transaction removed."""
    biggest: dict[str, int] = {}
    async with engine.begin() as connection:
        await connection.execute(text("create table deletes (name text, at bigint, n bigint)"))
        await connection.execute(
            text(
                "create function note_deletes() returns trigger language plpgsql as $$ begin"
                " insert into deletes select tg_table_name, txid_current(), count(*) from gone;"
                " return null; end $$"
            )
        )
        for table in TABLES[:-1]:
            await connection.execute(
                text(
                    f"create trigger note_deletes after delete on {table} referencing old table as gone"
                    " for each statement execute function note_deletes()"
                )
            )
    try:
        yield biggest
        async with engine.connect() as connection:
            summed = "select name, sum(n) as n from deletes group by name, at"
            found = await connection.execute(text(f"select name, max(n) from ({summed}) s group by 1"))
            biggest.update({name: int(most) for name, most in found if most})
    finally:
        async with engine.begin() as connection:
            await connection.execute(text("drop function note_deletes cascade"))
            await connection.execute(text("drop table deletes"))
