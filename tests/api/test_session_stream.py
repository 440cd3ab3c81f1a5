"""A session as a stream: each change once, in order, with what GET shows; resumed after any id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.calls import Decision, Gate, Result
from app.core.protocol import End, Progress, RefuseDecision
from app.store import decisions, feed, runs
from app.store.batches import Batch, write
from tests.api.reader import Event, reading
from tests.console.service import Site, serving
from tests.store.batches import MINE, OTHER, a_call, final, held_by_r1, partial
from tests.store.rows import add_attachment, until

pytestmark = pytest.mark.anyio

PATH = "/sessions/sesn_1/events"
HELD = a_call("tu_1", state="held", gate=Gate("tool", None, "tool_asks"))


@pytest.fixture
async def site(engine: AsyncEngine, migrated_url: str) -> AsyncIterator[Site]:
    async with serving(engine, migrated_url) as site:
        await held_by_r1(engine, MINE)
        yield site


async def save(site: Site, **values: Any) -> None:
    async with site.engine.begin() as connection:
        assert set() == await write(connection, "r1", [Batch(MINE, **values)])


def kinds(events: list[Event]) -> list[str]:
    return [f"{event.type} {event.data.get('id') or event.data.get('status')}" for event in events]


async def everything(site: Site, count: int, **params: Any) -> list[Event]:
    async with reading(site.http, PATH, **({"after": 0} | params)) as reader:
        return await reader.some(count)


async def test_a_stream_begins_now_or_with_everything_in_the_order_in_which_it_came_to_be(
    site: Site,
) -> None:
    await save(site, messages=[final("m_1")])
    await save(site, calls=[a_call("tu_1")], messages=[final("m_2")])
    events = await everything(site, 4)
    assert ["status live", "message.final m_1", "message.final m_2", "call tu_1"] == kinds(events)
    assert sorted(int(event.id or 0) for event in events) == [int(event.id or 0) for event in events]
    async with reading(site.http, PATH) as reader:
        await save(site, calls=[a_call("tu_2")])
        assert ["call tu_2"] == kinds([await reader.next()])


async def test_each_event_carries_what_get_shows(site: Site) -> None:
    await save(site, messages=[final("m_1")], calls=[HELD])
    for shown in await everything(site, 3):
        path = {"status": "", "message.final": "/messages/m_1", "confirmation": "/calls/tu_1"}[shown.type]
        got = (await site.http.get(f"/sessions/sesn_1{path}")).json()
        got.pop("last_event_age_s", None)
        shown.data.pop("last_event_age_s", None)
        assert shown.data == {name: got[name] for name in shown.data}


async def test_a_call_that_waits_is_a_confirmation_until_somebody_decides(site: Site) -> None:
    async with reading(site.http, PATH) as reader:
        await save(site, calls=[HELD])
        assert "confirmation" == (await reader.next()).type
        body = {"tool_use_id": "tu_1", "result": "allow"}
        assert 200 == (await site.http.post("/sessions/sesn_1/confirm", json=body)).status_code
        decided = await reader.next()
        assert ("call", "held", "allow") == (
            decided.type, decided.data["state"], decided.data["decision"]["result"]
        )  # fmt: skip


async def test_an_approval_and_a_decision_that_came_to_nothing_are_changes_too(site: Site) -> None:
    await site.http.put("/tools/lookup", json={"url": "https://t.example", "approvals_required": 2})
    await save(site, calls=[HELD])
    async with reading(site.http, PATH) as reader:
        body = {"tool_use_id": "tu_1", "result": "allow"}
        assert 202 == (await site.http.post("/sessions/sesn_1/confirm", json=body)).status_code
        assert 1 == len((await reader.next()).data["gate"]["approvals"])
        async with site.engine.begin() as connection:
            done = await decisions.decide(
                connection, "default", "sesn_1", "tu_1", result="deny", deny_message=None, by="k", via="api"
            )
        assert isinstance(done, decisions.Recorded)
        assert "call" == (await reader.next()).type
        await save(site, refusals=[RefuseDecision("tu_1", done.decision_id, "no")])
        again = await reader.next()
        assert ("confirmation", "refused") == (again.type, again.data["decision"]["status"])


async def test_a_result_that_was_left_by_an_earlier_run_is_a_change(site: Site) -> None:
    await save(site, calls=[a_call("tu_1", state="dispatched", attempts=1)])
    async with reading(site.http, PATH) as reader:
        async with site.engine.begin() as connection:
            left = Result(b'[{"type":"text","text":"ok"}]', is_error=False)
            await runs.leave_result(connection, MINE, "tu_1", 1, left, dispatched=1, unknown=False)
        assert ["answered"] == [(await reader.next()).data["state"]]


async def test_the_status_tells_of_turns_and_not_of_every_event(site: Site) -> None:
    async with reading(site.http, PATH) as reader:
        for cursor_at in (1.0, 2.0):
            await save(site, progress=Progress("live", cursor_at=cursor_at), has_events=True)
        await save(site, progress=Progress("reconnecting", cursor_at=3.0))
        assert "reconnecting" == (await reader.next()).data["status"]
        await save(site, end=End("idle"))
        assert "idle" == (await reader.next()).data["end_reason"]


async def test_wishes_are_told(site: Site) -> None:
    async with reading(site.http, PATH) as reader:
        await site.http.post("/sessions/sesn_1/detach")
        assert "detaching" == (await reader.next()).data["status"]


async def test_previews_grow_without_ids_and_end_as_finals_or_discarded(site: Site) -> None:
    await save(site, messages=[final("m_0"), partial("m_1", "so"), partial("m_2", "no")])
    async with reading(site.http, PATH, after=0) as reader:
        events = await reader.some(4)
        assert {"message.partial m_1", "message.partial m_2"} == set(kinds(events[2:]))
        last_id = reader.last_id
        assert last_id == events[1].id
        await save(site, messages=[partial("m_1", "so far")])
        grown = await reader.next()
        assert ("message.partial", "so far", last_id) == (grown.type, grown.data["text"], reader.last_id)
        await save(site, messages=[final("m_1", "so far so good")], dropped=["m_2"])
        events = await reader.some(2)
    assert ["message.final m_1", "message.discarded m_2"] == kinds(events)
    assert {"id": "m_2"} == events[1].data


async def test_open_previews_come_again_on_each_connection(site: Site) -> None:
    await save(site, messages=[partial("m_1", "so")])
    newest = (await everything(site, 2))[0].id
    for _ in range(2):
        async with reading(site.http, PATH, headers={"last-event-id": str(newest)}) as reader:
            assert ["message.partial m_1"] == kinds([await reader.next()])


async def test_a_stream_resumes_after_an_id_with_what_changed_since_once(site: Site) -> None:
    await save(site, calls=[a_call("tu_1")])
    await save(site, calls=[a_call("tu_2")])
    first = (await everything(site, 3))[1]
    assert "call tu_1" == kinds([first])[0]
    await save(site, calls=[a_call("tu_1", state="dispatched", attempts=1)])
    await save(site, calls=[a_call("tu_1", state="posting", attempts=1)])
    headers = {"last-event-id": str(first.id)}
    async with reading(site.http, PATH, headers=headers, after=0) as reader:
        events = await reader.some(2)
    assert ["tu_2 queued", "tu_1 posting"] == [f"{one.data['id']} {one.data['state']}" for one in events]


async def test_an_id_from_another_time_begins_now(site: Site) -> None:
    """A database that was restored knows of no such change."""
    async with reading(site.http, PATH, headers={"last-event-id": str(2**62)}) as reader:
        await save(site, calls=[a_call("tu_1")])
        assert ["call tu_1"] == kinds([await reader.next()])


@pytest.mark.parametrize("value", ["x", "-1", "1.5", str(2**63)])
async def test_an_id_that_is_none_is_refused(site: Site, value: str) -> None:
    answer = await site.http.get(PATH, headers={"last-event-id": value})
    assert 422 == answer.status_code


async def test_of_an_unknown_session_and_of_another_tenants_there_is_no_stream(site: Site) -> None:
    async with site.engine.begin() as connection:
        await add_attachment(connection, "other", "sesn_9")
    for session_id in ("sesn_8", "sesn_9"):
        answer = await site.http.get(f"/sessions/{session_id}/events")
        assert (404, "session_not_found") == (answer.status_code, answer.json()["code"])


async def test_long_histories_come_in_pages_without_a_gap_between_their_kinds(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "ROWS_MAX", 3)
    for n in range(7):
        await save(site, calls=[a_call(f"tu_{n}")])
        await save(site, messages=[final(f"m_{n}")])
    await save(site, calls=[a_call(f"more_{n}") for n in range(9)])
    events = await everything(site, 1 + 14 + 9)
    assert len(events) == len({event.id for event in events})
    expected = [one for n in range(7) for one in (f"call tu_{n}", f"message.final m_{n}")]
    assert ["status live", *expected] == kinds(events)[:15]


async def test_the_changes_of_one_batch_that_is_written_again_come_once(site: Site) -> None:
    """A commit whose outcome is unknown is simply run again."""
    async with reading(site.http, PATH) as reader:
        for _ in range(2):
            await save(site, calls=[HELD], messages=[final("m_1")])
        await save(site, calls=[a_call("tu_9")])
        events = await reader.some(3)
    assert ["message.final m_1", "confirmation tu_1", "call tu_9"] == kinds(events)


async def test_the_streams_of_a_session_share_their_reads(site: Site) -> None:
    reads = 0

    def count(*args: Any) -> None:
        nonlocal reads
        reads += "change >" in args[2] and "FROM calls" in args[2]

    async def one(ready: asyncio.Barrier) -> str:
        async with reading(site.http, PATH) as reader:
            await ready.wait()
            return kinds([await reader.next()])[0]

    ready = asyncio.Barrier(21)
    streams = [asyncio.create_task(one(ready)) for _ in range(20)]
    await ready.wait()
    event.listen(site.engine.sync_engine, "before_cursor_execute", count)
    await save(site, calls=[a_call("tu_1")])
    assert {"call tu_1"} == set(await asyncio.gather(*streams))
    assert reads <= 10


async def test_no_database_connection_is_held_while_a_stream_waits(site: Site) -> None:
    async with reading(site.http, PATH, after=0) as reader:
        await reader.next()
        open_ = "select count(*) from pg_stat_activity where state like 'idle in transaction%'"

        async def are_none_held() -> bool:
            async with site.engine.connect() as connection:
                return not await connection.scalar(text(open_))

        await until(are_none_held)


async def test_another_sessions_changes_do_not_come(site: Site) -> None:
    await held_by_r1(site.engine, OTHER)
    async with reading(site.http, PATH) as reader:
        async with site.engine.begin() as connection:
            await write(connection, "r1", [Batch(OTHER, calls=[a_call("tu_other")])])
        await save(site, calls=[a_call("tu_1", decision=Decision("allow", "accepted", "k", "api"))])
        assert ["call tu_1"] == kinds([await reader.next()])
