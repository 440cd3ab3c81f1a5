"""The model of a replica's way to the store: commits with unknown outcomes, outages, and deaths in between.

Left out: the group commit (a batch fails or succeeds by itself there too).
"""

from __future__ import annotations

from collections.abc import Callable

from app.store.batches import Batch
from app.store.leases import LeaseLostError
from app.store.writer import RETRY_EVERY_S, RETRY_S
from tests.simulation.record import Entry, Failed, Note, Record
from tests.simulation.schedule import KilledError, Process, Work
from tests.simulation.store import Store, UnavailableError
from tests.simulation.troubles import Troubles


class Writer:
    """One replica's writes and reads."""

    def __init__(
        self, replica_id: str, process: Process, store: Store, record: Record, troubles: Troubles
    ) -> None:
        self._replica_id, self._process, self._store = replica_id, process, store
        self._record, self._troubles = record, troubles

    def access(self) -> Work:
        """One read or small write: it takes a moment and fails while the store is away."""
        yield 0.002
        if self._store.is_down:
            raise UnavailableError

    def submit(self, batch: Batch) -> Work:
        """Commit the batch, again and again while the store is away.

        Raises:
            LeaseLostError, UnavailableError, ContradictionError: as `app.store.writer`.
        """
        if batch.is_empty:
            return
        scheduler, troubles = self._process.scheduler, self._troubles
        deadline = self._process.clock() + RETRY_S
        while True:
            yield 0.002
            self.perhaps_die("before a commit", troubles.crash_at_commit)
            if not (self._store.is_down or scheduler.chance(troubles.commit_fails)):
                is_held = self._store.write(self._replica_id, batch)
                self.perhaps_die("after a commit", troubles.crash_at_commit)
                if not scheduler.chance(troubles.commit_unknown):
                    break
            if self._process.clock() > deadline:
                raise UnavailableError
            yield RETRY_EVERY_S
        yield 0.001
        if not is_held:
            raise LeaseLostError(f"term {batch.lease.term} is over")

    def perhaps_die(self, where: str, probability: float) -> None:
        """Perhaps the process is killed at this very point."""
        if probability > 0 and self._process.scheduler.chance(probability):
            self._record.add(Note(self._process.scheduler.now, f"killed {where}", self._replica_id))
            self._process.is_alive = False
            raise KilledError

    def between_effects(self) -> None:
        self.perhaps_die("between effects", self._troubles.crash_at_effect)

    def perhaps_unheard(self) -> None:
        """Perhaps the answer to a write that was committed is lost."""
        if self._process.scheduler.chance(self._troubles.commit_unknown):
            raise UnavailableError

    def failed(self, error: Exception) -> None:
        """Work of this replica ended by an error; what the store or another replica causes is expected."""
        if not isinstance(error, UnavailableError | LeaseLostError):
            why = f"{error!r} from {error.__cause__!r}" if error.__cause__ else repr(error)
            self._record.add(Failed(self._process.scheduler.now, self._replica_id, why))

    def left(self, entry: Callable[[float], Entry]) -> None:
        self._record.add(entry(self._process.scheduler.now))
