"""What a run reads: the state it starts from, the wishes made meanwhile, calls by id."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import Row, ScalarSelect, case, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core import protocol
from app.core.calls import END_STATES, Call, Decision, Gate, Result
from app.core.notifications import call_data
from app.store import attachments, outbox, sends, tables
from app.store.batches import AttemptEnd, storable
from app.store.leases import Lease
from app.store.secrets import Secrets, UnreadableSecretError
from app.store.wakeups import notify, session_key

OVER_MAX: Final = 500
"""How many of the calls that ended last a run keeps in mind."""

UNSENT_CODES: Final = (
    "blocked_url", "blocked_address", "dns_failed", "connect_failed",
    "tls_expired", "tls_untrusted", "tls_wrong_host", "tls_too_old", "tls_failed", "unhealthy",
)  # fmt: skip
"""Codes of attempts that failed before anything was written to the tool."""

_calls = tables.calls
_decisions = tables.decisions


@dataclass(frozen=True, slots=True)
class Start:
    """Everything that a run begins with. `idle_left_s` is the rest of a countdown, None if none runs.

    `fault` says why the extra headers cannot be read; they are empty then.
    """

    settings: attachments.Settings
    extra_headers: Mapping[str, str] = field(repr=False)
    fault: str | None
    calls: tuple[Call, ...]
    over: tuple[Call, ...]
    progress: protocol.Progress
    idle_left_s: float | None
    open_messages: tuple[str, ...]
    wish: int
    is_detach_requested: bool
    wanted: tuple[str, ...]
    again: tuple[str, ...]
    is_steered: bool
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
    again: tuple[str, ...]


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
    fault: str | None = None
    extra_headers: Mapping[str, str] = {}
    try:
        extra_headers = await attachments.load_extra_headers(connection, secrets, *key)
    except UnreadableSecretError as error:
        fault = f"{error}. If it is lost for good, detach the session and attach it with its headers."
    return Start(
        settings=msgspec.json.decode(row.settings, type=attachments.Settings),
        extra_headers=extra_headers,
        fault=fault,
        calls=tuple(_unruled(_call(call, *numbered.get(call.id, (0, 0, False)))) for call in open_),
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
        again=tuple(row.again),
        is_steered=await sends.are_open(connection, lease),
        decided=tuple(await decided(connection, lease)),
    )


async def wishes(connection: AsyncConnection, replica_id: str) -> list[Wish]:
    """Read the attachments of this replica of which something was wished that nobody acted on."""
    a = tables.attachments
    rows = await connection.execute(
        select(
            a.c.tenant, a.c.session_id, a.c.wish, a.c.settings, a.c.detach_requested, a.c.wanted, a.c.again
        ).where(a.c.replica_id == replica_id, a.c.wish != a.c.wish_seen)
    )
    return [
        Wish(
            row.tenant,
            row.session_id,
            row.wish,
            row.settings,
            row.detach_requested,
            tuple(row.wanted),
            tuple(row.again),
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


async def body(connection: AsyncConnection, lease: Lease, call_id: str) -> tuple[bytes | None, str | None]:
    """Read what earlier deliveries of the call sent, and the key of its callback's token."""
    b = tables.bodies
    query = select(b.c.body, b.c.key_id).where(
        b.c.tenant == lease.tenant, b.c.session_id == lease.session_id, b.c.call_id == call_id
    )
    row = (await connection.execute(query)).one_or_none()
    return (None, None) if row is None else (row.body, row.key_id)


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


