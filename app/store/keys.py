"""API keys: 256 random bits, of which only a hash is stored, with a tenant and scopes.

The text ends with a checksum, as GitHub's tokens do, so that scanners of code can tell a key from noise.
"""

from __future__ import annotations

import hashlib
import secrets
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, get_args

from sqlalchemy import Row, func, insert, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables

Scope = Literal["tools", "sessions", "read", "confirm", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)

DEFAULT_TENANT: Final = "default"
_PREFIX: Final = "bsk_"
_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_BODY_CHARS: Final = 43
"""62 to the 43rd is just over 2 to the 256th."""
_SUM_CHARS: Final = 6
USE_KEPT_S: Final = 50
"""A key's last use is not written again for so long, however many replicas see it."""

_keys = tables.keys


@dataclass(frozen=True, slots=True)
class Key:
    """A key as listed; the key itself is shown once, when it is created."""

    tenant: str
    id: str
    name: str
    scopes: tuple[str, ...]
    created_at: datetime
    revoked_at: datetime | None
    expires_at: datetime | None
    last_used_at: datetime | None
    requests_per_min: int | None


def is_plausible(key: str) -> bool:
    """Whether the text has the shape and checksum of a key: slips and guesses cost no query."""
    body = key.removeprefix(_PREFIX)
    if len(body) != _BODY_CHARS + _SUM_CHARS or not body.isascii() or body == key:
        return False
    return body[_BODY_CHARS:] == _checksum(body[:_BODY_CHARS])


async def create(
    connection: AsyncConnection,
    tenant: str,
    name: str,
    scopes: Sequence[Scope],
    *,
    expires_in_s: int | None = None,
    requests_per_min: int | None = None,
) -> tuple[Key, str]:
    """Create a key, and its tenant if that is new; return it with its text, which nobody can read again."""
    await connection.execute(upsert(tables.tenants).values(id=tenant).on_conflict_do_nothing())
    body = _in_alphabet(secrets.randbits(256), _BODY_CHARS)
    text = _PREFIX + body + _checksum(body)
    row = (
        await connection.execute(
            insert(_keys)
            .values(
                tenant=tenant,
                id="key_" + secrets.token_hex(12),
                name=name,
                hash=_hash(text),
                scopes=sorted(set(scopes), key=SCOPES.index),
                expires_at=None if expires_in_s is None else func.now() + timedelta(seconds=expires_in_s),
                requests_per_min=requests_per_min,
            )
            .returning(_keys)
        )
    ).one()
    return _key(row), text


async def find(connection: AsyncConnection, text: str) -> tuple[Key, bool] | None:
    """Return the key that somebody presents and whether it has expired; None if it is unknown or revoked."""
    query = select(_keys, (_keys.c.expires_at <= func.now()).label("is_expired")).where(
        _keys.c.hash == _hash(text), _keys.c.revoked_at.is_(None)
    )
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else (_key(row), bool(row.is_expired))


async def used(connection: AsyncConnection, places: Collection[tuple[str, str]]) -> None:
    """Note that these keys, by tenant and id, were used about now, unless another replica just has."""
    place = tuple_(_keys.c.tenant, _keys.c.id)
    is_old = _keys.c.last_used_at < func.now() - timedelta(seconds=USE_KEPT_S)
    due = (
        select(_keys.c.tenant, _keys.c.id)
        .where(place.in_(sorted(places)), _keys.c.last_used_at.is_(None) | is_old)
        .with_for_update(skip_locked=True, key_share=True)
    )
    await connection.execute(update(_keys).where(place.in_(due)).values(last_used_at=func.now()))


async def page(
    connection: AsyncConnection, tenant: str, *, after: tuple[datetime, str] | None, limit: int
) -> list[Key]:
    """Return keys, revoked ones too, oldest first, from the first one after `after` (its time and id)."""
    query = (
        select(_keys).where(_keys.c.tenant == tenant).order_by(_keys.c.created_at, _keys.c.id).limit(limit)
    )
    if after is not None:
        query = query.where(tuple_(_keys.c.created_at, _keys.c.id) > after)
    return [_key(row) for row in await connection.execute(query)]


async def names(connection: AsyncConnection, tenant: str, ids: Collection[str]) -> dict[str, str]:
    """Return the names of the tenant's keys of these ids, revoked ones too."""
    query = select(_keys.c.id, _keys.c.name).where(_keys.c.tenant == tenant, _keys.c.id.in_(ids))
    return {row.id: row.name for row in await connection.execute(query)}


async def revoke(connection: AsyncConnection, tenant: str, key_id: str) -> Key | None:
    """Revoke a key for good; return it, or None if the tenant has none of that id. Again changes nothing."""
    revoked = (
        update(_keys)
        .where(_keys.c.tenant == tenant, _keys.c.id == key_id)
        .values(revoked_at=func.coalesce(_keys.c.revoked_at, func.now()))
        .returning(_keys)
    )
    row = (await connection.execute(revoked)).one_or_none()
    return None if row is None else _key(row)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _checksum(body: str) -> str:
    return _in_alphabet(zlib.crc32(body.encode()), _SUM_CHARS)


def _in_alphabet(number: int, chars: int) -> str:
    digits = []
    for _ in range(chars):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


def _key(row: Row[Any]) -> Key:
    return Key(
        tenant=row.tenant,
        id=row.id,
        name=row.name,
        scopes=tuple(row.scopes),
        created_at=row.created_at,
        revoked_at=row.revoked_at,
        expires_at=row.expires_at,
        last_used_at=row.last_used_at,
        requests_per_min=row.requests_per_min,
    )
