"""How runs end, and what they leave behind: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.runner import runner
from app.simulator.switches import FOREVER, Fault
from tests.runner.scripts import Gate, asked, custom, ended, in_state, live, results, turn
from tests.runner.service import Service
from tests.store.rows import until

pytestmark = pytest.mark.anyio

RUNNER_FOLDER = str(Path(runner.__file__).parent)
FLEETS = {"renewing", "polling", "notifications"}


async def terminate(service: Service, session_id: str) -> None:
    service.upstream.emit(session_id, {"type": "session.status_terminated"})


async def delete(service: Service, session_id: str) -> None:
    service.upstream.emit(session_id, {"type": "session.deleted", "processed_at": None})


async def refuse(service: Service, session_id: str) -> None:
    service.upstream.world.strike(Fault("refuse", endpoint="stream", status=401, count=FOREVER))
    service.upstream.world.end_streams(session_id)


async def lose(service: Service, session_id: str) -> None:
    service.upstream.world.strike(Fault("refuse", endpoint="stream", status=404, count=FOREVER))
    service.upstream.world.end_streams(session_id, "cut")


async def reject(service: Service, session_id: str) -> None:
    service.upstream.world.strike(Fault("refuse", endpoint="stream", status=400, count=FOREVER))
    service.upstream.world.end_streams(session_id, "error_frame")


async def exhaust(service: Service, session_id: str) -> None:
    service.upstream.world.end_streams(session_id, "truncate")


async def go_idle(service: Service, session_id: str) -> None:
    await service.http.patch(f"/sessions/{session_id}", json={"max_idle_s": 1})
    service.upstream.emit(session_id, {"type": "session.status_idle", "stop_reason": {"type": "end_turn"}})


async def detach(service: Service, session_id: str) -> None:
    await service.http.post(f"/sessions/{session_id}/detach")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (terminate, "terminated"),
        (delete, "deleted"),
        (refuse, "auth_failed"),
        (lose, "session_gone"),
        (reject, "upstream_rejected"),
        (exhaust, "reconnects_exhausted"),
        (go_idle, "idle"),
        (detach, "detached"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_run_that_ended_leaves_nothing_behind(
    service: Service,
    engine: AsyncEngine,
    end: Callable[[Service, str], Awaitable[None]],
    reason: str,
) -> None:
    """R-324: no stream, no task, no connection, no lease; the session that goes on keeps its own."""
    session, other = (service.upstream.create(turn(custom("lookup"))) for _ in range(2))
    await service.register("lookup")
    await live(service, session.id, max_reconnects=0 if end is exhaust else None)
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted")
    await end(service, session.id)
    assert reason == (await ended(service, session.id))[1]
    service.upstream.world.faults.clear()

    async def is_clean() -> bool:
        return not tasks_of_runs() and not service.upstream.streams.count and not checked_out(engine)

    await until(is_clean)
    async with engine.connect() as connection:
        row = (await connection.execute(text("select replica_id, status, term from attachments"))).one()
    assert (None, "detached" if reason == "detached" else "ended", 1) == tuple(row)
    await live(service, other.id)
    assert 1 == len(asked(service.upstream, session.id, "stream")) - (reason in REFUSED)


REFUSED = {"auth_failed", "session_gone", "upstream_rejected"}


def tasks_of_runs() -> list[asyncio.Task[object]]:
    """Tasks whose code is the runner's, but for those of the replica itself."""
    found = []
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        if code is not None and code.co_filename.startswith(RUNNER_FOLDER) and task.get_name() not in FLEETS:
            found.append(task)
    return found


def checked_out(engine: AsyncEngine) -> int:
    count: int = engine.sync_engine.pool.checkedout()  # type: ignore[attr-defined]
    return count


async def test_a_quiet_session_ends_when_its_time_is_up(service: Service) -> None:
    """R-230: within a second of the deadline, and no event was needed."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup")
    await live(service, session.id, max_idle_s=2)
    service.upstream.say(session.id)
    await in_state(service, session.id, "posted")
    shown = await service.until(f"/sessions/{session.id}", lambda shown: shown["idle_deadline"])
    deadline = datetime.fromisoformat(shown["idle_deadline"])
    assert ("ended", "idle") == await ended(service, session.id)
    over = datetime.fromisoformat((await service.get(f"/sessions/{session.id}"))["updated_at"])
    assert -0.05 <= (over - deadline).total_seconds() <= 1
    await service.upstream.until(lambda: service.upstream.streams.count == 0)


async def test_a_detach_lets_the_call_under_way_finish_and_starts_none(service: Service) -> None:
    """R-320, R-326: the started one is posted, the next one stays for a later attach."""
    session = service.upstream.create(turn(custom("lookup", "lookup")))
    await service.register("lookup")
    service.tool.reply = gate = Gate()
    await live(service, session.id, concurrency=1)
    service.upstream.say(session.id)
    await in_state(service, session.id, "dispatched", "queued")
    await service.tool.until(lambda: gate.inside)
    for _ in range(2):
        answer = await service.http.post(f"/sessions/{session.id}/detach")
        assert 202 == answer.status_code
    await service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "detaching")
    await service.upstream.until(lambda: service.upstream.streams.count == 0)
    gate.open()
    assert ("detached", "detached") == await ended(service, session.id)
    await in_state(service, session.id, "posted", "queued")
    assert 1 == len(service.tool.called)


async def test_a_call_that_waited_at_the_detach_runs_after_the_next_attach(service: Service) -> None:
    """R-322: unless somebody answered it meanwhile."""
    session = service.upstream.create(turn(custom("lookup", "lookup", "lookup")))
    await service.register("lookup")
    service.tool.reply = gate = Gate()
    await live(service, session.id, concurrency=1)
    service.upstream.say(session.id)
    calls = await in_state(service, session.id, "dispatched", "queued", "queued")
    await service.http.post(f"/sessions/{session.id}/detach")
    await service.upstream.until(lambda: service.upstream.streams.count == 0)
    gate.open()
    await ended(service, session.id)
    answer = {"type": "user.custom_tool_result", "custom_tool_use_id": calls[1]["id"], "is_error": False}
    content = [{"type": "text", "text": "by another client"}]
    service.upstream.world.send(
        session.id, {"events": [{**answer, "content": content}]}, now=service.upstream.now
    )
    await service.attach(session.id, concurrency=1)
    await in_state(service, session.id, "posted", "answered_elsewhere", "posted")
    assert [calls[0]["id"], calls[2]["id"]] == service.tool.called
    assert [1, 1, 1] == [len(one) for one in results(service.upstream, session.id).values()]
