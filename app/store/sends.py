"""Sends: events that clients of the service want in a session, in the order in which they asked.

The api writes them as wishes; the run of the session takes them up one by one. A send that is under way is
fenced by the term that began it: whoever comes after waits until it must be over, and then calls it unknown.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from sqlalchemy import Row, and_, func, insert, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.calls import END_STATES
from app.core.steering import KEPT_S
from app.store import attachments, tables
from app.store.attachments import Refused
from app.store.batches import storable
from app.store.leases import SEND_S, Lease
from app.store.wakeups import notify, session_key

OPEN_MAX: Final = 20
"""So many sends of one session may be open at once."""
LOST_AFTER_S: Final = SEND_S + 4.0
"""A send that began so long ago and has no outcome will never have one."""

_STOPPED: Final = "the service stopped during the send"
_TOO_OLD: Final = "no replica could send it in time"

Status = Literal["waiting", "sending", "sent", "refused", "unknown"]

_sends = tables.sends


@dataclass(frozen=True, slots=True)
class Send:
    """A send as stored. `sent` are the events as upstream took them, each with `id` and `type`.

    `waiting_on` are the calls that upstream wants answered first.
    """

    id: str
    session_id: str
    status: Status
    sent: Sequence[dict[str, Any]]
    code: str | None
    message: str | None
    waiting_on: tuple[str, ...]
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class Next:
    """A send to make now: `events` is what a JSON array holds between its brackets."""

    id: str
    events: bytes
    age_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a send came to. `code` and `message` say why one was refused, or is unknown."""

    status: Literal["sent", "refused", "unknown"]
    sent: Sequence[dict[str, Any]] = ()
    code: str | None = None
    message: str | None = None
    waiting_on: tuple[str, ...] = ()


class TooManySendsError(Exception):
    """The session has `OPEN_MAX` sends that are not over."""


async def wish(connection: AsyncConnection, tenant: str, session_id: str, events: bytes) -> str | Refused:
    """Ask for events to be sent; return the send's id. A session that ended by idleness is attached again.

    Raises:
        TooManySendsError: so many are open already.
    """
    woken = await attachments.wake(connection, tenant, session_id)
    if isinstance(woken, Refused):
        return woken
    open_ = select(func.count()).select_from(_sends).where(_of(tenant, session_id), _is_open())
    if (await connection.scalar(open_) or 0) >= OPEN_MAX:
        raise TooManySendsError
    id_ = "send_" + secrets.token_hex(12)
    row = {"tenant": tenant, "session_id": session_id, "id": id_, "events": events.decode()}
    await connection.execute(insert(_sends).values(row))
    return id_


async def get(connection: AsyncConnection, tenant: str, session_id: str, send_id: str) -> Send | None:
    query = select(_sends, _is_lost().label("is_lost")).where(_of(tenant, session_id), _sends.c.id == send_id)
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else _send(row)


async def are_open(connection: AsyncConnection, lease: Lease) -> bool:
    """Whether the session has sends that are not over."""
    query = select(func.count()).where(_of(lease.tenant, lease.session_id), _is_open())
    return bool(await connection.scalar(query))


