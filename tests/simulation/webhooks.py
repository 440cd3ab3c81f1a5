"""The modelled tools, and a delivery to one: attempts, waits and outcome as in `app.webhooks.delivery`.

A tool answers something new each time it runs, so that a result computed twice is told from the first.
Left out: slots per tool, progress of callbacks, replies that break the contract, everything below HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from app.core.calls import Call, Result, webhook_id
from app.core.outgoing import error_result
from app.core.retry import backoff_s, wait_s
from app.core.tools import Tool
from tests.simulation.record import Reached, Record, Replied
from tests.simulation.schedule import Process, Scheduler, Signal, Work
from tests.simulation.store import Store
from tests.simulation.troubles import Troubles

RETRY_START_S, RETRY_CAP_S = 0.5, 10.0
REPORT_EVERY_S, REPORTS_MAX = 1.0, 60
"""A tool repeats its report until it gets an answer."""
_REPEATED = {
    "never": frozenset[str](),
    "connect_only": frozenset({"unsent", "asked"}),
    "safe": frozenset({"unsent", "asked", "sent"}),
}


class AttemptLog(Protocol):
    """Who is told of attempts."""

    def started(self, attempt: int) -> Work: ...

    def finished(self, attempt: int, code: str | None, *, was_written: bool, is_promise: bool) -> Work: ...


@dataclass(frozen=True, slots=True)
class DeliveryRequest:
    """What is to be delivered, by which run."""

    replica: str
    term: int
    call: Call
    tool: Tool
    body: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a delivery came to; no result after a 202. `code` is None unless something was wrong."""

    result: Result | None
    attempts: int
    outcome_unknown: bool = False
    code: str | None = None


@dataclass(frozen=True, slots=True)
class _Tried:
    """One attempt; `retry` is what a policy must allow for another."""

    outcome: Outcome
    retry: str | None
    status: int | None = None
    floor_s: float | None = None


class Tools:
    """All webhooks of the tenant."""

    def __init__(
        self,
        scheduler: Scheduler,
        record: Record,
        troubles: Troubles,
        store: Store,
        hint: Callable[[], None],
    ) -> None:
        self._scheduler, self._record, self._troubles = scheduler, record, troubles
        self._store, self._hint = store, hint
        self._runs = 0

    def deliver(self, process: Process, request: DeliveryRequest, log: AttemptLog) -> Work:
        """Deliver a call from a process; return an `Outcome`."""
        tool, first = request.tool, request.call.attempts
        yield from log.started(first)
        deadline = process.clock() + tool.timeout_s
        failures = 0
        while True:
            number = first + failures
            failures += 1
            tried: _Tried = yield from self._try(process, request, number, deadline)
            code = None if tried.retry is None else tried.retry
            is_promise = tried.outcome.result is None
            yield from log.finished(number, code, was_written=tried.retry != "unsent", is_promise=is_promise)
            if tried.retry not in _REPEATED[tool.retry]:
                return replace(tried.outcome, code=code)
            nominal_s = backoff_s(failures, start_s=RETRY_START_S, cap_s=RETRY_CAP_S)
            pause_s = wait_s(nominal_s, floor_s=tried.floor_s, draw=self._scheduler.random.random())
            if process.clock() + pause_s >= deadline:
                return replace(tried.outcome, code=code)
            yield pause_s
            if process.clock() >= deadline:
                return replace(tried.outcome, code=code)
            yield from log.started(number + 1)

    def _try(self, process: Process, request: DeliveryRequest, number: int, deadline: float) -> Work:
        scheduler, troubles, tool = self._scheduler, self._troubles, request.tool
        if scheduler.chance(troubles.tool_refuses):
            yield 0.01
            return _Tried(Outcome(_error("not reached"), number), "unsent")
        travel_s = scheduler.between(0.005, 0.05)
        work_s = scheduler.between(1.0, 12.0) if scheduler.chance(troubles.tool_slow) else travel_s
        answer = Signal()
        is_cut, fate = scheduler.chance(troubles.tool_cut), scheduler.random.random()

        def arrive() -> None:
            is_busy = fate < troubles.tool_busy
            self._reached(request, number, has_run=not is_busy)
            if is_busy:
                scheduler.after(travel_s, lambda: answer.set((503, None)))
            elif troubles.tool_promises and scheduler.chance(troubles.tool_promises):
                if not is_cut:
                    scheduler.after(travel_s, lambda: answer.set((202, None)))
                if not scheduler.chance(troubles.tool_forgets):
                    content = self._content(request.call)
                    scheduler.after(
                        scheduler.between(0.0, 8.0), lambda: self._report(request.call.id, content)
                    )
            elif not is_cut:
                status = 500 if fate > 1 - troubles.tool_fails else 200
                content = self._content(request.call)
                scheduler.after(work_s, lambda: answer.set((status, content)))

        scheduler.after(travel_s, arrive)
        limit_s = max(0.0, deadline - process.clock())
        yield (
            answer,
            (
                travel_s + scheduler.between(0.0, 0.2)
                if is_cut
                else min(limit_s, tool.attempt_timeout_s or limit_s)
            ),
        )
        if not answer.is_set:
            outcome = Outcome(_error("cut; it may have run"), number, tool.retry != "safe")
            return _Tried(outcome, "sent")
        status, content = answer.value
        if status == 202:
            return _Tried(Outcome(None, number), None, status)
        self._record.add(Replied(scheduler.now, request.replica, request.term, request.call.id, number))
        if status == 503:
            return _Tried(Outcome(_error("busy"), number), "asked", status, floor_s=1.0)
        if status == 500:
            return _Tried(Outcome(_error(f"status 500: {content}"), number), "sent", status)
        return _Tried(Outcome(_ok(content), number), None, status)

    def _report(self, call_id: str, content: str, tries: int = 1) -> None:
        """The tool reports, again and again while nobody answers."""
        if self._store.is_down and tries < REPORTS_MAX:
            self._scheduler.after(REPORT_EVERY_S, lambda: self._report(call_id, content, tries + 1))
        elif not self._store.is_down and self._store.report(call_id, _ok(content)):
            self._hint()

    def _reached(self, request: DeliveryRequest, number: int, *, has_run: bool) -> None:
        call, tool = request.call, request.tool
        self._record.add(
            Reached(
                self._scheduler.now, request.replica, request.term, call.id, tool.name, tool.retry, number,
                webhook_id("t", "s", call.id), request.body, has_run,
            )
        )  # fmt: skip

    def _content(self, call: Call) -> str:
        self._runs += 1
        is_odd = self._scheduler.chance(self._troubles.tool_odd)
        return f"{'odd ' if is_odd else ''}{call.tool} run {self._runs} of {call.id}"


def _ok(text: str) -> Result:
    return Result(json.dumps([{"type": "text", "text": text}]).encode(), is_error=False)


_error: Callable[[str], Result] = error_result
