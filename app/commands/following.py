"""Follows a session's stream of events, again and again where it is cut, and prints it as it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from app.commands.client import Client, stop
from app.commands.printing import members_of, note, print_line, say, write

CUTS_MAX: Final = 10
"""In a row, without an event between them; then the service counts as away."""
PAUSE_S_MAX: Final = 10.0
OVER: Final = ("ended", "detached")
_AGAIN: Final = ("stopping", "renew", "database_unavailable")


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `id` is None for what is not replayed."""

    type: str
    id: str | None
    data: bytes


def events(
    client: Client, path: str, after: str | None, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Event]:
    """Yield the events of the session at `path`; after a cut the stream is opened again behind the last id.

    `after` is an id to begin behind, None for now: then the first event is how the session stands, as the
    stream tells only of changes, and there may be none any more.
    """
    cuts, was_open = 0, False
    while True:
        try:
            headers = {} if after is None else {"last-event-id": after}
            with client.stream(f"{path}/events", headers) as chunks:
                was_open = True
                if after is None:
                    yield Event("status", None, client.get(path))
                for event in parsed(chunks):
                    cuts, after = 0, event.id or after
                    if event.type != "end":
                        yield event
                        continue
                    end = json.loads(event.data)
                    if end["code"] not in _AGAIN:
                        stop(f"{end['code']}: {end['detail']}")
                    break
        except httpx.TransportError as error:
            if cuts >= CUTS_MAX or not was_open:
                client.unreached(error)
            note("The stream was cut; opening it again …")
        sleep(min(PAUSE_S_MAX, 0.5 * 2**cuts))
        cuts += 1


def parsed(chunks: Iterator[bytes]) -> Iterator[Event]:
    """Yield the events in the bytes of a stream, which ends its lines with a line feed."""
    type_, id_, data = "message", None, list[bytes]()
    for line in _lines(chunks):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if data:
                yield Event(type_, id_, b"\n".join(data))
            type_, id_, data = "message", None, []
        elif name == b"event":
            type_ = value.decode()
        elif name == b"id":
            id_ = value.decode()
        elif name == b"data":
            data.append(value)


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for chunk in chunks:
        *whole, left = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line])
            rest = []
        rest.append(left)


@dataclass
class Printer:
    """Prints events for people: text as it grows, calls as they change."""

    said: dict[str, str] = field(default_factory=dict)
    """What was printed of each message that is not final."""
    current: str | None = None
    """The message whose text the cursor stands behind."""

    def print(self, event: Event) -> None:
        """Print an event, as far as it is news."""
        one = json.loads(event.data)
        match event.type:
            case "message.partial":
                self._grow(one)
            case "message.final":
                self._grow(one)
                self._end_line()
                self.said.pop(one["id"], None)
            case "message.discarded":
                if self.said.pop(one["id"], None):
                    self._line("[the agent dropped that message]")
            case "call" | "confirmation":
                self._line(_call(one, event.data, is_waiting=event.type == "confirmation"))
            case "status":
                self._line(status_line(one))

    def _grow(self, message: dict[str, Any]) -> None:
        id_, text = message["id"], message["text"]
        said = self.said.get(id_, "")
        if self.current != id_:
            self._end_line()
        if not text.startswith(said):
            self._end_line()
            said = ""
        write(text[len(said) :])
        self.said[id_] = text
        if text:
            self.current = id_

    def _line(self, text: str) -> None:
        self._end_line()
        print_line(text)

    def _end_line(self) -> None:
        if self.current is not None:
            say("")
            self.current = None


def status_line(session: dict[str, Any]) -> str:
    """Return how a session stands, as one line."""
    reason = f" ({session['end_reason']})" if session["end_reason"] else ""
    calls = ", ".join(f"{count} {state}" for state, count in session["calls"].items())
    flags = f", flagged {', '.join(session['flags'])}" if session["flags"] else ""
    return f"[{session['session_id']} is {session['status']}{reason}; calls: {calls or 'none'}{flags}]"


def _call(call: dict[str, Any], raw: bytes, *, is_waiting: bool) -> str:
    text = f"[call {call['id']} {call['tool']}: {call['state']}"
    if is_waiting:
        return f"{text}, waits for a person] {members_of(raw)['input']}"
    if call["result"] is not None and call["result"]["is_error"]:
        text += ", an error"
    return f"{text}]"
