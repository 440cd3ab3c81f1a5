"""Upstream budgets: one token bucket per credential, shared by all replicas, by the database's time.

The bucket holds a tenth of a minute's limit and refills with the rest, so that no minute sees more than the
limit. Lower priorities draw only what leaves enough for higher ones, whichever replica those turn up in.
Upstream's 429 lowers the rate, which comes back slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.retry import RETRY_AFTER_S_MAX

LIMIT_PER_MIN_MIN: Final = 10
"""A lower limit is none that one could work with."""
CAPACITY_SHARE: Final = 0.1
"""How much of a minute's limit may go at once, after quiet; the rest refills over the minute."""
CAPACITY_MIN: Final = 4.0
"""With fewer tokens the lowest priority could never leave enough for the others."""
RECONNECT_FLOOR: Final = 0.25
"""What part of the bucket reconnects leave for answers."""
SWEEP_FLOOR: Final = 0.5
"""What part of the bucket sweeps leave for answers and reconnects."""
CUT: Final = 0.7
"""What a 429 leaves of the rate."""
CUT_EVERY_S: Final = 10.0
"""The refusals of so long a time are one: they come in volleys."""
RATE_SHARE_MIN: Final = 0.1
"""What part of the limit the rate never falls below."""
RATE_PER_MIN_MIN: Final = 6.0
"""What the rate never falls below either: with less, the bucket would hold more than a minute refills."""
RECOVERY_SHARE_PER_MIN: Final = 0.05
"""What part of the limit the rate wins back per minute without a refusal."""


class Priority(IntEnum):
    """Who draws first. Results, verdicts and the looks that belong to them; connecting again; the rest."""

    ANSWER = 0
    RECONNECT = 1
    SWEEP = 2


@dataclass(frozen=True, slots=True)
class Grant:
    """What a draw gave, by priority, and in how many seconds each could draw another."""

    granted: tuple[int, int, int]
    waits_s: tuple[float, float, float]


async def draw(
    connection: AsyncConnection,
    tenant: str,
    credential: str,
    *,
    limit_per_min: int,
    wanted: tuple[int, int, int],
    put_back: int = 0,
) -> Grant:
    """Draw up to `wanted` tokens by priority, in one statement.

    `put_back` are tokens of earlier draws that were not used; below zero, requests that went out without one.
    """
    values = {
        "tenant": tenant,
        "credential": credential,
        "limit": float(limit_per_min),
        "put_back": float(put_back),
        **dict(zip(("answers", "reconnects", "sweeps"), map(float, wanted), strict=True)),
    }
    row = (await connection.execute(_DRAW, values)).one_or_none()
    if row is None:
        await connection.execute(_CREATE, {name: values[name] for name in ("tenant", "credential", "limit")})
        row = (await connection.execute(_DRAW, values)).one()
    return Grant((int(row.answers), int(row.reconnects), int(row.sweeps)), _waits_s(row))


async def refuse(
    connection: AsyncConnection,
    tenant: str,
    credential: str,
    *,
    limit_per_min: int,
    priority: Priority,
    retry_after_s: float | None,
) -> None:
    """Learn from a 429: lower the rate, and hold this priority and those below for `retry_after_s`.

    Higher ones go on, since upstream counts reads and writes apart; a 429 of their own holds them too.
    """
    # The level as of now: what has refilled since the last draw is not to be found there afterwards.
    await draw(connection, tenant, credential, limit_per_min=limit_per_min, wanted=(0, 0, 0))
    values = {
        "tenant": tenant,
        "credential": credential,
        "limit": float(limit_per_min),
        "priority": int(priority),
        "floor": _FLOORS[priority],
        "retry_after": min(max(retry_after_s or 0.0, 0.0), RETRY_AFTER_S_MAX),
    }
    await connection.execute(_REFUSE, values)


_FLOORS: Final = (0.0, RECONNECT_FLOOR, SWEEP_FLOOR)

