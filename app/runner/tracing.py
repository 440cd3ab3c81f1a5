"""The trace of each call, as its run sees it: received, held, decided, delivered, posted, over.

Spans are children of `received`. The wait for a person is no span: `held` ends as it begins, and `decided`
is linked to it. The ids are the call's, so that another run or replica goes on with the same trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from app.core.calls import Call, webhook_id
from app.store.batches import Batch
from app.store.leases import Lease
from app.traces import ROOT, Span
from app.webhooks.delivery import AttemptReport

if TYPE_CHECKING:
    from app.otel import Traces

_NOTHING: Final[Mapping[str, str | int | None]] = MappingProxyType({})


class CallTraces:
    """What one run records of its calls. `calls` are those that were open when it began.

    `primary_thread_id` is that of calls without a thread, once a whole history has named it. `wall` is
    seconds since 1970.
    """

    def __init__(
        self, traces: Traces, lease: Lease, calls: Iterable[Call], wall: Callable[[], float] = time.time
    ) -> None:
        self.primary_thread_id: str | None = None
        self._traces, self._lease, self._wall = traces, lease, wall
        self._open = {call.id for call in calls}
        self._held = {call.id: _hold(call) for call in calls if call.state == "held"}

    def is_sampled(self, call_id: str) -> bool:
        """Whether the call is traced."""
        return self._traces.is_sampled(self._webhook_id(call_id))

    def committed(self, batch: Batch) -> None:
        """Record the turning points that the batch, which is committed, has stored."""
        for call in batch.calls:
            # One that upstream asks for again was received before.
            if call.id not in self._open and call.asked_at is None:
                self._record(call, "received", ROOT, took_s=self._since(_moment(call.processed_at)))
            self._open.add(call.id)
            self._hold(call)
            if call.is_over:
                self._open.discard(call.id)
                unknown = "outcome_unknown" if call.outcome_unknown else None
                self._record(call, "over", error="rejected" if call.state == "rejected" else unknown)

    def attempted(self, call: Call, report: AttemptReport) -> None:
        """Record a delivery attempt, if one was made."""
        if report.code != "unhealthy":
            more = {"bascule.attempt": report.attempt, "http.response.status_code": report.http_status}
            took_s = (report.finished_ms - report.started_ms) / 1000
            self._record(
                call, "delivery", report.attempt, more, took_s=took_s, error=report.code, is_request=True
            )

    def posted(self, call_id: str, outcome: str, status: int | None, took_s: float) -> None:
        """Record a send of a result or verdict, and what came of it."""
        attributes = self._ids(call_id) | {"http.response.status_code": status}
        error = None if outcome == "accepted" else outcome
        self._traces.record(
            Span(self._webhook_id(call_id), "post", attributes, took_s=took_s, error=error, is_request=True)
        )

    def _hold(self, call: Call) -> None:
        hold = self._held.get(call.id)
        if call.state == "held" and hold is None:
            self._held[call.id] = hold = _hold(call)
            self._record(call, "held", hold, {"bascule.gate": None if call.gate is None else call.gate.by})
        elif call.state != "held" and hold is not None:
            del self._held[call.id]
            if (decision := call.decision) is not None:
                more = {"bascule.decision": decision.result, "bascule.decided_via": decision.via}
                self._record(call, "decided", None, more, took_s=self._since(decision.at), link=hold)

    def _record(
        self,
        call: Call,
        name: str,
        part: str | int | None = None,
        attributes: Mapping[str, str | int | None] = _NOTHING,
        *,
        took_s: float = 0.0,
        error: str | None = None,
        link: str | None = None,
        is_request: bool = False,
    ) -> None:
        of_call = {
            "bascule.tool": call.tool,
            "bascule.kind": call.kind,
            "bascule.state": call.state,
            "bascule.thread_id": call.thread_id or self.primary_thread_id,
        }
        self._traces.record(
            Span(
                self._webhook_id(call.id),
                name,
                self._ids(call.id) | of_call | dict(attributes),
                part,
                took_s,
                error,
                link,
                is_request,
            )
        )

    def _ids(self, call_id: str) -> dict[str, str | int | None]:
        return {
            "bascule.tenant": self._lease.tenant,
            "bascule.session_id": self._lease.session_id,
            "bascule.call_id": call_id,
        }

    def _webhook_id(self, call_id: str) -> str:
        return webhook_id(self._lease.tenant, self._lease.session_id, call_id)

    def _since(self, moment: float | None) -> float:
        return 0.0 if moment is None else self._wall() - moment


def _hold(call: Call) -> str:
    """The part of a hold: a call can be held again after a delivery."""
    return f"held {call.attempts}"


def _moment(processed_at: str | None) -> float | None:
    try:
        return datetime.fromisoformat(processed_at).timestamp() if processed_at else None
    except ValueError:
        return None
