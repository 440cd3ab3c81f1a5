"""What lies between a replica and the modelled upstream: the network, and what it makes of requests.

Every request is one generator; it raises `RequestError` with the failure that `app.upstream` would report.
A request that has left arrives, or not, whatever becomes of its process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from app.core import protocol as p
from app.core.protocol import Failure
from app.store.leases import SEND_S
from app.upstream.failures import reach_of
from tests.simulation.schedule import Process, Signal, Work
from tests.simulation.upstream import T0, Stream, Upstream


class RequestError(Exception):
    """A request failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Client:
    """The requests of one replica."""

    def __init__(self, process: Process, upstream: Upstream) -> None:
        self._process, self._scheduler, self._upstream = process, process.scheduler, upstream

    def retrieve(self) -> Work:
        yield self._travel_s()
        self._reach()
        if self._happens("retrieve_fails"):
            raise RequestError(Failure("unknown", 503, "overloaded"))
        upstream = self._upstream
        policy = {"type": "agent_toolset_20260401"}
        policy["default_config"] = {"permission_policy": {"type": upstream.policy}}  # type: ignore[assignment]
        environment = "cloud" if upstream.is_cloud else "self_hosted"
        is_over = upstream.over is not None
        return p.SessionFacts(is_over, (policy,), environment, T0)  # type: ignore[arg-type]  # a text of two

    def stream(self) -> Work:
        yield self._travel_s()
        self._reach()
        if self._happens("open_fails"):
            raise RequestError(Failure("unknown", 503, "overloaded"))
        stream: Stream = self._upstream.open(self._process)
        return stream

    def pages(self, since: float | None, types: Sequence[str], each: Callable[[list[Any]], Work]) -> Work:
        """Walk the history; `each` is run with each page."""
        limit, place = self._scheduler.random.choice((3, 10, 50)), 0
        since = None if since is None else since - 1e-6
        while place >= 0:
            yield self._travel_s()
            self._reach()
            if self._happens("list_forbidden"):
                raise RequestError(Failure("refused", 403, "no"))
            if self._happens("list_fails"):
                raise RequestError(Failure("unknown", 503, "overloaded"))
            events, place = self._upstream.page(place, limit, since, types)
            if events:
                yield from each(events)

    def send(self, event: bytes, left: Callable[[], None], term: int, number: int) -> Work:
        """Send; `left` is called when the request leaves."""
        scheduler, upstream = self._scheduler, self._upstream
        if self._happens("send_unsent") or upstream.is_down:
            yield 0.01
            is_busy = scheduler.chance(0.5)
            raise RequestError(
                Failure("unsent", 429 if is_busy else None, "", retry_after_s=2.0 if is_busy else None)
            )
        if self._happens("send_unauthorized"):
            yield 0.01
            raise RequestError(Failure("refused", 401, "who are you"))
        left()
        answer = Signal()
        body = json.loads(event)
        is_late = self._happens("send_late")
        travel_s = scheduler.between(1.0, SEND_S - 0.2) if is_late else self._travel_s()
        is_lost, is_unheard = self._happens("send_lost"), self._happens("send_answer_lost")
        is_conflict = self._happens("send_conflict")

        def arrive() -> None:
            if is_conflict:
                answer.set((409, "conflict"))
                return
            status, message = upstream.arrive(body, by="us", term=term, number=number)
            if not is_unheard:
                scheduler.after(0.01, lambda: answer.set((status, message)))
            elif scheduler.chance(0.5):
                scheduler.after(0.01, lambda: answer.set((502, "bad gateway")))

        if not is_lost:
            scheduler.after(travel_s, arrive)
        yield answer, SEND_S
        status, message = answer.value if answer.is_set else (None, "no complete answer")
        if status != 200:
            reach = "unknown" if status is None else reach_of(status)
            raise RequestError(Failure(reach, status, message))

    def _travel_s(self) -> float:
        return self._scheduler.between(0.01, 0.05)

    def _reach(self) -> None:
        if self._upstream.is_down:
            raise RequestError(Failure("unsent", None, "cannot connect"))

    def _happens(self, trouble: str) -> bool:
        probability = getattr(self._upstream.troubles, trouble)
        return probability > 0 and self._scheduler.chance(probability)
