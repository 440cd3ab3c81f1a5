"""What runs write, and how: one statement per kind of row for many runs at once.

Columns travel as arrays and are unnested; everything is fenced by the terms that `_hold` locks first. Each
statement can be repeated with the same batch to the same end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.calls import END_STATES, Call, Result
from app.core.protocol import End, Progress, RefuseDecision, Snapshot
from app.core.tools import Tool
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
    """How a delivery attempt went. `reply` is the beginning of what came back."""

    call_id: str
    attempt: int
    http_status: int | None
    code: str | None
    reply: bytes


@dataclass(slots=True)
class Batch:
    """What one run writes at once. `idle_left_s` is the countdown's rest when `progress` has one."""

    lease: Lease
    calls: list[Call] = field(default_factory=list)
    decided: list[Call] = field(default_factory=list)
    refusals: list[RefuseDecision] = field(default_factory=list)
    reopened: list[str] = field(default_factory=list)
    bodies: list[tuple[str, bytes]] = field(default_factory=list)
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
        return bool(is_final or self.calls or self.decided or self.refusals or self.progress or self.end)


class ContradictionError(Exception):
    """The store holds a call in an end state that memory thinks open: the run must start afresh."""


async def write(connection: AsyncConnection, replica_id: str, batches: Sequence[Batch]) -> set[Lease]:
    """Write the batches whose leases hold, in the caller's transaction; return the leases that are lost.

    Raises:
        ContradictionError: a call is over in the store that memory thinks open.
    """
    leases = {batch.lease for batch in batches}
    lost = leases - await _hold(connection, replica_id, leases)
    held = [batch for batch in batches if batch.lease not in lost]
    if held:
        await _decisions(connection, held)
        await _calls(connection, held)
        await _bodies(connection, held)
        await _attempts(connection, replica_id, held)
        await _messages(connection, held)
        await _attachments(connection, held)
        loud = [session_key(b.lease.tenant, b.lease.session_id) for b in held if b.is_loud]
        await notify(connection, loud)
    return lost


async def _hold(connection: AsyncConnection, replica_id: str, leases: set[Lease]) -> set[Lease]:
    """Lock the attachments whose terms still hold; a claim waits until this transaction is over."""
    rows = await connection.execute(
        text(
            """
            select a.tenant, a.session_id, a.term from attachments a
            join unnest(cast(:tenants as text[]), cast(:sessions as text[]), cast(:terms as bigint[]))
                as w(tenant, session_id, term)
                on a.tenant = w.tenant and a.session_id = w.session_id and a.term = w.term
            where a.replica_id = :replica
            order by a.tenant, a.session_id
            for no key update of a
            """
        ),
        {
            "tenants": [lease.tenant for lease in leases],
            "sessions": [lease.session_id for lease in leases],
            "terms": [lease.term for lease in leases],
            "replica": replica_id,
        },
    )
    return {Lease(row.tenant, row.session_id, row.term) for row in rows}


class _Columns(defaultdict[str, list[Any]]):
    """Rows turned on their side, for `unnest`."""

    def __init__(self) -> None:
        super().__init__(list)

    def add(self, lease: Lease, **values: Any) -> None:
        for name, value in {"tenant": lease.tenant, "session_id": lease.session_id, **values}.items():
            self[name].append(_storable(value))


def _storable(value: Any) -> Any:
    """Text without what Postgres cannot keep; JSON text never holds any of it."""
    if isinstance(value, str) and not (value.isascii() and "\0" not in value):
        return value.encode("utf-8", "replace").decode().replace("\0", "�")
    return value


def _unnest(types: dict[str, str]) -> str:
    arrays = ", ".join(f"cast(:{name} as {type_}[])" for name, type_ in types.items())
    return f"unnest({arrays}) as w({', '.join(types)})"


_CALL_TYPES: Final = {
    "tenant": "text", "session_id": "text", "id": "text", "kind": "text", "tool": "text",
    "thread_id": "text", "input": "text", "processed_at": "text", "permission": "text", "state": "text",
    "gate_by": "text", "gate_reason": "text", "outcome_unknown": "boolean", "attempts": "integer",
    "result": "text", "is_error": "boolean", "posted": "boolean", "detail": "text",
}  # fmt: skip
_CHANGING: Final = (
    "state", "gate_by", "gate_reason", "outcome_unknown", "attempts", "result", "is_error", "posted", "detail"
)  # fmt: skip
_OVER: Final = ", ".join(f"'{state}'" for state in sorted(END_STATES - {"interrupted"}))


