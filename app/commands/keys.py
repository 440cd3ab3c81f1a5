"""`bascule keys`: who may ask the service."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from app.commands.options import HERE, LIST_ITEMS, Json, Key, ListLimit, Tenant, Url, connect, segment
from app.commands.printing import note, print_object, print_page

app = typer.Typer(no_args_is_help=True, help="Create, list and revoke keys.")


@app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="For people.", show_default=False)],
    scope: Annotated[
        list[str],
        typer.Option(help="tools, sessions, read, confirm or admin; repeatable.", show_default=False),
    ],
    expires_in_s: Annotated[
        int | None, typer.Option(min=1, help="Then it is refused; by default never.", show_default=False)
    ] = None,
    tenant: Tenant = None,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Create a key and print it; it cannot be shown again."""
    body = {"name": name, "scopes": scope, "expires_in_s": expires_in_s, "tenant": tenant}
    print_object(connect(url, key).send("POST", "/keys", body), as_json)
    note("Keep the key now: it cannot be shown again.")


@app.command("list")
def list_keys(
    tenant: Tenant = None,
    limit: ListLimit = LIST_ITEMS,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """List the keys, those too that were revoked or have expired, oldest first."""
    page = connect(url, key).pages("/keys", limit, _of(tenant))

    def row(one: dict[str, Any]) -> tuple[Any, ...]:
        end = one["expires_at"]
        is_expired = end is not None and datetime.fromisoformat(end) <= datetime.now(UTC)
        state = "revoked" if one["revoked_at"] else "expired" if is_expired else "valid"
        return one["id"], state, one["tenant"], ",".join(one["scopes"]), one["last_used_at"], one["name"]

    print_page(page, as_json, ("KEY", "STATE", "TENANT", "SCOPES", "LAST USED", "NAME"), row)


@app.command("delete")
def delete_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, key_…", show_default=False)],
    tenant: Tenant = None,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Revoke a key, at once and for good; it stays in the list."""
    answer = connect(url, key).send("DELETE", f"/keys/{segment(key_id)}", params=_of(tenant))
    print_object(answer, as_json)


def _of(tenant: str | None) -> dict[str, str]:
    return {} if tenant is None else {"tenant": tenant}
