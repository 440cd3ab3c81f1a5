"""Precedents: how earlier calls of a tool were decided, for whoever decides on the next one.

They are read from the audit, which stays when calls go. Those that upstream refused do not count, nor what a
policy, the time or a rule decided.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

LAST_MAX: Final = 5
"""How many of a tool are read."""


@dataclass(frozen=True, slots=True)
class Precedent:
    """A decision that somebody gave. `deny_message` is what the agent was told.

    `is_edited` says that an allow put another input in the place of the agent's.
    """

    result: str
    by: str
    via: str
    at: datetime
    deny_message: str | None
    is_edited: bool


async def of_tools(
    connection: AsyncConnection, tenant: str, tools: Collection[str]
) -> Mapping[str, Sequence[Precedent]]:
    """Return the last `LAST_MAX` decisions on calls of each tool, the newest first."""
    names = sorted(set(tools))
    found: dict[str, list[Precedent]] = {name: [] for name in names}
    if names:
        given = {"tenant": tenant, "tools": names, "most": LAST_MAX}
        for row in await connection.execute(_OF_TOOLS, given):
            found[row.tool].append(_precedent(row))
    return found


async def of_inputs(
    connection: AsyncConnection, tenant: str, inputs: Collection[tuple[str, str]]
) -> Mapping[tuple[str, str], Precedent]:
    """Return the last decision on a call of each tool and input, by its digest, where there is one."""
    pairs = sorted(set(inputs))
    if not pairs:
        return {}
    tools, digests = zip(*pairs, strict=True)
    given = {"tenant": tenant, "tools": list(tools), "digests": list(digests)}
    return {
        (row.tool, row.input_digest): _precedent(row) for row in await connection.execute(_OF_INPUTS, given)
    }


def _precedent(row: Row[Any]) -> Precedent:
    return Precedent(row.result, row.actor, row.via, row.at, row.deny_message, row.is_edited)


# The first line is what the two indexes hold.
_DECIDED: Final = """
    select a.result, a.actor, a.via, a.at, d.deny_message,
        coalesce(a.detail like 'edited %', false) as is_edited
    from audit a left join decisions d on d.tenant = a.tenant and d.id = a.decision_id
    where a.kind in ('decision.recorded', 'decision.seen') and a.via <> 'policy'
        and a.tenant = :tenant and a.subject = w.tool and d.status is distinct from 'refused'
"""
_OF_TOOLS: Final = text(
    f"""
    select w.tool, p.* from unnest(cast(:tools as text[])) as w(tool)
    cross join lateral ({_DECIDED} order by a.sequence desc limit :most) p
    """
)
_OF_INPUTS: Final = text(
    f"""
    select w.tool, w.input_digest, p.*
    from unnest(cast(:tools as text[]), cast(:digests as text[])) as w(tool, input_digest)
    cross join lateral (
        {_DECIDED} and a.input_digest = w.input_digest order by a.sequence desc limit 1
    ) p
    """
)