async def _calls(connection: AsyncConnection, batches: Sequence[Batch]) -> None:
    columns = _Columns()
    for batch in batches:
        for call in {call.id: call for call in batch.calls}.values():
            result = call.result or Result(b"", is_error=False)
            columns.add(
                batch.lease, id=call.id, kind=call.kind, tool=call.tool, thread_id=call.thread_id,
                input=call.input.decode(), processed_at=call.processed_at, permission=call.permission,
                state=call.state, gate_by=call.gate and call.gate.by,
                gate_reason=call.gate and call.gate.reason, outcome_unknown=call.outcome_unknown,
                attempts=call.attempts, result=call.result and result.content.decode(),
                is_error=call.result and result.is_error, posted=call.posted, detail=call.detail,
            )  # fmt: skip
    if not columns:
        return
    names = ", ".join(_CALL_TYPES)
    changes = ", ".join(f"{name} = excluded.{name}" for name in _CHANGING)
    written = await connection.execute(
        text(
            f"insert into calls ({names}) select {names} from {_unnest(_CALL_TYPES)}"  # noqa: S608
            f" on conflict (tenant, session_id, id) do update set {changes}, updated_at = now()"
            f" where calls.state not in ({_OVER}) or calls.state = excluded.state returning calls.id"
        ),
        dict(columns),
    )
    if len(written.all()) < len(columns["id"]):
        raise ContradictionError("a call that is over in the store was to be written again")


_DECISION_TYPES: Final = {
    "tenant": "text", "id": "text", "session_id": "text", "call_id": "text", "result": "text",
    "status": "text", "decided_by": "text", "via": "text", "deny_message": "text", "refusal": "text",
}  # fmt: skip


async def _decisions(connection: AsyncConnection, batches: Sequence[Batch]) -> None:
    """Ours change their status; a verdict seen upstream takes the place of one that was on its way.

    A call that needs a second decision, because its delivery's outcome is unknown, has spent the first.
    """
    ours, seen, spent = _Columns(), _Columns(), _Columns()
    for batch in batches:
        for refusal in batch.refusals:
            ours.add(batch.lease, id=refusal.decision_id, status="refused", refusal=refusal.refusal)
        for call in {call.id: call for call in batch.decided}.values():
            decision = call.decision
            if decision is None:
                continue
            if decision.id is not None:
                ours.add(batch.lease, id=decision.id, status=decision.status, refusal=decision.refusal)
                continue
            seen.add(
                batch.lease, id=f"seen_{batch.lease.session_id}_{call.id}", call_id=call.id,
                result=decision.result, status=decision.status, decided_by=decision.by, via=decision.via,
                deny_message=decision.deny_message, refusal=None,
            )  # fmt: skip
    if ours:
        types = {"tenant": "text", "session_id": "text", "id": "text", "status": "text", "refusal": "text"}
        await connection.execute(
            text(
                f"update decisions d set status = w.status, refusal = w.refusal from {_unnest(types)}"  # noqa: S608
                " where d.tenant = w.tenant and d.id = w.id and d.session_id = w.session_id"
            ),
            dict(ours),
        )
    for batch in batches:
        for call_id in batch.reopened:
            spent.add(batch.lease, call_id=call_id)
    if spent:
        types = {"tenant": "text", "session_id": "text", "call_id": "text"}
        await connection.execute(
            text(
                f"update decisions d set status = 'spent' from {_unnest(types)}"  # noqa: S608
                " where d.tenant = w.tenant and d.session_id = w.session_id and d.call_id = w.call_id"
                " and d.status = 'accepted'"
            ),
            dict(spent),
        )
    if seen:
        keys = {name: _DECISION_TYPES[name] for name in ("tenant", "session_id", "call_id")}
        await connection.execute(
            text(
                "update decisions d set status = 'refused', refusal = 'Somebody else decided first.'"  # noqa: S608
                f" from {_unnest(keys)} where d.tenant = w.tenant and d.session_id = w.session_id"
                " and d.call_id = w.call_id and d.status = 'sending'"
            ),
            {name: seen[name] for name in keys},
        )
        names = ", ".join(_DECISION_TYPES)
        await connection.execute(
            text(
                f"insert into decisions ({names}) select {names} from {_unnest(_DECISION_TYPES)}"  # noqa: S608
                " on conflict do nothing"
            ),
            dict(seen),
        )


