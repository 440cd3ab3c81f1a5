"""What is written down of a simulated life, for the checker and for the reader of a trace.

Only what can be seen from outside: what upstream's log holds, what arrived there, what reached a tool, what
the store committed, what people decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from app.core.calls import Call, Result
from app.core.protocol import End, Snapshot


@dataclass(frozen=True, slots=True)
class Emitted:
    """Upstream's log gained an event, listed from `listed_at` on. `by`: `us`, or anybody else."""

    at: float
    event: Mapping[str, Any]
    by: str = "agent"
    listed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class SendLeft:
    """A send left one of our processes; `term` is that of the run that sent it."""

    at: float
    replica: str
    term: int
    event: Mapping[str, Any]
    number: int


@dataclass(frozen=True, slots=True)
class SendArrived:
    """A send arrived upstream, and what became of it."""

    at: float
    term: int
    event: Mapping[str, Any]
    outcome: Literal["accepted", "refused"]
    message: str
    number: int


@dataclass(frozen=True, slots=True)
class Reached:
    """A delivery reached a tool. `has_run` says whether the tool did its work, or asked to come back."""

    at: float
    replica: str
    term: int
    call_id: str
    tool: str
    retry: str
    attempt: int
    webhook_id: str
    body: bytes
    has_run: bool


@dataclass(frozen=True, slots=True)
class Replied:
    """A tool's answer came to the process that had called it."""

    at: float
    replica: str
    term: int
    call_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """A replica got the lease."""

    at: float
    replica: str
    term: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch of a run was committed."""

    at: float
    replica: str
    term: int
    calls: tuple[Call, ...]
    messages: tuple[Snapshot, ...]
    started: tuple[tuple[str, int], ...]
    end: End | None
    status: str | None


@dataclass(frozen=True, slots=True)
class LeftResult:
    """A delivery that outlived its run stored its result."""

    at: float
    call_id: str
    attempt: int
    result: Result


@dataclass(frozen=True, slots=True)
class ReportTaken:
    """The store took what a tool reported after its 202."""

    at: float
    call_id: str
    result: Result


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A dispatch that never left waits again."""

    at: float
    call_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class DecisionMade:
    """A person decided on a held call, or its time was over. `reason` is that of the gate."""

    at: float
    id: str
    call_id: str
    result: str
    reason: str
    is_expiry: bool = False


@dataclass(frozen=True, slots=True)
class ToolsSet:
    """The registry changed."""

    at: float
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """Work of a replica ended by a defect."""

    at: float
    replica: str
    error: str


@dataclass(frozen=True, slots=True)
class UpstreamState:
    """How a call stands upstream at the end: what it is, what it waits for, how it was closed."""

    id: str
    kind: str
    tool: str
    needs: str
    end: str | None


@dataclass(frozen=True, slots=True)
class AtEnd:
    """Everything at the end of a life; `is_quiet` says that the world came to rest by itself."""

    at: float
    is_quiet: bool
    why: str
    session_over: str | None
    status: str
    end_reason: str | None
    calls: Mapping[str, Call]
    upstream: tuple[UpstreamState, ...]
    messages: Mapping[str, Snapshot]
    decisions: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the reader of the trace: a crash, a pause, an outage. The checker looks at no text."""

    at: float
    what: str
    replica: str = ""


Entry = (
    Emitted
    | SendLeft
    | SendArrived
    | Reached
    | Replied
    | Claimed
    | Committed
    | LeftResult
    | ReportTaken
    | TakenBack
    | DecisionMade
    | ToolsSet
    | Failed
    | AtEnd
    | Note
)


@dataclass(slots=True)
class Record:
    """The entries of one life, in the order of their happening."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
