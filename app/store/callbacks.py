"""Callbacks: what tools report after a 202. The first report of a call counts, by the database's time.

A report is a wish: whoever runs the session reads it and takes the call on. The token says which call it is
for and proves the right to answer it, so that a tool needs no key of the service.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from sqlalchemy import func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.calls import CALLBACK_PREFIX, END_STATES, webhook_id
from app.store import attachments, tables
from app.store.secrets import Secrets
from app.store.wakeups import notify, session_key, wish_key

TOKEN_CHARS_MAX: Final = 512

RefusalCode = Literal[
    "unauthenticated", "not_awaiting_callback", "callback_late", "already_answered", "call_over"
]


@dataclass(frozen=True, slots=True)
class Refused:
    """The report was not taken: a code of `app.api.problems`, and the call's state."""

    code: RefusalCode
    state: str | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The report is stored, or the time extended. `deadline_at` is when the tool's time is over."""

    deadline_at: datetime


def token_of(secrets: Secrets, key_id: str, tenant: str, session_id: str, call_id: str) -> str | None:
    """The token that lets its bearer answer this call and no other; None if the key is gone."""
    mac = secrets.mac(webhook_id(tenant, session_id, call_id), key_id)
    owner = base64.urlsafe_b64encode(tenant.encode()).decode().rstrip("=")
    return None if mac is None else f"{CALLBACK_PREFIX}.{key_id}.{owner}.{mac}"


def tenant_of(secrets: Secrets, token: str, session_id: str, call_id: str) -> str | None:
    """The tenant whose call the token is for; None if it is not for this call."""
    parts = token.split(".") if len(token) <= TOKEN_CHARS_MAX else []
    if len(parts) != 4 or not token.isascii():
        return None
    try:
        tenant = base64.b64decode(
            parts[2] + "=" * (-len(parts[2]) % 4), altchars=b"-_", validate=True
        ).decode()
    except (binascii.Error, ValueError):
        return None
    expected = token_of(secrets, parts[1], tenant, session_id, call_id)
    return tenant if expected is not None and hmac.compare_digest(expected, token) else None


async def report(
    connection: AsyncConnection, tenant: str, session_id: str, call_id: str, body: bytes, content_type: str
) -> Taken | Refused:
    """Store what a tool reports, unless another report or the end of its time came first."""
    found = await _find(connection, tenant, session_id, call_id)
    if isinstance(found, Refused):
        return found
    c = tables.callbacks
    is_call = (c.c.tenant == tenant) & (c.c.session_id == session_id) & (c.c.call_id == call_id)
    earlier = (await connection.execute(select(c).where(is_call))).one_or_none()
    if earlier is not None:
        is_same = (earlier.body, earlier.content_type) == (body, content_type)
        return Taken(found.deadline_at) if is_same else Refused("already_answered", found.state)
    if (refused := found.refusal) is not None:
        return refused
    await connection.execute(
        insert(c).values(
            tenant=tenant, session_id=session_id, call_id=call_id, body=body, content_type=content_type
        )
    )
    await _wish(connection, tenant, session_id)
    return Taken(found.deadline_at)


async def extend(connection: AsyncConnection, tenant: str, session_id: str, call_id: str) -> Taken | Refused:
    """Grant a tool that reports progress its time again, up to its maximum."""
    found = await _find(connection, tenant, session_id, call_id)
    if isinstance(found, Refused):
        return found
    if (refused := found.refusal) is not None:
        return refused
    if not found.is_promised:
        return Refused("not_awaiting_callback", found.state)
    d = tables.deliveries
    extended = await connection.scalar(
        update(d)
        .where(
            d.c.tenant == tenant, d.c.session_id == session_id, d.c.call_id == call_id,
            d.c.attempt == found.attempt,
        )
        .values(
            deadline_at=func.least(
                d.c.deadline_max_at, func.now() + func.make_interval(0, 0, 0, 0, 0, 0, d.c.callback_s)
            )
        )
        .returning(d.c.deadline_at)
    )  # fmt: skip
    assert extended is not None, "the delivery was read under the call's lock"
    return Taken(extended)


@dataclass(frozen=True, slots=True)
class _Found:
    """The call with its last delivery."""

    state: str
    attempt: int
    deadline_at: datetime
    is_promised: bool
    is_late: bool

    @property
    def refusal(self) -> Refused | None:
        """Why nothing more is taken, if nothing is."""
        if self.is_late and (self.is_promised or self.state == "dispatched"):
            return Refused("callback_late", self.state)
        if self.state == "dispatched":
            return None
        if self.state in ("answered", "posting", "posted"):
            return Refused("already_answered", self.state)
        return Refused("call_over" if self.state in END_STATES else "not_awaiting_callback", self.state)


async def _find(connection: AsyncConnection, tenant: str, session_id: str, call_id: str) -> _Found | Refused:
    """Lock the call, so that its runner takes no step meanwhile, and read its last delivery."""
    if await attachments.lock(connection, tenant, session_id) is None:
        return Refused("call_over")
    row = (
        await connection.execute(
            text(
                """
                select c.state, d.attempt, d.deadline_at, d.callback_s is not null as is_promised,
                    d.deadline_at <= now() as is_late
                from calls c join lateral (
                    select * from deliveries d where d.tenant = c.tenant and d.session_id = c.session_id
                        and d.call_id = c.id order by d.attempt desc limit 1
                ) d on true
                where c.tenant = :tenant and c.session_id = :session_id and c.id = :id
                for no key update of c
                """
            ),
            {"tenant": tenant, "session_id": session_id, "id": call_id},
        )
    ).one_or_none()
    if row is None:
        return Refused("not_awaiting_callback")
    return _Found(row.state, row.attempt, row.deadline_at, row.is_promised, row.is_late)


async def _wish(connection: AsyncConnection, tenant: str, session_id: str) -> None:
    a = tables.attachments
    await connection.execute(
        update(a).where(a.c.tenant == tenant, a.c.session_id == session_id).values(wish=a.c.wish + 1)
    )
    await notify(connection, [session_key(tenant, session_id), wish_key(tenant, session_id)])
