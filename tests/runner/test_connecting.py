"""Stream, history and reconnects, as the simulator sees them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.switches import FOREVER, Fault
from app.upstream.transport import Timeouts
from tests.runner.fleets import fleeting
from tests.runner.receiver import Delivery, echo
from tests.runner.scripts import asked, bash, came, custom, ended, in_state, listed, live, results, turn
from tests.runner.service import Service
from tests.store.rows import add_attachment, until

pytestmark = pytest.mark.anyio


async def test_history_is_asked_for_once_the_stream_stands(service: Service) -> None:
    """R-002: the session object, then the stream, and only then the list."""
    session = service.upstream.create("custom")
    await live(service, session.id)
    requests = asked(service.upstream, session.id, "retrieve", "stream", "list")
    assert ["retrieve", "stream", "list"] == [one.endpoint for one in requests]
    assert [200] * 3 == [one.status for one in requests]


async def test_no_event_of_the_stream_is_handled_before_history_was_read(service: Service) -> None:
    """R-002: the list was made before the call and answered after it."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    service.upstream.world.strike(Fault("delay_after", endpoint="list", delay_s=0.5))
    await service.attach(session.id)
    read = await came(service.upstream, session.id, "list")
    seen: list[int | None] = []

    async def note(delivery: Delivery) -> web.StreamResponse:
        seen.append(read.status)
        return await echo(delivery)

    service.tool.reply = note
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted")
    assert [200] == seen


async def test_a_call_on_the_stream_and_in_the_list_is_delivered_once(service: Service) -> None:
    """R-003: it came after the stream was opened and before the list was made."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    service.upstream.world.strike(Fault("delay", endpoint="list", delay_s=0.5))
    await service.attach(session.id)
    await came(service.upstream, session.id, "list")
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "posted")
    assert [call["id"]] == service.tool.called
    assert [1] == [len(one) for one in results(service.upstream, session.id).values()]


async def test_a_detach_before_the_first_connect_opens_no_stream(
    service: Service, engine: AsyncEngine
) -> None:
    """R-013: the wish was there before anybody ran the session."""
    session = service.upstream.create("custom")
    async with engine.begin() as connection:
        await add_attachment(
            connection, session_id=session.id, status="attaching", replica_id=None, detach_requested=True
        )
    assert ("detached", "detached") == await ended(service, session.id)
    assert [] == asked(service.upstream, session.id, "stream", "list")


async def test_a_detach_while_the_session_is_looked_up_ends_the_run(service: Service) -> None:
    """R-013: nothing hangs until upstream answers."""
    session = service.upstream.create("custom")
    service.upstream.world.strike(Fault("delay", endpoint="retrieve", delay_s=4))
    await service.attach(session.id)
    await came(service.upstream, session.id, "retrieve")
    await service.http.post(f"/sessions/{session.id}/detach")
    assert ("detached", "detached") == await ended(service, session.id, limit_s=2)
    assert [] == asked(service.upstream, session.id, "stream", "list")


async def test_a_detach_during_backoff_does_not_wait_for_its_end(service: Service) -> None:
    """R-050, R-327."""
    session = service.upstream.create("custom")
    fault = Fault("refuse", endpoint="stream", status=503, retry_after_s=30, count=FOREVER)
    service.upstream.world.strike(fault)
    await service.attach(session.id)
    await came(service.upstream, session.id, "stream")
    await service.until(f"/sessions/{session.id}", lambda shown: shown["reconnects"] == 1)
    await service.http.post(f"/sessions/{session.id}/detach")
    assert ("detached", "detached") == await ended(service, session.id, limit_s=2)
    assert 1 == len(asked(service.upstream, session.id, "stream"))


async def test_a_detach_during_a_history_read_dispatches_nothing(service: Service) -> None:
    """R-327: the page that arrives afterwards is nobody's."""
    session = service.upstream.create(turn(custom("lookup")))
    service.upstream.say(session.id)
    await service.register("lookup")
    service.upstream.world.strike(Fault("delay", endpoint="list", delay_s=3))
    await service.attach(session.id)
    await came(service.upstream, session.id, "list")
    await service.http.post(f"/sessions/{session.id}/detach")
    assert ("detached", "detached") == await ended(service, session.id, limit_s=2)
    assert {} == await service.calls(session.id)
    assert [] == service.tool.called


async def test_a_session_has_one_run_however_often_it_is_attached(service: Service) -> None:
    """R-014: a lease that is held is not claimed again."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    await live(service, session.id)
    for _ in range(3):
        await service.attach(session.id)
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted")
    assert 1 == len(asked(service.upstream, session.id, "stream"))
    assert 1 == (await service.get(f"/sessions/{session.id}"))["term"]


async def test_a_replica_that_claims_its_own_lost_lease_ends_its_earlier_run(
    service: Service, engine: AsyncEngine
) -> None:
    """R-014: two runs of a session never stand side by side in a process."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    await live(service, session.id)
    async with engine.begin() as connection:
        await connection.execute(text("update attachments set replica_id = null"))
    await service.until(f"/sessions/{session.id}", lambda shown: shown["term"] == 2)
    await listed(service.upstream, session.id, count=2)
    await service.upstream.until(lambda: service.upstream.streams.count == 1)
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted")
    assert 1 == len(service.tool.called)


