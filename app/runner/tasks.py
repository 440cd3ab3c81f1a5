"""What all tasks of one run share: the lease that they act under, and the inbox that they report to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine

from app.core import protocol as p
from app.logs import logger
from app.runner.budget import UNLIMITED, Budget, Unlimited
from app.runner.callbacks import Callbacks
from app.runner.tracing import CallTraces
from app.store.leases import Lease
from app.store.writer import Writer
from app.webhooks.delivery import Deliverer

if TYPE_CHECKING:
    from app.otel import Traces

TRUST_POLL_S: Final = 0.2

_K = TypeVar("_K")

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What every run of a replica shares.

    `trusted_for_s` says for how many seconds the replica's leases still hold, `draw` is a random number in
    [0, 1). `budget` is shared by the runs of one credential. `traces` is None where nothing is traced.
    """

    replica_id: str
    engine: AsyncEngine
    writer: Writer
    deliverer: Deliverer
    callbacks: Callbacks
    trusted_for_s: Callable[[], float]
    draw: Callable[[], float]
    budget: Budget | Unlimited = UNLIMITED
    traces: Traces | None = None


class Tasks:
    """The tasks of one run. `failed` is called with what ended one by a defect.

    Set `is_lost` when the lease may be another's: nothing is begun any more, also if the replica is well
    again. `has_left` is set when the run is over; what is left then is for the next one.
    """

    def __init__(
        self,
        lease: Lease,
        parts: Parts,
        inbox: asyncio.Queue[p.Notice],
        failed: Callable[[BaseException], None],
        traces: CallTraces | None = None,
    ) -> None:
        self.lease, self.parts, self.inbox, self.traces = lease, parts, inbox, traces
        self.is_lost = self.has_left = False
        self._failed = failed

    def start(self, tasks: dict[_K, asyncio.Task[None]], key: _K, work: Coroutine[Any, Any, None]) -> None:
        """Run some work as the task of this key, in place of an earlier one."""
        task = asyncio.create_task(work)
        tasks[key] = task

        def done(finished: asyncio.Task[None]) -> None:
            if tasks.get(key) is finished:
                del tasks[key]
            if not finished.cancelled() and (error := finished.exception()) is not None:
                log.error("task_failed", session_id=self.lease.session_id, error=repr(error))
                self._failed(error)

        task.add_done_callback(done)

    def is_trusted(self, for_s: float) -> bool:
        """Whether the lease surely holds for so long."""
        trusted_for_s = self.parts.trusted_for_s()
        return not self.is_lost and 0 < trusted_for_s >= for_s

    async def trust(self, for_s: float) -> None:
        """Wait until the lease holds for as long as an act may take; a lost lease cancels the task."""
        while not self.is_trusted(for_s):  # noqa: ASYNC110 - it is a clock that runs, not an event
            await asyncio.sleep(TRUST_POLL_S)
