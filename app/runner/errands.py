"""What a run does outside the process: streams, reads, sends, deliveries, each a task that reports back.

Nothing here decides anything. A task ends by putting a notice into the inbox; one that fails otherwise is a
defect and ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine

from app.core import events as ev
from app.core import protocol as p
from app.core.calls import Call
from app.core.retry import wait_s
from app.core.tools import Tool
from app.logs import logger
from app.runner import callbacks
from app.runner.budget import UNLIMITED, Budget, Unlimited
from app.runner.callbacks import Callbacks
from app.runner.health import store_health
from app.store import runs
from app.store.batches import AttemptEnd, AttemptStart, Batch
from app.store.budgets import Priority
from app.store.database import is_unavailable
from app.store.leases import SEND_S, Lease, LeaseLostError
from app.store.tools import disable_gone
from app.store.writer import Writer
from app.upstream.client import UpstreamClient
from app.upstream.failures import UpstreamError
from app.webhooks.delivery import AttemptReport, Deliverer, DeliveryRequest
from app.webhooks.health import Health

STREAM_BUFFER_MAX: Final = 10_000
"""How many events are buffered while history is read; then upstream is read no further."""
LOOK_EVERY_S: Final = 2.0
"""The time between the lists of one look."""
RETRIEVE_REQUESTS: Final = 2
"""What a RETRIEVE asks for: the session, and its environment."""
ORPHANS_EVERY_S: Final = 1.0
CALLBACKS_EVERY_S: Final = 60.0
"""How late a report may be found that no wish has told of."""
TRUST_POLL_S: Final = 0.2
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

_K = TypeVar("_K")

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What every run of a replica shares.

    `trusted_for_s` says for how many seconds the replica's leases still hold, `draw` is a random number in
    [0, 1). `budget` is shared by the runs of one credential.
    """

    replica_id: str
    engine: AsyncEngine
    writer: Writer
    deliverer: Deliverer
    callbacks: Callbacks
    trusted_for_s: Callable[[], float]
    draw: Callable[[], float]
    budget: Budget | Unlimited = UNLIMITED


