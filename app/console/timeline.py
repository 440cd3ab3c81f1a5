"""A session as it went: what the agent wrote and called, in the order of upstream's clock."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from app.console import wording
from app.console.cards import decider
from app.console.text import read_input
from app.store import calls, keys, messages, tables
from app.store.calls import CallView
from app.store.messages import MessageView

ENTRIES_MAX: Final = 100
"""Of either kind: the newest are shown."""
TEXT_CHARS_MAX: Final = 20_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A message or a call. `said` is a call in a sentence: verb, object, what became of it."""

    at: datetime
    message: MessageView | None = None
    call: CallView | None = None
    said: tuple[str, str, str] = ("", "", "")
    decided_by: str | None = None

    @property
    def key(self) -> str:
        one = self.message or self.call
        assert one is not None, "it is one of them"
        return "entry-" + hashlib.sha256(one.id.encode()).hexdigest()[:16]

    @property
    def version(self) -> str:
        decision = None if self.call is None else self.call.decision
        one = self.message and (self.message.content, self.message.state, self.message.is_stale)
        parts = (one, self.call and (self.call.state, self.call.updated_at, decision))
        return hashlib.sha256(repr(parts).encode("utf-8", "replace")).hexdigest()[:12]


async def mark(connection: AsyncConnection, tenant: str, session_id: str) -> str:
    """Return what changes with the session's newest entries, without reading them."""
    marks: list[object] = []
    for table in (tables.calls, tables.messages):
        last = (
            select(table.c.id, table.c.updated_at)
            .where(table.c.tenant == tenant, table.c.session_id == session_id)
            .order_by(table.c.position.desc())
            .limit(ENTRIES_MAX)
        ).subquery()
        marks += (await connection.execute(select(func.max(last.c.updated_at), func.max(last.c.id)))).one()
    of_it = (tables.attachments.c.tenant == tenant, tables.attachments.c.session_id == session_id)
    marks.append(await connection.scalar(select(tables.attachments.c.wish).where(*of_it)))
    return repr(marks)


async def newest(connection: AsyncConnection, tenant: str, session_id: str) -> tuple[Sequence[Entry], bool]:
    """Return the session's newest entries, oldest first, and whether there are older ones."""
    after_call = await calls.place_of_newest(connection, tenant, session_id, ENTRIES_MAX)
    after_message = await messages.place_of_newest(connection, tenant, session_id, ENTRIES_MAX)
    called = await calls.page(connection, tenant, session_id, after=after_call, limit=ENTRIES_MAX)
    said = await messages.page(connection, tenant, session_id, after=after_message, limit=ENTRIES_MAX)
    deciders = {call.decision.by for call in called.items if call.decision is not None}
    names = await keys.names(connection, tenant, deciders)
    entries = [Entry(_moment(one.processed_at, one.updated_at), message=one) for one in said.items]
    entries += [_of_call(call, names) for call in called.items]
    return sorted(entries, key=_order), after_call > 0 or after_message > 0


def _of_call(call: CallView, names: dict[str, str]) -> Entry:
    verb, object_ = wording.sentence(call, read_input(call.input))
    at = _moment(call.processed_at, call.created_at)
    said = (verb, object_, wording.state(call))
    return Entry(at, call=call, said=said, decided_by=decider(call.decision, names))


def _moment(processed_at: str | None, otherwise: datetime) -> datetime:
    """Upstream's time, if it gave one that can be read."""
    try:
        at = datetime.fromisoformat(processed_at or "")
    except ValueError:
        return otherwise
    return otherwise if at.tzinfo is None else at


def _order(entry: Entry) -> tuple[bool, datetime]:
    # What is being written comes last, whatever the clocks say.
    is_open = entry.message is not None and entry.message.state == "partial"
    return is_open, entry.at
