"""`bascule tools`: register webhooks, try them, and see what became of their deliveries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from app.commands.client import SLOW_LIMIT_S, stop
from app.commands.options import (
    HERE,
    LIST_ITEMS,
    Json,
    Key,
    ListLimit,
    Members,
    Url,
    connect,
    json_of,
    members,
    segment,
)
from app.commands.printing import print_json, print_object, print_page, print_table, say

app = typer.Typer(no_args_is_help=True, help="Register webhooks and try them.")

DELIVERY: Final = ("STARTED", "CALL", "ATTEMPT", "STATUS", "CODE", "MS", "REPLY")

Name = Annotated[str, typer.Argument(help="The name that the agent calls, or *.", show_default=False)]


@app.command("list")
def list_tools(
    limit: ListLimit = LIST_ITEMS, url: Url = HERE, key: Key = None, as_json: Json = False
) -> None:
    """List the tools by name."""
    page = connect(url, key).pages("/tools", limit)
    print_page(
        page,
        as_json,
        ("NAME", "URL", "GATE", "STATE"),
        lambda one: (one["name"], one["url"], one["gate"], _state(one)),
    )


@app.command("show")
def show_tool(name: Name, url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """Show a tool."""
    print_object(connect(url, key).get(f"/tools/{segment(name)}"), as_json)


@app.command("put")
def put_tool(
    name: Name,
    webhook: Annotated[str, typer.Argument(metavar="WEBHOOK", help="Its URL.", show_default=False)],
    given: Members = None,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Register a tool, or replace it: what is left out has its default. A new one shows its secret, once."""
    body = {"url": webhook, **members(given)}
    print_object(connect(url, key).send("PUT", f"/tools/{segment(name)}", body), as_json)


@app.command("delete")
def delete_tool(name: Name, url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """Delete a tool and name the open calls that it leaves."""
    answer = connect(url, key).send("DELETE", f"/tools/{segment(name)}")
    if as_json:
        print_json(answer)
        return
    gone = json.loads(answer)
    say(f"{gone['name']} is deleted; {gone['calls_total']} open calls are left.")
    if gone["calls"]:
        print_table(
            ("SESSION", "CALL", "STATE"),
            ([one["session_id"], one["id"], one["state"]] for one in gone["calls"]),
        )


@app.command("test")
def test_tool(
    name: Name,
    input_: Annotated[
        str, typer.Option("--input", metavar="JSON|@FILE", help="The input of the call.")
    ] = "{}",
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Send the tool a signed test call and show what comes back; ends with 1 if the delivery failed."""
    body = {"input": json_of(input_, "--input")}
    answer = connect(url, key).send("POST", f"/tools/{segment(name)}/test", body, limit_s=SLOW_LIMIT_S)
    print_object(answer, as_json)
    came = json.loads(answer)
    if came["status"] != "done":
        stop(f"The test is {came['status']}: it has no outcome.")
    if came["code"] is not None:
        stop(f"The delivery failed: {came['code']}; docs/errors.md explains the code.")


@app.command("rotate-secret")
def rotate_secret(
    name: Name,
    overlap_s: Annotated[
        float | None, typer.Option(min=0, help="For how long the old secret signs too.", show_default="a day")
    ] = None,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Give a tool a new signing secret and show it, once."""
    body = {} if overlap_s is None else {"overlap_s": overlap_s}
    print_object(connect(url, key).send("POST", f"/tools/{segment(name)}/rotate-secret", body), as_json)


@app.command("deliveries")
def list_deliveries(
    name: Name,
    failed: Annotated[bool, typer.Option("--failed", help="Only those with a code.")] = False,
    limit: ListLimit = LIST_ITEMS,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """List a tool's deliveries, newest first."""
    path = f"/tools/{segment(name)}/deliveries"
    page = connect(url, key).pages(path, limit, {"failed": "true"} if failed else {})
    print_page(page, as_json, DELIVERY, delivery_row)


def delivery_row(one: dict[str, Any]) -> Sequence[Any]:
    """The cells of a delivery, under the headings `DELIVERY`."""
    names = ("started_at", "call_id", "attempt", "http_status", "code", "duration_ms", "reply_excerpt")
    return [one[name] for name in names]


def _state(tool: dict[str, Any]) -> str:
    if tool["fault"] is not None:
        return "unreadable"
    if not tool["enabled"]:
        return f"disabled: {tool['disabled_reason']}" if tool["disabled_reason"] else "disabled"
    health = tool["health"]
    return "ok" if health["state"] == "closed" else f"{health['state']}: {health['last_error']}"
