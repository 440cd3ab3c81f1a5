"""Attachments: the wish that a session is served. Everything here writes wishes; runners write the state.

Each wish raises `wish`, so that whoever runs the session sees that there is something to read. Locks are
taken in the order attachment, call, decision.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import Row, func, select, tuple_, union_all, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core import protocol
from app.core.calls import END_STATES
from app.store import tables
from app.store.overdue import Overdue, overdue
from app.store.secrets import Secrets, UnreadableSecretError
from app.store.wakeups import notify, session_key, wish_key

NOT_ATTACHED: Final = frozenset({"ended", "detached"})
OVER_FOR_GOOD: Final = frozenset({"terminated", "deleted"})
"""End reasons after which upstream has nothing left to attach to."""

SESSION_ID: Final = re.compile("[A-Za-z0-9_-]{1,128}")
"""What the id of a session looks like."""

_HEADERS: Final = "attachments.extra_headers"
_attachments = tables.attachments


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the attach body asked for, as stored; the extra headers are stored apart, encrypted."""

    max_idle_s: float | None = 60.0
    max_reconnects: int | None = None
    tools: tuple[str, ...] | None = None
    concurrency: int = 8
    credential: str = "default"
    environment: Literal["cloud", "self_hosted"] | None = None
    labels: dict[str, str] = {}

    def for_core(self) -> protocol.Settings:
        """Return what the session's machine needs of them."""
        return protocol.Settings(
            max_idle_s=self.max_idle_s,
            max_reconnects=self.max_reconnects,
            tools=None if self.tools is None else frozenset(self.tools),
            concurrency=self.concurrency,
            environment=self.environment,
        )


@dataclass(frozen=True, slots=True)
class Attachment:
    """An attachment as stored; `calls` counts its calls by state. Times are the database's."""

    session_id: str
    settings: Settings
    status: str
    detach_requested: bool
    end_reason: str | None
    end_detail: str | None
    cursor_at: float | None
    reconnects: int
    idle_deadline: datetime | None
    flags: tuple[str, ...]
    missing: tuple[str, ...]
    environment: str | None
    primary_thread_id: str | None
    replica_id: str | None
    term: int
    last_event_at: datetime | None
    last_event_age_s: float | None
    created_at: datetime
    updated_at: datetime
    calls: Mapping[str, int]
    overdue: tuple[Overdue, ...]
    change: int

    @property
    def is_attached(self) -> bool:
        return self.status not in NOT_ATTACHED


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a wish was not taken: a code of `app.api.problems`, and the attachment as it is."""

    code: Literal["session_not_found", "settings_differ", "detaching", "session_ended", "not_attached"]
    attachment: Attachment | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The wish is stored; `is_new` says whether it changed anything."""

    attachment: Attachment
    is_new: bool


async def attach(
    connection: AsyncConnection,
    secrets: Secrets,
    tenant: str,
    session_id: str,
    settings: Settings,
    extra_headers: Mapping[str, str],
) -> Accepted | Refused:
    """Wish that the session is served with these settings.

    The same settings while it is served change nothing; other ones are refused. An attachment that ended is
    opened again with the new settings, unless the session itself is over.
    """
    values = {
        "settings": msgspec.json.encode(settings).decode(),
        "extra_headers": secrets.encrypt(
            msgspec.json.encode(dict(extra_headers)), column=_HEADERS, row=(tenant, session_id)
        ),
    }
    new = (
        insert(_attachments)
        .values(tenant=tenant, session_id=session_id, **values)
        .on_conflict_do_nothing()
        .returning(_attachments.c.session_id)
    )
    current = None
    while (await connection.execute(new)).one_or_none() is None:
        current = await lock(connection, tenant, session_id)
        if current is not None:
            break
        # Retention removed it in between: nothing is in the way now.
    if current is not None:
        attachment = await _shown(connection, tenant, current)
        if attachment.is_attached:
            if attachment.detach_requested:
                return Refused("detaching", attachment)
            if attachment.settings != settings or _headers(secrets, current) != dict(extra_headers):
                return Refused("settings_differ", attachment)
            return Accepted(attachment, is_new=False)
        if attachment.end_reason in OVER_FOR_GOOD:
            return Refused("session_ended", attachment)
        await _wish(connection, tenant, session_id, **values, **_REOPENED)
    await notify(connection, [session_key(tenant, session_id), wish_key(tenant, session_id)])
    stored = await get(connection, tenant, session_id)
    assert stored is not None
    return Accepted(stored, is_new=True)


