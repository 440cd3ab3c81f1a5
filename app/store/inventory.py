"""What all tenants have stored that reaches out of the service, for whoever checks the set-up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables


@dataclass(frozen=True, slots=True)
class Webhook:
    """A webhook that is in use. `takes_callbacks` is whether it may answer 202 and report later."""

    kind: Literal["tool", "subscription"]
    tenant: str
    name: str
    url: str
    takes_callbacks: bool


async def webhooks(connection: AsyncConnection, limit: int) -> Sequence[Webhook]:
    """Return at most `limit` tools and as many subscriptions, without those that are disabled."""
    t, s = tables.tools.c, tables.subscriptions.c
    tools = select(t.tenant, t.name, t.url, t.policy).where(t.disabled_at.is_(None))
    found = []
    for row in await connection.execute(tools.order_by(t.tenant, t.name).limit(limit)):
        policy = json.loads(row.policy)
        if policy.get("enabled", True):
            takes_callbacks = policy.get("callback_timeout_s", 1) > 0
            found.append(Webhook("tool", row.tenant, row.name, row.url, takes_callbacks))
    subscriptions = select(s.tenant, s.name, s.url).where(s.enabled, s.disabled_at.is_(None))
    rows = await connection.execute(subscriptions.order_by(s.tenant, s.name).limit(limit))
    return found + [Webhook("subscription", *row, takes_callbacks=False) for row in rows]


async def credentials(connection: AsyncConnection, limit: int) -> Sequence[tuple[str, str]]:
    """Return the (tenant, name) of at most `limit` stored credentials."""
    c = tables.credentials.c
    query = select(c.tenant, c.name).order_by(c.tenant, c.name).limit(limit)
    return [(row.tenant, row.name) for row in await connection.execute(query)]