async def take(connection: AsyncConnection, lease: Lease) -> Next | None:
    """Take up the oldest send, if nothing of the session is under way; the term must hold.

    One that an earlier term began, and that must be over by now, becomes unknown; one that nobody took up in
    `KEPT_S` is not sent any more.
    """
    key = {"tenant": lease.tenant, "session_id": lease.session_id, "term": lease.term}
    held = await connection.execute(
        text(
            "select 1 from attachments where tenant = :tenant and session_id = :session_id and term = :term"
            " and replica_id is not null for no key update"
        ),
        key,
    )
    if held.one_or_none() is None:
        return None
    over = await connection.execute(
        text(
            """
            update sends set finished_at = now(), events = '',
                status = case status when 'sending' then 'unknown' else 'refused' end,
                code = case status when 'sending' then null else 'upstream_unreachable' end,
                message = case status when 'sending' then :stopped else :too_old end
            where tenant = :tenant and session_id = :session_id and finished_at is null
                and case status when 'sending' then sending_at < now() - make_interval(secs => :lost_after_s)
                    else created_at < now() - make_interval(secs => :kept_s) end
            """
        ),
        key | {"lost_after_s": LOST_AFTER_S, "kept_s": KEPT_S, "stopped": _STOPPED, "too_old": _TOO_OLD},
    )
    taken = await connection.execute(
        text(
            """
            with oldest as (
                select id from sends where tenant = :tenant and session_id = :session_id
                    and finished_at is null
                order by position limit 1
            )
            update sends s set status = 'sending', term = :term, sending_at = now() from oldest
            where s.tenant = :tenant and s.session_id = :session_id and s.id = oldest.id
                and s.status = 'waiting'
            returning s.id, s.events, extract(epoch from now() - s.created_at) as age_s
            """
        ),
        key,
    )
    row = taken.one_or_none()
    if over.rowcount:
        await notify(connection, [session_key(lease.tenant, lease.session_id)])
    return None if row is None else Next(row.id, row.events.encode(), float(row.age_s))


async def put_back(connection: AsyncConnection, lease: Lease, send_id: str) -> None:
    """Let a send wait again that surely has not arrived."""
    await connection.execute(
        text(
            "update sends set status = 'waiting' where tenant = :tenant and session_id = :session_id"
            " and id = :id and status = 'sending' and term = :term"
        ),
        _named(lease, send_id),
    )


async def finish(connection: AsyncConnection, lease: Lease, send_id: str, outcome: Outcome) -> None:
    """Store what a send of this term came to, and wake whoever waits for it. What it carried is forgotten."""
    await connection.execute(
        text(
            "update sends set status = :status, sent = :sent, code = :code, message = :message,"
            " waiting_on = :waiting_on, finished_at = now(), events = ''"
            " where tenant = :tenant and session_id = :session_id and id = :id and term = :term"
            " and status in ('sending', 'unknown')"
        ),
        _named(lease, send_id)
        | {
            "status": outcome.status, "sent": json.dumps(list(outcome.sent)), "code": outcome.code,
            "message": storable(outcome.message), "waiting_on": list(outcome.waiting_on),
        },
    )  # fmt: skip
    await notify(connection, [session_key(lease.tenant, lease.session_id)])


async def are_answered(connection: AsyncConnection, lease: Lease, call_ids: Sequence[str]) -> bool:
    """Whether the store holds all of these calls, and each is over."""
    c = tables.calls.c
    query = select(func.count()).where(
        c.tenant == lease.tenant, c.session_id == lease.session_id, c.id.in_(call_ids),
        c.state.in_(END_STATES),
    )  # fmt: skip
    return await connection.scalar(query) == len(set(call_ids))


def _named(lease: Lease, send_id: str) -> dict[str, Any]:
    return {"tenant": lease.tenant, "session_id": lease.session_id, "term": lease.term, "id": send_id}


def _of(tenant: str, session_id: str) -> Any:
    return and_(_sends.c.tenant == tenant, _sends.c.session_id == session_id)


def _is_lost() -> Any:
    age = func.make_interval(0, 0, 0, 0, 0, 0, LOST_AFTER_S)
    return and_(_sends.c.status == "sending", _sends.c.sending_at < func.now() - age)


def _is_open() -> Any:
    is_fresh = and_(_sends.c.status == "sending", ~_is_lost())
    return and_(_sends.c.finished_at.is_(None), or_(_sends.c.status == "waiting", is_fresh))


def _send(row: Row[Any]) -> Send:
    is_lost = bool(row.is_lost)
    return Send(
        id=row.id,
        session_id=row.session_id,
        status="unknown" if is_lost else row.status,
        sent=json.loads(row.sent) if row.sent else (),
        code=row.code,
        message=_STOPPED if is_lost else row.message,
        waiting_on=tuple(row.waiting_on or ()),
        created_at=row.created_at,
        finished_at=row.finished_at,
    )
