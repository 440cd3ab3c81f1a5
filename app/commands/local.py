"""The commands of this machine: they run the service, or work on its database beside it.

What they need is imported when they run, so that the others start quickly.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from app.commands.client import Exit, stop
from app.settings import Settings, SettingsError, read_settings
from app.simulator.script import names

T = TypeVar("T")

secrets = typer.Typer(no_args_is_help=True, help="Rotate BASCULE_SECRET_KEY, which encrypts stored secrets.")
audit = typer.Typer(no_args_is_help=True, help="Check the audit in the database.")


def serve() -> None:
    """Run the service, with an embedded PostgreSQL unless BASCULE_DATABASE_URL is set."""
    from app import serve as serving

    settings = _settings()
    try:
        serving.serve(settings, os.environ)
    except serving.CannotServeError as error:
        stop(str(error))


def migrate(
    revision: Annotated[
        str | None, typer.Option(hidden=True, help="Write a migration instead, with this message.")
    ] = None,
) -> None:
    """Bring the database to this version's schema."""
    from app import serve as serving

    settings = _settings()
    try:
        with serving.database(settings, os.environ) as url:
            asyncio.run(serving.migrate_database(settings, url, revision=revision))
    except serving.CannotServeError as error:
        stop(str(error))


def openapi(
    check: Annotated[
        Path | None, typer.Option(help="Compare with this file instead; differences are a failure.")
    ] = None,
) -> None:
    """Print the OpenAPI document as YAML."""
    from app.openapi import document_yaml

    text = document_yaml()
    if check is None:
        sys.stdout.write(text)
    elif not check.exists() or check.read_text(encoding="utf-8") != text:
        stop(f"{check} is not what the service serves; write it again with: make openapi")


def simulate(
    scenario: Annotated[
        str | None,
        typer.Argument(help=f"One of {', '.join(names())}; by default all.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
) -> None:
    """Serve the simulator of the Managed Agents API."""
    from app.simulator import server

    if scenario is not None and scenario not in names():
        stop(f"there is no such scenario; take one of {', '.join(names())}", Exit.USAGE)
    try:
        server.main(scenario, port)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        reason = "is taken; does another simulator run?" if is_taken else "cannot be listened on."
        stop(f"port {port} {reason} Give --port another number, or leave it out for a free one", Exit.USAGE)


def demo(
    tool_url: Annotated[
        str | None,
        typer.Option(
            help="Your own tool's webhook, which gets the calls of lookup_order.", show_default=False
        ),
    ] = None,
) -> None:
    """Run the service against the simulator, with a tool and a session to watch."""
    importlib.import_module("app.demo").main(tool_url)


@secrets.command("reencrypt")
def reencrypt_secrets() -> None:
    """Rewrite every stored secret under the first key of BASCULE_SECRET_KEY, also while replicas serve."""
    from app.store import reencryption

    done = _with_secrets(reencryption.reencrypt)
    for one in done:
        counts = f"{one.rewritten} rewritten\t{one.current} current\t{one.unreadable_total} unreadable"
        print(one.column, counts, sep="\t")
    if lines := [sentence for one in done for sentence in one.unreadable]:
        stop("\n".join(lines))


@secrets.command("status")
def show_secrets() -> None:
    """Show how many stored secrets each key protects; one that protects none may go."""
    from app.store import reencryption

    for one in _with_secrets(reencryption.protected):
        named = ", ".join(f"{column} {count}" for column, count in one.values.items())
        print(
            one.key_id or "no known format", one.role, sum(one.values.values()), named or "nothing", sep="\t"
        )


@audit.command("verify")
def verify_audit(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's chain.")] = None,
) -> None:
    """Walk each tenant's chain; exit with 1 and name the first row that was changed, removed or moved.

    Prints for each tenant how many rows are sound and the hash of the last of them. Keep these elsewhere:
    whoever owns the database can make a whole chain anew, and only another head shows it.
    """
    from app import serve as serving

    settings = _settings()
    is_sound = True
    try:
        with serving.database(settings, os.environ) as url:
            for found in asyncio.run(serving.verify_audit(settings, url, tenant)):
                print(found.tenant, f"{found.rows} rows", f"head {found.head.hex()}", sep="\t")
                if found.fault is not None:
                    is_sound = False
                    print(f"{found.tenant}: {found.fault}", file=sys.stderr)
    except serving.CannotServeError as error:
        stop(str(error))
    if not is_sound:
        raise typer.Exit(1)


def _settings() -> Settings:
    try:
        return read_settings(os.environ)
    except SettingsError as error:
        stop(str(error))


def _with_secrets(work: Callable[..., Awaitable[T]]) -> T:
    from app import serve as serving

    settings = _settings()
    try:
        return serving.with_secrets(settings, os.environ, work)
    except serving.CannotServeError as error:
        stop(str(error))
