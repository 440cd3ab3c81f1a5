"""What waits for a person, as a stream: told whole at first, then as it changes, at the reader's own pace."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import streams
from tests.api.reader import Reader, reading
from tests.console.service import Site, serving
from tests.store.rows import add_attachment, add_call, until

pytestmark = pytest.mark.anyio

PATH = "/confirmations"


@pytest.fixture
async def site(engine: AsyncEngine, migrated_url: str) -> AsyncIterator[Site]:
    async with serving(engine, migrated_url) as site:
        async with engine.begin() as connection:
            await add_attachment(connection)
        yield site


async def hold(site: Site, call_id: str, **values: Any) -> None:
    async with site.engine.begin() as connection:
        await add_call(connection, call_id, **values)


async def deny(site: Site, call_id: str) -> None:
    body = {"tool_use_id": call_id, "result": "deny"}
    answer = await site.http.post("/sessions/sesn_1/confirm", json=body)
    assert answer.status_code in (200, 202), answer.text


def ids(events: list[Any]) -> list[str]:
    return [event.data["id"] for event in events]


async def whole(reader: Reader) -> list[str]:
    """The ids of what waits as the stream begins."""
    return ids(await reader.until("ready"))


async def test_all_that_waits_comes_first_and_then_what_is_new_or_settled(site: Site) -> None:
    await hold(site, "tu_1")
    await hold(site, "tu_2")
    async with reading(site.http, PATH) as reader:
        assert "text/event-stream; charset=utf-8" == reader.answer.headers["content-type"]
        assert "no" == reader.answer.headers["x-accel-buffering"]
        assert ["tu_1", "tu_2"] == await whole(reader)
        await hold(site, "tu_3")
        new = await reader.next()
        assert ("confirmation", "tu_3", "held") == (new.type, new.data["id"], new.data["state"])
        shown = (await site.http.get("/sessions/sesn_1/calls/tu_3")).json()
        assert new.data == {name: shown[name] for name in new.data}
        await deny(site, "tu_2")
        gone = await reader.next()
        assert ("settled", "tu_2", "deny") == (gone.type, gone.data["id"], gone.data["decision"]["result"])


async def test_a_call_that_changes_is_told_again(site: Site) -> None:
    await site.http.put("/tools/bash", json={"url": "https://t.example", "approvals_required": 2})
    await hold(site, "tu_1")
    async with reading(site.http, PATH) as reader:
        await whole(reader)
        body = {"tool_use_id": "tu_1", "result": "allow"}
        assert 202 == (await site.http.post("/sessions/sesn_1/confirm", json=body)).status_code
        again = await reader.next()
    assert ("confirmation", 1) == (again.type, len(again.data["gate"]["approvals"]))


async def test_filters_apply_and_other_tenants_calls_do_not_come(site: Site) -> None:
    async with site.engine.begin() as connection:
        await add_attachment(connection, "other", "sesn_9")
        await add_call(connection, "tu_9", "other", "sesn_9")
    await hold(site, "tu_1", tool="read")
    await hold(site, "tu_2")
    async with reading(site.http, PATH, tool="bash") as reader:
        assert ["tu_2"] == await whole(reader)
        await hold(site, "tu_3", tool="read")
        await hold(site, "tu_4")
        assert ["tu_4"] == ids([await reader.next()])


async def test_many_calls_are_read_some_at_a_time(site: Site) -> None:
    for n in range(45):
        await hold(site, f"tu_{n:02}", input=json.dumps({"text": "x" * 50_000}))
    async with reading(site.http, PATH) as reader:
        assert [f"tu_{n:02}" for n in range(45)] == await whole(reader)


async def test_input_with_line_breaks_arrives_as_it_was_written(site: Site) -> None:
    await hold(site, "tu_1", input='{"n": 1.50,\r\n "text": "a\\nb",\r"m": 2\n}')
    async with reading(site.http, PATH) as reader:
        (event,) = await reader.until("ready")
    assert {"n": 1.5, "text": "a\nb", "m": 2} == event.data["input"]


async def test_a_silent_stream_shows_that_it_lives_and_ends_when_its_key_is_revoked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PING_S", 0.2)
    made = (await site.http.post("/keys", json={"name": "ana", "scopes": ["confirm"]})).json()
    headers = {"authorization": f"Bearer {made['key']}"}
    async with reading(site.http, PATH, headers=headers) as reader:
        await whole(reader)
        ending = asyncio.create_task(reader.next())
        await until(lambda: _is(reader.pings >= 2))
        await site.http.delete(f"/keys/{made['id']}")
        end = await ending
        assert ("end", "unauthenticated") == (end.type, end.data["code"])
        with pytest.raises(EOFError):
            await reader.next()


async def test_a_stream_ends_when_its_key_expires(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PING_S", 0.2)
    body = {"name": "ana", "scopes": ["confirm"], "expires_in_s": 600}
    made = (await site.http.post("/keys", json=body)).json()
    async with reading(site.http, PATH, headers={"authorization": f"Bearer {made['key']}"}) as reader:
        await whole(reader)
        async with site.engine.begin() as connection:
            await connection.execute(text("update keys set expires_at = now()"))
        assert "key_expired" == (await reader.next()).data["code"]


async def test_a_stream_ends_with_its_time_and_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STREAM_S_MAX", 0.2)
    async with reading(site.http, PATH) as reader:
        assert [] == await whole(reader)
        assert "renew" == (await reader.next()).data["code"]


async def test_a_stream_ends_when_the_service_stops(engine: AsyncEngine, migrated_url: str) -> None:
    async with serving(engine, migrated_url) as site, reading(site.http, PATH) as reader:
        await whole(reader)
        site.bridge.stopping.set()
        assert "stopping" == (await reader.next()).data["code"]


async def test_the_loss_of_the_database_ends_a_stream_with_a_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold(site, "tu_1")
    async with reading(site.http, PATH) as reader:
        await whole(reader)
        async with site.engine.begin() as connection:
            await connection.execute(text("alter table calls rename to calls_away"))
        try:
            monkeypatch.setattr(streams, "is_unavailable", lambda _: True)
            monkeypatch.setattr(streams, "AWAY_S_MAX", 1.5)
            assert "database_unavailable" == (await reader.next()).data["code"]
        finally:
            async with site.engine.begin() as connection:
                await connection.execute(text("alter table calls_away rename to calls"))


async def test_a_reader_that_takes_nothing_is_dropped(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold its part of the memory for ever."""
    monkeypatch.setattr(streams, "SEND_LIMIT_S", 0.3)
    free = site.bridge.streams._value
    for n in range(20):
        await hold(site, f"tu_{n}", input=json.dumps({"text": "x" * 1_000_000}))
    key = site.http.headers["authorization"]
    stuck = socket.create_connection(("127.0.0.1", int(site.base.rpartition(":")[2])))
    with stuck:
        head = f"GET {PATH} HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\nauthorization: {key}\r\n\r\n"
        stuck.sendall(head.encode())
        await until(lambda: _is(site.bridge.streams._value < free))
        await until(lambda: _is(site.bridge.streams._value == free))


async def test_only_so_many_streams_are_open(engine: AsyncEngine, migrated_url: str) -> None:
    async with serving(engine, migrated_url) as site:
        for _ in range(site.bridge.streams._value - 1):
            await site.bridge.streams.acquire()
        async with reading(site.http, PATH) as reader:
            await whole(reader)
            answer = await site.http.get(PATH, headers={"accept": "text/event-stream"})
            assert (503, "too_many_streams") == (answer.status_code, answer.json()["code"])
        assert 200 == (await site.http.get(PATH)).status_code


async def test_streams_that_are_closed_leave_nothing_behind(site: Site) -> None:
    free = site.bridge.streams._value
    for _ in range(5):
        async with reading(site.http, PATH) as reader:
            await whole(reader)
    await until(lambda: _is(site.bridge.streams._value == free))


async def _is(fact: bool) -> bool:
    return fact
