"""The modelled store: committed state only, fenced by term, with its own clock.

One session, one tenant. Each method is one transaction of `app/store`, with the same conditions; what is left
out is everything about keys, paging, retention and other sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from app.core import protocol as p
from app.core.calls import END_STATES, Call, Decision, Gate, Result
from app.core.rules import VIA, Rule, ruling
from app.core.session import Stored
from app.core.tools import Tool
from app.store.batches import AttemptEnd, Batch
from app.store.leases import TTL_S, Lease
from app.store.runs import OVER_MAX
from tests.simulation.record import (
    Claimed,
    Committed,
    DecisionMade,
    LeftResult,
    Note,
    Record,
    ReportTaken,
    TakenBack,
    ToolsSet,
)
from tests.simulation.schedule import Scheduler

NOT_ATTACHED = ("ended", "detached")
_FINAL = END_STATES - {"interrupted"}


class UnavailableError(Exception):
    """The store cannot be used now."""


class ContradictionError(Exception):
    """A call that is over in the store was to be written again."""


@dataclass(slots=True)
class Attachment:
    """The session's row. `idle_deadline` is in the store's time."""

    settings: p.Settings
    status: str = "attaching"
    replica_id: str | None = None
    term: int = 0
    progress: p.Progress = field(default_factory=p.Progress)
    idle_deadline: float | None = None
    wish: int = 0
    wish_seen: int = 0
    detach_requested: bool = False
    wanted: tuple[str, ...] = ()
    end_reason: str | None = None
    restarts: int = 0


@dataclass(slots=True)
class DecisionRow:
    """A decision; `accepted` and `sending` ones stand."""

    id: str
    call_id: str
    decision: Decision
    status: str


@dataclass(slots=True)
class DeliveryRow:
    """An attempt: who began it, of which tool, until when it may report, whether it did."""

    replica_id: str
    tool: str
    deadline_at: float
    is_finished: bool = False
    code: str | None = None
    callback_s: float | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """What a run begins with: `app.store.runs.Start` without what is not modelled."""

    settings: p.Settings
    stored: Stored
    idle_left_s: float | None
    wish: int
    is_detach_requested: bool
    wanted: tuple[str, ...]
    decided: tuple[tuple[str, Decision], ...]


class Store:
    """Committed state. `is_down` makes every access fail; whoever calls looks at it."""

    def __init__(
        self, scheduler: Scheduler, record: Record, settings: p.Settings, tools: Mapping[str, Tool]
    ) -> None:
        self._scheduler, self._record = scheduler, record
        self.attachment = Attachment(settings)
        self.replicas: dict[str, float] = {}
        self.calls: dict[str, Call] = {}
        self.decisions: list[DecisionRow] = []
        self.deliveries: dict[tuple[str, int], DeliveryRow] = {}
        self.bodies: dict[str, bytes] = {}
        self.callbacks: dict[str, Result] = {}
        self.messages: dict[str, p.Snapshot] = {}
        self.tools: dict[str, Tool] = {}
        self.tools_version = 0
        self.rules: tuple[Rule, ...] = ()
        self.is_down = False
        self.set_tools(tools)

    @property
    def now(self) -> float:
        return self._scheduler.now

    # ---- leases

    def renew(self, replica_id: str) -> None:
        self.replicas[replica_id] = self.now + TTL_S

    def claim(self, replica_id: str) -> Lease | None:
        """Take the attachment if nobody runs it."""
        a = self.attachment
        expires_at = self.replicas.get(a.replica_id or "")
        is_free = expires_at is None or expires_at <= self.now
        if a.status in NOT_ATTACHED or not is_free:
            return None
        a.replica_id, a.term = replica_id, a.term + 1
        self._record.add(Claimed(self.now, replica_id, a.term))
        return Lease("t", "s", a.term)

    def held(self, replica_id: str) -> Lease | None:
        """The lease that the replica holds by the store's account."""
        a = self.attachment
        is_held = a.replica_id == replica_id and a.status not in NOT_ATTACHED
        return Lease("t", "s", a.term) if is_held else None

    def release(self, replica_id: str, lease: Lease) -> None:
        if self.attachment.term == lease.term and self.attachment.replica_id == replica_id:
            self.attachment.replica_id = None

    def leave(self, replica_id: str) -> None:
        self.replicas.pop(replica_id, None)

    # ---- what a run writes

    def holds(self, replica_id: str, lease: Lease) -> bool:
        return self.attachment.term == lease.term and self.attachment.replica_id == replica_id

    def write(self, replica_id: str, batch: Batch) -> bool:
        """Write a batch; return whether the lease held.

        Raises:
            ContradictionError: a call of the batch is over; nothing was written.
        """
        if not self.holds(replica_id, batch.lease):
            return False
        calls = {call.id: call for call in batch.calls}
        for call in calls.values():
            known = self.calls.get(call.id)
            if known is not None and known.state in _FINAL and known.state != call.state:
                raise ContradictionError(f"{call.id}: {known.state} was to become {call.state}")
        self._write_decisions(batch)
        for call in calls.values():
            known = self.calls.get(call.id, call)
            call = _with_left(call, known)  # noqa: PLW2901 - what is stored is this
            # What never changes is kept from the first record, and what has no column is not kept.
            self.calls[call.id] = replace(
                call, input=known.input, processed_at=known.processed_at, decision=None, asked_at=None,
                served_by=None,
            )  # fmt: skip
        for call_id, body, _ in batch.bodies:
            self.bodies.setdefault(call_id, body)
        for start in batch.started:
            row = DeliveryRow(replica_id, start.tool.name, self.now + start.tool.timeout_s)
            known_row = self.deliveries.setdefault((start.call_id, start.attempt), row)
            if not known_row.is_finished:
                known_row.deadline_at = row.deadline_at
        for end in batch.ended:
            if (end.call_id, end.attempt) in self.deliveries:
                self._end_attempt(self.deliveries[end.call_id, end.attempt], end)
        self._write_messages(batch)
        self._write_attachment(batch)
        self._record.add(
            Committed(
                self.now, replica_id, batch.lease.term, tuple(calls.values()), tuple(batch.messages),
                tuple((s.call_id, s.attempt) for s in batch.started), batch.end,
                batch.progress and batch.progress.status,
            )
        )  # fmt: skip
        return True

    def _write_decisions(self, batch: Batch) -> None:
        for refusal in batch.refusals:
            self._update_decision(refusal.decision_id, "refused")
        seen: list[tuple[str, Decision]] = []
        for call in {call.id: call for call in batch.decided}.values():
            decision = call.decision
            if decision is None:
                continue
            if decision.id is not None:
                self._update_decision(decision.id, decision.status)
            else:
                seen.append((call.id, decision))
        for call_id in batch.reopened:
            for row in self.decisions:
                is_rules = row.status == "sending" and row.decision.via == VIA
                if row.call_id == call_id and (row.status == "accepted" or is_rules):
                    row.status = "spent"
        for call in {call.id: call for call in batch.moved}.values():
            is_acted_on = call.decision is not None and call.decision.status == "accepted"
            kept = (call.decision.id or f"seen_{call.id}") if call.decision and is_acted_on else None
            for row in self.decisions:
                is_standing = row.status in ("sending", "accepted")
                if row.call_id == call.id and row.id != kept and is_standing:
                    row.status = "refused"
        for call_id, decision in seen:
            for row in self.decisions:
                if row.call_id == call_id and row.status == "sending":
                    row.status = "refused"
            id_ = f"seen_{call_id}"
            is_new = all(row.id != id_ for row in self.decisions) and self._standing(call_id) is None
            if is_new:
                self.decisions.append(DecisionRow(id_, call_id, decision, decision.status))

    def _update_decision(self, id_: str, status: str) -> None:
        for row in self.decisions:
            if row.id == id_:
                row.status = status

    def _write_messages(self, batch: Batch) -> None:
        for id_ in batch.dropped:
            if id_ in self.messages and self.messages[id_].state == "partial":
                del self.messages[id_]
        for snapshot in {snapshot.id: snapshot for snapshot in batch.messages}.values():
            known = self.messages.get(snapshot.id)
            if known is None or known.state == "partial":
                self.messages[snapshot.id] = snapshot

    def _write_attachment(self, batch: Batch) -> None:
        a, progress, end = self.attachment, batch.progress, batch.end
        if progress is not None:
            a.progress, a.status = progress, progress.status
            left_s = batch.idle_left_s
            a.idle_deadline = None if left_s is None else self.now + left_s
        if end is not None:
            a.status = "detached" if end.reason == "detached" else "ended"
            a.end_reason, a.replica_id = end.reason, None
        if batch.wish_seen is not None:
            if batch.wish_seen >= a.wish:
                a.wanted = ()
            a.wish_seen = max(a.wish_seen, batch.wish_seen)

    def leave_result(
        self, call_id: str, attempts: int, result: Result, *, dispatched: int, unknown: bool
    ) -> None:
        call = self.calls.get(call_id)
        if (
            call is None
            or call.state not in ("dispatched", "interrupted")
            or call.attempts != dispatched
            or call.result is not None
        ):
            return
        self.calls[call_id] = replace(
            call,
            state="answered" if call.state == "dispatched" else call.state,
            attempts=attempts,
            result=result,
            outcome_unknown=unknown,
        )
        self._record.add(LeftResult(self.now, call_id, attempts, result))

    def _end_attempt(self, row: DeliveryRow, end: AttemptEnd) -> None:
        row.is_finished, row.code, row.callback_s = True, end.code, end.callback_s
        if end.callback_s is not None:
            row.deadline_at = self.now + end.callback_s

    def leave_attempts(
        self, replica_id: str, ended: Collection[AttemptEnd], abandoned: Collection[str]
    ) -> None:
        done = {(end.call_id, end.attempt): end for end in ended}
        for key, row in self.deliveries.items():
            is_last = (key[0], key[1] + 1) not in self.deliveries
            is_given_up = key[0] in abandoned and is_last
            if row.replica_id == replica_id and key in done and not row.is_finished:
                self._end_attempt(row, done[key])
            if row.replica_id == replica_id and is_given_up:
                row.is_finished, row.code = True, "abandoned"

    def take_back(self, calls: Collection[tuple[str, int]]) -> None:
        """Let calls wait again whose delivery was committed and never began."""
        for call_id, attempt in sorted(calls):
            call = self.calls[call_id]
            if call.state == "dispatched" and call.attempts == attempt:
                self.calls[call_id] = replace(call, state="queued", attempts=attempt - 1)
                self.deliveries.pop((call_id, attempt), None)
                self._record.add(TakenBack(self.now, call_id, attempt))

    def count_restart(self) -> int:
        self.attachment.restarts += 1
        return self.attachment.restarts

    # ---- what a run reads

    def load(self, lease: Lease) -> Start | None:
        a = self.attachment
        if a.term != lease.term:
            return None
        open_ = [self._joined(call) for call in self.calls.values() if call.state not in END_STATES]
        over = [self._joined(call) for call in self.calls.values() if call.state in END_STATES][-OVER_MAX:]
        partials = tuple(id_ for id_, snapshot in self.messages.items() if snapshot.state == "partial")
        progress = replace(a.progress, status=a.status if a.status in _RUNNING else "attaching")
        numbered = [self._numbered(call) for call in open_]
        stored = Stored(tuple(_unruled(call) for call in numbered), tuple(over), progress, partials)
        left_s = None if a.idle_deadline is None else a.idle_deadline - self.now
        decided = tuple(self.decided())
        return Start(a.settings, stored, left_s, a.wish, a.detach_requested, a.wanted, decided)

    def _numbered(self, call: Call) -> Call:
        """The call with the number of its last attempt, and of the deliveries that came to nothing known."""
        rows = {attempt: row for (id_, attempt), row in self.deliveries.items() if id_ == call.id}
        lost = sum(
            row.callback_s is None and (not row.is_finished or row.code in (None, "abandoned"))
            for row in rows.values()
        )
        awaits = any(n >= call.attempts and row.callback_s is not None for n, row in rows.items())
        attempts = max(call.attempts, *rows, 0)
        return replace(
            call, attempts=attempts, episodes=lost, awaits_callback=awaits and call.state == "dispatched"
        )

    def decided(self) -> list[tuple[str, Decision]]:
        held = [self._joined(call) for call in self.calls.values() if call.state == "held"]
        return [(call.id, call.decision) for call in held if call.decision is not None]

    def recall(self, ids: Collection[str]) -> dict[str, Call]:
        return {id_: self._joined(self.calls[id_]) for id_ in ids if id_ in self.calls}

    def orphans(self, ids: Collection[str]) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for id_ in ids:
            call = self.calls.get(id_)
            if call is not None and call.state == "dispatched":
                rows = [
                    row
                    for (call_id, attempt), row in self.deliveries.items()
                    if call_id == id_ and attempt >= call.attempts
                ]
                may_report = all(row.code != "abandoned" for row in rows) and any(
                    row.deadline_at > self.now
                    and (row.callback_s is not None or self.replicas.get(row.replica_id, 0.0) > self.now)
                    for row in rows
                )
                promised = [row.deadline_at - self.now for row in rows if row.callback_s is not None]
                found[id_] = max(promised, default=0.0) if may_report else None
        return found

    def report(self, call_id: str, result: Result) -> bool:
        """Take what a tool reports of a call; return whether it was."""
        call = self.calls.get(call_id)
        rows = [row for (id_, _), row in sorted(self.deliveries.items()) if id_ == call_id]
        is_late = not rows or rows[-1].deadline_at <= self.now
        if call is None or call.state != "dispatched" or is_late or call_id in self.callbacks:
            return False
        self.callbacks[call_id] = result
        self.attachment.wish += 1
        self._record.add(ReportTaken(self.now, call_id, result))
        return True

    def called_back(self, ids: Collection[str]) -> dict[str, tuple[int, Result]]:
        """What tools have reported of these calls, as far as they are `dispatched`."""
        return {
            id_: (self.calls[id_].attempts, self.callbacks[id_])
            for id_ in ids
            if id_ in self.callbacks and self.calls[id_].state == "dispatched"
        }

    def _joined(self, call: Call) -> Call:
        gate = call.gate and Gate(call.gate.by, call.permission, call.gate.reason, rule=call.gate.rule)
        went = [row.tool for (id_, _), row in self.deliveries.items() if id_ == call.id]
        served_by = went[0] if went else None
        return replace(call, gate=gate, decision=self._standing(call.id), served_by=served_by)

    def _standing(self, call_id: str) -> Decision | None:
        for row in self.decisions:
            if row.call_id == call_id and row.status in ("accepted", "sending"):
                return replace(row.decision, status=row.status, id=row.id)  # type: ignore[arg-type]
        return None

    # ---- what people and operators wish

    def decide(self, id_: str, call_id: str, result: str, via: str = "api", by: str = "ana") -> bool:
        """Record a decision on a held call; return whether it stands."""
        a, call = self.attachment, self.calls.get(call_id)
        if a.status in NOT_ATTACHED or call is None or call.state != "held" or call.gate is None:
            return False
        if self._standing(call_id) is not None:
            return False
        status = "sending" if call.gate.by == "upstream" else "accepted"
        message = "Declined by a reviewer." if result == "deny" else None
        decision = Decision(result, status, by, via, self.now, message, id_)  # type: ignore[arg-type]
        self.decisions.append(DecisionRow(id_, call_id, decision, status))
        a.wish += 1
        self._record.add(DecisionMade(self.now, id_, call_id, result, call.gate.reason, via == "expiry"))
        return True

    def consult(self, call_id: str) -> bool:
        """Let a rule answer for a person on a held call; return whether one did."""
        call = self.calls.get(call_id)
        has_answered = any(row.call_id == call_id and row.decision.via == VIA for row in self.decisions)
        if call is None or call.gate is None or call.gate.reason == "outcome_unknown" or has_answered:
            return False
        rule = ruling(self.rules, call.kind, call.tool, call.input)
        if rule is None or rule.effect == "ask":
            return False
        return self.decide(f"{rule.id}/{call_id}", call_id, rule.effect, VIA, rule.id)

    def want(self, call_id: str) -> None:
        if call_id not in self.attachment.wanted:
            self.attachment.wanted = (*self.attachment.wanted, call_id)
            self.attachment.wish += 1

    def registry(self) -> tuple[int, dict[str, Tool], tuple[Rule, ...]]:
        return self.tools_version, dict(self.tools), self.rules

    def set_rules(self, rules: tuple[Rule, ...]) -> None:
        self.rules, self.tools_version = rules, self.tools_version + 1
        self._record.add(Note(self.now, f"rules {', '.join(rule.id for rule in rules) or 'none'}", ""))

    def set_tools(self, tools: Mapping[str, Tool]) -> None:
        self.tools, self.tools_version = dict(tools), self.tools_version + 1
        self._record.add(ToolsSet(self.now, tuple(sorted(tools))))

    def change_settings(self, settings: p.Settings) -> None:
        if self.attachment.status not in NOT_ATTACHED and not self.attachment.detach_requested:
            self.attachment.settings = settings
            self.attachment.wish += 1

    def detach(self) -> None:
        a = self.attachment
        if a.status not in NOT_ATTACHED and not a.detach_requested:
            a.detach_requested, a.wish = True, a.wish + 1

    def attach(self) -> None:
        """Attach again; nothing changes while the session is served, or once it is over for good."""
        a = self.attachment
        if a.status not in NOT_ATTACHED or a.end_reason in ("terminated", "deleted", "session_gone"):
            return
        a.status, a.end_reason, a.detach_requested, a.replica_id = "attaching", None, False, None
        a.restarts, a.idle_deadline = 0, None
        a.progress = replace(a.progress, reconnects=0, idle_id=None, idle_deadline=None, flags=frozenset())
        a.wish += 1


_RUNNING = ("attaching", "live", "reconnecting", "detaching")


def _with_left(call: Call, known: Call) -> Call:
    """The call as it is to be stored: a result that an earlier run left meanwhile stays."""
    is_left = (
        call.state in ("dispatched", "interrupted")
        and call.result is None
        and known.result is not None
        and call.attempts <= known.attempts
    )
    if not is_left:
        return call
    state = "answered" if call.state == "dispatched" else call.state
    return replace(
        call, state=state, result=known.result, attempts=known.attempts, outcome_unknown=known.outcome_unknown
    )


def _unruled(call: Call) -> Call:
    is_ours = call.state == "held" and call.gate is not None and call.gate.by != "upstream"
    return replace(call, decision=None) if is_ours else call
