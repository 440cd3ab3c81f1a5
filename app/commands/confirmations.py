"""`bascule confirmations`: what waits for a person, and that person's decision."""

from __future__ import annotations

import json
import shlex
from typing import Annotated, Any

import msgspec
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
    json_of,
    segment,
)
from app.commands.printing import members_of, note, print_json, print_line, say

app = typer.Typer(no_args_is_help=True, help="See what waits for a person, and decide.")


@app.command("list")
def list_confirmations(
    session: Annotated[str | None, typer.Option(help="Only this session's.", show_default=False)] = None,
    limit: ListLimit = LIST_ITEMS,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """List the calls that wait, the oldest first, each with its whole input."""
    params = {} if session is None else {"session": session}
    page = connect(url, key).pages("/confirmations", limit, params)
    if as_json:
        print_json(msgspec.json.encode(page))
    elif not page.data:
        say("Nothing waits for a person.")
    else:
        for one in page.data:
            _print_waiting(bytes(one))
    if page.next_cursor is not None:
        note(f"More than these {len(page.data)} wait; --limit prints more.")


@app.command("allow")
def allow_call(
    session: Session,
    call: Call,
    input_: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="JSON|@FILE",
            help="Runs in the place of the agent's input; custom calls only.",
            show_default=False,
        ),
    ] = None,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Let a call run."""
    edited = {} if input_ is None else {"input": json_of(input_, "--input")}
    _decide(session, {"tool_use_id": call, "result": "allow"} | edited, url, key, as_json)


@app.command("deny")
def deny_call(
    session: Session,
    call: Call,
    message: Annotated[str | None, typer.Option(help="Why; the agent is told.", show_default=False)] = None,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Keep a call from running."""
    why = {} if message is None else {"deny_message": message}
    _decide(session, {"tool_use_id": call, "result": "deny"} | why, url, key, as_json)


def _decide(session: str, body: dict[str, Any], url: str, key: str | None, as_json: bool) -> None:
    answer = connect(url, key).send("POST", f"/sessions/{segment(session)}/confirm", body)
    if as_json:
        print_json(answer)
        return
    call, done = json.loads(answer), {"allow": "allowed", "deny": "denied"}[body["result"]]
    named = f"{call['id']} ({call['tool']})"
    if call.get("code") == "second_approval_needed":
        say(f"{named} is approved; another key must allow it too.")
    elif call["decision"] is not None and call["decision"]["status"] == "sending":
        say(f"{named} is {done}; upstream has not accepted it yet.")
    else:
        say(f"{named} is {done}.")


def _print_waiting(raw: bytes) -> None:
    call, shown = json.loads(raw), members_of(raw)
    gate = call["gate"] or {}
    why = f"held by {gate.get('by')} ({gate.get('reason')})"
    print_line(f"{call['tool']} ({call['kind']}) in {call['session_id']}, {why}, since {call['created_at']}")
    print_line(f"  {shown['input']}")
    if call["edited_input"] is not None:
        print_line(f"  approved as: {shown['edited_input']}")
    print_line(f"  bascule confirmations allow {call['session_id']} {shlex.quote(call['id'])}")
