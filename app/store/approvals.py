"""Who may decide on the calls of a tool, and how many of them it takes to allow one.

Both are members of the tool's registration, as it is when somebody decides. A key is named by its id or by
its name; it is one identity, whichever way it came in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.events import Kind
from app.core.tools import CATCH_ALL, gating
from app.store import tables


class Rules(msgspec.Struct, frozen=True):
    """What a registration says, and its version, 0 for none; `approvers` None lets every key decide."""

    approvers: tuple[str, ...] | None = None
    approvals_required: int = 1
    version: int = 0


NO_RULES: Final = Rules()


async def rules_of(
    connection: AsyncConnection, tenant: str, calls: Collection[tuple[Kind, str]]
) -> dict[tuple[Kind, str], Rules]:
    """Return the rules for calls of these kinds and tools; without a registration there are none."""
    if not calls:
        return {}
    tools = tables.tools
    query = select(tools.c.name, tools.c.policy, tools.c.version).where(
        tools.c.tenant == tenant, tools.c.name.in_({CATCH_ALL, *(name for _, name in calls)})
    )
    rows = {row.name: row for row in await connection.execute(query)}
    found = {}
    for kind, name in calls:
        row = rows.get(gating(rows, kind, name) or "")
        found[kind, name] = NO_RULES if row is None else _rules(row.policy, row.version)
    return found


def _rules(policy: str, version: int) -> Rules:
    return msgspec.structs.replace(msgspec.json.decode(policy, type=Rules), version=version)


async def may_decide(
    connection: AsyncConnection, tenant: str, by: str, calls: Collection[tuple[Kind, str]]
) -> set[tuple[Kind, str]]:
    """Return those of these kinds and tools on whose calls the key `by` may decide."""
    keys = tables.keys
    name = await connection.scalar(select(keys.c.name).where(keys.c.tenant == tenant, keys.c.id == by))
    rules = await rules_of(connection, tenant, calls)
    return {
        one
        for one, rule in rules.items()
        if rule.approvers is None or by in rule.approvers or name in rule.approvers
    }


async def entitled(
    connection: AsyncConnection, tenant: str, rules: Rules, by: str, others: Sequence[str]
) -> tuple[bool, set[str]]:
    """Say whether `by` may decide, and which of the `others`, who did so earlier, still may.

    Those whose key was revoked, or is not named any more, do not count.
    """
    keys = tables.keys
    query = select(keys.c.id, keys.c.name, keys.c.revoked_at).where(
        keys.c.tenant == tenant, keys.c.id.in_([by, *others])
    )
    known = {row.id: row for row in await connection.execute(query)}

    def is_named(one: str) -> bool:
        if rules.approvers is None or one in rules.approvers:
            return True
        return one in known and known[one].name in rules.approvers

    revoked = {one for one, row in known.items() if row.revoked_at is not None}
    return is_named(by), {one for one in others if one != by and one not in revoked and is_named(one)}
