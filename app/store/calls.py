"""Calls as read by the api: a session's log, one call, and what waits for a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Row, Select, and_, func, lateral, not_, or_, select, true, tuple_
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.selectable import LateralFromClause

from app.core.rules import ASKING
from app.store import tables
from app.store.approvals import NO_RULES, Rules, may_decide, rules_of
from app.store.attachments import NOT_ATTACHED
from app.store.paging import Page, bounded_rows

RULE_S: Final = 2.0
"""For so long a rule that is about to answer may take; then the call waits for a person."""

Mark = tuple[str, str, datetime, datetime | None]
"""Session, call, when it last changed, and when somebody last approved it."""

_calls = tables.calls
_decisions = tables.decisions


@dataclass(frozen=True, slots=True)
class Filter:
    """Which of the calls that wait are wanted: those that fit every member that is not None.

    `older_than_s` is the least age in seconds since a call was first seen, by the database's time. `decider`
    is a key's id: calls whose approvers do not include it are left out.
    """

    tool: str | None = None
    reason: str | None = None
    older_than_s: float | None = None
    decider: str | None = None


ALL: Final = Filter()


@dataclass(frozen=True, slots=True)
class Approval:
    """Somebody's allow that alone does not suffice; `edited_input` is the JSON text that it would let run."""

    id: str
    by: str
    via: str
    at: datetime
    edited_input: str | None
    tool_version: int | None


@dataclass(frozen=True, slots=True)
class Gate:
    """Who holds or held the call. `rules` are those of its tool while it is held, `rule` a standing one."""

    by: str
    permission: str | None
    reason: str | None
    rule: str | None
    expires_at: datetime | None
    on_expiry: str | None
    is_overdue: bool
    rules: Rules
    approvals: tuple[Approval, ...]


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
    edited_input: str | None


@dataclass(frozen=True, slots=True)
class CallView:
    """A call as stored. `input` and `result` are JSON texts, never decoded; `position` orders the log, and
    `change` is the number of its last change.

    `ran_input` is the JSON text that has taken the place of `input` for its tool, if one has.
    """

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
    processed_at: str | None
    created_at: datetime
    updated_at: datetime
    change: int
    ran_input: str | None = field(default=None)

    @property
    def edited_input(self) -> str | None:
        """What an allow put in the place of the input; while another must allow it, what the last one did."""
        if self.decision is not None and self.decision.status != "refused":
            return self.ran_input if self.decision.edited_input is None else self.decision.edited_input
        given = () if self.gate is None else self.gate.approvals
        return given[-1].edited_input if given and self.state == "held" else self.ran_input


async def get(connection: AsyncConnection, tenant: str, session_id: str, call_id: str) -> CallView | None:
    query = _shown().where(
        _calls.c.tenant == tenant, _calls.c.session_id == session_id, _calls.c.id == call_id
    )
    return next(iter(await _views(connection, tenant, (await connection.execute(query)).all())), None)


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
    return await _page(connection, tenant, query, limit)


async def changed(
    connection: AsyncConnection, tenant: str, session_id: str, *, after: int, limit: int
) -> Page[CallView]:
    """Return the session's calls in the order of their last changes, from the one after `after` on."""
    query = _shown().where(
        _calls.c.tenant == tenant, _calls.c.session_id == session_id, _calls.c.change > after
    )
    return await _page(connection, tenant, query, limit, _calls.c.change)


async def waiting(
    connection: AsyncConnection,
    tenant: str,
    *,
    session_id: str | None = None,
    after: int,
    limit: int,
    only: Filter = ALL,
) -> Page[CallView]:
    """Return the calls that wait for a person, oldest first: held, undecided, of sessions that are served.

    With a `decider` the transaction must be one snapshot, as it is with REPEATABLE READ: a call that came in
    between would be left out, and the cursor would pass it.
    """
    wanted = await _wanted(connection, tenant, session_id, only)
    return await _page(connection, tenant, _shown().where(_calls.c.position > after, *wanted), limit)


async def waiting_marks(
    connection: AsyncConnection,
    tenant: str,
    *,
    session_id: str | None = None,
    limit: int,
    only: Filter = ALL,
) -> Sequence[Mark]:
    """Return which calls wait for a person and since when they are as they are, without reading them."""
    approved_at = (
        select(func.max(_decisions.c.decided_at))
        .where(*_of_call(), _decisions.c.status == "approved")
        .correlate(_calls)
        .scalar_subquery()
        .label("approved_at")
    )
    query = (
        select(_calls.c.session_id, _calls.c.id, _calls.c.updated_at, approved_at)
        .where(*await _wanted(connection, tenant, session_id, only))
        .order_by(_calls.c.position)
        .limit(limit)
    )
    rows = await connection.execute(query)
    return [(row.session_id, row.id, row.updated_at, row.approved_at) for row in rows]