class Errands:
    """The tasks of one run.

    `orphans` are calls whose delivery an earlier run began; once history was read, they are watched until
    it reported, or nobody is left who could. `failed` is called with what ended a task by a defect. Set
    `is_lost` when the lease may be another's: nothing is begun any more, also if the replica is well again.

    What a delivery came to is remembered until `kept` says that it is stored; `drain` leaves the rest to the
    next run. `tools` is the registry as known now: where a delivery goes of which nothing has arrived yet.
    """

    def __init__(
        self,
        lease: Lease,
        client: UpstreamClient,
        parts: Parts,
        inbox: asyncio.Queue[p.Notice],
        *,
        orphans: Iterable[str],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.ended: list[AttemptEnd] = []
        self.is_lost = False
        self.may_forward = asyncio.Event()
        self.tools: Mapping[str, Tool] = {}
        self._lease = lease
        self._client = client
        self._parts = parts
        self._budget = parts.budget
        self._inbox = inbox
        self._orphans = set(orphans)
        self._watches = 0
        self._failed = failed
        self._has_left = False
        self._outcomes: dict[str, tuple[int, p.Delivered]] = {}
        self._unstarted: set[tuple[str, int]] = set()
        self._promised: set[str] = set()
        self._waiting: set[str] = set()
        self._has_news = asyncio.Event()
        self._is_connecting = False
        self._single: dict[str, asyncio.Task[None]] = {}
        self._sends: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._leaving: set[tuple[str, int]] = set()
        self._deliveries: dict[str, asyncio.Task[None]] = {}

    def do(self, effect: p.Effect) -> None:
        """Perform an effect that leaves the process; what is only saved is the runner's."""
        match effect:
            case p.Deliver():
                self._start(self._deliveries, effect.call.id, self._deliver(effect.call, effect.tool))
            case p.Watch():
                self._watch([effect.call_id])
            case p.Send():
                self._start(self._sends, (effect.call_id, effect.number), self._send(effect))
            case p.Look():
                self._start(self._sends, (effect.call_id, effect.number), self._look(effect))
            case p.Withdraw():
                for key, task in self._sends.items():
                    if key[0] == effect.call_id and key not in self._leaving:
                        task.cancel()
            case p.Retrieve():
                self._start(self._single, "retrieve", self._retrieve())
            case p.OpenStream():
                self._cancel("stream")
                self._start(self._single, "stream", self._stream(effect))
            case p.CloseStream():
                self._cancel("history")
                self._cancel("stream")
            case p.ReadHistory():
                self._cancel("history")
                self._start(self._single, "history", self._read_history(effect))
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

    def look_again(self) -> None:
        """Something was wished: a tool may have reported."""
        self._has_news.set()

    def kept(self, call_id: str) -> None:
        """The result of the call's delivery is stored."""
        self._outcomes.pop(call_id, None)

    async def leave(self) -> None:
        """End everything but deliveries and sends under way; results are left to the next run from now on.

        Deliveries that wait for their turn, or for their endpoint, do not begin any more. A send that has
        left is waited for: the next run must not repeat it before it is over.
        """
        self._has_left = True
        leaving = [task for key, task in self._sends.items() if key in self._leaving]
        tasks = [*self._single.values(), *(task for task in self._sends.values() if task not in leaving)]
        tasks += [task for call_id, task in self._deliveries.items() if call_id in self._waiting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sends_left(SEND_S)
        for task in leaving:
            task.cancel()

    async def drain(self, timeout_s: float | None) -> None:
        """After `leave`: let deliveries finish, within `timeout_s` if given, and leave what they came to."""
        tasks = dict(self._deliveries)
        if tasks and timeout_s != 0:
            await asyncio.wait(tasks.values(), timeout=timeout_s)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        unstarted = {call_id for call_id, _ in self._unstarted}
        known = self._outcomes.keys() | self._promised | unstarted
        await self._leave_results(abandoned=tasks.keys() - known)

    async def _leave_results(self, *, abandoned: Collection[str]) -> None:
        """Leave all that is known to the next run, patiently while the database is away."""
        if not (self._outcomes or self._unstarted or self.ended or abandoned):
            return  # a stop ends hundreds of runs at once, and most have nothing to leave
        deadline = asyncio.get_running_loop().time() + LEAVE_TRIES_S
        while True:
            try:
                await self._write_left(abandoned)
                return
            except Exception as error:
                if not is_unavailable(error) or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(LEAVE_EVERY_S)

    async def _write_left(self, abandoned: Iterable[str]) -> None:
        lease = self._lease
        async with self._parts.engine.begin() as connection:
            for dispatched, left in self._outcomes.values():
                await runs.leave_result(
                    connection, lease, left.call_id, left.attempts, left.result,
                    dispatched=dispatched, unknown=left.outcome_unknown,
                )  # fmt: skip
            await runs.take_back(connection, lease, self._unstarted)
            await runs.leave_attempts(connection, self._parts.replica_id, lease, self.ended, abandoned)

    # ---- tasks

    def _start(self, tasks: dict[_K, asyncio.Task[None]], key: _K, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks[key] = task

        def done(finished: asyncio.Task[None]) -> None:
            if tasks.get(key) is finished:
                del tasks[key]
            if not finished.cancelled() and (error := finished.exception()) is not None:
                log.error("task_failed", session_id=self._lease.session_id, error=repr(error))
                self._failed(error)

        task.add_done_callback(done)

    def _cancel(self, key: str) -> None:
        task = self._single.get(key)
        if task is not None:
            task.cancel()

    async def _pause(self, nominal_s: float, floor_s: float | None = None) -> None:
        wait = wait_s(nominal_s, floor_s=floor_s, draw=self._parts.draw())
        if wait > 0:
            await asyncio.sleep(wait)

    def _is_trusted(self, for_s: float) -> bool:
        trusted_for_s = self._parts.trusted_for_s()
        return not self.is_lost and 0 < trusted_for_s >= for_s

    async def _trust(self, for_s: float) -> None:
        """Wait until the lease holds for as long as an act may take; a lost lease cancels the task."""
        while not self._is_trusted(for_s):  # noqa: ASYNC110 - it is a clock that runs, not an event
            await asyncio.sleep(TRUST_POLL_S)

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
                    self._client.stream(self._lease.session_id, effect.previews) as stream,
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
        self._watch(orphans)

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
                await self._trust(SEND_S)
                self._leaving.add(key)
                await self._client.send(self._lease.session_id, effect.event)
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

    # ---- webhooks

    async def _deliver(self, call: Call, tool: Tool) -> None:
        self._waiting.add(call.id)
        try:
            await self._deliver_once(call, tool)
        except (_NotStartedError, asyncio.CancelledError) as error:
            if call.id in self._waiting:
                self._unstarted.add((call.id, call.attempts))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._waiting.discard(call.id)

    async def _deliver_once(self, call: Call, tool: Tool) -> None:
        lease = self._lease
        body: bytes | None = None
        key_id: str | None = None
        url: str | None = None
        if call.attempts > 1:
            async with self._parts.engine.connect() as connection:
                body, key_id = await runs.body(connection, lease, call.id)
                url = await runs.url_of_earlier(connection, lease, call.id, call.attempts)
        if body is None:
            body, key_id = self._parts.callbacks.body(call, tool, lease)
        body = self._parts.callbacks.sent(body, key_id, call, lease)
        request = DeliveryRequest(lease.tenant, lease.session_id, call, tool, body, call.attempts)
        outcome = await self._parts.deliverer.deliver(request, _AttemptLog(self, call, tool, url))
        self._waiting.discard(call.id)
        if outcome.result is None:
            await self._promise(p.Promised(call.id, outcome.attempts))
            return
        notice = p.Delivered(
            call.id, outcome.result, outcome.attempts, outcome_unknown=outcome.outcome_unknown
        )
        if outcome.code is not None:
            notice = await self._reported(call.id) or notice
        self._outcomes[call.id] = call.attempts, notice
        if self._has_left:
            await self._leave_results(abandoned=())
        else:
            await self._inbox.put(notice)

    async def _promise(self, notice: p.Promised) -> None:
        self._promised.add(notice.call_id)
        if self._has_left:
            await self._leave_results(abandoned=())
        else:
            await self._inbox.put(notice)

    async def _reported(self, call_id: str) -> p.Delivered | None:
        """What the tool reported of a call by callback, if it has: no fault of its endpoint undoes that."""
        async with self._parts.engine.connect() as connection:
            backs = await runs.called_back(connection, self._lease, [call_id])
        return callbacks.delivered(backs[0], self.tools) if backs else None

    async def start_attempt(self, start: AttemptStart, *, is_first: bool, is_noted: bool) -> None:
        """Let an attempt leave: under a lease that holds, and once the store knows of it.

        A first attempt does not leave any more once the run is over; one that repeats another may, for its
        call is answered by this delivery alone until its deadline.

        Raises:
            _NotStartedError: the run is over, and nothing has left.
        """
        while is_first and (self._has_left or not self._is_trusted(0.0)):
            if self._has_left:
                raise _NotStartedError
            await asyncio.sleep(TRUST_POLL_S)
        if not is_noted and not self._has_left:
            ended = [end for end in self.ended if end.call_id == start.call_id]
            self.ended = [end for end in self.ended if end.call_id != start.call_id]
            is_stored = await self._note(Batch(self._lease, started=[start], ended=ended))
            if not is_stored and is_first:
                raise _NotStartedError
        self._waiting.discard(start.call_id)

    async def note_ended(self) -> None:
        """Let the store know at once how attempts went; after the run, `drain` does."""
        if not self._has_left:
            ended, self.ended = self.ended, []
            await self._note(Batch(self._lease, ended=ended))

    async def _note(self, batch: Batch) -> bool:
        """Store how attempts go, unless the run ended meanwhile: that must not end the delivery."""
        try:
            await self._parts.writer.submit(batch)
        except LeaseLostError:
            if not self._has_left:
                raise
            self.ended += batch.ended
            return False
        return True

    async def note_health(self, tool: str, health: Health) -> bool:
        """Store how this replica sees a tool's endpoint; return False when the database is away."""
        current = self.tools.get(tool)
        if current is None or current.url != health.url:
            return True  # it is the tool's no more
        parts = self._parts
        return await store_health(parts.engine, parts.replica_id, self._lease.tenant, tool, health)

    async def disable(self, tool: Tool) -> None:
        """Disable a tool whose endpoint answered 410. When the database is away, the next 410 does it."""
        try:
            async with self._parts.engine.begin() as connection:
                is_done = await disable_gone(connection, self._lease.tenant, tool)
        except Exception as error:
            if not is_unavailable(error):
                raise
            log.warning("tool_not_disabled", tool=tool.name, error=repr(error))
            return
        if is_done:
            log.warning(
                "tool_disabled", tenant=self._lease.tenant, tool=tool.name, reason="gone",
                remedy="PUT /tools/{tool} enables it again",
            )  # fmt: skip

    def _watch(self, orphans: Collection[str]) -> None:
        if orphans:
            self._watches += 1
            self._start(self._single, f"watch {self._watches}", self._watch_orphans(set(orphans)))

    async def _watch_orphans(self, orphans: set[str]) -> None:
        """Wait while whoever delivers a call may still report, or its tool; then say that none will."""
        while orphans:
            self._has_news.clear()
            async with self._parts.engine.connect() as connection:
                # In this order: a report that came before its time was over is never missed.
                waiting = await runs.orphans(connection, self._lease, orphans)
                backs = await runs.called_back(connection, self._lease, orphans)
                others = await runs.recall(connection, self._lease, orphans - waiting.keys())
            for back in backs:
                waiting.pop(back.call_id, None)
                await self._inbox.put(callbacks.delivered(back, self.tools))
            for call in others.values():
                if call.state == "queued":
                    await self._inbox.put(p.Orphaned(call.id, is_unsent=True))
                elif call.result is not None and not call.is_over:
                    unknown = call.outcome_unknown
                    notice = p.Delivered(call.id, call.result, call.attempts, outcome_unknown=unknown)
                    await self._inbox.put(notice)
            left_s = {call_id: seconds for call_id, seconds in waiting.items() if seconds is not None}
            for call_id in waiting.keys() - left_s.keys():
                await self._inbox.put(p.Orphaned(call_id))
            orphans = set(left_s)
            if orphans:
                pause_s = min(CALLBACKS_EVERY_S, max(ORPHANS_EVERY_S, min(left_s.values())))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_news.wait(), pause_s)


class _NotStartedError(Exception):
    """The run was over before the delivery could begin."""


class _AttemptLog:
    """Notes the attempts of one delivery: a start before it leaves, an end with the run's next commit.

    Once an attempt may have arrived, all go where it went: only that endpoint recognises the call. `url` is
    where one of an earlier episode did. The secrets are always those of now, however long the call waited.
    """

    def __init__(self, errands: Errands, call: Call, tool: Tool, url: str | None) -> None:
        self._errands = errands
        self._call = call
        self._tool = tool if url is None else replace(tool, url=url)
        self._noted_url = tool.url  # by the commit of the dispatch
        self._has_arrived = url is not None
        self._since = asyncio.get_running_loop().time()

    def current(self) -> Tool:
        current = self._errands.tools.get(self._tool.name)
        if current is not None and current.fault is None:
            self._tool = replace(self._tool, secrets=current.secrets)
            if current.url != self._tool.url and not self._has_arrived:
                self._tool = replace(self._tool, url=current.url, version=current.version)
        return self._tool

    async def started(self, attempt: int) -> None:
        # The first one was committed together with the dispatch, and its deadline counted from there.
        is_first = attempt == self._call.attempts
        waited_s = asyncio.get_running_loop().time() - self._since
        start = AttemptStart(self._call.id, attempt, self._tool)
        is_noted = is_first and waited_s < SLOT_WAIT_S and self._tool.url == self._noted_url
        await self._errands.start_attempt(start, is_first=is_first, is_noted=is_noted)

    async def health_changed(self, health: Health) -> bool:
        return await self._errands.note_health(self._tool.name, health)

    async def finished(self, report: AttemptReport) -> None:
        tool = self._tool
        self._errands.ended.append(
            AttemptEnd(
                self._call.id,
                report.attempt,
                report.http_status,
                report.code,
                report.reply_body,
                excerpt=report.reply_excerpt,
                duration_ms=report.finished_ms - report.started_ms,
                callback_s=tool.callback_timeout_s if report.is_promise else None,
                callback_max_s=tool.callback_timeout_max_s if report.is_promise else None,
            )
        )
        self._has_arrived = self._has_arrived or report.was_written
        if report.code == "gone":
            await self._errands.disable(self._tool)
        if not report.was_written:
            await self._errands.note_ended()
