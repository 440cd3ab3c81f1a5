"""Messages as read by the api: finals and open previews of a session, and their text.

`content` is a JSON text that is handed on byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Row, Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables
from app.store.paging import Page, bounded_rows

PARTIALS_MAX: Final = 50
"""Open previews shown behind the finals of a text poll; there is one per thread at most."""

_messages = tables.messages
_attachments = tables.attachments


class _Block(msgspec.Struct):
    type: str = ""
    text: str = ""


_BLOCKS: Final = msgspec.json.Decoder(list[_Block])


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message as stored. `is_stale` marks a preview that nobody writes on any more; `change` is the number
    of a final's last change."""

    id: str
    position: int
    state: str
    is_stale: bool
    content: str
    thread_id: str | None
    processed_at: str | None
    updated_at: datetime
    seq: int | None
    change: int

    @property
    def text(self) -> str:
        """The texts of its text blocks, joined by nothing. May hold lone surrogates, as the content may."""
        try:
            blocks = [(block.type, block.text) for block in _BLOCKS.decode(self.content)]
        except (msgspec.MsgspecError, UnicodeError):
            blocks = _read_loosely(self.content)
        return "".join(text for type_, text in blocks if type_ == "text")


async def get(
    connection: AsyncConnection, tenant: str, session_id: str, message_id: str
) -> MessageView | None:
    query = _of(tenant, session_id).where(_messages.c.id == message_id)
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else _message(row)


async def page(
    connection: AsyncConnection, tenant: str, session_id: str, *, after: int, limit: int
) -> Page[MessageView]:
    """Return finals and open previews in the order of their first appearance, from position `after` on."""
    query = _of(tenant, session_id).where(_messages.c.position > after)
    return await _page(connection, query, _messages.c.position, limit)


async def finals(
    connection: AsyncConnection, tenant: str, session_id: str, *, after_seq: int, limit: int
) -> Page[MessageView]:
    """Return finals in the order of their `seq`, from the first one after `after_seq`."""
    query = _of(tenant, session_id).where(_messages.c.seq > after_seq)
    return await _page(connection, query, _messages.c.seq, limit)


async def changed(
    connection: AsyncConnection, tenant: str, session_id: str, *, after: int, limit: int
) -> Page[MessageView]:
    """Return the session's finals in the order of their last changes, from the one after `after` on."""
    query = _of(tenant, session_id).where(_messages.c.state == "final", _messages.c.change > after)
    return await _page(connection, query, _messages.c.change, limit)


async def partials(connection: AsyncConnection, tenant: str, session_id: str) -> Sequence[MessageView]:
    """Return the open previews in the order of their first appearance."""
    query = _of(tenant, session_id).where(_messages.c.state == "partial", _messages.c.seq.is_(None))
    return (await _page(connection, query, _messages.c.position, PARTIALS_MAX)).items


async def previews(connection: AsyncConnection) -> dict[tuple[str, str], datetime]:
    """Return the sessions of all tenants that have open previews, each with when one last changed."""
    query = (
        select(_messages.c.tenant, _messages.c.session_id, func.max(_messages.c.updated_at).label("at"))
        .where(_messages.c.state == "partial")
        .group_by(_messages.c.tenant, _messages.c.session_id)
    )
    return {(row.tenant, row.session_id): row.at for row in await connection.execute(query)}


async def place_of_newest(connection: AsyncConnection, tenant: str, session_id: str, count: int) -> int:
    """Return the position after which `page` gives the session's newest `count` messages."""
    query = (
        select(_messages.c.position)
        .where(_messages.c.tenant == tenant, _messages.c.session_id == session_id)
        .order_by(_messages.c.position.desc())
        .offset(count)
        .limit(1)
    )
    return await connection.scalar(query) or 0


async def _page(connection: AsyncConnection, query: Select[Any], place: Any, limit: int) -> Page[MessageView]:
    size = func.octet_length(_messages.c.content)
    rows = await bounded_rows(connection, query, order_by=place, size=size, limit=limit)
    return Page([_message(row) for row in rows.items], rows.has_more)


def _of(tenant: str, session_id: str) -> Select[Any]:
    is_followed = (_attachments.c.status == "live") & (_attachments.c.term == _messages.c.term)
    is_stale = (_messages.c.state == "partial") & ~func.coalesce(is_followed, False)
    return (
        select(_messages, is_stale.label("is_stale"))
        .select_from(
            _messages.outerjoin(
                _attachments,
                (_attachments.c.tenant == _messages.c.tenant)
                & (_attachments.c.session_id == _messages.c.session_id),
            )
        )
        .where(_messages.c.tenant == tenant, _messages.c.session_id == session_id)
    )


def _message(row: Row[Any]) -> MessageView:
    return MessageView(
        id=row.id,
        position=row.position,
        state=row.state,
        is_stale=row.is_stale,
        content=row.content,
        thread_id=row.thread_id,
        processed_at=row.processed_at,
        updated_at=row.updated_at,
        seq=row.seq,
        change=row.change,
    )


def _read_loosely(content: str) -> list[tuple[str, str]]:
    """Read blocks that the strict decoder refuses: lone surrogates, members of odd types."""
    try:
        blocks = json.loads(content)
    except (ValueError, RecursionError):
        return []
    if not isinstance(blocks, list):
        return []
    members = [(block.get("type"), block.get("text")) for block in blocks if isinstance(block, dict)]
    return [(type_, text) for type_, text in members if isinstance(type_, str) and isinstance(text, str)]
