"""The order of the checks, and which of them can be made when an earlier one has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, get_args

from pydantic import SecretStr
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from app import serve
from app.doctor import database, egress, upstream
from app.doctor.findings import Check, Finding, within
from app.doctor.upstream import Way
from app.settings import (
    SECRET_KEY_FILE,
    Settings,
    SettingsError,
    read_settings,
    secret_keys,
    unknown_variables,
    variable,
)
from app.store import credentials, inventory
from app.store.credentials import DEFAULT
from app.store.database import create_engine
from app.store.inventory import Webhook
from app.store.keys import DEFAULT_TENANT
from app.store.migrate import read_schema
from app.store.secrets import Secrets, UnreadableSecretError
from app.upstream.headers import Credential

CONNECTIONS_MAX: Final = 2
WEBHOOKS_MAX: Final = 200
"""So many tools, and so many subscriptions, are looked at."""
CREDENTIALS_MAX: Final = 20
"""So many stored credentials are tried."""
CLOCK_WARNING_S: Final = 5.0
CLOCK_FAILED_S: Final = 150.0
"""Half of what receivers of signed webhooks tolerate by their libraries' default."""


class Tell(Protocol):
    """Takes findings in their order."""

    def __call__(self, *findings: Finding) -> None: ...


@dataclass(frozen=True, slots=True)
class _Stored:
    """What the database holds that is tried from here."""

    ways: Sequence[Way]
    webhooks: Sequence[Webhook]


def examine(
    environ: Mapping[str, str], report: Callable[[Finding], None], clock: Callable[[], float]
) -> None:
    """Make every check, and report each finding as it is known; `clock` gives seconds since 1970.

    Nothing is changed: an embedded database that does not run is started for the checks and stopped, one
    that was never made is not made. What an earlier failure prevents is reported last, as `unchecked`.
    """
    seen: set[Check] = set()

    def tell(*findings: Finding) -> None:
        for finding in findings:
            seen.add(finding.check)
            report(finding)

    settings = _check_settings(environ, tell)
    if settings is not None:
        _check_rest(settings, environ, tell, clock)
    missing = "the settings come first" if settings is None else "it needs a database that works"
    for check in get_args(Check):
        if check not in seen:
            report(Finding(check, "unchecked", f"Not looked at: {missing}."))


def _check_settings(environ: Mapping[str, str], tell: Tell) -> Settings | None:
    remedy = "Correct it; docs/settings.md lists every variable."
    settings = None
    try:
        settings = read_settings(environ)
    except SettingsError as error:
        tell(*(Finding("settings", "failed", f"{line}.", remedy) for line in str(error).splitlines()))
    else:
        given = sorted(variable(name) for name in Settings.model_fields if environ.get(variable(name)))
        tell(Finding("settings", "ok", f"Set: {', '.join(given)}." if given else "None is set."))
    for name in unknown_variables(environ):
        tell(Finding("settings", "warning", f"{name} is no setting and has no effect.", remedy))
    return settings


def _check_rest(
    settings: Settings, environ: Mapping[str, str], tell: Tell, clock: Callable[[], float]
) -> None:
    if settings.is_embedded and not (settings.data_dir / "postgres" / "pgdata").is_dir():
        detail = f"There is none in {settings.data_dir} yet; the first `bascule serve` makes it."
        tell(Finding("database", "unchecked", detail))
        asyncio.run(_examine(settings, None, tell, clock))
        return
    try:
        with serve.database(settings, environ) as url:
            asyncio.run(_examine(settings, url, tell, clock))
    except serve.CannotServeError as error:
        tell(Finding("database", "failed", f"{error}."))
        asyncio.run(_examine(settings, None, tell, clock))


async def _examine(settings: Settings, url: str | None, tell: Tell, clock: Callable[[], float]) -> None:
    offsets: dict[str, float] = {}
    stored = None
    if url is not None:
        met = await database.meet(settings, url, clock)
        tell(met.finding)
        if met.clock_offset_s is not None:
            offsets["PostgreSQL's"] = met.clock_offset_s
        if met.finding.status == "ok":
            stored = await _examine_store(settings, url, tell)
    ways = [*_own_ways(settings), *(stored.ways if stored is not None else ())]
    if not ways:
        remedy = "Set ANTHROPIC_API_KEY, or store one: PUT /credentials/{name}."
        tell(Finding("upstream", "warning", "No session can be served: there is no credential.", remedy))
        ways = [Way("no credential", settings.upstream_url, None)]
    for asked in await upstream.ask(ways, clock):
        tell(asked.finding)
        if asked.clock_offset_s is not None:
            offsets.setdefault("upstream's", asked.clock_offset_s)
    tell(_clock(offsets))
    if stored is not None:
        tell(*await within("webhooks", egress.check_webhooks(settings, stored.webhooks)))
        tell(egress.check_callbacks(settings, stored.webhooks))