async def change(
    connection: AsyncConnection, tenant: str, session_id: str, changes: Mapping[str, Any]
) -> Accepted | Refused:
    """Change members of `Settings` of an attachment that is served."""
    found = await _served(connection, tenant, session_id)
    if isinstance(found, Refused):
        return found
    settings = msgspec.structs.replace(found.settings, **changes)
    if settings == found.settings:
        return Accepted(found, is_new=False)
    await _wish(connection, tenant, session_id, settings=msgspec.json.encode(settings).decode())
    return await _accepted(connection, tenant, session_id)


async def detach(connection: AsyncConnection, tenant: str, session_id: str) -> Accepted | Refused:
    """Wish that the session is no longer served; asking again, or after it ended, changes nothing."""
    row = await lock(connection, tenant, session_id)
    if row is None:
        return Refused("session_not_found")
    attachment = await _shown(connection, tenant, row)
    if not attachment.is_attached or attachment.detach_requested:
        return Accepted(attachment, is_new=False)
    await _wish(connection, tenant, session_id, detach_requested=True)
    return await _accepted(connection, tenant, session_id)


async def wake(connection: AsyncConnection, tenant: str, session_id: str) -> Accepted | Refused:
    """Wish that the session is looked at; one that ended by idleness is served again, as it was before."""
    row = await lock(connection, tenant, session_id)
    if row is None:
        return Refused("session_not_found")
    attachment = await _shown(connection, tenant, row)
    if attachment.is_attached:
        if attachment.detach_requested:
            return Refused("detaching", attachment)
        await _wish(connection, tenant, session_id)
    elif attachment.end_reason == "idle":
        await _wish(connection, tenant, session_id, **_REOPENED)
    else:
        is_over = attachment.end_reason in OVER_FOR_GOOD
        return Refused("session_ended" if is_over else "not_attached", attachment)
    return await _accepted(connection, tenant, session_id)


async def get(connection: AsyncConnection, tenant: str, session_id: str) -> Attachment | None:
    row = (await connection.execute(_one(tenant, session_id))).one_or_none()
    return None if row is None else await _shown(connection, tenant, row)


async def settings_of_all(
    connection: AsyncConnection, tenant: str, session_ids: Collection[str]
) -> dict[str, tuple[Settings, str | None]]:
    """Return the settings of these sessions, each with the kind of environment that it runs in, if known."""
    table = _attachments.c
    query = select(table.session_id, table.settings, table.environment).where(
        table.tenant == tenant, table.session_id.in_(session_ids)
    )
    found = {}
    for row in await connection.execute(query):
        settings = settings_of(row.settings)
        found[row.session_id] = (settings, settings.environment or row.environment)
    return found


async def exists(connection: AsyncConnection, tenant: str, session_id: str) -> bool:
    """Whether the tenant ever attached the session."""
    query = select(_attachments.c.term).where(
        _attachments.c.tenant == tenant, _attachments.c.session_id == session_id
    )
    return (await connection.execute(query)).one_or_none() is not None


async def page(
    connection: AsyncConnection, tenant: str, *, after: tuple[datetime, str] | None, limit: int
) -> list[Attachment]:
    """Return attachments, newest first, from the first one older than `after` (its time and session)."""
    place = tuple_(_attachments.c.created_at, _attachments.c.session_id)
    query = (
        _shown_columns()
        .where(_attachments.c.tenant == tenant)
        .order_by(_attachments.c.created_at.desc(), _attachments.c.session_id.desc())
        .limit(limit)
    )
    if after is not None:
        query = query.where(place < after)
    rows = (await connection.execute(query)).all()
    return await _attachments_of(connection, tenant, rows)


async def lock(connection: AsyncConnection, tenant: str, session_id: str) -> Row[Any] | None:
    """Lock the attachment against other wishes and against its runner's writes until the transaction ends."""
    query = _one(tenant, session_id).with_for_update(key_share=True)
    return (await connection.execute(query)).one_or_none()


async def load_extra_headers(
    connection: AsyncConnection, secrets: Secrets, tenant: str, session_id: str
) -> dict[str, str]:
    """Return the headers that the attachment's upstream requests carry; for its runner.

    Raises:
        UnreadableSecretError: their key is missing.
    """
    row = (await connection.execute(_one(tenant, session_id))).one()
    return _decrypted(secrets, row)


def settings_of(stored: str) -> Settings:
    """Read the `settings` column. Members that this version does not know are left out."""
    return msgspec.json.decode(stored, type=Settings)


