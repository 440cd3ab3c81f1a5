"""`bascule sessions`: attach sessions, steer them, and watch them."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Final

import msgspec
import typer

from app.commands.client import Client, Exit, stop
from app.commands.following import OVER, Printer, events, status_line
from app.commands.options import (
    HERE,
    LIST_ITEMS,
    Json,
    Key,
    ListLimit,
    Members,
    Session,
    Url,
    connect,
    members,
    segment,
)
from app.commands.printing import note, print_json, print_object, print_page, say

POLL_S: Final = 0.5
WAIT_S: Final = 60.0
WAIT_S_MAX: Final = 3_600.0

app = typer.Typer(no_args_is_help=True, help="Attach sessions, steer and watch them.")

Wait = Annotated[
    float,
    typer.Option("--wait-s", min=0, max=WAIT_S_MAX, help="For how long to wait until it is so; 0 for not."),
]
Text = Annotated[str, typer.Argument(help="What to say to the agent.", show_default=False)]


@app.command("attach")
def attach_session(
    session: Session,
    given: Members = None,
    wait_s: Wait = WAIT_S,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Wish that a session is served, and wait until it is live."""
    client = connect(url, key)
    answer = client.send("POST", f"/sessions/{segment(session)}/attach", members(given))
    answer = _wait(client, session, answer, wait_s, ("attaching", "reconnecting"))
    _print_status(answer, as_json)
    if json.loads(answer)["status"] in OVER:
        raise typer.Exit(Exit.FAILED)


@app.command("detach")
def detach_session(
    session: Session, wait_s: Wait = WAIT_S, url: Url = HERE, key: Key = None, as_json: Json = False
) -> None:
    """Wish that a session is served no more, and wait until what is under way has drained."""
    client = connect(url, key)
    answer = client.send("POST", f"/sessions/{segment(session)}/detach")
    _print_status(_wait(client, session, answer, wait_s, ("detaching",)), as_json)


@app.command("list")
def list_sessions(
    limit: ListLimit = LIST_ITEMS, url: Url = HERE, key: Key = None, as_json: Json = False
) -> None:
    """List the attachments, newest first."""

    def row(one: dict[str, Any]) -> tuple[Any, ...]:
        calls = ", ".join(f"{count} {state}" for state, count in one["calls"].items())
        return one["session_id"], one["status"], one["end_reason"], calls, ", ".join(one["flags"])

    page = connect(url, key).pages("/sessions", limit)
    print_page(page, as_json, ("SESSION", "STATUS", "REASON", "CALLS", "FLAGS"), row)


@app.command("show")
def show_session(session: Session, url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """Show an attachment."""
    print_object(connect(url, key).get(f"/sessions/{segment(session)}"), as_json)


@app.command("text")
def show_text(
    session: Session, limit: ListLimit = LIST_ITEMS, url: Url = HERE, key: Key = None, as_json: Json = False
) -> None:
    """Print what the agent has said, and what it is writing."""
    page = connect(url, key).pages(f"/sessions/{segment(session)}/messages", limit)
    if as_json:
        print_json(msgspec.json.encode(page))
        return
    for one in (json.loads(bytes(raw)) for raw in page.data):
        say(one["text"] + (" …" if one["state"] == "partial" else ""))
    if page.next_cursor is not None:
        note(f"There are more than these {len(page.data)} messages; --limit prints more.")


@app.command("send")
def send_message(
    session: Session, text: Text, url: Url = HERE, key: Key = None, as_json: Json = False
) -> None:
    """Say something to the agent; a session that ended by idleness is attached again."""
    _send(session, {"type": "user.message", "content": text}, url, key, as_json)


@app.command("interrupt")
def interrupt_session(session: Session, url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """Stop the turn that runs, and close the calls that are open."""
    _send(session, {"type": "user.interrupt"}, url, key, as_json)


@app.command("follow")
def follow_session(
    session: Session,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin with what has happened so far.")
    ] = False,
    url: Url = HERE,
    key: Key = None,
    as_json: Annotated[
        bool, typer.Option("--json", help='Print each event as a line: {"event", "id", "data"}.')
    ] = False,
) -> None:
    """Print text as it is written and calls as they change, until the session ends or Ctrl-C."""
    client, path = connect(url, key), f"/sessions/{segment(session)}"
    printer = Printer()
    try:
        for event in events(client, path, "0" if from_start else None):
            if as_json:
                one = {"event": event.type, "id": event.id, "data": msgspec.Raw(event.data)}
                print_json(msgspec.json.encode(one), in_one_line=True)
            else:
                printer.print(event)
            if event.type == "status" and json.loads(event.data)["status"] in OVER:
                return
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None


def _send(session: str, event: dict[str, Any], url: str, key: str | None, as_json: bool) -> None:
    answer = connect(url, key).send("POST", f"/sessions/{segment(session)}/events", {"events": [event]})
    if as_json:
        print_json(answer)
        return
    sent = json.loads(answer)
    say("Upstream took it." if sent["status"] == "sent" else f"Upstream has not taken it yet: {sent['id']}.")


def _wait(client: Client, session: str, answer: bytes, wait_s: float, while_: tuple[str, ...]) -> bytes:
    """Wait until the session's status is none of `while_`, and tell of each that it has meanwhile."""
    deadline, told = time.monotonic() + wait_s, ""
    while (status := json.loads(answer)["status"]) in while_ and time.monotonic() < deadline:
        if status != told:
            note(f"{session} is {status} …")
            told = status
        time.sleep(POLL_S)
        answer = client.get(f"/sessions/{segment(session)}")
    if status in while_ and wait_s > 0:
        stop(f"{session} is still {status} after {wait_s:g} s; `bascule doctor` looks for the reason.")
    return answer


def _print_status(answer: bytes, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    session = json.loads(answer)
    say(status_line(session))
    if session["end_detail"]:
        say(session["end_detail"])
