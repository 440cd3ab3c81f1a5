"""Sends what clients of the service want in a session, one after the other, in the order of the wishes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from app.core import protocol as p
from app.core import steering
from app.core.retry import wait_s
from app.logs import logger
from app.runner.tasks import Tasks
from app.store import sends
from app.store.budgets import Priority
from app.store.database import is_unavailable
from app.store.leases import SEND_S
from app.store.sends import Next, Outcome
from app.upstream.client import UpstreamClient
from app.upstream.failures import UpstreamError

LOOK_AGAIN_S: Final = 1.0
"""How soon to look again while an earlier run's send may still be under way, or the database is away."""
SHOWN_OF_EVENT: Final = ("id", "type", "processed_at")
"""What is kept of an event as upstream took it; its content is the client's own."""

log = logger(__name__)


class Steering:
    """The sends of one run. `look` when some were wished; `leave` at the end of the run."""

    def __init__(self, tasks: Tasks, client: UpstreamClient) -> None:
        self._tasks = tasks
        self._lease, self._engine = tasks.lease, tasks.parts.engine
        self._client = client
        self._budget = tasks.parts.budget
        self._running: dict[str, asyncio.Task[None]] = {}
        self._is_asked = self._is_working = self._is_sending = self._has_left = False
        self._trying, self._tries = "", 0

    def look(self) -> None:
        """Take up what is wished, unless that is under way already; then look once more."""
        self._is_asked = True
        if not self._is_working:
            self._is_working = True
            self._tasks.start(self._running, "sends", self._work())

    async def leave(self) -> None:
        """Begin nothing more. A send that was taken up is waited for: nobody else knows what became of it."""
        self._has_left = True
        running = list(self._running.values())
        if running and self._is_sending:
            await asyncio.wait(running, timeout=SEND_S)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _work(self) -> None:
        """Send until nothing is open, and tell the machine, so that no countdown ends the run meanwhile."""
        while self._is_asked and not self._has_left:
            self._is_asked = False
            while await self._step() and not self._has_left:
                pass
            await self._tasks.inbox.put(p.Steered(self._is_asked))
        self._is_working = (
            False  # with the last look at what was asked: a wish between them would wait for ever
        )

    async def _step(self) -> bool:
        """Make the next send, if it can be made now; return False once none is open."""
        try:
            async with self._engine.connect() as connection:
                if not await sends.are_open(connection, self._lease):
                    return False
            pause_s = await self._send_next()
        except Exception as error:
            if not is_unavailable(error):
                raise
            log.warning("sends_not_read", session_id=self._lease.session_id, error=repr(error))
            pause_s = LOOK_AGAIN_S
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        return True

    async def _send_next(self) -> float:
        """Send the oldest events, and store what came of it; return how long to pause."""
        taken: Next | None = None
        outcome: Outcome | steering.Again
        try:
            async with self._budget.turn(Priority.ANSWER):
                await self._tasks.trust(SEND_S)
                self._is_sending = True  # before it is taken up: cut off after that, it would count as sent
                async with self._engine.begin() as connection:
                    taken = await sends.take(connection, self._lease)
                if taken is None:
                    return LOOK_AGAIN_S
                if self._has_left:
                    outcome = steering.Again(0.0)
                else:
                    answer = await self._client.send(self._lease.session_id, taken.events)
                    outcome = Outcome("sent", _shown(answer))
            await self._store(taken, outcome)
        except UpstreamError as error:
            assert taken is not None
            outcome = await self._after(taken, error.failure)
            await self._store(taken, outcome)
        finally:
            self._is_sending = False
        if isinstance(outcome, steering.Again):
            draw = self._tasks.parts.draw()
            return wait_s(outcome.after_s, floor_s=outcome.floor_s, draw=draw)
        return 0.0

    async def _after(self, taken: Next, failure: p.Failure) -> Outcome | steering.Again:
        self._tries = self._tries + 1 if taken.id == self._trying else 1
        self._trying = taken.id
        waits_for = steering.waiting_on(failure)
        are_answered = bool(waits_for) and await self._are_answered(waits_for)
        step = steering.after_send(failure, tries=self._tries, age_s=taken.age_s, are_answered=are_answered)
        match step:
            case steering.Again():
                return step
            case steering.Refused():
                return Outcome("refused", (), step.code, step.message, step.waiting_on)
            case steering.Unknown():
                return Outcome("unknown", message=step.message)

    async def _are_answered(self, call_ids: Sequence[str]) -> bool:
        """Whether we know that all these calls are over; while the database is away we know of none."""
        try:
            async with self._engine.connect() as connection:
                return await sends.are_answered(connection, self._lease, call_ids)
        except Exception as error:
            if not is_unavailable(error):
                raise
            return False

    async def _store(self, taken: Next, outcome: Outcome | steering.Again) -> None:
        """Store what is known now, however long the database is away: nobody else knows it."""
        while True:
            try:
                async with self._engine.begin() as connection:
                    if isinstance(outcome, Outcome):
                        await sends.finish(connection, self._lease, taken.id, outcome)
                    else:
                        await sends.put_back(connection, self._lease, taken.id)
                return
            except Exception as error:
                if not is_unavailable(error):
                    raise
                log.warning("send_not_stored", session_id=self._lease.session_id, error=repr(error))
            await asyncio.sleep(LOOK_AGAIN_S)


def _shown(answer: bytes | None) -> list[dict[str, Any]]:
    """The events that upstream took, as far as its answer can be read."""
    try:
        data = msgspec.json.decode(answer or b"", type=_Answer).data
    except (ValueError, RecursionError):
        return []
    return [
        {name: one[name] for name in SHOWN_OF_EVENT if isinstance(one.get(name), str)}
        for one in data
        if isinstance(one.get("id"), str) and isinstance(one.get("type"), str)
    ]


class _Answer(msgspec.Struct):
    data: list[dict[str, Any]] = []
