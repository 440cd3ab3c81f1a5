"""How the world may misbehave: `Switches` stand until they are changed, a `Fault` strikes the next requests.

Every entry is something that the real API does, may do, or has been reported to do.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

FAULTS_MAX = 1_000
FOREVER = 1_000_000_000


@dataclass(frozen=True)
class Switches:
    """Standing behaviour, of the whole world or of one session. The defaults are the documented API.

    What headers are required is settled before a session is looked at, so only the world's switches count
    there.
    """

    require_beta: bool = True
    """Without `anthropic-beta: managed-agents-2026-04-01` every path is a 404."""
    require_version: bool = True
    """Without `anthropic-version` a request is a 400."""

    ping_interval_s: float | None = 15.0
    """Seconds of quiet on a stream before a `ping`; None sends none."""
    frame_names: bool = True
    """Write `event: <type>` lines. Clients skip frames without them."""
    newline: Literal["lf", "crlf", "cr"] = "lf"
    """Line endings of the stream."""
    replay_on_connect: bool = False
    """A new stream starts with the whole history, which the real API never does."""
    silent: bool = False
    """Streams open but carry nothing, not even pings."""
    stream_duplicates: bool = False
    """Every event is written twice."""
    deltas_max: int | None = None
    """Previews beyond this many deltas per message are shed."""
    close_terminated_streams: bool = False
    """Streams end after `session.status_terminated`."""

    nulls: Literal["null", "absent", "mixed"] = "null"
    """Whether fields that are null are written, left out, or by turns."""
    omit_evaluated_permission: bool = False
    """Leave `evaluated_permission` and `evaluation` out of every call."""
    stamp_step_s: float = 0.0
    """Round `processed_at` down to multiples of this, so that events share one; 0: all differ."""

    page_size_default: int = 1000
    page_size_max: int = 1000
    """Pages never hold more than this, whatever `limit` asks."""
    empty_pages: bool = False
    """Every second page is empty and has a cursor."""
    stuck_cursor: bool = False
    """From the second page on `next_page` is the cursor that was sent."""
    list_queued: bool = True
    """Show queued events (null `processed_at`) in lists, after the others."""
    list_lag_s: float = 0.0
    """Events show in lists only this long after they were emitted."""

    unpark_s: float = 0.0
    """Delay between the last answer and `session.status_running`; messages are refused meanwhile."""
    interrupt_s: float = 0.0
    """Delay between accepting an interrupt and applying it."""
    confirm_s: float = 0.0
    """Delay between accepting a confirmation and processing it."""
    status_lag_s: float = 0.0
    """The session's `status` field shows what was true this long ago."""
    reidle: Literal["remainder", "stale", "none"] = "remainder"
    """What a part of the answers brings: an idle with the remaining ids, one with the old ids, or none."""
    idle_ids_max: int | None = None
    """`requires_action` lists no more than this many ids."""
    session_idle: bool = True
    """Emit `session.status_idle` for requires_action. Without it only the calls themselves tell."""

    duplicate_answers: Literal["refuse", "ignore", "append"] = "refuse"
    """A second result for a call: 400, or 200 without effect, or 200 and in the log as well. The first one
    counts."""
    late_answers: Literal["refuse", "ignore"] = "refuse"
    """A result for a call that an interrupt closed: 400, or 200 without effect."""
    dead_thread_answers: Literal["refuse", "ignore"] = "ignore"
    """An answer for a call of a terminated thread: 400, or 200 without effect."""
    late_confirmations: Literal["refuse", "ignore"] = "ignore"
    """A second or late confirmation: 400, or 200 without effect."""
    parked_messages: Literal["refuse", "queue"] = "refuse"
    """A `user.message` while the session waits for answers."""
    terminated_send_status: int = 409
    """Status of a send to an archived or terminated session."""
    strict_system_message: bool = True
    """A `system.message` must be last and follow a message or a result in the same request."""
    interrupt_closes_custom_calls: bool = False
    """An interrupt writes a `user.custom_tool_result` of its own for each open custom call."""
    send_reply: Literal["events", "empty"] = "events"
    """What an accepted send answers: the events, or 202 with no body as some runtimes do."""

    def with_changes(self, changes: dict[str, Any]) -> Self:
        """Return these switches with some of them changed.

        Raises:
            ValueError: a name is no switch.
        """
        known = {each.name for each in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ValueError(f"no such switch: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        return replace(self, **changes)


FaultKind = Literal[
    "refuse",
    "refuse_after",
    "drop",
    "drop_after",
    "delay",
    "delay_after",
    "eof",
    "cut",
    "truncate",
    "error_frame",
]
STREAM_FAULTS = frozenset({"eof", "cut", "truncate", "error_frame"})

Endpoint = Literal[
    "send",
    "list",
    "stream",
    "retrieve",
    "create",
    "update",
    "delete",
    "archive",
    "sessions",
    "environment",
    "resources",
    "threads",
    "thread",
    "thread_archive",
    "thread_list",
    "thread_stream",
]


@dataclass(frozen=True)
class Fault:
    """What happens to the next requests that match.

    On any endpoint: `refuse` (an error before anything is done), `refuse_after` (the request is done, then
    an error), `drop` and `drop_after` (the connection closes before or after), `delay` and `delay_after`
    (the work, or its answer, comes late). On streams only, after `after_events` events: `eof` (a clean
    end), `cut` (the connection closes in the middle of a frame), `truncate` (a clean end in the middle of a
    frame), `error_frame` (an `event: error`, then the end).
    """

    kind: FaultKind
    endpoint: Endpoint | None = None
    """Which requests; None is all of them."""
    session_id: str | None = None
    """Of which session; None is any."""
    count: int = 1
    """How many requests it strikes; `FOREVER` never wears off."""
    skip: int = 0
    """How many matching requests it lets pass first."""
    page: int | None = None
    """Only the list request for this page of a walk, counted from 0."""
    event_type: str | None = None
    """Only sends that carry an event of this type."""
    status: int = 500
    message: str | None = None
    """The error's text; `{id}` becomes the call that the send names."""
    error_type: str | None = None
    code: str | None = None
    """The error's `details.error_code`."""
    retry_after_s: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    """Extra headers of the error."""
    delay_s: float = 0.0
    after_events: int = 0

    @classmethod
    def slow_commit(cls, count: int, *, session_id: str | None = None) -> Self:
        """Return a fault that knows no call yet for the next `count` sends of results."""
        message = "tool_use_id {id} does not match any custom_tool_use event in this session"
        return cls(
            kind="refuse",
            endpoint="send",
            session_id=session_id,
            count=count,
            event_type="user.custom_tool_result",
            status=400,
            message=message,
        )

    @classmethod
    def rate_limited(
        cls, *, endpoint: Endpoint | None = None, count: int = 1, retry_after_s: int = 1
    ) -> Self:
        """Return a fault that answers 429 with `retry-after`."""
        return cls(kind="refuse", endpoint=endpoint, count=count, status=429, retry_after_s=retry_after_s)


class FaultBook:
    """The faults that wait for their requests; the first that matches strikes."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Fault, int, int]] = []

    def add(self, fault: Fault) -> None:
        """Put a fault behind the ones that wait."""
        if len(self._waiting) >= FAULTS_MAX:
            raise ValueError(f"over {FAULTS_MAX} faults wait; clear some first")
        self._waiting.append((fault, fault.skip, fault.count))

    def clear(self) -> None:
        """Forget every fault."""
        self._waiting.clear()

    def take(
        self, endpoint: str, session_id: str | None, page: int, event_types: frozenset[str]
    ) -> Fault | None:
        """Return the fault that strikes this request, if any, and count it."""
        for place, (fault, skips, left) in enumerate(self._waiting):
            if not _matches(fault, endpoint, session_id, page, event_types):
                continue
            if skips:
                self._waiting[place] = (fault, skips - 1, left)
                continue
            if left > 1:
                self._waiting[place] = (fault, 0, left - 1)
            else:
                del self._waiting[place]
            return fault
        return None

    def waiting(self) -> list[Fault]:
        """Return the faults that still wait."""
        return [fault for fault, _skips, _left in self._waiting]


def _matches(
    fault: Fault, endpoint: str, session_id: str | None, page: int, event_types: frozenset[str]
) -> bool:
    if fault.kind in STREAM_FAULTS and endpoint not in ("stream", "thread_stream"):
        return False
    return (
        fault.endpoint in (None, endpoint)
        and fault.session_id in (None, session_id)
        and fault.page in (None, page)
        and (fault.event_type is None or fault.event_type in event_types)
    )
