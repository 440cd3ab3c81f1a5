"""`bascule calls`: what became of the tool calls of a session."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from app.commands.options import (
    HERE,
    LIST_ITEMS,
    Call,
    Json,
    Key,
    ListLimit,
    Session,
    Url,
    connect,
    segment,
)
from app.commands.printing import (
    members_of,
    print_json,
    print_members,
    print_object,
    print_page,
    print_table,
    say,
)
from app.commands.tools import DELIVERY, delivery_row

app = typer.Typer(no_args_is_help=True, help="See what became of tool calls.")


@app.command("list")
def list_calls(
    session: Session,
    state: Annotated[str | None, typer.Option(help="Only these, such as held.", show_default=False)] = None,
    limit: ListLimit = LIST_ITEMS,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """List a session's calls in their order."""
    params = {} if state is None else {"state": state}
    page = connect(url, key).pages(f"/sessions/{segment(session)}/calls", limit, params)

    def row(one: dict[str, Any]) -> tuple[Any, ...]:
        return one["id"], one["tool"], one["kind"], one["state"], one["attempts"], one["created_at"]

    print_page(page, as_json, ("CALL", "TOOL", "KIND", "STATE", "ATTEMPTS", "CREATED"), row)


@app.command("show")
def show_call(session: Session, call: Call, url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """Show a call with every attempt to deliver it."""
    answer = connect(url, key).get(f"/sessions/{segment(session)}/calls/{segment(call)}")
    if as_json:
        print_json(answer)
        return
    fields = members_of(answer)
    del fields["deliveries"]
    print_members(fields)
    say("\nDeliveries:")
    print_table(DELIVERY, map(delivery_row, json.loads(answer)["deliveries"]))


@app.command("redeliver")
def redeliver_call(
    session: Session, call: Call, url: Url = HERE, key: Key = None, as_json: Json = False
) -> None:
    """Deliver a call once more whose tool has answered 202 and lost it."""
    path = f"/sessions/{segment(session)}/calls/{segment(call)}/redeliver"
    print_object(connect(url, key).send("POST", path), as_json)
