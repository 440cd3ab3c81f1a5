"""Attach rules: which sessions of a tenant are attached by themselves, and with which settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Row, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.sightings import AttachRule
from app.store import tables
from app.store.attachments import Settings, settings_of

RULES_MAX: Final = 100
"""Of one tenant."""
_LOCK: Final = text("select pg_advisory_xact_lock(hashtext('attach_rules'), hashtext(:tenant))")

_rules = tables.attach_rules


@dataclass(frozen=True, slots=True)
class StoredRule:
    """A rule as stored. `settings` are those of the attachments that it makes."""

    name: str
    agent_id: str | None
    environment_id: str | None
    settings: Settings
    enabled: bool
    created_at: datetime
    updated_at: datetime

    def for_core(self) -> AttachRule:
        return AttachRule(self.name, self.agent_id, self.environment_id, self.updated_at.timestamp())


class TooManyAttachRulesError(Exception):
    """The tenant has `RULES_MAX` of them."""


async def put(
    connection: AsyncConnection,
    tenant: str,
    name: str,
    *,
    agent_id: str | None,
    environment_id: str | None,
    settings: Settings,
    enabled: bool,
) -> tuple[StoredRule, bool]:
    """Store or replace a rule; return it, and whether it is new. Attachments that it made stay as they are.

    Raises:
        TooManyAttachRulesError: it would be one too many.
    """
    await connection.execute(_LOCK, {"tenant": tenant})  # those that are counted come one after the other
    values: dict[str, Any] = {
        "agent_id": agent_id,
        "environment_id": environment_id,
        "settings": msgspec.json.encode(settings).decode(),
        "enabled": enabled,
    }
    changed = update(_rules).where(*_is(tenant, name)).values(**values, updated_at=func.now())
    row = (await connection.execute(changed.returning(_rules))).one_or_none()
    if row is not None:
        return _rule(row), False
    count = select(func.count()).where(_rules.c.tenant == tenant)
    if (await connection.scalar(count) or 0) >= RULES_MAX:
        raise TooManyAttachRulesError
    made = insert(_rules).values(tenant=tenant, name=name, **values).returning(_rules)
    return _rule((await connection.execute(made)).one()), True


async def get(connection: AsyncConnection, tenant: str, name: str) -> StoredRule | None:
    row = (await connection.execute(select(_rules).where(*_is(tenant, name)))).one_or_none()
    return None if row is None else _rule(row)


async def every(connection: AsyncConnection, tenant: str) -> Sequence[StoredRule]:
    """Return the tenant's rules by name."""
    query = select(_rules).where(_rules.c.tenant == tenant).order_by(_rules.c.name)
    return [_rule(row) for row in await connection.execute(query)]


async def live(connection: AsyncConnection, tenant: str, credential: str) -> dict[str, StoredRule]:
    """Return the enabled rules about sessions of this credential, by name."""
    rules = await every(connection, tenant)
    return {rule.name: rule for rule in rules if rule.enabled and rule.settings.credential == credential}


async def remove(connection: AsyncConnection, tenant: str, name: str) -> bool:
    """Delete a rule; return whether there was one. Attachments that it made stay."""
    gone = await connection.execute(delete(_rules).where(*_is(tenant, name)))
    return gone.rowcount > 0


def _is(tenant: str, name: str) -> tuple[Any, ...]:
    return _rules.c.tenant == tenant, _rules.c.name == name


def _rule(row: Row[Any]) -> StoredRule:
    return StoredRule(
        row.name, row.agent_id, row.environment_id, settings_of(row.settings), row.enabled, row.created_at,
        row.updated_at,
    )  # fmt: skip
