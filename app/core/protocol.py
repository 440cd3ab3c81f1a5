"""All that passes between the core and the runner: notices in, effects out.

A notice says what happened; an effect says what to do. The runner performs effects in their order:
everything that is to be saved is committed before anything of the same batch leaves the process.
Times are monotonic seconds of the runner's clock unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from app.core.calls import Call, Decision, Result
from app.core.events import Answer, AnyEvent, Confirmation, Interrupt
from app.core.rules import Rule
from app.core.tools import Tool

EndReason = Literal[
    "terminated",
    "deleted",
    "idle",
    "auth_failed",
    "session_gone",
    "upstream_rejected",
    "reconnects_exhausted",
    "internal_error",
    "detached",
]

# ---- values shared by notices and effects


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request to upstream did not succeed.

    `reach` says how far it got: `unsent` (nothing can have been accepted: refused at connect, 429),
    `refused` (upstream said no), `unknown` (it may have been accepted: timeout, cut, 408, 409, 5xx).
    `status` is None when there was no answer. `message` is upstream's own, cut to 500 characters.
    `is_silence` marks a stream that was cut for saying nothing, `is_paging_loop` a list that goes nowhere.
    """

    reach: Literal["unsent", "refused", "unknown"]
    status: int | None = None
    message: str = ""
    retry_after_s: float | None = None
    is_silence: bool = False
    is_paging_loop: bool = False


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What RETRIEVE told. `agent_tools` is the session's `agent.tools`; None if it could not be read.

    `created_at` is in seconds since 1970; None where it is not told.
    """

    is_over: bool
    agent_tools: Sequence[Mapping[str, Any]] | None = None
    environment: Literal["cloud", "self_hosted"] | None = None
    created_at: float | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What the attachment asked for. `tools` None means every tool of the tenant."""

    max_idle_s: float | None = 60.0
    max_reconnects: int | None = None
    tools: frozenset[str] | None = None
    concurrency: int = 8
    environment: Literal["cloud", "self_hosted"] | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A message as known now. `content` is a JSON array of blocks, as bytes."""

    id: str
    state: Literal["partial", "final"]
    content: bytes
    thread_id: str | None = None
    processed_at: str | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look at history showed about one call.

    `session` is what RETRIEVE said when it was asked too; `is_gone` that it answered 404 or 410.
    """

    answers: tuple[Answer, ...] = ()
    verdicts: tuple[Confirmation, ...] = ()
    interrupts: tuple[Interrupt, ...] = ()
    terminated_threads: frozenset[str] = frozenset()
    session: SessionFacts | None = None
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How the attachment stands; the runner saves it with the batch that changed it.

    `cursor_at` is the newest `processed_at` that a complete read of history has shown, in seconds since 1970.
    `idle_id` names the idle event that armed the countdown, `idle_deadline` its end (monotonic).
    """

    status: Literal["attaching", "live", "reconnecting", "detaching"] = "attaching"
    cursor_at: float | None = None
    reconnects: int = 0
    idle_id: str | None = None
    idle_deadline: float | None = None
    flags: frozenset[str] = frozenset()
    missing: tuple[str, ...] = ()
    primary_thread_id: str | None = None
    environment: Literal["cloud", "self_hosted"] | None = None


# ---- notices


@dataclass(frozen=True, slots=True)
class Retrieved:
    """RETRIEVE answered; `facts` is None when it failed, which decides nothing."""

    facts: SessionFacts | None


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The stream is established; nothing of it was read yet."""


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The stream failed to open, broke, or ended; `failure` is None for a clean end."""

    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """One page of a history read, in list order. `number` is that of its `ReadHistory`."""

    events: Sequence[AnyEvent]
    number: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """The last page was read. `known` are stored calls among `SessionMachine.to_recall`, in any state."""

    known: Mapping[str, Call] = field(default_factory=dict)
    number: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class HistoryFailed:
    """The history read broke off."""

    failure: Failure
    number: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Received:
    """The stream delivered an event. None is told before the connection's first history read has ended."""

    event: AnyEvent


@dataclass(frozen=True, slots=True)
class ToolsChanged:
    """The tenant's registry is now this, and its live rules, those that are about any session or this one."""

    tools: Mapping[str, Tool]
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """The attachment's settings are now this."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class Decided:
    """Somebody decided on a held call through the service."""

    call_id: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class Wanted:
    """Somebody asked for calls by id that the store does not hold."""

    call_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Redeliver:
    """An operator asked for one more delivery of calls whose tools have promised a result."""

    call_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Steered:
    """Whether events of the service's own clients are on their way to the session."""

    is_under_way: bool


