"""What a run reads: the state it starts from, the wishes made meanwhile, calls by id."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from sqlalchemy import Row, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core import protocol
from app.core.calls import END_STATES, Call, Decision, Gate, Result
from app.store import attachments, tables
from app.store.batches import AttemptEnd
from app.store.leases import Lease
from app.store.secrets import Secrets

OVER_MAX: Final = 500
"""How many of the calls that ended last a run keeps in mind."""

UNSENT_CODES: Final = (
    "blocked_url", "blocked_address", "dns_failed", "connect_failed",
    "tls_expired", "tls_untrusted", "tls_wrong_host", "tls_failed",
)  # fmt: skip
"""Codes of attempts that failed before anything was written to the tool."""

_calls = tables.calls
_decisions = tables.decisions


@dataclass(frozen=True, slots=True)
class Start:
    """Everything that a run begins with. `idle_left_s` is the rest of a countdown, None if none runs."""

    settings: attachments.Settings
    extra_headers: Mapping[str, str]
    calls: tuple[Call, ...]
    over: tuple[Call, ...]
    progress: protocol.Progress
    idle_left_s: float | None
    open_messages: tuple[str, ...]
    wish: int
    is_detach_requested: bool
    wanted: tuple[str, ...]
    decided: tuple[tuple[str, Decision], ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """What was wished of an attachment since its runner looked. `settings` is their stored JSON."""

    tenant: str
    session_id: str
    wish: int
    settings: str
    is_detach_requested: bool
    wanted: tuple[str, ...]


async def load(connection: AsyncConnection, secrets: Secrets, lease: Lease) -> Start | None:
    """Read what a run of this lease starts from, or None if the term is over already."""
    a = tables.attachments
    row = (
        await connection.execute(
            select(a, func.extract("epoch", a.c.idle_deadline - func.now()).label("idle_left_s")).where(
                a.c.tenant == lease.tenant, a.c.session_id == lease.session_id, a.c.term == lease.term
            )
        )
    ).one_or_none()
    if row is None:
        return None
    key = (lease.tenant, lease.session_id)
    query = _with_decision(key)
    open_ = await connection.execute(
        query.where(_calls.c.state.not_in(END_STATES)).order_by(_calls.c.position)
    )
    numbered = await _attempts(connection, key)
    over = await connection.execute(
        query.where(_calls.c.state.in_(END_STATES)).order_by(_calls.c.position.desc()).limit(OVER_MAX)
    )
    m = tables.messages
    partials = await connection.scalars(
        select(m.c.id).where(
            m.c.tenant == key[0], m.c.session_id == key[1], m.c.state == "partial", m.c.seq.is_(None)
        )
    )
    return Start(
        settings=msgspec.json.decode(row.settings, type=attachments.Settings),
        extra_headers=await attachments.load_extra_headers(connection, secrets, *key),
        calls=tuple(_unruled(_call(call, *numbered.get(call.id, (0, 0)))) for call in open_),
        over=tuple(_call(call) for call in reversed(over.all())),
        progress=protocol.Progress(
            status=row.status,
            cursor_at=row.cursor_at,
            reconnects=row.reconnects,
            idle_id=row.idle_id,
            flags=frozenset(row.flags),
            missing=tuple(row.missing),
            primary_thread_id=row.primary_thread_id,
            environment=row.environment,
        ),
        idle_left_s=None if row.idle_left_s is None else float(row.idle_left_s),
        open_messages=tuple(partials),
        wish=row.wish,
        is_detach_requested=row.detach_requested,
        wanted=tuple(row.wanted),
        decided=tuple(await decided(connection, lease)),
    )


async def wishes(connection: AsyncConnection, replica_id: str) -> list[Wish]:
    """Read the attachments of this replica of which something was wished that nobody acted on."""
    a = tables.attachments
    rows = await connection.execute(
        select(a.c.tenant, a.c.session_id, a.c.wish, a.c.settings, a.c.detach_requested, a.c.wanted).where(
            a.c.replica_id == replica_id, a.c.wish != a.c.wish_seen
        )
    )
    return [
        Wish(
            row.tenant,
            row.session_id,
            row.wish,
            row.settings,
            row.detach_requested,
            tuple(row.wanted),
        )
        for row in rows
    ]


async def decided(connection: AsyncConnection, lease: Lease) -> list[tuple[str, Decision]]:
    """Read the standing decisions on calls that are still held, by call."""
    rows = await connection.execute(
        _with_decision((lease.tenant, lease.session_id)).where(
            _calls.c.state == "held", _decisions.c.id.is_not(None)
        )
    )
    found = ((row.id, _decision(row)) for row in rows)
    return [(call_id, decision) for call_id, decision in found if decision is not None]


async def recall(connection: AsyncConnection, lease: Lease, ids: Collection[str]) -> dict[str, Call]:
    """Read calls by id, in any state."""
    if not ids:
        return {}
    rows = await connection.execute(
        _with_decision((lease.tenant, lease.session_id)).where(_calls.c.id.in_(ids))
    )
    return {row.id: _call(row) for row in rows}


async def body(connection: AsyncConnection, lease: Lease, call_id: str) -> bytes | None:
    """Read what earlier deliveries of the call sent."""
    b = tables.bodies
    query = select(b.c.body).where(
        b.c.tenant == lease.tenant, b.c.session_id == lease.session_id, b.c.call_id == call_id
    )
    found: bytes | None = await connection.scalar(query)
    return found


async def url_of_earlier(connection: AsyncConnection, lease: Lease, call_id: str, attempt: int) -> str | None:
    """Read where the deliveries before this attempt went, unless none of them can have arrived.

    Only that endpoint can recognise the call's `webhook-id`.
    """
    d = tables.deliveries
    may_have_arrived = d.c.finished_at.is_(None) | d.c.code.is_(None) | d.c.code.not_in(UNSENT_CODES)
    query = (
        select(d.c.url)
        .where(
            d.c.tenant == lease.tenant, d.c.session_id == lease.session_id, d.c.call_id == call_id,
            d.c.attempt < attempt, may_have_arrived,
        )
        .order_by(d.c.attempt)
        .limit(1)
    )  # fmt: skip
    found: str | None = await connection.scalar(query)
    return found


async def orphans(connection: AsyncConnection, lease: Lease, ids: Collection[str]) -> dict[str, bool]:
    """Say of `dispatched` calls of an earlier run whether their delivery may still report.

    It may until its deadline, while the replica that began it lives and has not given it up. That an attempt
    has ended says nothing: another may follow.
    Calls that are `dispatched` no more are left out: their delivery has stored its result.
    """
    rows = await connection.execute(
        text(
            """
            select c.id, bool_or(d.deadline_at > now() and r.expires_at > now())
                and not coalesce(bool_or(d.code = 'abandoned'), false) as may_report
            from calls c
            left join deliveries d on d.tenant = c.tenant and d.session_id = c.session_id
                and d.call_id = c.id and d.attempt >= c.attempts
            left join replicas r on r.id = d.replica_id
            where c.tenant = :tenant and c.session_id = :session_id and c.id = any(cast(:ids as text[]))
                and c.state = 'dispatched'
            group by c.id
            """
        ),
        {"tenant": lease.tenant, "session_id": lease.session_id, "ids": list(ids)},
    )
    return {row.id: bool(row.may_report) for row in rows}


async def leave_result(
    connection: AsyncConnection,
    lease: Lease,
    call_id: str,
    attempts: int,
    result: Result,
    *,
    dispatched: int,
    unknown: bool,
) -> None:
    """Store the result of a delivery that outlived its run; fenced by its dispatch, not by the term.

    Only a call that still waits for just the delivery that began with the attempt `dispatched` takes it, or
    that was interrupted meanwhile; its next run posts it. `attempts` is the number of the last attempt.
    """
    await connection.execute(
        text(
            """
            update calls set state = case state when 'dispatched' then 'answered' else state end,
                attempts = :attempts, result = :result,
                is_error = :is_error, outcome_unknown = :unknown, updated_at = now()
            where tenant = :tenant and session_id = :session_id and id = :id
                and state in ('dispatched', 'interrupted') and attempts = :dispatched and result is null
            """
        ),
        {
            "tenant": lease.tenant,
            "session_id": lease.session_id,
            "id": call_id,
            "attempts": attempts,
            "dispatched": dispatched,
            "result": result.content.decode(),
            "is_error": result.is_error,
            "unknown": unknown,
        },
    )


async def take_back(connection: AsyncConnection, lease: Lease, calls: Iterable[tuple[str, int]]) -> None:
    """Let calls wait again whose delivery was committed and never began; each is named with its attempt."""
    for call_id, attempt in calls:
        key = {"tenant": lease.tenant, "session_id": lease.session_id, "id": call_id, "attempt": attempt}
        taken = await connection.execute(
            text(
                "update calls set state = 'queued', attempts = attempts - 1, updated_at = now()"
                " where tenant = :tenant and session_id = :session_id and id = :id"
                " and state = 'dispatched' and attempts = :attempt returning id"
            ),
            key,
        )
        if taken.all():
            await connection.execute(
                text(
                    "delete from deliveries where tenant = :tenant and session_id = :session_id"
                    " and call_id = :id and attempt = :attempt and finished_at is null"
                ),
                key,
            )


async def leave_attempts(
    connection: AsyncConnection,
    replica_id: str,
    lease: Lease,
    ended: Iterable[AttemptEnd],
    abandoned: Iterable[str],
) -> None:
    """Note how the last attempts of a run went; those of `abandoned` calls that did not end are over too."""
    d = tables.deliveries
    owned = (
        (d.c.tenant == lease.tenant) & (d.c.session_id == lease.session_id) & (d.c.replica_id == replica_id)
    )
    mine = owned & d.c.finished_at.is_(None)
    for end in ended:
        await connection.execute(
            update(d)
            .where(mine, d.c.call_id == end.call_id, d.c.attempt == end.attempt)
            .values(finished_at=func.now(), http_status=end.http_status, code=end.code, reply=end.reply)
        )
    calls = list(abandoned)
    if calls:
        # The last one, also when it has ended and another would have followed.
        later = d.alias("later")
        has_later = (
            select(later.c.attempt)
            .where(
                later.c.tenant == d.c.tenant, later.c.session_id == d.c.session_id,
                later.c.call_id == d.c.call_id, later.c.attempt > d.c.attempt,
            )
            .exists()
        )  # fmt: skip
        await connection.execute(
            update(d)
            .where(owned, d.c.call_id.in_(calls), ~has_later)
            .values(finished_at=func.coalesce(d.c.finished_at, func.now()), code="abandoned")
        )


def _with_decision(key: tuple[str, str]) -> Any:
    """Calls of a session, each with its standing decision if there is one."""
    standing = (
        (_decisions.c.tenant == _calls.c.tenant)
        & (_decisions.c.session_id == _calls.c.session_id)
        & (_decisions.c.call_id == _calls.c.id)
        & _decisions.c.status.in_(("accepted", "sending"))
    )
    return (
        select(
            _calls,
            _decisions.c.id.label("decision_id"),
            _decisions.c.result.label("decision_result"),
            _decisions.c.status.label("decision_status"),
            _decisions.c.decided_by,
            _decisions.c.via,
            _decisions.c.deny_message,
            func.extract("epoch", _decisions.c.decided_at).label("decided_epoch"),
        )
        .select_from(_calls.outerjoin(_decisions, standing))
        .where(_calls.c.tenant == key[0], _calls.c.session_id == key[1])
    )


async def _attempts(connection: AsyncConnection, key: tuple[str, str]) -> dict[str, tuple[int, int]]:
    """The number of the last attempt of each open call, and how many episodes were lost.

    Retries within one episode have numbers too; all of them but the last were noted with how they went. One
    that an orderly stop abandoned is nobody's fault.
    """
    d = tables.deliveries
    is_lost = d.c.finished_at.is_(None) | d.c.code.is_(None)
    rows = await connection.execute(
        select(d.c.call_id, func.max(d.c.attempt).label("attempt"),
               func.count().filter(is_lost).label("lost"))
        .join(_calls, (_calls.c.tenant == d.c.tenant) & (_calls.c.session_id == d.c.session_id)
              & (_calls.c.id == d.c.call_id))
        .where(_calls.c.tenant == key[0], _calls.c.session_id == key[1], _calls.c.state.not_in(END_STATES))
        .group_by(d.c.call_id)
    )  # fmt: skip
    return {row.call_id: (row.attempt, row.lost) for row in rows}


def _call(row: Row[Any], attempts: int = 0, episodes: int = 0) -> Call:
    result = None if row.result is None else Result(row.result.encode(), bool(row.is_error))
    gate = None if row.gate_by is None else Gate(row.gate_by, row.permission, row.gate_reason)
    return Call(
        id=row.id,
        kind=row.kind,
        tool=row.tool,
        input=row.input.encode(),
        state=row.state,
        thread_id=row.thread_id,
        processed_at=row.processed_at,
        permission=row.permission,
        gate=gate,
        decision=_decision(row),
        attempts=max(row.attempts, attempts),
        episodes=episodes,
        outcome_unknown=row.outcome_unknown,
        result=result,
        posted=row.posted,
        detail=row.detail,
    )


def _unruled(call: Call) -> Call:
    """A decision on a gate of ours that nobody acted on yet is told again, by `decided`."""
    is_ours = call.state == "held" and call.gate is not None and call.gate.by != "upstream"
    return replace(call, decision=None) if is_ours else call


def _decision(row: Row[Any]) -> Decision | None:
    if row.decision_id is None:
        return None
    return Decision(
        result=row.decision_result,
        status=row.decision_status,
        by=row.decided_by,
        via=row.via,
        at=float(row.decided_epoch),
        deny_message=row.deny_message,
        id=row.decision_id,
    )
