"""The deliveries of one run: made, noted, watched, and what they came to left to the next run.

A delivery may outlive its run. What it came to is remembered until `kept` says that it is stored; `drain`
leaves the rest, fenced by its dispatch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from app import metrics
from app.core import protocol as p
from app.core.calls import Call
from app.core.tools import Tool
from app.logs import logger
from app.runner import callbacks
from app.runner.health import store_health
from app.runner.tasks import TRUST_POLL_S, Tasks
from app.store import runs
from app.store.batches import AttemptEnd, AttemptStart, Batch
from app.store.database import is_unavailable
from app.store.leases import LeaseLostError
from app.store.tools import disable_gone
from app.webhooks.delivery import AttemptReport, DeliveryRequest
from app.webhooks.health import Health

ORPHANS_EVERY_S: Final = 1.0
CALLBACKS_EVERY_S: Final = 60.0
"""How late a report may be found that no wish has told of."""
SLOT_WAIT_S: Final = 1.0
"""A delivery that waited longer for a slot of its tool has its deadline noted again."""
LEAVE_TRIES_S: Final = 60.0
"""How long results of a run that is over are tried to be left while the database is away."""
LEAVE_EVERY_S: Final = 0.5

log = logger(__name__)


class Deliveries:
    """What a run delivers. `ended` are attempts that ended and are not noted yet.

    `tools` is the registry as known now: where a delivery goes of which nothing has arrived yet.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.ended: list[AttemptEnd] = []
        self.tools: Mapping[str, Tool] = {}
        self._tasks = tasks
        self._running: dict[str, asyncio.Task[None]] = {}
        self._waiting: set[str] = set()
        self._outcomes: dict[str, tuple[int, p.Delivered]] = {}
        self._unstarted: set[tuple[str, int]] = set()
        self._promised: set[str] = set()
        self._watching: dict[int, asyncio.Task[None]] = {}
        self._watches = 0
        self._news: set[asyncio.Event] = set()

    def start(self, effect: p.Deliver) -> None:
        """Begin a delivery."""
        self._tasks.start(self._running, effect.call.id, self._deliver(effect.call, effect.tool))

    @property
    def ending(self) -> list[asyncio.Task[None]]:
        """The tasks that end with their run: what watches, and what still waits for its turn or endpoint."""
        return [
            *self._watching.values(), *(self._running[id_] for id_ in self._waiting if id_ in self._running)
        ]  # fmt: skip

    def look_again(self) -> None:
        """Something was wished: a tool may have reported."""
        for news in self._news:
            news.set()

    def kept(self, call_id: str) -> None:
        """The result of the call's delivery is stored."""
        self._outcomes.pop(call_id, None)

    async def drain(self, timeout_s: float | None) -> None:
        """After `leave`: let deliveries finish, within `timeout_s` if given, and leave what they came to."""
        tasks = dict(self._running)
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
        lease = self._tasks.lease
        async with self._tasks.parts.engine.begin() as connection:
            for dispatched, left in self._outcomes.values():
                await runs.leave_result(
                    connection, lease, left.call_id, left.attempts, left.result,
                    dispatched=dispatched, unknown=left.outcome_unknown,
                )  # fmt: skip
            await runs.take_back(connection, lease, self._unstarted)
            await runs.leave_attempts(connection, self._tasks.parts.replica_id, lease, self.ended, abandoned)

    # ---- one delivery

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
        lease = self._tasks.lease
        body: bytes | None = None
        key_id: str | None = None
        url: str | None = None
        if call.attempts > 1:
            async with self._tasks.parts.engine.connect() as connection:
                body, key_id = await runs.body(connection, lease, call.id)
                url = await runs.url_of_earlier(connection, lease, call.id, call.attempts)
        if body is None:
            body, key_id = self._tasks.parts.callbacks.body(call, tool, lease)
        body = self._tasks.parts.callbacks.sent(body, key_id, call, lease)
        traces = self._tasks.traces
        request = DeliveryRequest(
            lease.tenant, lease.session_id, call, tool, body, call.attempts,
            is_sampled=traces is None or traces.is_sampled(call.id),
        )  # fmt: skip
        outcome = await self._tasks.parts.deliverer.deliver(request, _AttemptLog(self, call, tool, url))
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
        if self._tasks.has_left:
            await self._leave_results(abandoned=())
        else:
            await self._tasks.inbox.put(notice)

    async def _promise(self, notice: p.Promised) -> None:
        self._promised.add(notice.call_id)
        if self._tasks.has_left:
            await self._leave_results(abandoned=())
        else:
            await self._tasks.inbox.put(notice)

    async def _reported(self, call_id: str) -> p.Delivered | None:
        """What the tool reported of a call by callback, if it has: no fault of its endpoint undoes that."""
        async with self._tasks.parts.engine.connect() as connection:
            backs = await runs.called_back(connection, self._tasks.lease, [call_id])
        return callbacks.delivered(backs[0], self.tools) if backs else None

    async def start_attempt(self, start: AttemptStart, *, is_first: bool, is_noted: bool) -> None:
        """Let an attempt leave: under a lease that holds, and once the store knows of it.

        A first attempt does not leave any more once the run is over; one that repeats another may, for its
        call is answered by this delivery alone until its deadline.

        Raises:
            _NotStartedError: the run is over, and nothing has left.
        """
        while is_first and (self._tasks.has_left or not self._tasks.is_trusted(0.0)):
            if self._tasks.has_left:
                raise _NotStartedError
            await asyncio.sleep(TRUST_POLL_S)
        if not is_noted and not self._tasks.has_left:
            ended = [end for end in self.ended if end.call_id == start.call_id]
            self.ended = [end for end in self.ended if end.call_id != start.call_id]
            is_stored = await self._note(Batch(self._tasks.lease, started=[start], ended=ended))
            if not is_stored and is_first:
                raise _NotStartedError
        self._waiting.discard(start.call_id)

    def trace(self, call: Call, report: AttemptReport) -> None:
        if self._tasks.traces is not None:
            self._tasks.traces.attempted(call, report)

    async def note_ended(self) -> None:
        """Let the store know at once how attempts went; after the run, `drain` does."""
        if not self._tasks.has_left:
            ended, self.ended = self.ended, []
            await self._note(Batch(self._tasks.lease, ended=ended))

    async def _note(self, batch: Batch) -> bool:
        """Store how attempts go, unless the run ended meanwhile: that must not end the delivery."""
        try:
            await self._tasks.parts.writer.submit(batch)
        except LeaseLostError:
            if not self._tasks.has_left:
                raise
            self.ended += batch.ended
            return False
        return True

    async def note_health(self, tool: str, health: Health) -> bool:
        """Store how this replica sees a tool's endpoint; return False when the database is away."""
        current = self.tools.get(tool)
        if current is None or current.url != health.url:
            return True  # it is the tool's no more
        parts = self._tasks.parts
        return await store_health(parts.engine, parts.replica_id, self._tasks.lease.tenant, tool, health)

    async def disable(self, tool: Tool) -> None:
        """Disable a tool whose endpoint answered 410. When the database is away, the next 410 does it."""
        try:
            async with self._tasks.parts.engine.begin() as connection:
                is_done = await disable_gone(connection, self._tasks.lease.tenant, tool)
        except Exception as error:
            if not is_unavailable(error):
                raise
            log.warning("tool_not_disabled", tool=tool.name, error=repr(error))
            return
        if is_done:
            log.warning(
                "tool_disabled", tenant=self._tasks.lease.tenant, tool=tool.name, reason="gone",
                remedy="PUT /tools/{tool} enables it again",
            )  # fmt: skip

    def watch(self, orphans: Collection[str]) -> None:
        if orphans:
            self._watches += 1
            self._tasks.start(self._watching, self._watches, self._watch_orphans(set(orphans)))

    async def _watch_orphans(self, orphans: set[str]) -> None:
        """Wait while whoever delivers a call may still report, or its tool; then say that none will."""
        news = asyncio.Event()
        self._news.add(news)
        try:
            await self._watch_on(orphans, news)
        finally:
            self._news.discard(news)

    async def _watch_on(self, orphans: set[str], news: asyncio.Event) -> None:
        while orphans:
            news.clear()
            async with self._tasks.parts.engine.connect() as connection:
                # In this order: a report that came before its time was over is never missed.
                waiting = await runs.orphans(connection, self._tasks.lease, orphans)
                backs = await runs.called_back(connection, self._tasks.lease, orphans)
                others = await runs.recall(connection, self._tasks.lease, orphans - waiting.keys())
            for back in backs:
                waiting.pop(back.call_id, None)
                await self._tasks.inbox.put(callbacks.delivered(back, self.tools))
            for call in others.values():
                if call.state == "queued":
                    await self._tasks.inbox.put(p.Orphaned(call.id, is_unsent=True))
                elif call.result is not None and not call.is_over:
                    unknown = call.outcome_unknown
                    notice = p.Delivered(call.id, call.result, call.attempts, outcome_unknown=unknown)
                    await self._tasks.inbox.put(notice)
            left_s = {call_id: seconds for call_id, seconds in waiting.items() if seconds is not None}
            for call_id in waiting.keys() - left_s.keys():
                await self._tasks.inbox.put(p.Orphaned(call_id))
            orphans = set(left_s)
            if orphans:
                pause_s = min(CALLBACKS_EVERY_S, max(ORPHANS_EVERY_S, min(left_s.values())))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), pause_s)