async def test_a_silent_stream_is_broken(engine: AsyncEngine, migrated_url: str) -> None:
    """R-016: it is opened again, and such a cut does not count as a reconnect."""
    async with fleeting(engine, migrated_url, timeouts=Timeouts(silence_s=0.3)) as upstream:
        session = upstream.create("custom")
        upstream.world.switch(silent=True)
        async with engine.begin() as connection:
            await add_attachment(connection, session_id=session.id, status="attaching", replica_id=None)
        await upstream.until(lambda: len(asked(upstream, session.id, "stream")) >= 3)
        upstream.world.switch(silent=False, ping_interval_s=0.05)
        before = len(asked(upstream, session.id, "stream"))
        async with engine.connect() as connection:
            assert 0 == await connection.scalar(text("select reconnects from attachments"))
        upstream.say(session.id)

        async def is_told() -> bool:
            async with engine.connect() as connection:
                return bool(await connection.scalar(text("select count(*) from calls")))

        await until(is_told, limit_s=10)
        assert len(asked(upstream, session.id, "stream")) <= before + 1


@pytest.mark.parametrize(
    "events", [0, 1], ids=["that deliver nothing (R-047)", "that deliver an event (R-048)"]
)
async def test_the_bound_on_reconnects_is_a_total_over_streams(service: Service, events: int) -> None:
    """R-047, R-048: open calls stay stored for a later attach."""
    session = service.upstream.create(turn(bash()))
    await service.register("bash")
    service.upstream.say(session.id)
    fault = Fault("eof", endpoint="stream", count=FOREVER, after_events=events)
    service.upstream.world.strike(fault)
    await service.attach(session.id, max_reconnects=3)
    for number in range(1, 5 if events else 1):
        await listed(service.upstream, session.id, count=number)
        service.upstream.emit(session.id, {"type": "session.usage"})
    assert ("ended", "reconnects_exhausted") == await ended(service, session.id, limit_s=30)
    assert 4 == len(asked(service.upstream, session.id, "stream"))
    await in_state(service, session.id, "held")
    service.upstream.world.faults.clear()
    await service.attach(session.id, max_reconnects=3)
    await service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "live")
    await in_state(service, session.id, "held")


async def test_a_history_that_breaks_off_decides_nothing_and_is_read_again(service: Service) -> None:
    """R-064, R-067: on the same stream, after a wait, until it was read to its end."""
    session = service.upstream.create(turn(custom("lookup"), bash()))
    await service.register("lookup", "bash")
    service.upstream.world.switch(session.id, page_size_max=2)
    service.upstream.say(session.id)
    service.upstream.world.strike(Fault("refuse", endpoint="list", page=1, status=500, count=2))
    seen: list[list[int | None]] = []

    async def note(delivery: Delivery) -> web.StreamResponse:
        seen.append([one.status for one in asked(service.upstream, session.id, "list")])
        return await echo(delivery)

    service.tool.reply = note
    await service.attach(session.id)
    await in_state(service, session.id, "posted", "held")
    assert [200, 500, 200, 500, 200, 200] == seen[0][:6]
    assert 1 == len(service.tool.called)
    assert 1 == len(asked(service.upstream, session.id, "stream"))


async def test_a_call_runs_although_history_cannot_be_read_at_first(service: Service) -> None:
    """R-067: two lists fail outright, the third shows the call."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    service.upstream.say(session.id)
    service.upstream.world.strike(Fault("refuse", endpoint="list", status=500, count=2))
    await service.attach(session.id)
    await in_state(service, session.id, "posted")
    lists = asked(service.upstream, session.id, "list")
    assert [500, 500, 200] == [one.status for one in lists][:3]
    waits_s = [(b.at_us - a.at_us) / 1e6 for a, b in pairwise(lists)]
    assert waits_s[0] >= 0.25
    assert waits_s[1] >= 0.5


async def test_a_long_history_is_read_for_the_one_call_that_is_open(service: Service) -> None:
    """R-092: 20,000 events on 20 pages; what is kept of them is the open call and the text."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    for number in range(10_000):
        call_id = f"sevt_old{number}"
        call: dict[str, Any] = {"type": "agent.custom_tool_use", "name": "lookup", "input": {"n": number}}
        service.upstream.emit(session.id, {**call, "id": call_id})
        answer = {"type": "user.custom_tool_result", "custom_tool_use_id": call_id, "content": []}
        service.upstream.emit(session.id, answer)
    service.upstream.say(session.id)
    await service.attach(session.id)
    (call,) = await in_state(service, session.id, "posted", limit_s=30)
    assert [call["id"]] == service.tool.called
    pages = [one for one in asked(service.upstream, session.id, "list") if one.status == 200]
    assert 21 <= len(pages) <= 23
