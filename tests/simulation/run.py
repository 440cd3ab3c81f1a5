"""The model of `app.runner.runner`: one run of the session.

Effects are performed in the real order: what is to be saved is committed, then the rest leaves. Batches are
made by the real rules. Left out: messages that the store refuses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from app.core import protocol as p
from app.core.calls import Call
from app.core.rules import Rule
from app.core.session import SessionMachine
from app.core.tools import Tool
from app.runner.runner import NOTICES_MAX, DefectError
from app.runner.saving import Saving
from app.store.batches import Batch
from app.store.leases import SEND_S, Lease
from app.webhooks.wire import build_body
from tests.simulation.client import Client
from tests.simulation.errands import Errands, Parts
from tests.simulation.schedule import Signal, Work
from tests.simulation.store import Start

MachineClass = type[SessionMachine]


class Run:
    """One run of the attachment: `app.runner.runner.SessionRunner`."""

    machine_class: MachineClass = SessionMachine
    errands_class: type[Errands] = Errands

    def __init__(
        self,
        lease: Lease,
        start: Start,
        tools: dict[str, Tool],
        rules: tuple[Rule, ...],
        client: Client,
        parts: Parts,
        skipped: set[str],
    ) -> None:
        self.lease = lease
        self._parts, self._skipped = parts, skipped
        self._clock = parts.process.clock
        self._inbox: deque[p.Notice] = deque()
        self._awake = Signal()
        self._is_stopping = self._is_lost = False
        stored = start.stored
        orphans = [call.id for call in stored.calls if call.state == "dispatched"]
        self._errands = self.errands_class(
            lease, client, parts, self._put, orphans=orphans, failed=self._fail
        )
        deadline = None if start.idle_left_s is None else self._clock() + start.idle_left_s
        progress = replace(stored.progress, idle_deadline=deadline)
        self._machine = self.machine_class(start.settings, tools, replace(stored, progress=progress), rules)
        self._failure: Exception | None = None
        self._told: list[p.Notice] = []
        self._told_tools: p.ToolsChanged | None = None
        self._told_wish: int | None = None
        self._saving = Saving(
            lease,
            stored.calls,
            progress,
            start.wish,
            lambda effect: (build_body(effect.call, lease.session_id), None),
        )
        self._first: list[p.Notice] = [p.Decided(call_id, decision) for call_id, decision in start.decided]
        if start.wanted:
            self._first.append(p.Wanted(start.wanted))
        if start.is_detach_requested:
            self._first.append(p.DetachRequested())

    @property
    def machine(self) -> SessionMachine:
        return self._machine

    def _put(self, notice: p.Notice) -> None:
        self._inbox.append(notice)
        self._awake.set()

    def wish(self, notices: Sequence[p.Notice], number: int) -> None:
        self._told, self._told_wish = list(notices), number
        self._errands.look_again()
        self._put(p.Tick())

    def change_tools(self, tools: dict[str, Tool], rules: tuple[Rule, ...]) -> None:
        self._told_tools = p.ToolsChanged(tools, rules)
        self._put(p.Tick())

    def stop(self) -> None:
        self._is_stopping = True
        self._put(p.Tick())

    def lose(self) -> None:
        self._is_lost = self._errands.is_lost = True
        self.stop()

    def run(self) -> Work:
        try:
            yield from self._go()
        except Exception:
            yield from self._errands.leave()
            raise
        yield from self._errands.leave()
        if self._failure is not None:
            raise self._failure

    def _go(self) -> Work:
        yield from self._perform(self._machine.start())
        yield from self._handle(self._first)
        while not self._machine.is_over and not self._is_stopping:
            notices = yield from self._next()
            yield from self._handle(notices)
        if not self._machine.is_over and not self._is_lost:
            yield from self._finish_sends()

    def drain(self, timeout_s: Callable[[], float | None]) -> Work:
        is_over = self._machine.is_over
        yield from self._errands.drain((lambda: 0.0) if is_over else timeout_s)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self.lose()

    def _next(self) -> Work:
        due = [self._machine.next_wake(self._clock()), *self._saving.due(self._machine)]
        deadline = min((at for at in due if at is not None), default=None)
        while not self._inbox and (deadline is None or self._clock() < deadline):
            self._awake.clear()
            if deadline is None:
                yield self._awake
            else:
                yield self._awake, deadline - self._clock()
        yield 0.0
        notices = [self._inbox.popleft() for _ in range(min(NOTICES_MAX, len(self._inbox)))]
        notices += self._take_told()
        return notices or [p.Tick()]

    def _take_told(self) -> list[p.Notice]:
        told, self._told = self._told, []
        if self._told_tools is not None:
            told, self._told_tools = [self._told_tools, *told], None
        if self._told_wish is not None:
            self._saving.wish_seen, self._told_wish = self._told_wish, None
        return told

    def _handle(self, notices: Sequence[p.Notice]) -> Work:
        effects: list[p.Effect] = []
        is_history_settled = False
        for notice in notices:
            if isinstance(notice, p.Received):
                self._saving.has_events = True
                if notice.event.id and notice.event.id in self._skipped:
                    continue
            elif isinstance(notice, p.HistoryRead):
                known: dict[str, Call] = {}
                if ids := self._machine.to_recall:
                    yield from self._parts.writer.access()
                    known = self._parts.store.recall(ids)
                notice = p.HistoryRead(known, notice.number)  # noqa: PLW2901 - what follows sees only this
            elif isinstance(notice, p.HistoryPage):
                self._saving.has_events |= bool(notice.events)
                kept = [event for event in notice.events if event.id not in self._skipped]
                notice = p.HistoryPage(kept, notice.number)  # noqa: PLW2901 - what follows sees only this
            if isinstance(notice, p.HistoryRead | p.HistoryFailed):
                is_history_settled |= notice.number == self._machine.read_number
            effects += self._decide(notice)
        yield from self._perform(effects)
        if is_history_settled:
            self._errands.may_forward.set()

    def _decide(self, notice: p.Notice) -> list[p.Effect]:
        try:
            return self._machine.handle(notice, self._clock())
        except Exception as error:
            raise DefectError(notice.event.id if isinstance(notice, p.Received) else None) from error

    def _perform(self, effects: Sequence[p.Effect]) -> Work:
        yield from self._save(self._batch(effects))
        for effect in effects:
            self._errands.do(effect)
            self._parts.writer.between_effects()

    def _save(self, batch: Batch) -> Work:
        yield from self._parts.writer.submit(batch)
        for call in batch.calls:
            if call.result is not None:
                self._errands.kept(call.id)

    def _finish_sends(self) -> Work:
        self._errands.do(p.CloseStream())
        notices: list[p.Notice] = [p.Stopping()]
        deadline = self._clock() + SEND_S
        while True:
            effects = [effect for notice in notices for effect in self._decide(notice)]
            yield from self._save(self._batch(effects))
            left_s = deadline - self._clock()
            if left_s <= 0 or (not self._errands.are_sends_leaving and not self._inbox):
                return
            yield from self._errands.sends_left(left_s)
            notices = [n for n in self._inbox if isinstance(n, p.Sent | p.Delivered)]
            self._inbox.clear()

    def _batch(self, effects: Sequence[p.Effect]) -> Batch:
        ended, self._errands.ended = self._errands.ended, []
        return self._saving.batch(effects, self._machine, ended, self._clock())
