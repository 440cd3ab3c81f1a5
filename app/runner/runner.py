"""Runs one session: feeds notices to the core, saves what it says, and sends its errands out.

One loop takes what happened out of the inbox, asks the machine, commits what is to be saved, and only then
lets anything leave the process. The loop waits for nothing but the inbox and the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from sqlalchemy.exc import DBAPIError

from app.core import protocol as p
from app.core.calls import Call
from app.core.rules import Rule
from app.core.session import SessionMachine, Stored
from app.core.tools import Tool
from app.logs import logger
from app.runner.deliveries import Deliveries
from app.runner.errands import Errands
from app.runner.lines import tell
from app.runner.observers import Observers
from app.runner.saving import Saving
from app.runner.steering import Steering
from app.runner.tasks import Parts, Tasks
from app.runner.tracing import CallTraces
from app.store import runs
from app.store.batches import Batch, ContradictionError
from app.store.database import is_unavailable
from app.store.leases import SEND_S, Lease, LeaseLostError
from app.upstream.client import UpstreamClient

INBOX_MAX: Final = 2_000
"""How many notices may wait for the loop; whoever brings more waits."""
NOTICES_MAX: Final = 500
"""How many notices share one commit."""

log = logger(__name__)


class DefectError(Exception):
    """Handling a notice failed. `event_id` names the event that it carried, if it carried one."""

    def __init__(self, event_id: str | None) -> None:
        super().__init__(f"handling event {event_id} failed" if event_id else "handling a notice failed")
        self.event_id = event_id


class SessionRunner:
    """One run of one attachment. `run` returns when the attachment ended, or after `stop` or `lose`.

    `rules` are the live ones of the tenant, oldest first. `skipped` are ids of events whose handling failed
    before, and which this run leaves out.
    """

    def __init__(
        self,
        lease: Lease,
        start: runs.Start,
        tools: Mapping[str, Tool],
        client: UpstreamClient,
        parts: Parts,
        *,
        rules: Sequence[Rule] = (),
        skipped: frozenset[str] = frozenset(),
    ) -> None:
        self.lease = lease
        self._parts = parts
        self._skipped = skipped
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[p.Notice] = asyncio.Queue(INBOX_MAX)
        self._is_stopping = False
        self._is_lost = False
        orphans = [call.id for call in start.calls if call.state == "dispatched"]
        self._traces = None if parts.traces is None else CallTraces(parts.traces, lease, start.calls)
        self._tasks = Tasks(lease, parts, self._inbox, self._fail, self._traces)
        self._deliveries = Deliveries(self._tasks)
        self._deliveries.tools = tools
        self._observers = Observers(self._tasks)
        self._errands = Errands(
            self._tasks, client, self._deliveries, orphans=orphans, tap=self._observers.take
        )
        self._steering = Steering(self._tasks, client)
        self._failure: BaseException | None = None
        self._told: list[p.Notice] = []
        self._told_tools: p.ToolsChanged | None = None
        self._told_wish: int | None = None
        deadline = None if start.idle_left_s is None else self._loop.time() + start.idle_left_s
        progress = replace(start.progress, idle_deadline=deadline)
        stored = Stored(start.calls, start.over, progress, start.open_messages)
        self._machine = SessionMachine(start.settings.for_core(), tools, stored, self._about(rules))
        self._saving = Saving(
            lease,
            start.calls,
            progress,
            start.wish,
            lambda effect: parts.callbacks.body(effect.call, effect.tool, lease),
        )
        self._first: list[p.Notice] = [p.Decided(call_id, decision) for call_id, decision in start.decided]
        if start.wanted:
            self._first.append(p.Wanted(start.wanted))
        if start.again:
            self._first.append(p.Redeliver(start.again))
        if start.is_steered:
            self._first.append(p.Steered(True))
        if start.is_detach_requested:
            self._first.append(p.DetachRequested())

    # ---- what the fleet calls

    def wish(self, notices: Sequence[p.Notice], number: int) -> None:
        """Bring what is wished of the attachment. A later wish contains the earlier ones."""
        self._told, self._told_wish = list(notices), number
        self._deliveries.look_again()
        self._steer()
        self._wake()

    def change_tools(self, tools: Mapping[str, Tool], rules: Sequence[Rule]) -> None:
        """Bring a changed registry, and the live rules."""
        self._told_tools = p.ToolsChanged(tools, self._about(rules))
        self._deliveries.tools = tools
        self._wake()

    def watch(self, left_s: float) -> None:
        """Somebody follows upstream's events as they come, for so long."""
        self._observers.watch(left_s)

    def _steer(self) -> None:
        if any(isinstance(notice, p.Steered) for notice in self._told):
            self._steering.look()

    def _about(self, rules: Sequence[Rule]) -> tuple[Rule, ...]:
        return tuple(rule for rule in rules if rule.session_id in (None, self.lease.session_id))

    def stop(self) -> None:
        """End the run soon, for another replica to go on; deliveries under way may finish."""
        self._is_stopping = True
        self._wake()

    def lose(self) -> None:
        """End the run at once: its lease is another's, or may be."""
        self._is_lost = self._tasks.is_lost = True
        self.stop()

    async def run(self) -> None:
        """Run until the attachment ends, `stop`, or `lose`.

        Raises:
            LeaseLostError: the lease turned out to be another's.
            DefectError: the core failed on a notice.
            Exception: the store could not be written, or a task of the run ended by a defect.
        """
        try:
            await self._perform(self._machine.start())
            await self._handle(self._first)
            if any(isinstance(notice, p.Steered) for notice in self._first):
                self._steering.look()
            while not self._machine.is_over and not self._is_stopping:
                await self._handle(await self._next())
            if not self._machine.is_over and not self._is_lost:
                await self._finish_sends()
        finally:
            await self._errands.leave()
            await self._steering.leave()
            await self._observers.leave()
        if self._failure is not None:
            raise self._failure

    async def drain(self, timeout_s: float | None) -> None:
        """After `run`: let deliveries under way finish and leave their results to the next run.

        `timeout_s` None waits for as long as they may take; those of an attachment that ended are not
        waited for.
        """
        await self._deliveries.drain(0.0 if self._machine.is_over else timeout_s)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self.lose()

    # ---- the loop

    def _wake(self) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # a full inbox keeps the loop awake by itself
            self._inbox.put_nowait(p.Tick())

    async def _next(self) -> list[p.Notice]:
        """Wait for notices, for the machine's next wake, or for something that is late to be saved."""
        due = [self._machine.next_wake(self._loop.time()), *self._saving.due(self._machine)]
        notices: list[p.Notice] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min((at for at in due if at is not None), default=None)):
                notices.append(await self._inbox.get())
        while len(notices) < NOTICES_MAX and not self._inbox.empty():
            notices.append(self._inbox.get_nowait())
        notices += self._take_told()
        # An event that was there when a deadline was noticed wins over it: time speaks when all is quiet.
        return notices or [p.Tick()]

    def _take_told(self) -> list[p.Notice]:
        told, self._told = self._told, []
        if self._told_tools is not None:
            told, self._told_tools = [self._told_tools, *told], None
        if self._told_wish is not None:
            self._saving.wish_seen, self._told_wish = self._told_wish, None
        return told

    async def _handle(self, notices: Sequence[p.Notice]) -> None:
        effects: list[p.Effect] = []
        is_history_settled = False
        for notice in notices:
            if isinstance(notice, p.Received):
                self._saving.has_events = True
                if notice.event.id and notice.event.id in self._skipped:
                    continue
            elif isinstance(notice, p.HistoryPage):
                self._saving.has_events |= bool(notice.events)
                kept = [event for event in notice.events if event.id not in self._skipped]
                notice = p.HistoryPage(kept, notice.number)  # noqa: PLW2901 - what follows sees only this
            elif isinstance(notice, p.HistoryRead):
                notice = p.HistoryRead(await self._recall(), notice.number)  # noqa: PLW2901 - what follows sees only this
            if isinstance(notice, p.HistoryRead | p.HistoryFailed):
                # A read that belongs to an earlier connection does not open the gate of this one.
                is_history_settled |= notice.number == self._machine.read_number
            effects += self._decide(notice)
        await self._perform(effects)
        if is_history_settled:
            self._errands.may_forward.set()

    def _decide(self, notice: p.Notice) -> list[p.Effect]:
        try:
            return self._machine.handle(notice, self._loop.time())
        except Exception as error:
            raise DefectError(notice.event.id if isinstance(notice, p.Received) else None) from error

    async def _recall(self) -> dict[str, Call]:
        ids = self._machine.to_recall
        if not ids:
            return {}
        async with self._parts.engine.connect() as connection:
            return await runs.recall(connection, self.lease, ids)

    async def _perform(self, effects: Sequence[p.Effect]) -> None:
        """Commit what is to be saved, then do the rest in order."""
        await self._save(self._batch(effects))
        for effect in effects:
            self._errands.do(effect)

    async def _save(self, batch: Batch) -> None:
        """Commit the batch. Messages that the store refuses are lost, and nothing else is."""
        try:
            await self._parts.writer.submit(batch)
        except (LeaseLostError, ContradictionError):
            raise
        except Exception as error:
            if is_unavailable(error) or not batch.messages:
                raise
            messages, batch.messages = batch.messages, []
            await self._parts.writer.submit(batch)
            for message in messages:
                await self._save_message(message)
        for call in batch.calls:
            if call.result is not None:
                self._deliveries.kept(call.id)
        tell(self.lease.session_id, batch)
        if self._traces is not None:
            self._traces.primary_thread_id = self._machine.progress.primary_thread_id
            self._traces.committed(batch)

    async def _save_message(self, message: p.Snapshot) -> None:
        try:
            await self._parts.writer.submit(Batch(self.lease, messages=[message]))
        except DBAPIError as refused:
            if is_unavailable(refused):
                raise
            log.error("message_refused", session_id=self.lease.session_id, message_id=message.id)

    async def _finish_sends(self) -> None:
        """Sends that have left are waited for, as long as one may take; then the lease can go."""
        self._errands.do(p.CloseStream())
        notices: list[p.Notice] = [p.Stopping()]
        deadline = self._loop.time() + SEND_S
        while True:
            effects = [effect for notice in notices for effect in self._decide(notice)]
            await self._save(self._batch(effects))
            left_s = deadline - self._loop.time()
            if left_s <= 0 or (not self._errands.are_sends_leaving and self._inbox.empty()):
                return
            await self._errands.sends_left(left_s)
            notices = []
            while not self._inbox.empty():
                notice = self._inbox.get_nowait()
                if isinstance(notice, p.Sent | p.Delivered):
                    notices.append(notice)

    def _batch(self, effects: Sequence[p.Effect]) -> Batch:
        ended, self._deliveries.ended = self._deliveries.ended, []
        return self._saving.batch(effects, self._machine, ended, self._loop.time())
