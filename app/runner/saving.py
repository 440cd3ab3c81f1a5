"""What of a run is saved, and when: effects become a batch.

Calls, decisions and finals are saved with the notice that changed them. Previews wait up to
`PARTIALS_EVERY_S`, and a position that moved alone up to `CURSOR_EVERY_S`. Times are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from app.core import protocol as p
from app.core.calls import REOPENING, Call, Decision
from app.core.session import SessionMachine
from app.store.batches import AttemptEnd, AttemptStart, Batch
from app.store.leases import Lease

PARTIALS_EVERY_S: Final = 0.25
"""How often previews are saved at most."""
CURSOR_EVERY_S: Final = 1.0
"""How late the cursor may be saved when nothing else is: a late one only means to read a little more."""

Bodies = Callable[[p.Deliver], tuple[bytes, str | None]]
"""Makes the body of a call's deliveries, and names the key for its callback's token."""


class Saving:
    """What one run has saved, and so what is news.

    `has_events` is set when events came, `wish_seen` to the number of the last wish that was brought; both
    are saved with the next batch.
    """

    def __init__(
        self, lease: Lease, calls: Iterable[Call], progress: p.Progress, wish_seen: int, bodies: Bodies
    ) -> None:
        self.has_events = False
        self.wish_seen: int | None = wish_seen
        self._lease, self._bodies = lease, bodies
        self._held: set[str] = set()
        self._decisions: dict[str, Decision | None] = {}
        for call in calls:
            self._decisions[call.id] = call.decision
            if call.state == "held":
                self._held.add(call.id)
        self._saved = progress
        self._saved_at = self._partials_at = 0.0

    def due(self, machine: SessionMachine) -> list[float]:
        """When something that waits is to be saved at the latest."""
        due = []
        if machine.messages.has_partials:
            due.append(self._partials_at + PARTIALS_EVERY_S)
        if machine.progress != self._saved:
            due.append(self._saved_at + CURSOR_EVERY_S)
        return due

    def batch(
        self, effects: Sequence[p.Effect], machine: SessionMachine, ended: list[AttemptEnd], now: float
    ) -> Batch:
        """Put together what is to be committed before any of the effects is performed."""
        batch = Batch(self._lease, ended=ended)
        for effect in effects:
            match effect:
                case p.SaveCall():
                    self._save_call(batch, effect.call)
                case p.RefuseDecision():
                    batch.refusals.append(effect)
                case p.SaveMessage():
                    batch.messages.append(effect.snapshot)
                case p.DropMessages():
                    batch.dropped += effect.ids
                case p.Deliver():
                    call = effect.call
                    batch.started.append(AttemptStart(call.id, call.attempts, effect.tool))
                    if call.attempts == 1:
                        batch.bodies.append((call.id, *self._bodies(effect)))
                case p.End():
                    batch.end = effect
                case _:
                    pass
        if machine.messages.has_partials and now >= self._partials_at + PARTIALS_EVERY_S:
            self._partials_at = now
            batch.messages += machine.messages.partials()
        batch.wish_seen, self.wish_seen = self.wish_seen, None
        self._save_progress(batch, machine.progress, now)
        return batch

    def _save_progress(self, batch: Batch, progress: p.Progress, now: float) -> None:
        if progress == self._saved and not (self.has_events and not batch.is_empty):
            return
        is_minor = replace(progress, cursor_at=self._saved.cursor_at) == self._saved
        if is_minor and batch.is_empty and now < self._saved_at + CURSOR_EVERY_S:
            return
        batch.progress = self._saved = progress
        batch.has_events, self.has_events = self.has_events, False
        if progress.idle_deadline is not None:
            batch.idle_left_s = progress.idle_deadline - now
        self._saved_at = now

    def _save_call(self, batch: Batch, call: Call) -> None:
        batch.calls.append(call)
        if call.decision is not None and call.decision != self._decisions.get(call.id):
            batch.decided.append(call)
        if call.state == "held" and call.gate is not None and call.gate.reason in REOPENING:
            batch.reopened += [] if call.decision is not None else [call.id]
        if call.state == "held":
            self._held.add(call.id)
        elif call.id in self._held:
            self._held.discard(call.id)
            batch.moved.append(call)
        if call.is_over:
            self._decisions.pop(call.id, None)
        else:
            self._decisions[call.id] = call.decision
