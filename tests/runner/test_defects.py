"""Faults of our own, and of the store: one event or message must not take its session down."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import tables
from tests.runner.scripts import asked, custom, ended, in_state, listed, live, turn
from tests.runner.service import Service
from tests.store.rows import add_call

pytestmark = pytest.mark.anyio

IMPOSSIBLE = "sevt_impossible"


async def make_impossible(engine: AsyncEngine, session_id: str) -> None:
    """Store a call whose revival is no step of `STEPS`: an MCP call, interrupted after it was allowed."""
    async with engine.begin() as connection:
        await add_call(connection, IMPOSSIBLE, session_id=session_id, kind="mcp", state="interrupted")
        await connection.execute(
            insert(tables.decisions).values(
                tenant="default",
                session_id=session_id,
                call_id=IMPOSSIBLE,
                id="dec_1",
                result="allow",
                status="accepted",
                decided_by="ann",
                via="api",
            )
        )


def ask_for_it(service: Service, session_id: str, *, in_list: bool) -> None:
    """Emit the event whose handling fails; always the same one."""
    reason = {"type": "requires_action", "event_ids": [IMPOSSIBLE]}
    event = {"type": "session.status_idle", "id": "sevt_defect", "stop_reason": reason}
    if in_list:
        service.upstream.emit(session_id, event)
    else:
        raw = json.dumps(event | {"processed_at": "2026-11-30T12:00:00.000000Z"}).encode()
        service.upstream.world.emit_raw(session_id, raw, name="session.status_idle")


async def test_an_event_whose_handling_fails_twice_is_left_out(service: Service, engine: AsyncEngine) -> None:
    """R-053: after each failure the run starts again, and the third one goes on."""
    session = service.upstream.create(turn(custom("lookup")))
    await make_impossible(engine, session.id)
    await service.register("lookup")
    await live(service, session.id)
    for number in (2, 3):
        ask_for_it(service, session.id, in_list=False)
        await listed(service.upstream, session.id, count=number)
    ask_for_it(service, session.id, in_list=False)
    service.upstream.say(session.id)
    shown = await service.until(
        f"/sessions/{session.id}", lambda shown: shown["calls"].get("posted"), limit_s=5
    )
    assert "live" == shown["status"]
    assert 3 == len(asked(service.upstream, session.id, "stream"))
    assert 1 == len(service.tool.called)


async def test_an_event_that_history_tells_again_is_left_out_too(
    service: Service, engine: AsyncEngine
) -> None:
    """R-053: real events are in the list as well; a restart meets them there."""
    session = service.upstream.create(turn(custom("lookup")))
    await make_impossible(engine, session.id)
    await service.register("lookup")
    await live(service, session.id)
    ask_for_it(service, session.id, in_list=True)
    await listed(service.upstream, session.id, count=3)
    service.upstream.say(session.id)
    await service.until(f"/sessions/{session.id}", lambda shown: shown["calls"].get("posted"), limit_s=8)
    assert 3 == len(asked(service.upstream, session.id, "stream"))


async def test_a_session_that_fails_again_and_again_is_given_up(
    service: Service, engine: AsyncEngine
) -> None:
    """R-053: after five restarts within ten minutes, with a reason that anyone can read."""
    session = service.upstream.create(turn(custom("lookup")))
    await make_impossible(engine, session.id)
    await live(service, session.id)
    async with engine.begin() as connection:
        await connection.execute(text("update attachments set restarts = 5, restarted_at = now()"))
    ask_for_it(service, session.id, in_list=False)
    assert ("ended", "internal_error") == await ended(service, session.id, limit_s=3)
    shown = await service.get(f"/sessions/{session.id}")
    assert "again and again" in shown["end_detail"]
    await service.upstream.until(lambda: service.upstream.streams.count == 0)
    async with engine.connect() as connection:
        assert await connection.scalar(text("select replica_id is null from attachments"))


@pytest.fixture
async def refusing(engine: AsyncEngine) -> AsyncIterator[None]:
    """The store refuses messages that hold this word, as it might refuse one for its size."""
    async with engine.begin() as connection:
        await connection.execute(
            text("alter table messages add constraint refused check (content not like '%poison%')")
        )
    yield
    async with engine.begin() as connection:
        await connection.execute(text("alter table messages drop constraint refused"))


@pytest.mark.usefixtures("refusing")
async def test_a_message_that_the_store_refuses_stops_no_call(service: Service) -> None:
    """A-060: its text is lost, and nothing else is."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    await live(service, session.id)
    content = [{"type": "text", "text": "poison"}]
    service.upstream.emit(session.id, {"type": "agent.message", "id": "m1", "content": content})
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted", limit_s=8)
    shown = await service.get(f"/sessions/{session.id}")
    assert ("live", 1) == (shown["status"], shown["term"])
    assert 1 == len(asked(service.upstream, session.id, "stream"))


@pytest.mark.usefixtures("refusing")
async def test_a_preview_that_the_store_refuses_stops_no_call(service: Service) -> None:
    """A-060: the same for a message that is still being written."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    await live(service, session.id)
    start = {"type": "event_start", "event": {"type": "agent.message", "id": "m1"}}
    delta = {"type": "content_delta", "index": 0, "content": {"type": "text", "text": "poison"}}
    service.upstream.emit(session.id, start)
    service.upstream.emit(session.id, {"type": "event_delta", "event_id": "m1", "delta": delta})
    content = [{"type": "text", "text": "good"}]
    service.upstream.emit(session.id, {"type": "agent.message", "id": "m2", "content": content})
    await service.until(f"/sessions/{session.id}/messages", lambda shown: shown["data"], limit_s=8)
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted", limit_s=8)
    assert 1 == len(asked(service.upstream, session.id, "stream"))


async def test_a_message_with_an_id_that_cannot_be_a_key_stops_no_call(service: Service) -> None:
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    await live(service, session.id)
    content = [{"type": "text", "text": "x"}]
    for id_ in (secrets.token_hex(4_000), "a\0b", ""):
        service.upstream.emit(session.id, {"type": "agent.message", "id": id_, "content": content})
        start = {"type": "event_start", "event": {"type": "agent.message", "id": id_ or "x"}}
        service.upstream.emit(session.id, start)
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted", limit_s=8)
    assert 1 == len(asked(service.upstream, session.id, "stream"))
