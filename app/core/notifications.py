"""What subscribers are told: the closed set of events, and what each says.

What is said is thin: ids, names, states and codes. Never an input, a result, a message's text or a secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args
from urllib.parse import quote

Event = Literal[
    "confirmation.requested",
    "confirmation.decided",
    "confirmation.expired",
    "confirmation.reminded",
    "call.failed",
    "call.outcome_unknown",
    "call.unowned",
    "session.ended",
    "session.stuck",
    "tool.unhealthy",
    "message.final",
]

EVENTS: Final[frozenset[str]] = frozenset(get_args(Event))

STUCK_FLAGS: Final = frozenset(
    {
        "no_credential",
        "unreadable_headers",
        "upstream_contradiction",
        "posting_degraded",
        "history_degraded",
    }
)
"""Flags of a session that somebody should look at; `unowned_calls` has an event of its own."""


def call_data(
    session_id: str,
    call_id: str,
    *,
    thread_id: str | None,
    tool: str,
    kind: str,
    state: str,
    gate_by: str | None,
    gate_reason: str | None,
    outcome_unknown: bool,
) -> dict[str, Any]:
    """What every event about a call says of it."""
    return {
        "session_id": session_id,
        "call_id": call_id,
        "thread_id": thread_id,
        "tool": tool,
        "kind": kind,
        "state": state,
        "gate": None if gate_by is None else {"by": gate_by, "reason": gate_reason},
        "outcome_unknown": outcome_unknown,
    }


def decision_data(decision_id: str, result: str, status: str, by: str, via: str) -> dict[str, Any]:
    """What `confirmation.decided` and `.expired` say of the decision; its message is for the agent."""
    return {"decision": {"id": decision_id, "result": result, "status": status, "by": by, "via": via}}


def encode(data: Mapping[str, Any]) -> str:
    """The data as JSON text that can be stored and sent: half characters become `?`."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def link(base_url: str, data: Mapping[str, Any]) -> str:
    """The page of the console that shows what the event is about. Opening it changes nothing."""
    match data:
        case {"session_id": session_id, "call_id": call_id}:
            path = f"/sessions/{quote(session_id, safe='')}/calls/{quote(call_id, safe='')}"
        case {"session_id": session_id}:
            path = f"/sessions/{quote(session_id, safe='')}"
        case {"tool": tool}:
            path = f"/tools/{quote(tool, safe='')}"
        case _:
            path = ""
    return f"{base_url}/console{path}"
