"""What has changed of a session since a number: its calls, its finals, and the attachment itself.

A row has the number of its last change only, so a reader who was away gets what is true now, once, and not
how it came to be so. Numbers of one session are committed in their order, and everything is read at one
moment, so that nothing comes in below a number that was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import attachments, calls, messages, tables
from app.store.attachments import Attachment
from app.store.calls import CallView
from app.store.messages import MessageView

ROWS_MAX: Final = 100
"""Of one kind that are read at once."""

Change = CallView | MessageView | Attachment


@dataclass(frozen=True, slots=True)
class Feed:
    """Changes in their order up to the one numbered `position`, and the open previews as they are then.

    `has_more` says whether others follow; then the previews are left out.
    """

    changes: Sequence[Change]
    position: int
    has_more: bool
    partials: Sequence[MessageView] = ()


async def read(connection: AsyncConnection, tenant: str, session_id: str, after: int) -> Feed | None:
    """Return what has changed after the number; None if the tenant never attached the session.

    The transaction must be one snapshot, as it is with REPEATABLE READ.
    """
    attachment = await attachments.get(connection, tenant, session_id)
    if attachment is None:
        return None
    found_calls = await calls.changed(connection, tenant, session_id, after=after, limit=ROWS_MAX)
    finals = await messages.changed(connection, tenant, session_id, after=after, limit=ROWS_MAX)
    ends = [page.items[-1].change for page in (found_calls, finals) if page.has_more]
    changes: list[Change] = [*found_calls.items, *finals.items]
    if attachment.change > after:
        changes.append(attachment)
    if ends:
        # Beyond the end of a page that was cut there may be what was not read.
        changes = [one for one in changes if one.change <= min(ends)]
    changes.sort(key=lambda one: one.change)
    partials = () if ends else await messages.partials(connection, tenant, session_id)
    return Feed(changes, changes[-1].change if changes else after, bool(ends), partials)


async def position(connection: AsyncConnection, tenant: str, session_id: str) -> int | None:
    """Return the number of the session's last change; None if the tenant never attached it."""
    attachment = await attachments.get(connection, tenant, session_id)
    if attachment is None:
        return None
    c, m = tables.calls.c, tables.messages.c
    of_calls = select(func.max(c.change)).where(c.tenant == tenant, c.session_id == session_id)
    of_finals = select(func.max(m.change)).where(
        m.tenant == tenant, m.session_id == session_id, m.state == "final"
    )
    newest = [await connection.scalar(query) or 0 for query in (of_calls, of_finals)]
    return max(attachment.change, *newest)
