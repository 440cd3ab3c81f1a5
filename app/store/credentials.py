"""Credentials: what proves to upstream who asks, for each tenant, by name. The secret is encrypted.

Every change raises the registry's version, so that runs which use a credential begin again with what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from sqlalchemy import Row, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables
from app.store.secrets import Secrets
from app.store.tools import raise_version

DEFAULT: Final = "default"
"""The name that an attach body means by none."""
CREDENTIALS_MAX: Final = 100
"""Of one tenant."""
SECRET: Final = "credentials.secret"  # noqa: S105 - the name of a column

_credentials = tables.credentials


@dataclass(frozen=True, slots=True)
class CredentialView:
    """A credential as listed. `upstream_url` None means that of the service."""

    name: str
    type: Literal["api_key", "bearer"]
    upstream_url: str | None
    version: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Stored:
    """A credential for use."""

    type: Literal["api_key", "bearer"]
    secret: str = field(repr=False)
    upstream_url: str | None
    version: int


class TooManyCredentialsError(Exception):
    """The tenant has `CREDENTIALS_MAX` credentials."""


async def put(
    connection: AsyncConnection,
    secrets: Secrets,
    tenant: str,
    name: str,
    *,
    kind: Literal["api_key", "bearer"],
    secret: str,
    upstream_url: str | None,
) -> tuple[CredentialView, bool]:
    """Store or replace a credential; return it, and whether it is new.

    Raises:
        TooManyCredentialsError: it would be one too many.
    """
    await raise_version(connection, tenant)  # first: its lock puts those that are counted in order
    sealed = secrets.encrypt(secret.encode(), column=SECRET, row=(tenant, name))
    values: dict[str, Any] = {"type": kind, "secret": sealed, "upstream_url": upstream_url}
    changed = (
        update(_credentials)
        .where(*_is(tenant, name))
        .values(**values, version=_credentials.c.version + 1, updated_at=func.now())
        .returning(_credentials)
    )
    row = (await connection.execute(changed)).one_or_none()
    if row is not None:
        return _view(row), False
    count = select(func.count()).where(_credentials.c.tenant == tenant)
    if (await connection.scalar(count) or 0) >= CREDENTIALS_MAX:
        raise TooManyCredentialsError
    made = insert(_credentials).values(tenant=tenant, name=name, **values).returning(_credentials)
    return _view((await connection.execute(made)).one()), True


async def get(connection: AsyncConnection, tenant: str, name: str) -> CredentialView | None:
    row = (await connection.execute(select(_credentials).where(*_is(tenant, name)))).one_or_none()
    return None if row is None else _view(row)


async def every(connection: AsyncConnection, tenant: str) -> Sequence[CredentialView]:
    """Return the tenant's credentials by name."""
    query = select(_credentials).where(_credentials.c.tenant == tenant).order_by(_credentials.c.name)
    return [_view(row) for row in await connection.execute(query)]


async def remove(connection: AsyncConnection, tenant: str, name: str) -> bool:
    """Delete a credential; return whether there was one. Runs that use it wait for another of its name."""
    gone = await connection.execute(delete(_credentials).where(*_is(tenant, name)))
    if gone.rowcount:
        await raise_version(connection, tenant)
    return gone.rowcount > 0


async def load(connection: AsyncConnection, secrets: Secrets, tenant: str, name: str) -> Stored | None:
    """Return a credential for use.

    Raises:
        UnreadableSecretError: its key is missing.
    """
    row = (await connection.execute(select(_credentials).where(*_is(tenant, name)))).one_or_none()
    if row is None:
        return None
    secret = secrets.decrypt(row.secret, column=SECRET, row=(tenant, name)).decode()
    return Stored(row.type, secret, row.upstream_url, row.version)


async def versions(connection: AsyncConnection, tenant: str) -> dict[str, int]:
    """Return the version of each credential by name: it rises with each change."""
    query = select(_credentials.c.name, _credentials.c.version).where(_credentials.c.tenant == tenant)
    return {row.name: row.version for row in await connection.execute(query)}


def _is(tenant: str, name: str) -> tuple[Any, ...]:
    return _credentials.c.tenant == tenant, _credentials.c.name == name


def _view(row: Row[Any]) -> CredentialView:
    return CredentialView(row.name, row.type, row.upstream_url, row.version, row.created_at, row.updated_at)