async def _bodies(connection: AsyncConnection, batches: Sequence[Batch]) -> None:
    columns = _Columns()
    for batch in batches:
        for call_id, body in batch.bodies:
            columns.add(batch.lease, call_id=call_id, body=body)
    if columns:
        types = {"tenant": "text", "session_id": "text", "call_id": "text", "body": "bytea"}
        names = ", ".join(types)
        await connection.execute(
            text(
                f"insert into bodies ({names}) select {names} from {_unnest(types)} on conflict do nothing"  # noqa: S608
            ),
            dict(columns),
        )


async def _attempts(connection: AsyncConnection, replica_id: str, batches: Sequence[Batch]) -> None:
    started, ended = _Columns(), _Columns()
    for batch in batches:
        for start in batch.started:
            started.add(
                batch.lease,
                call_id=start.call_id,
                attempt=start.attempt,
                tool=start.tool.name,
                left_s=start.tool.timeout_s,
            )
        for end in batch.ended:
            ended.add(
                batch.lease, call_id=end.call_id, attempt=end.attempt, http_status=end.http_status,
                code=end.code, reply=end.reply,
            )  # fmt: skip
    key = {"tenant": "text", "session_id": "text", "call_id": "text", "attempt": "integer"}
    if started:
        types = {**key, "tool": "text", "left_s": "double precision"}
        names = ", ".join([*key, "tool"])
        await connection.execute(
            text(
                f"insert into deliveries ({names}, replica_id, deadline_at)"  # noqa: S608
                f" select {names}, :replica, now() + make_interval(secs => w.left_s)"
                f" from {_unnest(types)} on conflict do nothing"
            ),
            {**started, "replica": replica_id},
        )
    if ended:
        types = {**key, "http_status": "integer", "code": "text", "reply": "bytea"}
        await connection.execute(
            text(
                "update deliveries d set finished_at = now(), http_status = w.http_status, code = w.code,"  # noqa: S608
                f" reply = w.reply from {_unnest(types)} where d.tenant = w.tenant"
                " and d.session_id = w.session_id and d.call_id = w.call_id and d.attempt = w.attempt"
            ),
            dict(ended),
        )


_MESSAGE_TYPES: Final = {
    "tenant": "text", "session_id": "text", "id": "text", "content": "text", "thread_id": "text",
    "processed_at": "text", "term": "bigint",
}  # fmt: skip


async def _messages(connection: AsyncConnection, batches: Sequence[Batch]) -> None:
    finals, partials, dropped = _Columns(), _Columns(), _Columns()
    for batch in batches:
        for snapshot in {snapshot.id: snapshot for snapshot in batch.messages}.values():
            (finals if snapshot.state == "final" else partials).add(
                batch.lease, id=snapshot.id, content=snapshot.content.decode(), term=batch.lease.term,
                thread_id=snapshot.thread_id, processed_at=snapshot.processed_at,
            )  # fmt: skip
        for id_ in batch.dropped:
            dropped.add(batch.lease, id=id_)
    if dropped:
        types = {"tenant": "text", "session_id": "text", "id": "text"}
        await connection.execute(
            text(
                f"delete from messages m using {_unnest(types)} where m.tenant = w.tenant"  # noqa: S608
                " and m.session_id = w.session_id and m.id = w.id and m.state = 'partial'"
            ),
            dict(dropped),
        )
    names = ", ".join(_MESSAGE_TYPES)
    if partials:
        await connection.execute(
            text(
                f"insert into messages ({names}, state) select {names}, 'partial'"  # noqa: S608
                f" from {_unnest(_MESSAGE_TYPES)} on conflict (tenant, session_id, id) do update"
                " set content = excluded.content, term = excluded.term, updated_at = now()"
                " where messages.state = 'partial'"
            ),
            dict(partials),
        )
    if finals:
        # A final gets the session's next number as it commits; the attachment is locked, so numbers have no
        # gaps and a poll cursor passes none. A final that is stored already stands.
        numbered = ", ".join(f"new.{name}" for name in _MESSAGE_TYPES)
        await connection.execute(
            text(
                f"""
                with new as (
                    select w.*,
                        row_number() over (partition by w.tenant, w.session_id order by w.place) as step
                    from (select u.* from unnest({
                    ", ".join(f"cast(:{name} as {type_}[])" for name, type_ in _MESSAGE_TYPES.items())
                }) with ordinality as u({names}, place)) w
                    where not exists (
                        select from messages m where m.tenant = w.tenant and m.session_id = w.session_id
                        and m.id = w.id and m.state = 'final')
                ), raised as (
                    update attachments a set message_seq = a.message_seq + n.steps
                    from (select tenant, session_id, count(*) as steps from new group by 1, 2) n
                    where a.tenant = n.tenant and a.session_id = n.session_id
                    returning a.tenant, a.session_id, a.message_seq - n.steps as base
                )
                insert into messages ({names}, state, seq)
                select {numbered}, 'final', raised.base + new.step
                from new join raised on raised.tenant = new.tenant and raised.session_id = new.session_id
                on conflict (tenant, session_id, id) do update
                set state = 'final', seq = excluded.seq, content = excluded.content, term = excluded.term,
                    thread_id = excluded.thread_id, processed_at = excluded.processed_at, updated_at = now()
                """  # noqa: S608
            ),
            dict(finals),
        )


