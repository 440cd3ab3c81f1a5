"""Pages that are bounded in rows and in bytes, over a key that only rises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import ColumnElement, Row, Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
"""A page ends before the row that would take it over this; one row of any size is always given."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some items in order; `has_more` says whether others follow the last one."""

    items: Sequence[T]
    has_more: bool


async def bounded_rows(
    connection: AsyncConnection,
    query: Select[Any],
    *,
    order_by: ColumnElement[Any],
    size: ColumnElement[int],
    limit: int,
) -> Page[Row[Any]]:
    """Run the query for at most `limit` rows and `PAGE_BYTES_MAX` bytes, `size` being a row's."""
    some = (
        query.add_columns(size.label("size_bytes"), order_by.label("place"))
        .order_by(order_by)
        .limit(limit + 1)
        .subquery()
    )
    summed = select(
        some,
        func.sum(some.c.size_bytes).over(order_by=some.c.place).label("sum_bytes"),
        func.count().over().label("found"),
    ).subquery()
    fits = (summed.c.sum_bytes <= PAGE_BYTES_MAX) | (summed.c.sum_bytes == summed.c.size_bytes)
    rows = (await connection.execute(select(summed).where(fits).order_by(summed.c.place))).all()
    kept = rows[:limit]
    return Page(kept, bool(rows) and rows[0].found > len(kept))
