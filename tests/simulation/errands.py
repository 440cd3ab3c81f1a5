"""The model of `app.runner.errands` and `deliveries`: each a task that reports back.

Line by line the order of the real ones. Left out: bounds of buffers, malformed events, logs.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from app.core import events as ev
from app.core import protocol as p
from app.core.calls import Call
from app.core.retry import wait_s
from app.core.tools import Tool
from app.runner.deliveries import (
    CALLBACKS_EVERY_S,
    LEAVE_EVERY_S,
    LEAVE_TRIES_S,
    ORPHANS_EVERY_S,
    SLOT_WAIT_S,
)
from app.runner.errands import _SETTLING, CONSULT_AGAIN_S, LOOK_EVERY_S
from app.runner.tasks import TRUST_POLL_S
from app.store.batches import AttemptEnd, AttemptStart, Batch
from app.store.leases import SEND_S, Lease, LeaseLostError
from app.webhooks.wire import build_body
from tests.simulation.client import Client, RequestError
from tests.simulation.record import SendLeft
from tests.simulation.schedule import Process, Signal, Task, Work
from tests.simulation.store import Store, UnavailableError
from tests.simulation.webhooks import DeliveryRequest, Outcome, Tools
from tests.simulation.writer import Writer

Inbox = Callable[[p.Notice], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """What every run of a replica shares."""

    replica_id: str
    process: Process
    store: Store
    writer: Writer
    tools: Tools
    trusted_for_s: Callable[[], float]


class Errands:
    """The tasks of one run. What a delivery came to is remembered until `kept` says that it is stored."""

    def __init__(
        self, lease: Lease, client: Client, parts: Parts, inbox: Inbox, *, orphans: Iterable[str],
        failed: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self.ended: list[AttemptEnd] = []
        self.is_lost = False
        self.clock = parts.process.clock
        self.may_forward = Signal()
        self.has_left = False
        self._outcomes: dict[str, tuple[int, p.Delivered]] = {}
        self._unstarted: set[tuple[str, int]] = set()
        self._promised: set[str] = set()
        self._news = Signal()
        self._lease, self._client, self._parts, self._put = lease, client, parts, inbox
        self._orphans = set(orphans)
        self._watches = 0
        self._failed = failed
        self._single: dict[Any, Task] = {}
        self._sends: dict[Any, Task] = {}
        self._leaving: set[tuple[str, int]] = set()
        self._deliveries: dict[Any, Task] = {}

    def do(self, effect: p.Effect) -> None:
        match effect:
            case p.Deliver():
                self._start(self._deliveries, effect.call.id, self._deliver(effect.call, effect.tool))
            case p.ConsultRules():
                self._start(self._single, f"rules {effect.call_id}", self._consult(effect.call_id))
            case p.Watch():
                self._watch([effect.call_id])
            case p.Send():
                self._start(self._sends, (effect.call_id, effect.number), self._send(effect))
            case p.Look():
                self._start(self._sends, (effect.call_id, effect.number), self._look(effect))
            case p.Withdraw():
                for key, task in list(self._sends.items()):
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
            case _:
                pass

    @property
    def are_sends_leaving(self) -> bool:
        return bool(self._leaving)

    def sends_left(self, timeout_s: float) -> Work:
        deadline = self._parts.process.clock() + timeout_s
        for task in [self._sends[key] for key in self._leaving if key in self._sends]:
            yield task.finished, max(0.0, deadline - self._parts.process.clock())

    def look_again(self) -> None:
        """Something was wished: a tool may have reported."""
        self._news.set()

    def kept(self, call_id: str) -> None:
        """The result of the call's delivery is stored."""
        self._outcomes.pop(call_id, None)

    def leave(self) -> Work:
        """End everything but deliveries and sends under way; a send that has left is waited for."""
        self.has_left = True
        leaving = [task for key, task in self._sends.items() if key in self._leaving]
        for task in [*self._single.values(), *(t for t in self._sends.values() if t not in leaving)]:
            task.cancel()
        yield from self.sends_left(SEND_S)
        for task in leaving:
            task.cancel()

    def drain(self, timeout_s: Callable[[], float | None]) -> Work:
        """Let deliveries finish, and leave what they came to. `timeout_s` is asked for what is left."""
        tasks = dict(self._deliveries)
        for task in tasks.values():
            while not task.finished.is_set and (left_s := timeout_s()) != 0.0:
                yield task.finished, min(1.0, left_s if left_s is not None else 1.0)
        for task in tasks.values():
            task.cancel()
        yield from self._leave_results(tasks.keys() - self._outcomes.keys() - self._promised)

    def _leave_results(self, abandoned: Collection[str]) -> Work:
        deadline = self._parts.process.clock() + LEAVE_TRIES_S
        while True:
            try:
                yield from self._parts.writer.access()
                break
            except UnavailableError:
                if self._parts.process.clock() > deadline:
                    raise
                yield LEAVE_EVERY_S
        store = self._parts.store
        for dispatched, left in self._outcomes.values():
            store.leave_result(
                left.call_id, left.attempts, left.result, dispatched=dispatched, unknown=left.outcome_unknown
            )
        store.take_back(self._unstarted)
        store.leave_attempts(self._parts.replica_id, self.ended, abandoned)

    # ---- tasks

    def _start(self, tasks: dict[Any, Task], key: Any, work: Work) -> Task:
        def done(finished: Task) -> None:
            if tasks.get(key) is finished:
                del tasks[key]
            if finished.error is not None:
                self._parts.writer.failed(finished.error)
                self._failed(finished.error)

        task = tasks[key] = self._parts.process.spawn(work, done)
        return task

    def _cancel(self, key: str) -> None:
        if key in self._single:
            self._single[key].cancel()

    def _pause(self, nominal_s: float, floor_s: float | None = None) -> Work:
        draw = self._parts.process.scheduler.random.random()
        wait = wait_s(nominal_s, floor_s=floor_s, draw=draw)
        if wait > 0:
            yield wait

    def _is_trusted(self, for_s: float) -> bool:
        trusted_for_s = self._parts.trusted_for_s()
        return not self.is_lost and 0 < trusted_for_s >= for_s

    def _trust(self, for_s: float) -> Work:
        while not self._is_trusted(for_s):
            yield TRUST_POLL_S

    # ---- upstream

    def _consult(self, call_id: str) -> Work:
        while True:
            yield 0.002
            if not self._parts.store.is_down:
                self._parts.store.consult(call_id)
                return
            yield CONSULT_AGAIN_S

    def _retrieve(self) -> Work:
        facts = None
        with contextlib.suppress(RequestError):
            facts = yield from self._client.retrieve()
        self._put(p.Retrieved(facts))

    def _stream(self, effect: p.OpenStream) -> Work:
        """Hold the stream; its events wait until history was read once. Its tasks end with it."""
        yield from self._pause(effect.after_s, effect.floor_s)
        self.may_forward.clear()
        try:
            stream = yield from self._client.stream()
        except RequestError as error:
            self._put(p.StreamClosed(error.failure))
            return
        self._put(p.StreamOpened())
        buffer: deque[Any] = deque()
        try:
            while buffer or stream.events or not stream.is_over:
                buffer.extend(stream.events)
                stream.events.clear()
                if not buffer:
                    stream.signal.clear()
                    yield stream.signal
                elif not self.may_forward.is_set:
                    yield self.may_forward
                else:
                    self._put(p.Received(buffer.popleft()))
                    yield 0.0
            self._put(p.StreamClosed(stream.failure))
        finally:
            stream.end()

    def _read_history(self, effect: p.ReadHistory) -> Work:
        yield from self._pause(effect.after_s, effect.floor_s)

        def page(events: list[Any]) -> Work:
            self._put(p.HistoryPage(events, effect.number))
            yield 0.0

        try:
            yield from self._client.pages(effect.since, (), page)
        except RequestError as error:
            self._put(p.HistoryFailed(error.failure, effect.number))
            return
        self._put(p.HistoryRead(number=effect.number))
        orphans, self._orphans = self._orphans, set()
        self._watch(orphans)

    def _send(self, effect: p.Send) -> Work:
        yield from self._pause(effect.after_s, effect.floor_s)
        key = (effect.call_id, effect.number)
        failure: p.Failure | None = None
        try:
            yield from self._trust(SEND_S)
            self._leaving.add(key)
            yield from self._client.send(
                effect.event, lambda: self._left(effect), self._lease.term, effect.number
            )
        except RequestError as error:
            failure = error.failure
        finally:
            self._leaving.discard(key)
        self._put(p.Sent(effect.call_id, failure, effect.number))

    def _left(self, effect: p.Send) -> None:
        self._parts.writer.left(
            lambda at: SendLeft(
                at, self._parts.replica_id, self._lease.term, json.loads(effect.event), effect.number
            )
        )

    def _look(self, effect: p.Look) -> Work:
        yield from self._pause(effect.after_s, effect.floor_s)
        findings: p.Findings | None = None
        try:
            for number in range(effect.rounds):
                if number:
                    yield LOOK_EVERY_S
                findings = None
                findings = yield from self._find(effect.call_id, effect.since)
                if findings.answers or (effect.is_for_verdict and findings.verdicts):
                    break
        except RequestError:
            pass
        if effect.retrieve and findings is not None:
            try:
                session = yield from self._client.retrieve()
                findings = replace(findings, session=session)
            except RequestError as error:
                findings = replace(findings, is_gone=error.failure.status in (404, 410))
        self._put(p.Looked(effect.call_id, findings, effect.number))

    def _find(self, call_id: str, since: float | None) -> Work:
        found: list[Any] = []

        def page(events: list[Any]) -> Work:
            found.extend(events)
            yield 0.0

        yield from self._client.pages(since, _SETTLING, page)
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

    def _deliver(self, call: Call, tool: Tool) -> Work:
        lease, parts = self._lease, self._parts
        body: bytes | None = None
        if call.attempts > 1:
            yield from parts.writer.access()
            body = parts.store.bodies.get(call.id)
        if body is None:
            body = build_body(call, lease.session_id)
        request = DeliveryRequest(parts.replica_id, lease.term, call, tool, body)
        try:
            outcome: Outcome = yield from parts.tools.deliver(parts.process, request, _Log(self, call, tool))
        except _NotStartedError:
            self._unstarted.add((call.id, call.attempts))
            return
        if outcome.result is None:
            self._promised.add(call.id)
            if not self.has_left:
                self._put(p.Promised(call.id, outcome.attempts))
            else:
                yield from self._leave_results(())
            return
        notice = p.Delivered(
            call.id, outcome.result, outcome.attempts, outcome_unknown=outcome.outcome_unknown
        )
        if outcome.code is not None:
            yield from parts.writer.access()
            for attempts, result in parts.store.called_back([call.id]).values():
                notice = p.Delivered(call.id, result, attempts)
        self._outcomes[call.id] = call.attempts, notice
        if not self.has_left:
            self._put(notice)
        else:
            yield from self._leave_results(())

    def start_attempt(self, start: AttemptStart, *, is_first: bool, is_noted: bool) -> Work:
        """Let an attempt leave: under a lease that holds, and once the store knows of it."""
        while is_first and (self.has_left or not self._is_trusted(0.0)):
            if self.has_left:
                raise _NotStartedError
            yield TRUST_POLL_S
        if not is_noted and not self.has_left:
            ended = [end for end in self.ended if end.call_id == start.call_id]
            self.ended = [end for end in self.ended if end.call_id != start.call_id]
            is_stored = yield from self._note(Batch(self._lease, started=[start], ended=ended))
            if not is_stored and is_first:
                raise _NotStartedError

    def note_ended(self) -> Work:
        """Let the store know at once how attempts went."""
        if not self.has_left:
            ended, self.ended = self.ended, []
            yield from self._note(Batch(self._lease, ended=ended))

    def _note(self, batch: Batch) -> Work:
        """Store how attempts go, unless the run ended meanwhile: that must not end the delivery."""
        try:
            yield from self._parts.writer.submit(batch)
        except LeaseLostError:
            if not self.has_left:
                raise
            self.ended += batch.ended
            return False
        return True

    def _watch(self, orphans: Collection[str]) -> None:
        if orphans:
            self._watches += 1
            self._start(self._single, f"watch {self._watches}", self._watch_orphans(set(orphans)))

    def _watch_orphans(self, orphans: set[str]) -> Work:
        store = self._parts.store
        while orphans:
            self._news.clear()
            yield from self._parts.writer.access()
            waiting = store.orphans(orphans)
            for id_, (attempts, result) in store.called_back(orphans).items():
                waiting.pop(id_, None)
                self._put(p.Delivered(id_, result, attempts))
            others = store.recall(orphans - waiting.keys())
            for call in others.values():
                if call.state == "queued":
                    self._put(p.Orphaned(call.id, is_unsent=True))
                elif call.result is not None and not call.is_over:
                    unknown = call.outcome_unknown
                    self._put(p.Delivered(call.id, call.result, call.attempts, outcome_unknown=unknown))
            left_s = {call_id: seconds for call_id, seconds in waiting.items() if seconds is not None}
            for call_id in sorted(waiting.keys() - left_s.keys()):
                self._put(p.Orphaned(call_id))
            orphans = set(left_s)
            if orphans:
                yield self._news, min(CALLBACKS_EVERY_S, max(ORPHANS_EVERY_S, min(left_s.values())))


class _NotStartedError(Exception):
    """The run was over before the delivery could begin."""


class _Log:
    """Notes the attempts of one delivery."""

    def __init__(self, errands: Errands, call: Call, tool: Tool) -> None:
        self._errands, self._call, self._tool = errands, call, tool
        self._clock = errands.clock
        self._since = self._clock()

    def started(self, attempt: int) -> Work:
        is_first = attempt == self._call.attempts
        is_noted = is_first and self._clock() - self._since < SLOT_WAIT_S
        start = AttemptStart(self._call.id, attempt, self._tool)
        yield from self._errands.start_attempt(start, is_first=is_first, is_noted=is_noted)

    def finished(self, attempt: int, code: str | None, *, was_written: bool, is_promise: bool) -> Work:
        callback_s = self._tool.callback_timeout_s if is_promise else None
        self._errands.ended.append(
            AttemptEnd(self._call.id, attempt, None, code, b"", at=0.0, callback_s=callback_s)
        )
        if not was_written:
            yield from self._errands.note_ended()
