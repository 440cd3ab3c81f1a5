"""Idempotency keys: the first answer to each, committed with the effect that it tells of.

A row stands for a request that was answered. A request that is under way holds a lock of its transaction, and
the lock goes with it: a crash leaves neither an effect without its answer nor a key that is taken for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables
from app.store.secrets import Secrets

KEPT_DAYS: Final = 1
"""How long an answer is repeated, by the database's clock; then the key is as good as new."""

_answers = tables.idempotency_keys


class InFlightError(Exception):
    """Another request with the same key is being answered now."""


@dataclass(frozen=True, slots=True)
class Place:
    """Whose key it is: another tenant, or another API key, may use the same text for something else."""

    tenant: str
    caller: str
    key: str

    @property
    def row(self) -> tuple[str, str, str]:
        return self.tenant, self.caller, self.key


class Answer(msgspec.Struct, frozen=True):
    """What a request was answered. `request` is a digest of it: of its method, address and body."""

    request: str
    status: int
    headers: Mapping[str, str]
    body: bytes


async def claim(connection: AsyncConnection, secrets: Secrets, place: Place) -> Answer | None:
    """Take the key until the transaction ends; return the answer that it stands for, if there is one.

    Raises:
        InFlightError: another transaction holds it.
        UnreadableSecretError: the answer was encrypted with a key that is gone.
    """
    lock = func.hashtextextended(msgspec.json.encode(place.row).decode(), 0)
    if not await connection.scalar(select(func.pg_try_advisory_xact_lock(lock))):
        raise InFlightError
    is_kept = _answers.c.created_at > func.now() - timedelta(days=KEPT_DAYS)
    sealed = await connection.scalar(select(_answers.c.answer).where(*_is_at(place), is_kept))
    if sealed is None:
        return None
    plain = secrets.decrypt(sealed, column="idempotency_keys.answer", row=place.row)
    return msgspec.json.decode(plain, type=Answer)


async def keep(connection: AsyncConnection, secrets: Secrets, place: Place, answer: Answer) -> None:
    """Keep the answer, in the place of an earlier one; it may show a secret, and is encrypted."""
    sealed = secrets.encrypt(msgspec.json.encode(answer), column="idempotency_keys.answer", row=place.row)
    values = {"answer": sealed, "created_at": func.now()}
    added = insert(_answers).values(tenant=place.tenant, caller=place.caller, key=place.key, **values)
    await connection.execute(added.on_conflict_do_update(constraint=_answers.primary_key, set_=values))


def _is_at(place: Place) -> tuple[Any, ...]:
    return _answers.c.tenant == place.tenant, _answers.c.caller == place.caller, _answers.c.key == place.key
