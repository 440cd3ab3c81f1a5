"""What a run does outside the process: streams, reads and sends, each a task that reports back.

Nothing here decides anything. A task ends by putting a notice into the inbox; one that fails otherwise is a
defect and ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Final

from app import metrics
from app.core import events as ev
from app.core import protocol as p
from app.core.retry import wait_s
from app.logs import logger
from app.runner.deliveries import Deliveries
from app.runner.tasks import Tasks
from app.store import decisions
from app.store.budgets import Priority
from app.store.database import is_unavailable
from app.store.leases import SEND_S
from app.upstream.client import UpstreamClient
from app.upstream.failures import UpstreamError
from app.upstream.stream import Tap

STREAM_BUFFER_MAX: Final = 10_000
"""How many events are buffered while history is read; then upstream is read no further."""
LOOK_EVERY_S: Final = 2.0
"""The time between the lists of one look."""
RETRIEVE_REQUESTS: Final = 2
"""What a RETRIEVE asks for: the session, and its environment."""
ORPHANS_EVERY_S: Final = 1.0
CALLBACKS_EVERY_S: Final = 60.0
"""How late a report may be found that no wish has told of."""
CONSULT_AGAIN_S: Final = 1.0
SLOT_WAIT_S: Final = 1.0
"""A delivery that waited longer for a slot of its tool has its deadline noted again."""
LEAVE_TRIES_S: Final = 60.0
"""How long results of a run that is over are tried to be left while the database is away."""
LEAVE_EVERY_S: Final = 0.5

_SETTLING: Final = (
    "user.tool_result",
    "user.custom_tool_result",
    "agent.tool_result",
    "agent.mcp_tool_result",
    "user.tool_confirmation",
    "user.interrupt",
    "session.thread_status_terminated",
)
"""The event types that can settle a call."""

log = logger(__name__)


class Errands:
    """What a run does upstream; deliveries and what watches them are passed on.

    `orphans` are calls whose delivery an earlier run began; once history was read, they are watched until
    it reported, or nobody is left who could. `tap` sees what the streams bring.
    """

    def __init__(
        self,
        tasks: Tasks,
        client: UpstreamClient,
        deliveries: Deliveries,
        *,
        orphans: Iterable[str],
        tap: Tap | None = None,
    ) -> None:
        self.may_forward = asyncio.Event()
        self._tasks = tasks
        self._lease, self._inbox, self._budget = tasks.lease, tasks.inbox, tasks.parts.budget
        self._client, self._tap = client, tap
        self._deliveries = deliveries
        self._orphans = set(orphans)
        self._is_connecting = False
        self._single: dict[str, asyncio.Task[None]] = {}
        self._sends: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._leaving: set[tuple[str, int]] = set()

    def do(self, effect: p.Effect) -> None:
        """Perform an effect that leaves the process; what is only saved is the runner's."""
        match effect:
            case p.Deliver():
                self._deliveries.start(effect)
            case p.ConsultRules():
                self._tasks.start(self._single, f"rules {effect.call_id}", self._consult(effect.call_id))
            case p.Watch():
                self._deliveries.watch([effect.call_id])
            case p.Send():
                self._tasks.start(self._sends, (effect.call_id, effect.number), self._send(effect))
            case p.Look():
                self._tasks.start(self._sends, (effect.call_id, effect.number), self._look(effect))
            case p.Withdraw():
                for key, task in self._sends.items():
                    if key[0] == effect.call_id and key not in self._leaving:
                        task.cancel()
            case p.Retrieve():
                self._tasks.start(self._single, "retrieve", self._retrieve())
            case p.OpenStream():
                self._cancel("stream")
                self._tasks.start(self._single, "stream", self._stream(effect))
            case p.CloseStream():
                self._cancel("history")
                self._cancel("stream")
            case p.ReadHistory():
                self._cancel("history")
                self._tasks.start(self._single, "history", self._read_history(effect))
            case p.SaveCall() | p.SaveMessage() | p.DropMessages() | p.RefuseDecision() | p.End():
                pass

    async def sends_left(self, timeout_s: float) -> None:
        """Wait for sends that have left the process, not for those that wait to."""
        leaving = [self._sends[key] for key in self._leaving if key in self._sends]
        if leaving:
            await asyncio.wait(leaving, timeout=timeout_s)

    @property
    def are_sends_leaving(self) -> bool:
        return bool(self._leaving)

    async def leave(self) -> None:
        """End everything but deliveries and sends under way; results are left to the next run from now on.

        Deliveries that wait for their turn, or for their endpoint, do not begin any more. A send that has
        left is waited for: the next run must not repeat it before it is over.
        """
        self._tasks.has_left = True
        leaving = [task for key, task in self._sends.items() if key in self._leaving]
        tasks = [*self._single.values(), *(task for task in self._sends.values() if task not in leaving)]
        tasks += self._deliveries.ending
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sends_left(SEND_S)
        for task in leaving:
            task.cancel()

    # ---- tasks

    def _cancel(self, key: str) -> None:
        task = self._single.get(key)
        if task is not None:
            task.cancel()

    async def _pause(self, nominal_s: float, floor_s: float | None = None) -> None:
        wait = wait_s(nominal_s, floor_s=floor_s, draw=self._tasks.parts.draw())
        if wait > 0:
            await asyncio.sleep(wait)

    async def _consult(self, call_id: str) -> None:
        """Ask the store until it has answered: nobody may have been told of the call."""
        tenant, session_id = self._lease.tenant, self._lease.session_id
        while True:
            try:
                async with self._tasks.parts.engine.begin() as connection:
                    await decisions.consult(connection, tenant, session_id, call_id)
                return
            except Exception as error:
                if not is_unavailable(error):
                    raise
                log.warning("rules_not_consulted", session_id=session_id, call_id=call_id, error=repr(error))
            await asyncio.sleep(CONSULT_AGAIN_S)

    # ---- upstream

    async def _retrieve(self) -> None:
        facts: p.SessionFacts | None = None
        try:
            async with self._budget.turn(Priority.RECONNECT, RETRIEVE_REQUESTS):
                facts = await self._client.retrieve(self._lease.session_id)
        except UpstreamError as error:
            log.info("retrieve_failed", session_id=self._lease.session_id, status=error.failure.status)
        await self._inbox.put(p.Retrieved(facts))

    async def _stream(self, effect: p.OpenStream) -> None:
        """Hold the stream, reading from the start; its events wait until history was read once."""
        await self._pause(effect.after_s, effect.floor_s)
        self.may_forward.clear()
        buffer: asyncio.Queue[ev.AnyEvent | ev.Malformed | None] = asyncio.Queue(STREAM_BUFFER_MAX)
        failure: p.Failure | None = None
        async with asyncio.TaskGroup() as group:
            try:
                async with (
                    self._budget.turn(Priority.RECONNECT),
                    self._client.stream(self._lease.session_id, effect.previews, self._tap) as stream,
                ):
                    self._is_connecting = True
                    await self._inbox.put(p.StreamOpened())
                    group.create_task(self._forward(buffer))
                    async for event in stream:
                        await buffer.put(event)
            except UpstreamError as error:
                failure = error.failure
            await buffer.put(None)
        await self._inbox.put(p.StreamClosed(failure))

    async def _forward(self, buffer: asyncio.Queue[ev.AnyEvent | ev.Malformed | None]) -> None:
        await self.may_forward.wait()
        while (event := await buffer.get()) is not None:
            if isinstance(event, ev.Malformed):
                log.warning("event_malformed", session_id=self._lease.session_id, reason=event.reason)
            else:
                await self._inbox.put(p.Received(event))

    async def _read_history(self, effect: p.ReadHistory) -> None:
        await self._pause(effect.after_s, effect.floor_s)
        priority = Priority.RECONNECT if self._is_connecting else Priority.SWEEP
        pages = self._pages(priority, effect.since)
        try:
            async with contextlib.aclosing(pages):
                async for page in pages:
                    await self._inbox.put(p.HistoryPage(page, effect.number))
        except UpstreamError as error:
            await self._inbox.put(p.HistoryFailed(error.failure, effect.number))
            return
        self._is_connecting = False
        await self._inbox.put(p.HistoryRead(number=effect.number))
        orphans, self._orphans = self._orphans, set()
        self._deliveries.watch(orphans)

    async def _pages(
        self, priority: Priority, since: float | None, types: Sequence[str] = ()
    ) -> AsyncGenerator[list[ev.AnyEvent], None]:
        """Walk the history. The first page waits for its turn; those after it pay when they have come."""
        pages = self._client.pages(self._lease.session_id, since, types)
        async with self._budget.turn(priority), contextlib.aclosing(pages):
            is_paid = True
            async for page in pages:
                if not is_paid:
                    await self._budget.take(priority)
                is_paid = False
                yield page

    async def _send(self, effect: p.Send) -> None:
        await self._pause(effect.after_s, effect.floor_s)
        key = (effect.call_id, effect.number)
        failure: p.Failure | None = None
        try:
            async with self._budget.turn(Priority.ANSWER):
                await self._tasks.trust(SEND_S)
                self._leaving.add(key)
                began, outcome, status = asyncio.get_running_loop().time(), "unknown", None
                try:
                    await self._client.send(self._lease.session_id, effect.event)
                    outcome = "accepted"
                except UpstreamError as error:
                    outcome, status = error.failure.reach, error.failure.status
                    raise
                finally:
                    took_s = asyncio.get_running_loop().time() - began
                    metrics.POSTS.labels(outcome=outcome).observe(took_s)
                    if self._tasks.traces is not None:
                        self._tasks.traces.posted(effect.call_id, outcome, status, took_s)
        except UpstreamError as error:
            failure = error.failure
        finally:
            self._leaving.discard(key)
        await self._inbox.put(p.Sent(effect.call_id, failure, effect.number))

    async def _look(self, effect: p.Look) -> None:
        await self._pause(effect.after_s, effect.floor_s)
        findings: p.Findings | None = None
        with contextlib.suppress(UpstreamError):
            for number in range(effect.rounds):
                if number:
                    await asyncio.sleep(LOOK_EVERY_S)
                findings = None
                findings = await self._find(effect.call_id, effect.since)
                if findings.answers or (effect.is_for_verdict and findings.verdicts):
                    break
        if effect.retrieve and findings is not None:
            try:
                async with self._budget.turn(Priority.ANSWER, RETRIEVE_REQUESTS):
                    session = await self._client.retrieve(self._lease.session_id)
                findings = replace(findings, session=session)
            except UpstreamError as error:
                findings = replace(findings, is_gone=error.failure.status in (404, 410))
        await self._inbox.put(p.Looked(effect.call_id, findings, effect.number))

    async def _find(self, call_id: str, since: float | None) -> p.Findings:
        """Read the history for all that can settle the call."""
        found: list[ev.AnyEvent] = []
        pages = self._pages(Priority.ANSWER, since, _SETTLING)
        async with contextlib.aclosing(pages):
            async for page in pages:
                found += page
        answers = (ev.UserToolResult, ev.CustomToolResult, ev.AgentToolResult, ev.McpToolResult)
        return p.Findings(
            answers=tuple(e for e in found if isinstance(e, answers) and ev.answered_id(e) == call_id),
            verdicts=tuple(e for e in found if isinstance(e, ev.Confirmation) and e.tool_use_id == call_id),
            interrupts=tuple(e for e in found if isinstance(e, ev.Interrupt)),
            terminated_threads=frozenset(
                e.session_thread_id
                for e in found
                if isinstance(e, ev.ThreadTerminated) and e.session_thread_id
            ),
        )
