"""Rotation of BASCULE_SECRET_KEY: what each key still protects, and rewriting it all under the first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sqlalchemy import Column, bindparam, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.core.calls import END_STATES
from app.store import tables
from app.store.secrets import HEAD_BYTES, Secrets, UnreadableSecretError, key_id_of

BATCH_ROWS: Final = 200
"""How many rows one transaction locks, reads and writes."""
UNREADABLE_MAX: Final = 100
"""How many values of a column that cannot be read are named; the count is exact."""


TOKENS: Final = "callback tokens of open calls"
"""They are with the tools already, so nothing rewrites them: their key must stay until the calls are over."""

_b, _c = tables.bodies.c, tables.calls.c
_TOKENS: Final = (
    select(_b.key_id, func.count())
    .join(tables.calls, (_c.tenant == _b.tenant) & (_c.session_id == _b.session_id) & (_c.id == _b.call_id))
    .where(_b.key_id.is_not(None), _c.state.not_in(END_STATES))
    .group_by(_b.key_id)
)


@dataclass(slots=True)
class Rewritten:
    """What became of the values of one column.

    `current` are those that the first key had encrypted already. `unreadable` says of the first values that
    cannot be read, in a sentence each, which row and which key.
    """

    column: str
    rewritten: int = 0
    current: int = 0
    unreadable_total: int = 0
    unreadable: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Protected:
    """How many values of each column a key protects, and how many tokens of callbacks of open calls.

    `key_id` None stands for values in no known format.
    """

    key_id: str | None
    role: Literal["writes", "reads", "missing"]
    values: Mapping[str, int]


async def reencrypt(engine: AsyncEngine, secrets: Secrets) -> list[Rewritten]:
    """Rewrite what other keys encrypted under the first one, and let replicas read their tools again.

    Replicas may serve meanwhile: a value is read and written under one lock of its row. What cannot be read
    stays as it is. It may break off anywhere and be repeated.
    """
    done = [await _rewrite(engine, secrets, column) for column in tables.ENCRYPTED]
    async with engine.begin() as connection:
        # By the poll of every replica: one that could not read a tool finds it mended.
        await connection.execute(update(tables.registries).values(version=tables.registries.c.version + 1))
    return done


async def protected(engine: AsyncEngine, secrets: Secrets) -> list[Protected]:
    """Return what each key protects: those that are set, in their order, then those that are missing."""
    found: dict[str | None, dict[str, int]] = {key_id: {} for key_id in secrets.key_ids}
    for column in tables.ENCRYPTED:
        head = func.substring(column, 1, HEAD_BYTES)
        async with engine.connect() as connection:
            counts = await connection.execute(select(head, func.count()).group_by(head))
        for sealed, count in counts:
            by_column = found.setdefault(key_id_of(sealed), {})
            by_column[_name(column)] = by_column.get(_name(column), 0) + count
    async with engine.connect() as connection:
        for key_id, count in await connection.execute(_TOKENS):
            found.setdefault(key_id, {})[TOKENS] = count
    return [
        Protected(
            key_id,
            "writes" if key_id == secrets.key_id else "reads" if key_id in secrets.key_ids else "missing",
            by_column,
        )
        for key_id, by_column in found.items()
    ]


async def _rewrite(engine: AsyncEngine, secrets: Secrets, column: Column[Any]) -> Rewritten:
    done = Rewritten(_name(column))
    after: tuple[Any, ...] | None = None
    while True:
        async with engine.begin() as connection:
            after = await _rewrite_batch(connection, secrets, column, after, done)
        if after is None:
            return done


async def _rewrite_batch(
    connection: AsyncConnection,
    secrets: Secrets,
    column: Column[Any],
    after: tuple[Any, ...] | None,
    done: Rewritten,
) -> tuple[Any, ...] | None:
    """Rewrite the rows that follow the primary key `after`; return the last one's, or None at the end."""
    key = tuple(column.table.primary_key)
    query = select(*key, column).order_by(*key).limit(BATCH_ROWS).with_for_update(key_share=True)
    if after is not None:
        query = query.where(tuple_(*key) > after)
    new = []
    last = None
    for *place, sealed in await connection.execute(query):
        last = tuple(place)
        try:
            plain = secrets.decrypt(sealed, column=done.column, row=last)
        except UnreadableSecretError as error:
            done.unreadable_total += 1
            done.unreadable += [str(error)] if len(done.unreadable) < UNREADABLE_MAX else []
            continue
        if secrets.is_current(sealed):
            done.current += 1
            continue
        again = secrets.encrypt(plain, column=done.column, row=last)
        new.append({f"at_{n}": value for n, value in enumerate(last)} | {"new_value": again})
    if new:
        is_there = [one == bindparam(f"at_{n}") for n, one in enumerate(key)]
        statement = update(column.table).where(*is_there).values({column: bindparam("new_value")})
        await connection.execute(statement, new)
        done.rewritten += len(new)
    return last


def _name(column: Column[Any]) -> str:
    return f"{column.table.name}.{column.name}"
