"""Calls as read by the api: a session's log, one call, and what waits for a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, and_, func, lateral, not_, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables
from app.store.attachments import NOT_ATTACHED
from app.store.paging import Page, bounded_rows

_calls = tables.calls
_decisions = tables.decisions


@dataclass(frozen=True, slots=True)
class Gate:
    """Who holds or held the call."""

    by: str
    permission: str | None
    reason: str | None
    expires_at: datetime | None
    on_expiry: str | None
    is_overdue: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision that stands, or the last one that upstream refused."""

    id: str
    result: str
    status: str
    by: str
    via: str
    at: datetime
    deny_message: str | None
    refusal: str | None


@dataclass(frozen=True, slots=True)
class CallView:
    """A call as stored. `input` and `result` are JSON texts, never decoded; `position` orders the log."""

    session_id: str
    id: str
    position: int
    kind: str
    tool: str
    thread_id: str | None
    input: str
    state: str
    outcome_unknown: bool
    awaits_callback: bool
    gate: Gate | None
    decision: Decision | None
    attempts: int
    result: str | None
    is_error: bool | None
    posted: bool
    detail: str | None
    created_at: datetime
    updated_at: datetime


async def get(connection: AsyncConnection, tenant: str, session_id: str, call_id: str) -> CallView | None:
    query = _shown().where(
        _calls.c.tenant == tenant, _calls.c.session_id == session_id, _calls.c.id == call_id
    )
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else _call(row)


async def page(
    connection: AsyncConnection,
    tenant: str,
    session_id: str,
    *,
    after: int,
    limit: int,
    state: str | None = None,
) -> Page[CallView]:
    """Return the session's calls in the order of their first record, from position `after` on."""
    query = _shown().where(
        _calls.c.tenant == tenant, _calls.c.session_id == session_id, _calls.c.position > after
    )
    if state is not None:
        query = query.where(_calls.c.state == state)
    return await _page(connection, query, limit)


async def waiting(
    connection: AsyncConnection, tenant: str, *, session_id: str | None = None, after: int, limit: int
) -> Page[CallView]:
    """Return the calls that wait for a person, oldest first: held, undecided, of sessions that are served."""
    attachments = tables.attachments
    is_decided = (
        select(_decisions.c.id)
        .where(*_of_call(), _decisions.c.status.in_(("accepted", "sending")))
        .correlate(_calls)
        .exists()
    )
    is_served = (
        select(attachments.c.term)
        .where(
            attachments.c.tenant == _calls.c.tenant,
            attachments.c.session_id == _calls.c.session_id,
            attachments.c.status.not_in(NOT_ATTACHED),
        )
        .correlate(_calls)
        .exists()
    )
    query = _shown().where(
        _calls.c.tenant == tenant,
        _calls.c.state == "held",
        _calls.c.position > after,
        not_(is_decided),
        is_served,
    )
    if session_id is not None:
        query = query.where(_calls.c.session_id == session_id)
    return await _page(connection, query, limit)


async def _page(connection: AsyncConnection, query: Select[Any], limit: int) -> Page[CallView]:
    size = func.octet_length(_calls.c.input) + func.coalesce(func.octet_length(_calls.c.result), 0)
    rows = await bounded_rows(connection, query, order_by=_calls.c.position, size=size, limit=limit)
    return Page([_call(row) for row in rows.items], rows.has_more)


def _of_call() -> Sequence[ColumnElement[bool]]:
    return (
        _decisions.c.tenant == _calls.c.tenant,
        _decisions.c.session_id == _calls.c.session_id,
        _decisions.c.call_id == _calls.c.id,
    )


def _shown() -> Select[Any]:
    """Calls with the decision to show: the one that stands, else the last that was refused."""
    shown = lateral(
        select(
            _decisions.c.id.label("decision_id"),
            _decisions.c.result.label("decision_result"),
            _decisions.c.status.label("decision_status"),
            _decisions.c.decided_by,
            _decisions.c.via,
            _decisions.c.decided_at,
            _decisions.c.deny_message,
            _decisions.c.refusal,
        )
        .where(and_(*_of_call()), _decisions.c.status != "spent")
        .order_by((_decisions.c.status == "refused").asc(), _decisions.c.decided_at.desc())
        .limit(1)
        .correlate(_calls)
    )
    d = tables.deliveries
    is_its = (d.c.tenant == _calls.c.tenant) & (d.c.session_id == _calls.c.session_id)
    promise = select(d.c.attempt).where(
        is_its, d.c.call_id == _calls.c.id, d.c.attempt >= _calls.c.attempts, d.c.callback_s.is_not(None)
    )
    awaits = and_(_calls.c.state == "dispatched", promise.correlate(_calls).exists())
    is_overdue = and_(_calls.c.state == "held", _calls.c.gate_expires_at <= func.now())
    columns = (awaits.label("awaits_callback"), is_overdue.label("is_overdue"))
    return select(_calls, shown, *columns).select_from(_calls.outerjoin(shown, true()))


def _call(row: Row[Any]) -> CallView:
    gate = decision = None
    if row.gate_by is not None:
        gate = Gate(
            row.gate_by, row.permission, row.gate_reason,
            row.gate_expires_at, row.gate_on_expiry, bool(row.is_overdue),
        )  # fmt: skip
    if row.decision_id is not None:
        decision = Decision(
            id=row.decision_id,
            result=row.decision_result,
            status=row.decision_status,
            by=row.decided_by,
            via=row.via,
            at=row.decided_at,
            deny_message=row.deny_message,
            refusal=row.refusal,
        )
    return CallView(
        session_id=row.session_id,
        id=row.id,
        position=row.position,
        kind=row.kind,
        tool=row.tool,
        thread_id=row.thread_id,
        input=row.input,
        state=row.state,
        outcome_unknown=row.outcome_unknown,
        awaits_callback=row.awaits_callback,
        gate=gate,
        decision=decision,
        attempts=row.attempts,
        result=row.result,
        is_error=row.is_error,
        posted=row.posted,
        detail=row.detail,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