async def _examine_store(settings: Settings, url: str, tell: Tell) -> _Stored | None:
    """Look into a database that answers; None if its schema is not one to read from."""
    engine = create_engine(url, connections_max=CONNECTIONS_MAX, is_behind_pooler=settings.is_behind_pooler)
    try:
        schema = await read_schema(engine)
        tell(database.judge_schema(settings, schema))
        tell(*await within("wakeups", database.check_wakeups(settings, url, engine)))
        if not schema.is_current:
            return None
        ways: Sequence[Way] = ()
        secrets = _secrets(settings)
        if isinstance(secrets, Finding):
            tell(secrets)
        else:
            tell(*await within("secrets", database.check_secrets(engine, secrets)))
            ways = await _stored_ways(settings, engine, secrets)
        async with engine.connect() as connection:
            return _Stored(ways, await inventory.webhooks(connection, WEBHOOKS_MAX))
    except (SQLAlchemyError, *database.FAULTS) as error:
        cause = getattr(error, "orig", error).__cause__ or error  # without what SQLAlchemy puts around it
        detail = f"It answered, and then failed: {(str(cause).splitlines() or [type(cause).__name__])[0]}."
        remedy = "See PostgreSQL's log; behind a pooler set BASCULE_DATABASE_DIRECT_URL as well."
        tell(Finding("database", "failed", detail, remedy))
        return None
    finally:
        await engine.dispose()


async def _stored_ways(settings: Settings, engine: AsyncEngine, secrets: Secrets) -> Sequence[Way]:
    ways = []
    async with engine.connect() as connection:
        for tenant, name in await inventory.credentials(connection, CREDENTIALS_MAX):
            try:
                found = await credentials.load(connection, secrets, tenant, name)
            except UnreadableSecretError:
                continue  # the check of secrets tells of it
            is_replaced = (tenant, name) == (DEFAULT_TENANT, DEFAULT) and settings.anthropic_api_key
            if found is not None and not is_replaced:
                url = found.upstream_url or settings.upstream_url
                ways.append(Way(f"credential {name} of {tenant}", url, Credential(found.type, found.secret)))
    return ways


def _own_ways(settings: Settings) -> Sequence[Way]:
    if settings.anthropic_api_key is None:
        return ()
    credential = Credential("api_key", settings.anthropic_api_key.get_secret_value())
    return [Way(variable("anthropic_api_key"), settings.upstream_url, credential)]


def _secrets(settings: Settings) -> Secrets | Finding:
    """Return the keys that open what is stored, or why there are none."""
    file = settings.data_dir / SECRET_KEY_FILE
    try:
        key = settings.secret_key or SecretStr(file.read_text(encoding="utf-8").strip())
        return Secrets(secret_keys(key))
    except FileNotFoundError:
        remedy = "If anything was stored under an earlier one, restore that file first."
        return Finding("secrets", "warning", f"There is no {file}; the next start makes a new one.", remedy)
    except (OSError, ValueError) as error:
        remedy = "Let this user read it, or restore it from where it is kept."
        return Finding("secrets", "failed", f"{file} cannot be used: {error}.", remedy)


def _clock(offsets: Mapping[str, float]) -> Finding:
    if not offsets:
        return Finding("clock", "unchecked", "Nobody else told the time.")
    whose, worst = max(offsets.items(), key=lambda one: abs(one[1]))
    way = "ahead of" if worst > 0 else "behind"
    detail = f"This machine's clock is {abs(worst):.1f} s {way} {whose}."
    if abs(worst) < CLOCK_WARNING_S:
        return Finding("clock", "ok", detail)
    remedy = "Let every machine follow NTP: receivers refuse webhooks whose timestamp is minutes off."
    is_hopeless = abs(worst) >= CLOCK_FAILED_S
    return Finding("clock", "failed" if is_hopeless else "warning", detail, remedy)