_REOPENED: Final[Mapping[str, Any]] = {
    "status": "attaching",
    "end_reason": None,
    "end_detail": None,
    "terminal_event_id": None,
    "detach_requested": False,
    "replica_id": None,
    "reconnects": 0,
    "restarts": 0,
    "restarted_at": None,
    "idle_id": None,
    "idle_deadline": None,
    "flags": [],
}


async def _wish(connection: AsyncConnection, tenant: str, session_id: str, **values: Any) -> None:
    await connection.execute(
        update(_attachments)
        .where(_attachments.c.tenant == tenant, _attachments.c.session_id == session_id)
        .values(
            **values, wish=_attachments.c.wish + 1, updated_at=func.now(), change=tables.changes.next_value()
        )
    )


async def _accepted(connection: AsyncConnection, tenant: str, session_id: str) -> Accepted:
    await notify(connection, [session_key(tenant, session_id), wish_key(tenant, session_id)])
    stored = await get(connection, tenant, session_id)
    assert stored is not None
    return Accepted(stored, is_new=True)


async def _served(connection: AsyncConnection, tenant: str, session_id: str) -> Attachment | Refused:
    row = await lock(connection, tenant, session_id)
    if row is None:
        return Refused("session_not_found")
    attachment = await _shown(connection, tenant, row)
    if not attachment.is_attached:
        is_over = attachment.end_reason in OVER_FOR_GOOD
        return Refused("session_ended" if is_over else "not_attached", attachment)
    return Refused("detaching", attachment) if attachment.detach_requested else attachment


def _shown_columns() -> Any:
    age = func.extract("epoch", func.clock_timestamp() - _attachments.c.last_event_at)
    return select(_attachments, age.label("last_event_age_s"))


def _one(tenant: str, session_id: str) -> Any:
    return _shown_columns().where(_attachments.c.tenant == tenant, _attachments.c.session_id == session_id)


async def _shown(connection: AsyncConnection, tenant: str, row: Row[Any]) -> Attachment:
    (attachment,) = await _attachments_of(connection, tenant, [row])
    return attachment


async def _attachments_of(
    connection: AsyncConnection, tenant: str, rows: Sequence[Row[Any]]
) -> list[Attachment]:
    ids = [row.session_id for row in rows]
    counts = await _calls_by_state(connection, tenant, ids)
    is_any_open = any(state not in END_STATES for states in counts.values() for state in states)
    late = await overdue(connection, tenant, ids) if is_any_open else {}
    return [_attachment(row, counts.get(row.session_id, {}), late.get(row.session_id, ())) for row in rows]


async def _calls_by_state(
    connection: AsyncConnection, tenant: str, session_ids: Sequence[str]
) -> dict[str, dict[str, int]]:
    calls = tables.calls
    counted = (
        select(calls.c.session_id, calls.c.state, func.count().label("n"))
        .where(calls.c.tenant == tenant, calls.c.session_id.in_(session_ids))
        .group_by(calls.c.session_id, calls.c.state)
    )
    # Two queries in one, as each has an index of its own: together they would read every call.
    query = union_all(
        counted.where(calls.c.state.not_in(END_STATES)), counted.where(calls.c.state.in_(END_STATES))
    )
    counts: dict[str, dict[str, int]] = {}
    for row in await connection.execute(query):
        counts.setdefault(row.session_id, {})[row.state] = row.n
    return counts


def _attachment(row: Row[Any], calls: Mapping[str, int], late: tuple[Overdue, ...]) -> Attachment:
    return Attachment(
        session_id=row.session_id,
        settings=settings_of(row.settings),
        status=row.status,
        detach_requested=row.detach_requested,
        end_reason=row.end_reason,
        end_detail=row.end_detail,
        cursor_at=row.cursor_at,
        reconnects=row.reconnects,
        idle_deadline=row.idle_deadline,
        flags=tuple(row.flags),
        missing=tuple(row.missing),
        environment=row.environment,
        primary_thread_id=row.primary_thread_id,
        replica_id=row.replica_id,
        term=row.term,
        last_event_at=row.last_event_at,
        last_event_age_s=None if row.last_event_age_s is None else float(row.last_event_age_s),
        created_at=row.created_at,
        updated_at=row.updated_at,
        calls=calls,
        overdue=late,
        change=row.change,
    )


def _headers(secrets: Secrets, row: Row[Any]) -> dict[str, str] | None:
    try:
        return _decrypted(secrets, row)
    except UnreadableSecretError:
        return None


def _decrypted(secrets: Secrets, row: Row[Any]) -> dict[str, str]:
    plain = secrets.decrypt(row.extra_headers, column=_HEADERS, row=(row.tenant, row.session_id))
    return msgspec.json.decode(plain, type=dict[str, str])