@dataclass(frozen=True, slots=True)
class Orphaned:
    """A `dispatched` call of an earlier run: whoever delivered it will not report any more.

    With `is_unsent` it never left: its run ended while it waited for its turn.
    """

    call_id: str
    is_unsent: bool = False


@dataclass(frozen=True, slots=True)
class Delivered:
    """A delivery episode ended. `attempts` counts all deliveries of the call so far."""

    call_id: str
    result: Result
    attempts: int
    outcome_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Promised:
    """The tool answered 202: its result comes later, and nothing is under way here. `attempts` as above."""

    call_id: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A send ended: accepted when `failure` is None. `number` is that of its `Send`."""

    call_id: str
    failure: Failure | None = None
    number: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Looked:
    """A look at history ended; `findings` is None when it could not be read. `number` is its `Look`'s."""

    call_id: str
    findings: Findings | None
    number: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class DetachRequested:
    """The attachment is to end without the session ending."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The replica stops and another will go on: start nothing more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; sent when `SessionMachine.next_wake` is due."""


Notice = (
    Retrieved
    | StreamOpened
    | StreamClosed
    | HistoryPage
    | HistoryRead
    | HistoryFailed
    | Received
    | ToolsChanged
    | SettingsChanged
    | Decided
    | Wanted
    | Redeliver
    | Steered
    | Orphaned
    | Delivered
    | Promised
    | Sent
    | Looked
    | DetachRequested
    | Stopping
    | Tick
)

# ---- effects


@dataclass(frozen=True, slots=True)
class SaveCall:
    """Store the call as it now stands."""

    call: Call


@dataclass(frozen=True, slots=True)
class RefuseDecision:
    """Store that a decision came too late; `refusal` says why."""

    call_id: str
    decision_id: str
    refusal: str


@dataclass(frozen=True, slots=True)
class ConsultRules:
    """See in the store whether a standing rule answers for a person; its decision comes as `Decided`."""

    call_id: str


@dataclass(frozen=True, slots=True)
class SaveMessage:
    """Store the snapshot; a partial one may be coalesced with its successors."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class DropMessages:
    """Forget previews whose message never came."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    """Call the tool's webhook for a call that is `dispatched`."""

    call: Call
    tool: Tool


@dataclass(frozen=True, slots=True)
class Watch:
    """A `dispatched` call has nothing under way here: an earlier run delivered it, or its tool calls back.

    Report its result with `Delivered`, or `Orphaned` once nobody is left who could.
    """

    call_id: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send one client event upstream, after a jittered wait; report with `Sent`.

    `number` tells apart the sends of one call: one that was withdrawn too late still reports.
    """

    call_id: str
    event: bytes
    after_s: float = 0.0
    floor_s: float | None = None
    number: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Forget a send or look of this call that is still waiting; one under way runs on."""

    call_id: str


@dataclass(frozen=True, slots=True)
class Look:
    """Read history for what settles this call; report with `Looked`.

    `rounds` lists, 2 s apart, stopping at the first that shows an answer, or a verdict if `is_for_verdict`;
    `retrieve` asks for the session too. `floor_s` is waited at least: a send that was cut may still be
    worked on.
    """

    call_id: str
    since: float | None
    rounds: int = 1
    retrieve: bool = False
    after_s: float = 0.0
    floor_s: float | None = None
    is_for_verdict: bool = False
    number: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Retrieve:
    """Read the session object; report with `Retrieved`."""


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open the stream after a jittered wait; report with `StreamOpened` or `StreamClosed`."""

    after_s: float = 0.0
    floor_s: float | None = None
    previews: bool = True


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close the stream without a report."""


@dataclass(frozen=True, slots=True)
class ReadHistory:
    """Read the history from `since` (seconds since 1970, inclusive; None: from the first event).

    At most one read runs: a new one takes the place of the one before, which `number` tells apart.
    """

    since: float | None
    after_s: float = 0.0
    floor_s: float | None = None
    number: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class End:
    """The run is over and the attachment with it."""

    reason: EndReason
    detail: str | None = None
    event_id: str | None = None


Effect = (
    SaveCall
    | RefuseDecision
    | ConsultRules
    | SaveMessage
    | DropMessages
    | Deliver
    | Watch
    | Send
    | Withdraw
    | Look
    | Retrieve
    | OpenStream
    | CloseStream
    | ReadHistory
    | End
)
