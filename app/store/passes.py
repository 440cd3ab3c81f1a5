"""Browser passes: what signs a browser in, once by a link or for some hours by a cookie.

A pass is 256 random bits, of which only a hash is stored, and has the rights of a key. It ends with its time,
when it is closed, and when its key is revoked or expires. Database time decides.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

from sqlalchemy import Row, Select, and_, delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables

Kind = Literal["link", "session"]

LIFETIME_S: Final[dict[Kind, int]] = {"link": 900, "session": 43_200}
TOKEN_BYTES: Final = 32
TOKEN_CHARS_MAX: Final = 64

_passes = tables.browser_passes
_keys = tables.keys


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass that is good now. `name` and `scopes` are its key's, None when the operator's key made it;
    then `proof` must be that of the key as it is now."""

    tenant: str
    key_id: str
    name: str | None
    scopes: tuple[str, ...] | None
    proof: str | None


async def issue(
    connection: AsyncConnection, kind: Kind, tenant: str, key_id: str, proof: str | None = None
) -> str:
    """Make a pass and return its text; what has expired is removed along the way."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    await connection.execute(delete(_passes).where(_passes.c.expires_at < func.now()))
    await connection.execute(
        insert(_passes).values(
            tenant=tenant,
            hash=_hash(token),
            kind=kind,
            key_id=key_id,
            proof=proof,
            expires_at=func.now() + timedelta(seconds=LIFETIME_S[kind]),
        )
    )
    return token


async def find(connection: AsyncConnection, kind: Kind, token: str) -> Pass | None:
    """Return the pass of this text, unless it has ended."""
    row = (await connection.execute(_good(kind, token))).one_or_none()
    return None if row is None else _pass(row)


async def spend(connection: AsyncConnection, token: str) -> Pass | None:
    """Return the link of this text, if it is good, and end it: of two who try, one gets it."""
    found = await find(connection, "link", token)
    ended = delete(_passes).where(_passes.c.hash == _hash(token), _passes.c.kind == "link")
    spent = (await connection.execute(ended.returning(_passes.c.hash))).one_or_none()
    return None if spent is None else found


async def close(connection: AsyncConnection, token: str) -> None:
    """End a pass before its time."""
    await connection.execute(delete(_passes).where(_passes.c.hash == _hash(token)))


def _good(kind: Kind, token: str) -> Select[Any]:
    its_key = and_(_keys.c.tenant == _passes.c.tenant, _keys.c.id == _passes.c.key_id)
    is_in_time = _keys.c.expires_at.is_(None) | (_keys.c.expires_at > func.now())
    is_live = _keys.c.id.is_not(None) & _keys.c.revoked_at.is_(None) & is_in_time
    return (
        select(_passes.c.tenant, _passes.c.key_id, _passes.c.proof, _keys.c.name, _keys.c.scopes)
        .select_from(_passes.outerjoin(_keys, its_key))
        .where(
            _passes.c.hash == _hash(token),
            _passes.c.kind == kind,
            _passes.c.expires_at > func.now(),
            is_live | _passes.c.proof.is_not(None),
        )
    )


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _pass(row: Row[Any]) -> Pass:
    return Pass(
        row.tenant, row.key_id, row.name, None if row.scopes is None else tuple(row.scopes), row.proof
    )