_PROGRESS_TYPES: Final = {
    "tenant": "text", "session_id": "text", "status": "text", "cursor_at": "double precision",
    "reconnects": "integer", "idle_id": "text", "idle_left_s": "double precision", "flags": "text",
    "missing": "text", "primary_thread_id": "text", "environment": "text", "end_reason": "text",
    "end_detail": "text", "terminal_event_id": "text", "is_over": "boolean", "has_events": "boolean",
    "has_progress": "boolean", "wish_seen": "bigint",
}  # fmt: skip
_SEPARATOR: Final = "\x1f"


async def _attachments(connection: AsyncConnection, batches: Sequence[Batch]) -> None:
    columns = _Columns()
    for batch in {batch.lease: _merged(batch, batches) for batch in batches}.values():
        progress, end = batch.progress, batch.end
        if progress is None and end is None and batch.wish_seen is None:
            continue
        shown = progress or Progress()
        status = shown.status if end is None else ("detached" if end.reason == "detached" else "ended")
        columns.add(
            batch.lease, status=status, cursor_at=shown.cursor_at, reconnects=shown.reconnects,
            idle_id=shown.idle_id, idle_left_s=batch.idle_left_s, flags=_SEPARATOR.join(sorted(shown.flags)),
            missing=_SEPARATOR.join(shown.missing), primary_thread_id=shown.primary_thread_id,
            environment=shown.environment, end_reason=end and end.reason, end_detail=end and end.detail,
            terminal_event_id=end and end.event_id, is_over=end is not None, has_events=batch.has_events,
            has_progress=progress is not None, wish_seen=batch.wish_seen,
        )  # fmt: skip
    if not columns:
        return
    kept = ", ".join(
        f"{name} = case when w.has_progress then {value} else a.{name} end"
        for name, value in {
            "cursor_at": "w.cursor_at",
            "reconnects": "w.reconnects",
            "idle_id": "w.idle_id",
            "idle_deadline": "now() + make_interval(secs => w.idle_left_s)",
            "flags": _split("flags"),
            "missing": _split("missing"),
            "primary_thread_id": "w.primary_thread_id",
            "environment": "w.environment",
        }.items()
    )
    await connection.execute(
        text(
            f"""
            update attachments a set {kept},
                status = case when w.has_progress or w.is_over then w.status else a.status end,
                end_reason = case when w.is_over then w.end_reason else a.end_reason end,
                end_detail = case when w.is_over then w.end_detail else a.end_detail end,
                terminal_event_id = case when w.is_over then w.terminal_event_id else a.terminal_event_id end,
                replica_id = case when w.is_over then null else a.replica_id end,
                last_event_at = case when w.has_events then now() else a.last_event_at end,
                wish_seen = greatest(a.wish_seen, w.wish_seen),
                wanted = case when w.wish_seen >= a.wish then '{{}}' else a.wanted end,
                updated_at = now()
            from {_unnest(_PROGRESS_TYPES)}
            where a.tenant = w.tenant and a.session_id = w.session_id
            """  # noqa: S608
        ),
        dict(columns),
    )


def _split(name: str) -> str:
    """An array out of a text column: `unnest` would flatten arrays of arrays."""
    return f"coalesce(string_to_array(nullif(w.{name}, ''), '{_SEPARATOR}'), '{{}}')"


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