_PER_MIN: Final = f"""
    case when refused_at is null then cast(:limit as float8) else least(
        cast(:limit as float8),
        rate_per_min + cast(:limit as float8) * {RECOVERY_SHARE_PER_MIN}
            * cast(extract(epoch from now() - refused_at) as float8) / 60
    ) end"""

# A replica may have begun its transaction before the one that drew last: time never runs backwards here.
_DRAW: Final = text(
    f"""
    with held as (
        select *, {_PER_MIN} as per_min,
            case when paused_until > now() then paused_priority else 3 end as open_below,
            greatest(0, cast(extract(epoch from now() - updated_at) as float8)) as elapsed_s,
            greatest(0, cast(extract(epoch from paused_until - now()) as float8)) as pause_s
        from budgets where tenant = :tenant and credential = :credential
        for no key update
    ), sized as (
        select *, greatest({CAPACITY_MIN}, per_min * {CAPACITY_SHARE}) as capacity from held
    ), paced as (
        select *, (per_min - capacity) / 60 as per_s from sized
    ), filled as (
        select *, least(capacity, greatest(-capacity,
            tokens + elapsed_s * per_s + cast(:put_back as float8))) as level
        from paced
    ), first as (
        select *, case when open_below > 0
            then greatest(0, least(cast(:answers as float8), floor(level))) else 0 end as answers
        from filled
    ), second as (
        select *, case when open_below > 1
            then greatest(0, least(cast(:reconnects as float8),
                floor(level - answers - capacity * {RECONNECT_FLOOR}))) else 0 end as reconnects
        from first
    ), third as (
        select *, case when open_below > 2
            then greatest(0, least(cast(:sweeps as float8),
                floor(level - answers - reconnects - capacity * {SWEEP_FLOOR}))) else 0 end as sweeps
        from second
    )
    update budgets b
    set tokens = t.level - t.answers - t.reconnects - t.sweeps, updated_at = greatest(t.updated_at, now())
    from third t
    where b.tenant = t.tenant and b.credential = t.credential
    returning t.answers, t.reconnects, t.sweeps, b.tokens, t.capacity, t.per_s, t.open_below, t.pause_s
    """
)

_CREATE: Final = text(
    f"""
    insert into budgets (tenant, credential, tokens, rate_per_min)
    values (:tenant, :credential, greatest({CAPACITY_MIN}, cast(:limit as float8) * {CAPACITY_SHARE}),
        cast(:limit as float8))
    on conflict (tenant, credential) do nothing
    """
)

_IS_SAME_VOLLEY: Final = f"coalesce(refused_at > now() - make_interval(secs => {CUT_EVERY_S}), false)"

_REFUSE: Final = text(
    f"""
    update budgets
    set rate_per_min = case when {_IS_SAME_VOLLEY} then rate_per_min else
            greatest({RATE_PER_MIN_MIN}, cast(:limit as float8) * {RATE_SHARE_MIN}, ({_PER_MIN}) * {CUT}) end,
        refused_at = case when {_IS_SAME_VOLLEY} then refused_at else now() end,
        tokens = least(tokens, cast(:floor as float8)
            * greatest({CAPACITY_MIN}, ({_PER_MIN}) * {CUT} * {CAPACITY_SHARE})),
        paused_priority = case when paused_until > now()
            then least(paused_priority, cast(:priority as int)) else cast(:priority as int) end,
        paused_until = greatest(paused_until, now() + make_interval(secs => cast(:retry_after as float8)))
    where tenant = :tenant and credential = :credential
    """
)


def _waits_s(row: Row[Any]) -> tuple[float, float, float]:
    def wait_s(priority: Priority) -> float:
        missing = row.capacity * _FLOORS[priority] + 1 - row.tokens
        pause_s = row.pause_s if priority >= row.open_below else 0.0
        return float(max(missing / row.per_s, pause_s, 0.0))

    return wait_s(Priority.ANSWER), wait_s(Priority.RECONNECT), wait_s(Priority.SWEEP)