async def orphans(connection: AsyncConnection, lease: Lease, ids: Collection[str]) -> dict[str, float | None]:
    """Say of `dispatched` calls that nobody here delivers for how many seconds they may still report.

    A delivery may until its deadline, while the replica that began it lives and has not given it up: 0, for
    it may end at any moment. That an attempt has ended says nothing: another may follow. A tool that has
    answered 202 may until the deadline of its callback. None: nobody will.
    Calls that are `dispatched` no more are left out: their delivery has stored its result.
    """
    rows = await connection.execute(
        text(
            """
            select c.id, bool_or(d.deadline_at > now() and (r.expires_at > now() or d.callback_s is not null))
                and not coalesce(bool_or(d.code = 'abandoned'), false) as may_report,
                extract(epoch from max(d.deadline_at) filter (where d.callback_s is not null) - now())
                    as left_s
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
    return {row.id: float(row.left_s or 0.0) if row.may_report else None for row in rows}


@dataclass(frozen=True, slots=True)
class Callback:
    """The result that a tool reported after its 202, as it came; `attempts` have been made of the call.

    `tool` is the name that the agent called, `served_by` the registration that the delivery went to.
    """

    call_id: str
    tool: str
    served_by: str
    attempts: int
    body: bytes
    content_type: str


async def called_back(connection: AsyncConnection, lease: Lease, ids: Collection[str]) -> Sequence[Callback]:
    """Read what tools have reported of these calls, as far as they are `dispatched`."""
    b, c = tables.callbacks, _calls
    is_call = (b.c.tenant == c.c.tenant) & (b.c.session_id == c.c.session_id) & (b.c.call_id == c.c.id)
    rows = await connection.execute(
        select(c.c.id, c.c.tool, _served_by().label("served_by"), c.c.attempts, b.c.body, b.c.content_type)
        .select_from(c.join(b, is_call))
        .where(
            c.c.tenant == lease.tenant, c.c.session_id == lease.session_id, c.c.id.in_(ids),
            c.c.state == "dispatched",
        )
    )  # fmt: skip
    return [
        Callback(row.id, row.tool, row.served_by or row.tool, row.attempts, row.body, row.content_type)
        for row in rows
    ]


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
    await attachments.lock(connection, lease.tenant, lease.session_id)
    left = await connection.execute(
        text(
            """
            update calls set state = case state when 'dispatched' then 'answered' else state end,
                change = nextval('changes'), attempts = :attempts, result = :result,
                is_error = :is_error, outcome_unknown = :unknown, updated_at = now()
            where tenant = :tenant and session_id = :session_id and id = :id
                and state in ('dispatched', 'interrupted') and attempts = :dispatched and result is null
            returning kind, tool, thread_id, state, gate_by, gate_reason, created_at
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
    row = left.one_or_none()
    if row is not None:
        await notify(connection, [session_key(lease.tenant, lease.session_id)])
    if row is None or not result.is_error:
        return
    data = call_data(
        lease.session_id, call_id, thread_id=row.thread_id, tool=row.tool, kind=row.kind, state=row.state,
        gate_by=row.gate_by, gate_reason=row.gate_reason, outcome_unknown=unknown,
    )  # fmt: skip
    if unknown:
        await outbox.put(connection, lease.tenant, "call.outcome_unknown", data, since=row.created_at)
    failed = data | {"code": None}
    await outbox.put(connection, lease.tenant, "call.failed", failed, since=row.created_at)


async def take_back(connection: AsyncConnection, lease: Lease, calls: Iterable[tuple[str, int]]) -> None:
    """Let calls wait again whose delivery was committed and never began; each is named with its attempt."""
    await attachments.lock(connection, lease.tenant, lease.session_id)
    for call_id, attempt in calls:
        key = {"tenant": lease.tenant, "session_id": lease.session_id, "id": call_id, "attempt": attempt}
        taken = await connection.execute(
            text(
                "update calls set change = nextval('changes'), state = 'queued', attempts = attempts - 1,"
                " updated_at = now()"
                " where tenant = :tenant and session_id = :session_id and id = :id"
                " and state = 'dispatched' and attempts = :attempt returning id"
            ),
            key,
        )
        if taken.all():
            await notify(connection, [session_key(lease.tenant, lease.session_id)])
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
            .values(
                finished_at=func.now(),
                http_status=end.http_status,
                code=end.code,
                reply=end.reply,
                reply_excerpt=storable(end.excerpt),
                duration_ms=end.duration_ms,
            )
        )
        if end.callback_s is not None and end.callback_max_s is not None:
            await connection.execute(
                update(d)
                .where(owned, d.c.call_id == end.call_id, d.c.attempt == end.attempt)
                .values(
                    callback_s=end.callback_s,
                    deadline_at=func.now() + timedelta(seconds=end.callback_s),
                    deadline_max_at=func.now() + timedelta(seconds=end.callback_max_s),
                )
            )
    calls = list(abandoned)
    await notify(connection, [session_key(lease.tenant, lease.session_id)])
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


def _served_by() -> ScalarSelect[str]:
    """The registration that a call's deliveries went to: they all went to one."""
    d = tables.deliveries
    its = (
        (d.c.tenant == _calls.c.tenant)
        & (d.c.session_id == _calls.c.session_id)
        & (d.c.call_id == _calls.c.id)
    )
    return select(d.c.tool).where(its).limit(1).scalar_subquery()


def _with_decision(key: tuple[str, str]) -> Any:
    """Calls of a session, each with its standing decision if there is one, and who got its deliveries."""
    standing = (
        (_decisions.c.tenant == _calls.c.tenant)
        & (_decisions.c.session_id == _calls.c.session_id)
        & (_decisions.c.call_id == _calls.c.id)
        & _decisions.c.status.in_(("accepted", "sending"))
    )
    is_over = _calls.c.state.in_(END_STATES - {"interrupted"})
    return (
        select(
            _calls,
            _decisions.c.id.label("decision_id"),
            _decisions.c.result.label("decision_result"),
            _decisions.c.status.label("decision_status"),
            _decisions.c.decided_by,
            _decisions.c.via,
            _decisions.c.deny_message,
            _decisions.c.edited_input.label("decided_input"),
            _decisions.c.tool_version,
            func.extract("epoch", _decisions.c.decided_at).label("decided_epoch"),
            case((is_over, None), else_=_served_by()).label("served_by"),
        )
        .select_from(_calls.outerjoin(_decisions, standing))
        .where(_calls.c.tenant == key[0], _calls.c.session_id == key[1])
    )


async def _attempts(connection: AsyncConnection, key: tuple[str, str]) -> dict[str, tuple[int, int, bool]]:
    """The last attempt of each open call, how many episodes were lost, and whether the last one was a 202.

    Retries within one episode have numbers too; all of them but the last were noted with how they went. One
    that an orderly stop abandoned is nobody's fault.
    """
    d = tables.deliveries
    is_lost = (d.c.finished_at.is_(None) | d.c.code.is_(None)) & d.c.callback_s.is_(None)
    is_promised = func.bool_or((d.c.attempt >= _calls.c.attempts) & d.c.callback_s.is_not(None))
    rows = await connection.execute(
        select(d.c.call_id, func.max(d.c.attempt).label("attempt"),
               func.count().filter(is_lost).label("lost"), is_promised.label("is_promised"))
        .join(_calls, (_calls.c.tenant == d.c.tenant) & (_calls.c.session_id == d.c.session_id)
              & (_calls.c.id == d.c.call_id))
        .where(_calls.c.tenant == key[0], _calls.c.session_id == key[1], _calls.c.state.not_in(END_STATES))
        .group_by(d.c.call_id)
    )  # fmt: skip
    return {row.call_id: (row.attempt, row.lost, row.is_promised) for row in rows}


def _call(row: Row[Any], attempts: int = 0, episodes: int = 0, is_promised: bool = False) -> Call:
    result = None if row.result is None else Result(row.result.encode(), bool(row.is_error))
    gate = (
        None
        if row.gate_by is None
        else Gate(row.gate_by, row.permission, row.gate_reason, rule=row.gate_rule)
    )
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
        served_by=row.served_by,
        outcome_unknown=row.outcome_unknown,
        awaits_callback=is_promised and row.state == "dispatched",
        result=result,
        posted=row.posted,
        detail=row.detail,
        edited_input=row.edited_input and row.edited_input.encode(),
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
        edited_input=row.decided_input and row.decided_input.encode(),
        tool_version=row.tool_version,
    )
