"""Checks the database: whether it answers, its schema, its wake-ups, and the secrets that it keeps."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qs, urlsplit

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine

from app.doctor.findings import Finding
from app.settings import Settings
from app.store import reencryption
from app.store.database import CONNECT_LIMIT_S
from app.store.migrate import Schema
from app.store.reencryption import Protected
from app.store.secrets import Secrets
from app.store.wakeups import Wakeups

VERSION_MIN: Final = 15
"""Of PostgreSQL."""

FAULTS: Final = (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError)
"""All that opening a connection raises when the server, the network or the URL is wrong."""


@dataclass(frozen=True, slots=True)
class Met:
    """What became of a first connection; `clock_offset_s` is how far this machine's clock is ahead."""

    finding: Finding
    clock_offset_s: float | None = None


async def meet(settings: Settings, url: str, clock: Callable[[], float]) -> Met:
    """Open a connection as the service would and ask who answers, and what time it is."""
    place = f"the embedded one in {settings.data_dir}" if settings.is_embedded else _place(url)
    begin = time.monotonic()
    try:
        connection = await asyncpg.connect(
            url, timeout=CONNECT_LIMIT_S, command_timeout=CONNECT_LIMIT_S, statement_cache_size=0
        )
        try:
            version = int(await connection.fetchval("show server_version_num")) // 10_000
            before = clock()
            now = await connection.fetchval("select clock_timestamp()")
            offset_s = (before + clock()) / 2 - now.timestamp()
        finally:
            connection.terminate()
    except FAULTS as error:
        detail, remedy = _reason(error, "BASCULE_DATABASE_URL")
        return Met(Finding("database", "failed", f"PostgreSQL at {place}: {detail}", remedy))
    said = f"PostgreSQL {version}, {place}"
    if version < VERSION_MIN:
        remedy = f"Upgrade it, or set BASCULE_DATABASE_URL to a server of version {VERSION_MIN} or later."
        return Met(Finding("database", "failed", f"{said}: it is too old.", remedy), offset_s)
    detail = f"{said}, answers within {(time.monotonic() - begin) * 1000:.0f} ms."
    return Met(Finding("database", "ok", detail), offset_s)


def judge_schema(settings: Settings, schema: Schema) -> Finding:
    """Compare the database's revision with the one that this version needs."""
    if schema.is_later:
        detail = f"A later version has migrated the database to {schema.revision}; this one can serve on."
        return Finding("schema", "warning", detail, "Finish the upgrade: replace this version.")
    if schema.is_current:
        return Finding("schema", "ok", f"At revision {schema.revision}, which this version needs.")
    at = "empty" if schema.revision is None else f"at revision {schema.revision}"
    detail = f"The database is {at}; this version needs {schema.head}."
    if settings.is_embedded or settings.migrate:
        return Finding("schema", "warning", detail, "Nothing: `bascule serve` migrates it as it starts.")
    remedy = "Run `bascule migrate`, or set BASCULE_MIGRATE=1 to let `bascule serve` do it."
    return Finding("schema", "failed", detail, remedy)


async def check_wakeups(settings: Settings, url: str, engine: AsyncEngine) -> Sequence[Finding]:
    """Listen where the service would, and see whether what its pool notifies arrives."""
    direct = settings.database_direct_url
    variable = "BASCULE_DATABASE_URL" if direct is None else "BASCULE_DATABASE_DIRECT_URL"
    try:
        is_heard = await Wakeups(url if direct is None else direct.get_secret_value(), engine).proven()
    except FAULTS as error:
        detail, remedy = _reason(error, variable)
        return [Finding("wakeups", "failed", f"PostgreSQL by {variable}: {detail}", remedy)]
    if is_heard:
        return [Finding("wakeups", "ok", "A NOTIFY comes back by LISTEN: waiting ends in milliseconds.")]
    detail = "A NOTIFY does not come back by LISTEN: replicas only look by the clock, once a second."
    remedy = (
        "A pooler is in the way: set BASCULE_DATABASE_DIRECT_URL to PostgreSQL itself."
        if direct is None
        else "BASCULE_DATABASE_DIRECT_URL leads through a pooler, or to another database: correct it."
    )
    return [Finding("wakeups", "warning", detail, remedy)]


async def check_secrets(engine: AsyncEngine, secrets: Secrets) -> Sequence[Finding]:
    """See whether the keys that are set open all that is stored."""
    found = await reencryption.protected(engine, secrets)
    missing = [_missing(one) for one in found if one.role == "missing"]
    if missing:
        return missing
    older = [one for one in found if one.role == "reads" and one.values]
    count = sum(sum(one.values.values()) for one in found)
    detail = f"BASCULE_SECRET_KEY opens all of {count} stored secrets."
    if older:
        left = sum(sum(one.values.values()) for one in older)
        remedy = "Finish the rotation: `bascule secrets reencrypt`."
        return [Finding("secrets", "warning", f"{detail} {left} are under an older key.", remedy)]
    return [Finding("secrets", "ok", detail)]


def _missing(one: Protected) -> Finding:
    named = ", ".join(f"{column} {count}" for column, count in one.values.items())
    if one.key_id is None:
        detail = f"Stored secrets are in no known format: {named}."
        return Finding("secrets", "failed", detail, "Did a later version write them? Run that one.")
    detail = f"BASCULE_SECRET_KEY does not hold key {one.key_id}, which stored secrets need: {named}."
    return Finding("secrets", "failed", detail, "Append that key behind the present one, with a comma.")


def _reason(error: Exception, variable: str) -> tuple[str, str]:
    """What a fault means and what to do; it repeats nothing of the URL, which holds a password."""
    match error:
        case asyncpg.InvalidPasswordError() | asyncpg.InvalidAuthorizationSpecificationError():
            return "the user or the password is refused.", f"Correct them in {variable}."
        case asyncpg.InvalidCatalogNameError():
            return "there is no such database.", f"Create it, or name another one in {variable}."
        case asyncpg.TooManyConnectionsError():
            remedy = "Raise max_connections of PostgreSQL, or lower BASCULE_DATABASE_CONNECTIONS_MAX."
            return "it has no connection left.", remedy
        case socket.gaierror():
            return "the host name cannot be looked up.", f"Correct the host in {variable}."
        case ssl.SSLError():
            remedy = f"Correct sslmode and sslrootcert in {variable}, or the server's certificate."
            return f"TLS failed: {error.reason or 'no reason given'}.", remedy
        case TimeoutError() | asyncio.TimeoutError():
            detail = f"no answer within {CONNECT_LIMIT_S:g} s."
            return detail, "Let this machine reach it: address, firewall, and whether it runs."
        case OSError():
            reason = os.strerror(error.errno) if error.errno else type(error).__name__
            return f"it cannot be reached: {reason}.", f"Start PostgreSQL there, or correct {variable}."
        case asyncpg.PostgresError():
            return (
                f"it says: {error.args[0] if error.args else error}.",
                f"Correct {variable}, or the server.",
            )
        case _:
            remedy = f"Correct {variable}: in a password, @ : / ? # % are written as %40 and so on."
            return f"it cannot be connected to ({type(error).__name__}).", remedy


def _place(url: str) -> str:
    """Where a URL leads, without user and password."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or parse_qs(parts.query).get("host", ["the default socket"])[0]
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        return "BASCULE_DATABASE_URL"
    return f"{host}{port}{parts.path}"
