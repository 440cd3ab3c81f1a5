"""What runs write: batches, and how many of them become the rows of one transaction.

Everything is fenced by the terms that are locked first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.calls import Call
from app.core.protocol import End, Progress, RefuseDecision, Snapshot
from app.core.tools import Tool
from app.store import audit, outbox
from app.store import statements as st
from app.store.attachments import OVER_FOR_GOOD
from app.store.audit import Entry, Kind
from app.store.leases import Lease
from app.store.wakeups import notify, session_key


@dataclass(frozen=True, slots=True)
class AttemptStart:
    """A delivery attempt that is about to leave; it is over when the tool's time is."""

    call_id: str
    attempt: int
    tool: Tool


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How a delivery attempt went. `reply` is what came back; `at` when, by the event loop's clock.

    `excerpt` is the reply's beginning without secrets, for people; `duration_ms` is what the attempt took.
    After a 202 the tool has `callback_s` to report, with all its extensions `callback_max_s`.
    """

    call_id: str
    attempt: int
    http_status: int | None
    code: str | None
    reply: bytes
    callback_s: float | None = None
    callback_max_s: float | None = None
    at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    excerpt: str = ""
    duration_ms: int | None = None

    @property
    def age_s(self) -> float:
        return asyncio.get_running_loop().time() - self.at


@dataclass(slots=True)
class Batch:
    """What one run writes at once. `idle_left_s` is the countdown's rest when `progress` has one.

    `bodies` are by call, each with the id of the key that derives the token of its callback.
    """

    lease: Lease
    calls: list[Call] = field(default_factory=list)
    decided: list[Call] = field(default_factory=list)
    refusals: list[RefuseDecision] = field(default_factory=list)
    reopened: list[str] = field(default_factory=list)
    moved: list[Call] = field(default_factory=list)
    bodies: list[tuple[str, bytes, str | None]] = field(default_factory=list)
    started: list[AttemptStart] = field(default_factory=list)
    ended: list[AttemptEnd] = field(default_factory=list)
    messages: list[Snapshot] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    progress: Progress | None = None
    idle_left_s: float | None = None
    has_events: bool = False
    wish_seen: int | None = None
    end: End | None = None

    @property
    def is_empty(self) -> bool:
        return not (
            self.calls or self.decided or self.refusals or self.bodies or self.started or self.ended
            or self.messages or self.dropped or self.progress or self.end or self.wish_seen is not None
        )  # fmt: skip

    @property
    def is_loud(self) -> bool:
        """Whether somebody may be waiting for this; previews are read at the next poll."""
        is_final = any(message.state == "final" for message in self.messages)
        of_calls = self.calls or self.decided or self.refusals or self.started or self.ended
        return bool(is_final or of_calls or self.progress or self.end)


class ContradictionError(Exception):
    """The store holds a call in an end state that memory thinks open: the run must start afresh."""


async def write(connection: AsyncConnection, replica_id: str, batches: Sequence[Batch]) -> set[Lease]:
    """Write the batches whose leases hold, in the caller's transaction; return the leases that are lost.

    What becomes of decisions goes into the audit, at the end: it locks the heads of those tenants' chains.

    Raises:
        ContradictionError: a call is over in the store that memory thinks open.
    """
    leases = {batch.lease for batch in batches}
    asked = await _hold(connection, replica_id, leases)
    lost = leases - asked.keys()
    held = [batch for batch in batches if batch.lease not in lost]
    is_told = False
    if told := _notifications(held, asked):
        is_told = (await connection.execute(st.TELL.statement, told)).rowcount > 0
    entries: list[Entry] = []
    # Messages before calls: a stream tells of both in the order of the statements, as the agent made them.
    for rows in (_decisions(held), _messages(held), _calls(held), _attempts(held), _attachments(held)):
        for bulk, columns in rows:
            if columns:
                done = await connection.execute(bulk.statement, {**columns, "replica": replica_id})
                if bulk is st.SAVE_CALLS and len(done.all()) < len(columns["id"]):
                    raise ContradictionError("a call that is over in the store was to be opened again")
                if bulk in _AUDITED:
                    entries += _entries(bulk, done.all())
    await _touch(connection, entries, held)
    loud = [session_key(b.lease.tenant, b.lease.session_id) for b in held if b.is_loud]
    await notify(connection, [*loud, outbox.KEY] if is_told else loud)
    await audit.append(connection, entries)
    return lost


async def _touch(connection: AsyncConnection, decided: Sequence[Entry], batches: Sequence[Batch]) -> None:
    """Number the change of calls whose decision changed and nothing else."""
    saved = {(b.lease.tenant, b.lease.session_id, call.id) for b in batches for call in b.calls}
    leases = {(batch.lease.tenant, batch.lease.session_id): batch.lease for batch in batches}
    touched = {(one.tenant, one.session_id or "", one.call_id or "") for one in decided} - saved
    columns = _Columns()
    for tenant, session_id, call_id in sorted(touched):
        columns.add(leases[tenant, session_id], call_id=call_id)
    if columns:
        await connection.execute(st.TOUCH_CALLS.statement, dict(columns))


_AUDITED: Final[dict[st.Bulk, tuple[Kind, str | None]]] = {
    st.RULE: ("decision.refused", None),
    st.SPEND: ("decision.spent", None),
    st.DISPLACE: ("decision.refused", "overtaken"),
    st.CLOSE_QUESTIONS: ("decision.refused", "moved_on"),
    st.SEE_DECISIONS: ("decision.seen", None),
}
"""Statements about decisions, and what the audit says of those that they changed."""


def _entries(bulk: st.Bulk, changed: Sequence[Row[Any]]) -> list[Entry]:
    kind, detail = _AUDITED[bulk]
    return [
        Entry(
            row.tenant, kind, row.decided_by, row.via, row.session_id, row.call_id,
            decision_id=row.id, result=row.result, detail=detail,
        )
        for row in changed
        if bulk is not st.RULE or row.status == "refused"
    ]  # fmt: skip


async def _hold(
    connection: AsyncConnection, replica_id: str, leases: set[Lease]
) -> dict[Lease, Sequence[str]]:
    """Lock what still holds; return the events that are asked for of each."""
    columns = _Columns()
    for lease in leases:
        columns.add(lease, term=lease.term)
    rows = await connection.execute(st.HOLD.statement, {**columns, "replica": replica_id})
    return {Lease(row.tenant, row.session_id, row.term): row.asked or () for row in rows}


class _Columns(dict[str, list[Any]]):
    """Rows turned on their side."""

    def add(self, lease: Lease, **values: Any) -> None:
        for name, value in {"tenant": lease.tenant, "session_id": lease.session_id, **values}.items():
            self.setdefault(name, []).append(storable(value))


_Rows = list[tuple[st.Bulk, _Columns]]


def storable(value: Any) -> Any:
    """Text without what Postgres cannot keep; JSON text never holds any of it."""
    if isinstance(value, str) and not (value.isascii() and "\0" not in value):
        return value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    return value


def _notifications(batches: Sequence[Batch], asked: Mapping[Lease, Sequence[str]]) -> _Columns:
    columns, seen = _Columns(), set()
    for batch in batches:
        for fact in outbox.facts(batch, asked[batch.lease]):
            key = (batch.lease, fact["type"], fact["call_id"], fact["mark"])
            if key not in seen:
                seen.add(key)
                columns.add(batch.lease, **fact, place=len(seen))
    return columns


def _calls(batches: Sequence[Batch]) -> _Rows:
    calls, bodies = _Columns(), _Columns()
    for batch in batches:
        for call in {call.id: call for call in batch.calls}.values():
            calls.add(
                batch.lease, id=call.id, kind=call.kind, tool=call.tool, thread_id=call.thread_id,
                input=call.input.decode(), processed_at=call.processed_at, permission=call.permission,
                state=call.state, gate_by=call.gate and call.gate.by,
                gate_reason=call.gate and call.gate.reason,
                expires_in_s=call.gate and call.gate.expires_in_s,
                gate_on_expiry=call.gate and call.gate.expires_in_s and call.gate.on_expiry,
                gate_remind_after_s=call.gate and call.gate.remind_after_s,
                gate_rule=call.gate and call.gate.rule,
                outcome_unknown=call.outcome_unknown,
                attempts=call.attempts, result=call.result and call.result.content.decode(),
                is_error=call.result and call.result.is_error, posted=call.posted, detail=call.detail,
                edited_input=call.edited_input and call.edited_input.decode(),
            )  # fmt: skip
        for call_id, body, key_id in batch.bodies:
            bodies.add(batch.lease, call_id=call_id, body=body, key_id=key_id)
    return [(st.SAVE_CALLS, calls), (st.KEEP_BODIES, bodies)]


def _decisions(batches: Sequence[Batch]) -> _Rows:
    ours, spent, displaced, seen, closed = _Columns(), _Columns(), _Columns(), _Columns(), _Columns()
    for batch in batches:
        lease = batch.lease
        for refusal in batch.refusals:
            ours.add(lease, id=refusal.decision_id, status="refused", refusal=refusal.refusal)
        for call_id in batch.reopened:
            spent.add(lease, call_id=call_id)
        for call in {call.id: call for call in batch.moved}.values():
            is_acted_on = call.decision is not None and call.decision.status == "accepted"
            kept = _decision_id(lease, call) if is_acted_on else None
            closed.add(lease, call_id=call.id, kept=kept or "")
        for call in {call.id: call for call in batch.decided}.values():
            decision = call.decision
            if decision is None:
                continue
            if decision.id is not None:
                ours.add(lease, id=decision.id, status=decision.status, refusal=decision.refusal)
                continue
            displaced.add(lease, call_id=call.id)
            seen.add(
                lease, call_id=call.id, id=_decision_id(lease, call), result=decision.result,
                status=decision.status, decided_by=decision.by, via=decision.via,
                deny_message=decision.deny_message,
            )  # fmt: skip
    return [
        (st.RULE, ours),
        (st.SPEND, spent),
        (st.CLOSE_QUESTIONS, closed),
        (st.DISPLACE, displaced),
        (st.SEE_DECISIONS, seen),
    ]


def _decision_id(lease: Lease, call: Call) -> str | None:
    """The id of the decision that the call goes by; one seen upstream has an id of its call."""
    if call.decision is None:
        return None
    return call.decision.id or outbox.seen_id(lease.session_id, call.id)


def _attempts(batches: Sequence[Batch]) -> _Rows:
    started, ended = _Columns(), _Columns()
    for batch in batches:
        for start in batch.started:
            tool = start.tool
            started.add(
                batch.lease, call_id=start.call_id, attempt=start.attempt, tool=tool.name,
                url=tool.url, left_s=tool.timeout_s,
            )  # fmt: skip
        for end in batch.ended:
            ended.add(
                batch.lease, call_id=end.call_id, attempt=end.attempt, http_status=end.http_status,
                code=end.code, reply=end.reply, excerpt=end.excerpt, duration_ms=end.duration_ms,
                age_s=end.age_s, callback_s=end.callback_s, callback_max_s=end.callback_max_s,
            )  # fmt: skip
    return [(st.START_ATTEMPTS, started), (st.END_ATTEMPTS, ended)]


def _messages(batches: Sequence[Batch]) -> _Rows:
    finals, partials, dropped = _Columns(), _Columns(), _Columns()
    for batch in batches:
        for snapshot in {snapshot.id: snapshot for snapshot in batch.messages}.values():
            row = {
                "id": snapshot.id, "content": snapshot.content.decode(), "thread_id": snapshot.thread_id,
                "processed_at": snapshot.processed_at, "term": batch.lease.term,
            }  # fmt: skip
            if snapshot.state == "final":
                finals.add(batch.lease, **row, place=len(finals.get("id", ())))
            else:
                partials.add(batch.lease, **row)
        for id_ in batch.dropped:
            dropped.add(batch.lease, id=id_)
    return [(st.DROP_PARTIALS, dropped), (st.SAVE_PARTIALS, partials), (st.SAVE_FINALS, finals)]


def _attachments(batches: Sequence[Batch]) -> _Rows:
    columns, dropped = _Columns(), _Columns()
    for batch in {batch.lease: _merged(batch, batches) for batch in batches}.values():
        progress, end = batch.progress, batch.end
        if progress is None and end is None and batch.wish_seen is None:
            continue
        shown = progress or Progress()
        status = shown.status if end is None else ("detached" if end.reason == "detached" else "ended")
        columns.add(
            batch.lease, status=status, cursor_at=shown.cursor_at, reconnects=shown.reconnects,
            idle_id=shown.idle_id, idle_left_s=batch.idle_left_s,
            flags=st.SEPARATOR.join(sorted(shown.flags)), missing=st.SEPARATOR.join(shown.missing),
            primary_thread_id=shown.primary_thread_id, environment=shown.environment,
            end_reason=end and end.reason, end_detail=end and end.detail,
            terminal_event_id=end and end.event_id, is_over=end is not None, has_events=batch.has_events,
            has_progress=progress is not None, wish_seen=batch.wish_seen,
        )  # fmt: skip
        if end is not None and end.reason != "idle":
            code = "session_ended" if end.reason in OVER_FOR_GOOD else "not_attached"
            dropped.add(batch.lease, code=code, message=f"the session is served no more: {end.reason}")
    return [(st.SAVE_ATTACHMENTS, columns), (st.DROP_SENDS, dropped)]


def _merged(batch: Batch, batches: Sequence[Batch]) -> Batch:
    """What all batches of the lease say of the attachment: the last word on each matter."""
    same = [other for other in batches if other.lease == batch.lease]
    if len(same) == 1:
        return batch
    merged = Batch(batch.lease)
    for other in same:
        if other.progress is not None:
            merged.progress, merged.idle_left_s = other.progress, other.idle_left_s
        merged.end = other.end or merged.end
        merged.wish_seen = other.wish_seen if other.wish_seen is not None else merged.wish_seen
        merged.has_events = merged.has_events or other.has_events
    return merged