async def place_of_newest(connection: AsyncConnection, tenant: str, session_id: str, count: int) -> int:
    """Return the position after which `page` gives the session's newest `count` calls."""
    query = (
        select(_calls.c.position)
        .where(_calls.c.tenant == tenant, _calls.c.session_id == session_id)
        .order_by(_calls.c.position.desc())
        .offset(count)
        .limit(1)
    )
    return await connection.scalar(query) or 0


async def _wanted(
    connection: AsyncConnection, tenant: str, session_id: str | None, only: Filter
) -> list[ColumnElement[bool]]:
    """The conditions on calls that wait for a person and fit the filter."""
    wanted = [_calls.c.tenant == tenant, *_is_waiting()]
    if session_id is not None:
        wanted.append(_calls.c.session_id == session_id)
    if only.tool is not None:
        wanted.append(_calls.c.tool == only.tool)
    if only.reason is not None:
        wanted.append(_calls.c.gate_reason == only.reason)
    if only.older_than_s is not None:
        since = func.now() - func.make_interval(0, 0, 0, 0, 0, 0, only.older_than_s)
        wanted.append(_calls.c.created_at <= since)
    if only.decider is not None:
        held = select(_calls.c.kind, _calls.c.tool).where(_calls.c.tenant == tenant, _calls.c.state == "held")
        asked = {(row.kind, row.tool) for row in await connection.execute(held.distinct())}
        theirs = await may_decide(connection, tenant, only.decider, asked)
        wanted.append(tuple_(_calls.c.kind, _calls.c.tool).in_(theirs))
    return wanted


def _is_waiting() -> Sequence[ColumnElement[bool]]:
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
    # One that a rule is about to answer would come and go in the same moment.
    is_asked = or_(
        _calls.c.gate_rule.is_(None),
        _calls.c.gate_reason.in_(ASKING),
        _calls.c.updated_at <= func.now() - func.make_interval(0, 0, 0, 0, 0, 0, RULE_S),
    )
    return _calls.c.state == "held", not_(is_decided), is_served, is_asked


async def _page(
    connection: AsyncConnection,
    tenant: str,
    query: Select[Any],
    limit: int,
    place: ColumnElement[Any] = _calls.c.position,
) -> Page[CallView]:
    result, edited = (
        func.coalesce(func.octet_length(_calls.c[name]), 0) for name in ("result", "edited_input")
    )
    size = func.octet_length(_calls.c.input) + result + edited
    rows = await bounded_rows(connection, query, order_by=place, size=size, limit=limit)
    return Page(await _views(connection, tenant, rows.items), rows.has_more)


async def _views(connection: AsyncConnection, tenant: str, rows: Sequence[Row[Any]]) -> list[CallView]:
    """Return calls with the rules of those that are held."""
    held = [(row.kind, row.tool) if row.state == "held" else None for row in rows]
    rules = await rules_of(connection, tenant, {one for one in held if one is not None})
    return [_call(row, NO_RULES if one is None else rules[one]) for row, one in zip(rows, held, strict=True)]


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
            _decisions.c.edited_input.label("decided_input"),
        )
        .where(and_(*_of_call()), _decisions.c.status.not_in(("spent", "approved")))
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
    given = _approvals()
    both = _calls.outerjoin(shown, true()).outerjoin(given, true())
    return select(_calls, shown, given, *columns).select_from(both)


def _approvals() -> LateralFromClause:
    """The approvals of calls that are gated, oldest first."""
    names = {"id": "approval_ids", "decided_by": "approved_by", "via": "approved_via"}
    names |= {"decided_at": "approved_at", "edited_input": "approved_inputs"}
    names |= {"tool_version": "approved_versions"}
    arrays = [
        func.array_agg(aggregate_order_by(_decisions.c[name], _decisions.c.decided_at)).label(label)
        for name, label in names.items()
    ]
    is_given = and_(_calls.c.gate_by.is_not(None), *_of_call(), _decisions.c.status == "approved")
    return lateral(select(*arrays).where(is_given).correlate(_calls))


def _call(row: Row[Any], rules: Rules) -> CallView:
    gate = decision = None
    if row.gate_by is not None:
        gate = Gate(
            row.gate_by, row.permission, row.gate_reason, row.gate_rule,
            row.gate_expires_at, row.gate_on_expiry, bool(row.is_overdue), rules,
            tuple(map(Approval, row.approval_ids or (), row.approved_by or (), row.approved_via or (),
                      row.approved_at or (), row.approved_inputs or (), row.approved_versions or ())),
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
            edited_input=row.decided_input,
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
        processed_at=row.processed_at,
        created_at=row.created_at,
        updated_at=row.updated_at,
        change=row.change,
        ran_input=row.edited_input,
    )
