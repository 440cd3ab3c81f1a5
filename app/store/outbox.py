"""The outbox: what subscribers are to be told, written together with the change that it tells of.

`facts` are what a batch may have to tell; the statement that stores them compares each with the rows as they
were before the batch, so that a turning point is told once, also when the batch is written again. A tenant
without subscriptions pays for one look-up in `HOLD`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.calls import Call
from app.core.notifications import STUCK_FLAGS, Event, call_data, decision_data, encode
from app.core.rules import is_promised
from app.store.calls import CallView
from app.store.wakeups import notify

if TYPE_CHECKING:
    from app.store.batches import Batch

KEY: Final = "notifications"
"""The wake-up of whoever sends them."""

ASKED: Final = (
    "(select array_agg(distinct e) from subscriptions s cross join unnest(s.events) e"
    " where s.tenant = {0}.tenant and s.enabled)"
)
"""SQL of the events that the subscriptions of a row's tenant ask for; null when there are none."""


def facts(batch: Batch, asked: Collection[str]) -> Iterator[dict[str, Any]]:
    """What the batch may have to tell of the events in `asked`, in the order to tell it.

    `mark` is what the statement compares: the gate's reason, a decision, a message, a flag, why it ended.
    """
    if not asked:
        return
    for event, data, call_id, mark in _facts(batch):
        if event in asked:
            yield {"type": event, "data": encode(data), "call_id": call_id, "mark": mark}


_Fact = tuple[Event, dict[str, Any], str | None, str | None]


def _facts(batch: Batch) -> Iterator[_Fact]:
    session_id = batch.lease.session_id
    for call in {call.id: call for call in batch.decided}.values():
        yield from _decided(session_id, call)
    for call in {call.id: call for call in batch.calls}.values():
        yield from _turned(batch, call)
    for snapshot in batch.messages:
        if snapshot.state == "final":
            told = {"session_id": session_id, "message_id": snapshot.id, "thread_id": snapshot.thread_id}
            yield "message.final", told, None, snapshot.id
    if batch.progress is not None:
        for flag in sorted(batch.progress.flags & STUCK_FLAGS):
            yield "session.stuck", {"session_id": session_id, "flag": flag}, None, flag
    if batch.end is not None:
        status = "detached" if batch.end.reason == "detached" else "ended"
        ended = {"session_id": session_id, "status": status, "end_reason": batch.end.reason}
        yield "session.ended", ended, None, batch.end.reason


def _decided(session_id: str, call: Call) -> Iterator[_Fact]:
    """A decision that others gave; ours was told when it was recorded."""
    decision = call.decision
    if decision is None or decision.status == "refused" or decision.id is not None:
        return
    id_ = seen_id(session_id, call.id)
    more = decision_data(id_, decision.result, decision.status, decision.by, decision.via)
    yield "confirmation.decided", of_call(session_id, call) | more, call.id, id_


def _turned(batch: Batch, call: Call) -> Iterator[_Fact]:
    data = of_call(batch.lease.session_id, call)
    if call.state == "held" and call.confirmation is None and call.gate is not None and not is_promised(call):
        yield "confirmation.requested", data, call.id, call.gate.reason
    if call.state == "unowned":
        progress = batch.progress
        if not (call.kind == "builtin" and progress is not None and progress.environment == "cloud"):
            yield "call.unowned", data, call.id, call.kind
    if call.outcome_unknown:
        yield "call.outcome_unknown", data, call.id, None
    is_failure = call.result is not None and call.result.is_error and call.confirmation != "deny"
    if is_failure or call.state == "rejected":
        codes = [end.code for end in batch.ended if end.call_id == call.id]
        mark = "rejected" if call.state == "rejected" else None
        yield "call.failed", data | {"code": codes[-1] if codes else None}, call.id, mark


def of_call(session_id: str, call: Call) -> dict[str, Any]:
    """What is told of a call as the core knows it."""
    gate = call.gate
    return call_data(
        session_id, call.id, thread_id=call.thread_id, tool=call.tool, kind=call.kind, state=call.state,
        gate_by=None if gate is None else gate.by, gate_reason=None if gate is None else gate.reason,
        outcome_unknown=call.outcome_unknown,
    )  # fmt: skip


def of_view(call: CallView) -> dict[str, Any]:
    """What is told of a call as it is stored."""
    gate = call.gate
    return call_data(
        call.session_id, call.id, thread_id=call.thread_id, tool=call.tool, kind=call.kind, state=call.state,
        gate_by=None if gate is None else gate.by, gate_reason=None if gate is None else gate.reason,
        outcome_unknown=call.outcome_unknown,
    )  # fmt: skip


def seen_id(session_id: str, call_id: str) -> str:
    """The id of a decision that was seen upstream."""
    return f"seen/{session_id}/{call_id}"


async def put(
    connection: AsyncConnection,
    tenant: str,
    event: Event,
    data: Mapping[str, Any],
    *,
    since: datetime | None = None,
) -> None:
    """Tell the tenant's subscribers of an event, once the transaction commits; `since` begins its age."""
    stored = await connection.execute(
        text(
            """
            insert into notifications (tenant, subscription, id, type, data, age_s)
            select s.tenant, s.name, 'ntf_' || replace(gen_random_uuid()::text, '-', ''), :type, :data,
                extract(epoch from now() - cast(:since as timestamptz))
            from subscriptions s where s.tenant = :tenant and s.enabled and :type = any(s.events)
            """
        ),
        {"tenant": tenant, "type": event, "data": encode(data), "since": since},
    )
    if stored.rowcount:
        await notify(connection, [KEY])
