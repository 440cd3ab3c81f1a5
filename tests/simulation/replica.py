"""The model of `app.runner.fleet`: one replica, its lease, and the run that it supervises.

Writes are fenced by the term and acts by the trusted time. Left out: several sessions, tenants, credentials,
budgets, notifications by id, paced adoption.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from app.core import protocol as p
from app.core.rules import Rule
from app.core.tools import Tool
from app.runner.fleet import DEFECTS_MAX, DRAIN_S, POLL_S, RESTART_CAP_S, RESTARTS_MAX, STARTS_PER_S
from app.runner.runner import DefectError
from app.store.batches import Batch
from app.store.leases import MARGIN_S, RENEW_S, SEND_S, TTL_S, Lease, LeaseLostError
from tests.simulation.client import Client
from tests.simulation.errands import Parts
from tests.simulation.run import Run
from tests.simulation.schedule import Process, Signal, Task, Work
from tests.simulation.store import Store, UnavailableError
from tests.simulation.webhooks import Tools
from tests.simulation.writer import Writer


class Replica:
    """One process of the service: `app.runner.fleet.Fleet`."""

    run_class: type[Run] = Run

    def __init__(
        self, replica_id: str, process: Process, store: Store, writer: Writer, tools: Tools, client: Client
    ) -> None:
        self.replica_id, self.process = replica_id, process
        self.has_stopped = Signal()
        self._store, self._writer, self._client = store, writer, client
        self._parts = Parts(replica_id, process, store, writer, tools, self.trusted_for_s)
        self._trusted_until = process.clock()
        self._run: Run | None = None
        self._lease: Lease | None = None
        self._task: Task | None = None
        self._draining: list[Task] = []
        self._registry: tuple[int, dict[str, Tool], tuple[Rule, ...]] | None = None
        self._is_stopping = False
        self._stopping_at: float | None = None
        self._failed_events: dict[str, int] = {}
        self._hint = Signal()
        self._tasks = [process.spawn(self._renewing()), process.spawn(self._polling())]

    def trusted_for_s(self) -> float:
        return self._trusted_until - self.process.clock()

    def hint(self) -> None:
        """A wake-up arrived: something may have been wished."""
        if self.process.is_alive:
            self._hint.set()

    # ---- leases

    def _renewing(self) -> Work:
        while True:
            with contextlib.suppress(UnavailableError):
                yield from self._renew()
            self._lose_if_late()
            yield RENEW_S

    def _lose_if_late(self) -> None:
        """End the run when the lease is not sure any more: a pause of the process ends trust too."""
        if self.trusted_for_s() <= 0:
            self._lose()

    def _renew(self) -> Work:
        self._lose_if_late()
        began = self.process.clock()
        yield from self._writer.access()
        self._store.renew(self.replica_id)
        self._writer.perhaps_unheard()
        self._trusted_until = began + TTL_S - MARGIN_S

    def _polling(self) -> Work:
        while True:
            with contextlib.suppress(UnavailableError):
                yield from self._poll()
            self._hint.clear()
            yield self._hint, POLL_S

    def _poll(self) -> Work:
        if self.trusted_for_s() <= SEND_S:
            return
        yield from self._writer.access()
        lease = self._store.claim(self.replica_id)
        self._writer.perhaps_unheard()
        if lease is not None:
            self._begin(lease)
        yield from self._writer.access()
        a = self._store.attachment
        is_wished = a.replica_id == self.replica_id and a.wish != a.wish_seen
        wish, settings, is_detached, wanted = a.wish, a.settings, a.detach_requested, a.wanted
        yield from self._compare(self._store.held(self.replica_id))
        if is_wished and self._run is not None:
            run = self._run
            yield from self._writer.access()
            notices: list[p.Notice] = [p.SettingsChanged(settings)]
            notices += [p.Decided(call_id, decision) for call_id, decision in self._store.decided()]
            notices += [p.Wanted(wanted)] if wanted else []
            notices += [p.DetachRequested()] if is_detached else []
            run.wish(notices, wish)
        yield from self._refresh_registry()

    def _compare(self, held: Lease | None) -> Work:
        """Give back a lease that nobody runs here, and end a run whose lease is another's."""
        mine = self._lease if self._task is not None else None
        if held is not None and held != mine:
            yield from self._release(held)
        if self._run is not None and self._lease != held:
            self._run.lose()

    def _refresh_registry(self) -> Work:
        if self._task is None:
            self._registry = None
        elif self._registry is not None and self._registry[0] != self._store.tools_version:
            yield from self._writer.access()
            self._registry = self._store.registry()
            if self._run is not None:
                self._run.change_tools(*self._registry[1:])

    # ---- runs

    def _begin(self, lease: Lease) -> None:
        self._lose()
        self._lease, self._run = lease, None
        self._task = self.process.spawn(self._supervise(lease), self._ended(lease))

    def _lose(self) -> None:
        """End a run whose lease is another's, or may be; one that has not begun would act on old news."""
        if self._run is not None:
            self._run.lose()
        elif self._task is not None and not self._task.finished.is_set:
            self._task.cancel()

    def _ended(self, lease: Lease) -> Callable[[Task], None]:
        def ended(task: Task) -> None:
            if self._lease == lease:
                self._run = self._task = self._lease = None
            if task.error is not None:
                self._writer.failed(task.error)

        return ended

    def _supervise(self, lease: Lease) -> Work:
        delay_s = 1.0
        while True:
            try:
                yield from self._run_once(lease)
                return
            except LeaseLostError:
                return
            except UnavailableError:
                yield from self._release(lease)
                return
            except Exception as error:
                self._writer.failed(error)
                if isinstance(error, DefectError) and error.event_id:
                    count = self._failed_events.get(error.event_id, 0) + 1
                    self._failed_events[error.event_id] = count
            yield from self._writer.access()
            if not self._store.holds(self.replica_id, lease):
                pass
            elif self._store.count_restart() > RESTARTS_MAX:
                yield from self._writer.submit(Batch(lease, end=p.End("internal_error", "again and again")))
                return
            yield delay_s
            delay_s = min(delay_s * 2, RESTART_CAP_S)

    def _run_once(self, lease: Lease) -> Work:
        yield 1 / STARTS_PER_S
        yield from self._writer.access()
        start = self._store.load(lease)
        if start is None:
            return
        if self._registry is None:
            yield from self._writer.access()
            self._registry = self._store.registry()
        skipped = {id_ for id_, count in self._failed_events.items() if count >= DEFECTS_MAX}
        run = self.run_class(lease, start, *self._registry[1:], self._client, self._parts, skipped)
        if self._lease == lease:
            self._run = run
        if self._is_stopping:
            run.stop()
        try:
            yield from run.run()
        finally:
            if self._run is run:
                self._run = None
            if self.process.is_alive:
                self._draining.append(self.process.spawn(run.drain(self._drain_s)))
        yield from self._release(lease)

    def _drain_s(self) -> float | None:
        """Deliveries may take as long as their tools may, unless the process is to end."""
        if self._stopping_at is None:
            return None
        return max(0.0, self._stopping_at + DRAIN_S - self.process.clock())

    def _release(self, lease: Lease) -> Work:
        try:
            yield from self._writer.access()
            self._store.release(self.replica_id, lease)
        except UnavailableError:
            pass

    # ---- the end

    def stop(self) -> None:
        """SIGTERM: give the lease back at once, let deliveries finish, then leave."""
        if self.process.is_alive and not self._is_stopping:
            self.process.spawn(self._stop())

    def _stop(self) -> Work:
        self._is_stopping, self._stopping_at = True, self.process.clock()
        self._tasks[1].cancel()
        if self._run is not None:
            self._run.stop()
        elif self._task is not None:
            self._task.cancel()
        if self._task is not None:
            yield self._task.finished
        for task in self._draining:
            yield task.finished
        self._tasks[0].cancel()
        try:
            yield from self._writer.access()
            self._store.leave(self.replica_id)
        except UnavailableError:
            pass
        self.process.is_alive = False
        self.has_stopped.set()
