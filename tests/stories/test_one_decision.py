"""A hundred people on one card, half for and half against, while its time runs out: one decision.

Each round holds a call, sets its expiry to a moment within the rush, and lets clients of two replicas decide
at once, while two more sweepers than the replicas' own let it expire. `-m nightly` makes 1,000 rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Final

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server
from app.store import audit, decisions
from tests.runner.receiver import Receiver
from tests.runner.scripts import custom, ended, in_state, live, results, turn
from tests.runner.service import Service
from tests.runner.test_restarts import Start, replica, tool, upstream

__all__ = ["replica", "tool", "upstream"]

pytestmark = pytest.mark.anyio

CLIENTS: Final = 100
EXPIRIES_S: Final = (0.05, 0.75)
"""The expiry falls somewhere before one of these: about when the first decides, or somewhere in the rush."""
ATTEMPTS: Final = ("decision.recorded", "decision.repeated", "decision.contrary", "decision.rejected")


async def test_of_a_hundred_decisions_and_an_expiry_at_once_one_counts(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine
) -> None:
    """D-050, D-051: one decision, a dispatch at most, a hundred audited attempts; in a few rounds."""
    await race(replica, upstream, tool, engine, rounds=3)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
async def test_a_thousand_such_rounds_break_no_promise(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine
) -> None:
    """And each side wins some of them."""
    winners = await race(replica, upstream, tool, engine, rounds=1_000)
    assert winners.keys() == {"allow", "deny", "expiry"}, winners


async def race(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine, *, rounds: int
) -> Counter[str]:
    """Run the rounds; return how often each side won."""
    chance = random.Random(rounds)
    winners: Counter[str] = Counter()
    async with replica() as one, replica() as other:
        await one.register("lookup", gate="ask", expires_in_s=3600)
        for number in range(rounds):
            winners[await round_of(chance, (one, other), upstream, tool, engine)] += 1
            if number % 100 == 99:
                print(f"{number + 1} rounds: {dict(winners)}", flush=True)
    async with engine.connect() as connection:
        found = await audit.verify(connection, "default")
    assert found.fault is None
    assert found.rows >= rounds * CLIENTS
    return winners


async def round_of(
    chance: random.Random,
    served: tuple[Service, Service],
    upstream: Server,
    tool: Receiver,
    engine: AsyncEngine,
) -> str:
    """Let them decide on one call, and check what came of it; return who won."""
    session = upstream.create(turn(custom("lookup")))
    await live(served[0], session.id)
    upstream.say(session.id)
    (call,) = await in_state(served[0], session.id, "held")
    tool.deliveries.clear()
    sent = ["allow", "deny"] * (CLIENTS // 2)
    chance.shuffle(sent)
    async with sweeping(engine, session.id, call["id"]):
        await set_expiry(engine, session.id, chance.uniform(0, chance.choice(EXPIRIES_S)))
        answers = await asyncio.gather(
            *(confirm(served[n % 2], session.id, call["id"], result) for n, result in enumerate(sent))
        )
    end = await served[0].until(
        f"/sessions/{session.id}/calls/{call['id']}", lambda c: c["state"] in ("posted", "denied", "expired")
    )
    decision = end["decision"]
    winner = "expiry" if decision["via"] == "expiry" else decision["result"]
    assert end["state"] == {"allow": "posted", "deny": "denied", "expiry": "expired"}[winner]
    is_late = datetime.fromisoformat(decision["at"]) >= datetime.fromisoformat(end["gate"]["expires_at"])
    assert is_late == (winner == "expiry")
    for result, answer in zip(sent, answers, strict=True):
        check_answer(winner, result, answer)
    assert len(tool.called) == (1 if winner == "allow" else 0)
    assert [1] == [len(one) for one in results(upstream, session.id).values()]
    await check_record(engine, session.id, winner)
    await served[0].http.post(f"/sessions/{session.id}/detach")
    await ended(served[0], session.id)
    return winner


def check_answer(winner: str, result: str, answer: httpx.Response) -> None:
    """Those of the winner's mind succeed; the others hear who decided, or that the time was over."""
    if result == winner:
        is_late = answer.status_code == 409 and answer.json()["code"] == "expired"
        assert answer.status_code == 200 or is_late, answer.text
    else:
        code = "expired" if winner == "expiry" else "already_decided"
        assert (answer.status_code, answer.json()["code"]) == (409, code), answer.text


async def check_record(engine: AsyncEngine, session_id: str, winner: str) -> None:
    """One decision in the store, and in the audit a row for each attempt."""
    async with engine.connect() as connection:
        stored = await connection.execute(
            text("select status from decisions where session_id = :session"), {"session": session_id}
        )
        assert [row.status for row in stored] == ["accepted"]
        rows = await audit.page(connection, "default", after=None, limit=500, session_id=session_id)
    kinds = Counter(row.entry.kind for row in rows)
    assert sum(kinds[kind] for kind in ATTEMPTS) == CLIENTS
    is_expiry = winner == "expiry"
    assert (kinds["decision.recorded"], kinds["decision.expired"]) == ((0, 1) if is_expiry else (1, 0))
    assert sum(kinds.values()) == CLIENTS + is_expiry


async def confirm(service: Service, session_id: str, call_id: str, result: str) -> httpx.Response:
    body: dict[str, Any] = {"tool_use_id": call_id, "result": result}
    return await service.http.post(f"/sessions/{session_id}/confirm", json=body, timeout=30)


async def set_expiry(engine: AsyncEngine, session_id: str, left_s: float) -> None:
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "update calls set gate_expires_at = clock_timestamp() + make_interval(secs => :left)"
                " where session_id = :session and state = 'held'"
            ),
            {"left": left_s, "session": session_id},
        )


@contextlib.asynccontextmanager
async def sweeping(engine: AsyncEngine, session_id: str, call_id: str) -> AsyncIterator[None]:
    """Try all the time to let the call expire, twice at once, as replicas do that poll just then."""

    async def sweep() -> None:
        while True:
            async with engine.begin() as connection:
                await decisions.expire(connection, "default", session_id, call_id)
            await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(sweep()) for _ in range(2)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