class _NotStartedError(Exception):
    """The run was over before the delivery could begin."""


class _AttemptLog:
    """Notes the attempts of one delivery: a start before it leaves, an end with the run's next commit.

    Once an attempt may have arrived, all go where it went: only that endpoint recognises the call. `url` is
    where one of an earlier episode did. The secrets are always those of now, however long the call waited.
    """

    def __init__(self, deliveries: Deliveries, call: Call, tool: Tool, url: str | None) -> None:
        self._deliveries = deliveries
        self._call = call
        self._tool = tool if url is None else replace(tool, url=url)
        self._noted_url = tool.url  # by the commit of the dispatch
        self._has_arrived = url is not None
        self._since = asyncio.get_running_loop().time()

    def current(self) -> Tool:
        current = self._deliveries.tools.get(self._tool.name)
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
        await self._deliveries.start_attempt(start, is_first=is_first, is_noted=is_noted)

    async def health_changed(self, health: Health) -> bool:
        return await self._deliveries.note_health(self._tool.name, health)

    async def finished(self, report: AttemptReport) -> None:
        tool = self._tool
        took_s = (report.finished_ms - report.started_ms) / 1000
        metrics.DELIVERIES.labels(outcome=report.code or "ok").observe(took_s)
        self._deliveries.trace(self._call, report)
        self._deliveries.ended.append(
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
            await self._deliveries.disable(self._tool)
        if not report.was_written:
            await self._deliveries.note_ended()
