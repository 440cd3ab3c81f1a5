"""The command line: `bascule`, or `python -m app`."""

from __future__ import annotations

import asyncio
import errno
import importlib
import json
import os
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import httpx
import typer

from app.commands.doctor import doctor
from app.settings import ADMIN_KEY_FILE, Settings, SettingsError, read_settings
from app.simulator.script import names

REQUEST_LIMIT_S = 30.0

T = TypeVar("T")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Forwards tool calls of Claude Managed Agents sessions to webhooks.",
)
keys = typer.Typer(no_args_is_help=True, help="Create, list and revoke keys of a running service.")
app.add_typer(keys, name="keys")
secrets = typer.Typer(no_args_is_help=True, help="Rotate BASCULE_SECRET_KEY, which encrypts stored secrets.")
app.add_typer(secrets, name="secrets")
audit = typer.Typer(no_args_is_help=True, help="Check the audit in the database.")
app.add_typer(audit, name="audit")
app.command()(doctor)

Url = Annotated[str, typer.Option(envvar="BASCULE_URL", help="Where the service listens.")]
AdminKey = Annotated[
    str | None,
    typer.Option("--key", envvar="BASCULE_ADMIN_KEY", help="By default the one in BASCULE_DATA_DIR."),
]
Tenant = Annotated[str | None, typer.Option(help="Another tenant than the key's own.")]


@app.command()
def serve() -> None:
    """Run the service, with an embedded PostgreSQL unless BASCULE_DATABASE_URL is set."""
    from app import serve as serving

    settings = _settings()
    try:
        serving.serve(settings, os.environ)
    except serving.CannotServeError as error:
        _stop(str(error))


@app.command()
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
        _stop(str(error))


@app.command()
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
        _stop(f"{check} is not what the service serves; write it again with: make openapi")


@app.command()
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
        _stop(f"there is no such scenario; take one of {', '.join(names())}", code=2)
    try:
        server.main(scenario, port)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        reason = "is taken; does another simulator run?" if is_taken else "cannot be listened on."
        _stop(f"port {port} {reason} Give --port another number, or leave it out for a free one", code=2)


@app.command()
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


@keys.command("create")
def create_key(
    name: str,
    scope: Annotated[list[str], typer.Option(help="tools, sessions, read, confirm or admin; repeatable.")],
    url: Url = "http://127.0.0.1:8080",
    key: AdminKey = None,
    tenant: Tenant = None,
) -> None:
    """Create a key and print it; it cannot be shown again."""
    body = {"name": name, "scopes": scope} | ({"tenant": tenant} if tenant else {})
    print(json.dumps(_request("POST", url, "/keys", key, json_body=body), indent=2))


@keys.command("list")
def list_keys(url: Url = "http://127.0.0.1:8080", key: AdminKey = None, tenant: Tenant = None) -> None:
    """List the keys, revoked ones too."""
    params = {"limit": "200"} | ({"tenant": tenant} if tenant else {})
    while True:
        page = _request("GET", url, "/keys", key, params=params)
        for item in page["data"]:
            end = item["expires_at"]
            is_expired = end is not None and datetime.fromisoformat(end) <= datetime.now(UTC)
            state = "revoked" if item["revoked_at"] else "expired" if is_expired else "valid"
            print(item["id"], state, item["tenant"], ",".join(item["scopes"]), item["name"], sep="\t")
        if page["next_cursor"] is None:
            return
        params["cursor"] = page["next_cursor"]


@keys.command("revoke")
def revoke_key(
    key_id: str, url: Url = "http://127.0.0.1:8080", key: AdminKey = None, tenant: Tenant = None
) -> None:
    """Revoke a key at once and for good."""
    params = {"tenant": tenant} if tenant else {}
    print(json.dumps(_request("DELETE", url, f"/keys/{key_id}", key, params=params), indent=2))


@secrets.command("reencrypt")
def reencrypt_secrets() -> None:
    """Rewrite every stored secret under the first key of BASCULE_SECRET_KEY, also while replicas serve."""
    from app.store import reencryption

    done = _with_secrets(reencryption.reencrypt)
    for one in done:
        counts = f"{one.rewritten} rewritten\t{one.current} current\t{one.unreadable_total} unreadable"
        print(one.column, counts, sep="\t")
    if lines := [sentence for one in done for sentence in one.unreadable]:
        _stop("\n".join(lines))


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
        _stop(str(error))
    if not is_sound:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    app()


def _settings() -> Settings:
    try:
        return read_settings(os.environ)
    except SettingsError as error:
        _stop(str(error))


def _with_secrets(work: Callable[..., Awaitable[T]]) -> T:
    from app import serve as serving

    settings = _settings()
    try:
        return serving.with_secrets(settings, os.environ, work)
    except serving.CannotServeError as error:
        _stop(str(error))


def _request(
    method: str,
    url: str,
    path: str,
    key: str | None,
    *,
    params: dict[str, str] | None = None,
    json_body: Any = None,
) -> Any:
    headers = {"authorization": f"Bearer {key or _stored_admin_key()}"}
    try:
        response = httpx.request(
            method,
            url.rstrip("/") + path,
            headers=headers,
            params=params,
            json=json_body,
            timeout=REQUEST_LIMIT_S,
            trust_env=False,
        )
    except httpx.HTTPError as error:
        _stop(f"no answer from {url}: {error}; is `bascule serve` running there? --url names another address")
    try:
        body = response.json()
    except ValueError:
        _stop(f"{url} answered {response.status_code} without JSON; --url must name the service")
    if response.is_error:
        lines = [f"{item['field']}: {item['message']}" for item in body.get("errors", [])]
        _stop("\n".join([f"{body.get('code')}: {body.get('detail')}", *lines]))
    return body


def _stored_admin_key() -> str:
    path = _settings().data_dir / ADMIN_KEY_FILE
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        _stop(f"no key: pass --key, set BASCULE_ADMIN_KEY, or run where {path} can be read")


def _stop(message: str, *, code: int = 1) -> NoReturn:
    print(message, file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
