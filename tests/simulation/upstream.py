"""The modelled upstream: one session's log, its calls, its streams and lists, and what it accepts.

It knows nothing of our code but the bytes of our sends. First result wins; late, doubled and unknown ones are
refused. Left out: workflow runs, budgets, outcomes, archives; a session has one agent at a time.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from app.core import events as ev
from tests.simulation.record import Emitted, Record, SendArrived
from tests.simulation.schedule import Scheduler, Signal
from tests.simulation.troubles import LIST_LAG_S_MAX, Troubles

T0 = datetime(2026, 10, 29, 14, 0, tzinfo=UTC).timestamp()
RACE_S = 3.0
"""How long upstream may say of a new call of a child thread that it knows none such."""
PRIMARY = "th0"


def stamp(at: float) -> str:
    return datetime.fromtimestamp(T0 + at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(slots=True)
class UpstreamCall:
    """A call as upstream sees it. `needs` is what it waits for; `end` is set once it waits for nothing."""

    id: str
    kind: str
    tool: str
    thread: str | None
    at: float
    needs: str
    end: str | None = None
    asks: bool = False


@dataclass(slots=True)
class Logged:
    """An entry of the log: listed from `visible_at` on."""

    event: Any
    type: str
    at: float
    visible_at: float


@dataclass(slots=True)
class Stream:
    """One connection's stream. Events wait in `events`; `is_over` with `failure` ends it."""

    events: deque[Any] = field(default_factory=deque)
    signal: Signal = field(default_factory=Signal)
    is_over: bool = False
    failure: Any = None
    is_mute: bool = False
    owner: Any = None
    last_due: float = 0.0

    def put(self, event: Any) -> None:
        if not self.is_over:
            self.events.append(event)
            self.signal.set()

    def end(self, failure: Any = None) -> None:
        if not self.is_over:
            self.is_over, self.failure = True, failure
            self.signal.set()


class Upstream:
    """The session and everything that reads or writes it."""

    def __init__(self, scheduler: Scheduler, record: Record, troubles: Troubles) -> None:
        random = scheduler.random
        self.scheduler, self.record, self.troubles = scheduler, record, troubles
        self.is_cloud = random.random() < 0.2
        self.policy = random.choice(["always_allow", "always_allow", "always_ask"])
        self.replays = random.random() < 0.1
        self.tolerates = random.random() < 0.2
        self.names_primary = random.random() < 0.5
        self.calls: dict[str, UpstreamCall] = {}
        self.log: list[Logged] = []
        self.streams: list[Stream] = []
        self.terminated: set[str] = set()
        self.over: str | None = None
        self.is_down = False
        self._ids = 0
        self._at = 0.0

    # ---- the log

    def emit(self, type_: str, *, by: str = "agent", id: str | None = None, **fields: Any) -> dict[str, Any]:
        """Add an event to the log and to every stream."""
        self._ids += 1
        self._at = max(self._at + 1e-5, self.scheduler.now)
        event = {"type": type_, "id": id or f"sevt_{self._ids}", "processed_at": stamp(self._at), **fields}
        parsed = ev.parse(json.dumps(event).encode())
        # What names the primary thread is listed at once: nothing could be concluded without it.
        is_lagging = bool(self.log) and self._happens("list_lags")
        lag = LIST_LAG_S_MAX * self.scheduler.random.random() if is_lagging else 0.0
        self.log.append(Logged(parsed, type_, T0 + self._at, self.scheduler.now + lag))
        self.record.add(Emitted(self.scheduler.now, event, by, self.scheduler.now + lag))
        self.show(parsed)
        return event

    def show(self, event: Any) -> None:
        """Send an event down every open stream, as well as each of them does today."""
        scheduler = self.scheduler
        self.streams = [s for s in self.streams if not s.is_over and s.owner.is_alive]
        for stream in self.streams:
            if stream.is_mute or self._happens("event_lost"):
                continue
            for _ in range(2 if self._happens("event_doubled") else 1):
                due = scheduler.now + 0.01
                if self._happens("event_delayed"):
                    due += scheduler.between(0.0, 3.0)
                else:
                    due = stream.last_due = max(due, stream.last_due)
                scheduler.after(due - scheduler.now, lambda s=stream: s.put(event))  # type: ignore[misc]

    def show_preview(self, body: dict[str, Any]) -> None:
        self.show(ev.parse(json.dumps(body).encode()))

    # ---- what the agent and others do

    def call(self, kind: str, tool: str, permission: str | None, thread: str | None) -> UpstreamCall:
        """The agent calls a tool."""
        type_ = {"custom": "agent.custom_tool_use", "builtin": "agent.tool_use", "mcp": "agent.mcp_tool_use"}
        fields: dict[str, Any] = {"name": tool, "input": {"n": self._ids}, "session_thread_id": thread}
        if kind == "mcp":
            fields["mcp_server_name"] = "github"
        if kind != "custom" and permission is not None:
            fields["evaluated_permission"] = permission
        self._at = max(self._at, self.scheduler.now)
        asks = kind != "custom" and permission not in ("allow", "deny", None)
        if kind == "builtin" and permission is None:
            asks = self.policy != "always_allow"
        call = UpstreamCall(f"sevt_call{len(self.calls)}", kind, tool, thread, 0.0, "verdict", asks=asks)
        self.calls[call.id] = call
        self.emit(type_[kind], id=call.id, **fields)
        call.at = self._at
        if kind != "custom" and permission == "deny":
            self._close(call, "denied")
        elif not asks:
            self._allowed(call)
        return call

    def _allowed(self, call: UpstreamCall) -> None:
        if call.kind == "custom" or (call.kind == "builtin" and not self.is_cloud):
            call.needs = "result"
        else:
            call.needs = "platform"
            self.scheduler.after(self.scheduler.between(0.05, 2.0), lambda: self._run(call))

    def _run(self, call: UpstreamCall) -> None:
        """The platform ran a call."""
        if call.end is None and call.needs == "platform" and self.over is None:
            self._close(call, "answered")
            self._answer_event(call, by="agent")

    def _answer_event(self, call: UpstreamCall, by: str) -> None:
        type_, name = ("agent.mcp_tool_result", "mcp_tool_use_id")
        if call.kind != "mcp":
            type_, name = ("agent.tool_result", "tool_use_id")
        content = [{"type": "text", "text": "by the platform"}]
        self.emit(type_, by=by, **{name: call.id, "content": content, "session_thread_id": call.thread})

    def _close(self, call: UpstreamCall, end: str) -> None:
        call.needs, call.end = "", end

    def interrupt(self, thread: str | None) -> None:
        """Somebody interrupts a thread, or all of them."""
        if self.over:
            return
        if self.scheduler.chance(0.3):
            queued = {"type": "user.interrupt", "id": f"sevt_{self._ids + 1}", "session_thread_id": thread}
            self.show_preview(queued)
        self.emit("user.interrupt", by="other", session_thread_id=thread)
        for call in self.pending():
            is_primary = thread == PRIMARY and call.thread is None and self.names_primary
            if thread is None or thread == call.thread or is_primary:
                if self.scheduler.chance(self.troubles.revive) and call.needs in ("result", "verdict"):
                    continue  # upstream keeps waiting for it, and will say so
                self._close(call, "interrupted")
                if call.kind == "builtin" and self.scheduler.chance(0.3):
                    self._answer_event(call, by="agent")

    def end_thread(self, thread: str) -> None:
        if self.over or thread in self.terminated:
            return
        self.terminated.add(thread)
        self.emit("session.thread_status_terminated", session_thread_id=thread)
        for call in self.pending():
            if call.thread == thread:
                self._close(call, "thread_terminated")

    def end_session(self) -> None:
        if self.over is None:
            self.over = "terminated"
            self.emit("session.status_terminated")
            for call in self.pending():
                self._close(call, "session_ended")

    def pending(self) -> list[UpstreamCall]:
        return [call for call in self.calls.values() if call.end is None]

    def waits_for(self) -> list[str]:
        """The calls that upstream waits for."""
        return [call.id for call in self.pending() if call.needs in ("verdict", "result")]

    # ---- what clients send

    def arrive(self, event: dict[str, Any], *, by: str, term: int = 0, number: int = 0) -> tuple[int, str]:
        """A client event arrives; return the status and message of the answer."""
        status, message = self._judge(event, by)
        if by == "us":
            outcome = "accepted" if status == 200 else "refused"
            self.record.add(SendArrived(self.scheduler.now, term, event, outcome, message, number))
        return status, message

    def _judge(self, event: dict[str, Any], by: str) -> tuple[int, str]:
        if self.over is not None:
            return 400, "the session is terminated"
        is_verdict = event["type"] == "user.tool_confirmation"
        call = self.calls.get(event.get("custom_tool_use_id") or event.get("tool_use_id") or "")
        is_young = call is not None and call.thread is not None and self.scheduler.now < call.at + RACE_S
        if call is None or (is_young and by == "us" and self._happens("send_race")):
            return 400, "the id does not match any tool use of this session"
        if call.thread in self.terminated:
            return 400, "the thread takes no more input"
        if is_verdict:
            return self._take_verdict(call, event, by)
        if ("custom" if event["type"] == "user.custom_tool_result" else "builtin") != call.kind:
            return 400, "the result is of another kind than the call"
        if call.needs != "result":
            return (200, "") if self.tolerates and call.end == "answered" else (400, "already answered")
        if "odd" in json.dumps(event["content"]):
            return 400, "content.0: the image cannot be read"
        self._close(call, "answered")
        self._echo(event, call, by)
        return 200, ""

    def _take_verdict(self, call: UpstreamCall, event: dict[str, Any], by: str) -> tuple[int, str]:
        if call.kind == "custom" or call.needs != "verdict":
            return 400, "the call does not wait for a confirmation"
        if event["result"] == "allow":
            self._allowed(call)
        else:
            self._close(call, "denied")
        self._echo(event, call, by)
        return 200, ""

    def _echo(self, event: dict[str, Any], call: UpstreamCall, by: str) -> None:
        fields = {name: value for name, value in event.items() if name not in ("type", "session_thread_id")}
        self.emit(event["type"], by=by, session_thread_id=call.thread, **fields)

    # ---- what clients read

    def open(self, owner: Any) -> Stream:
        """A stream for a process; it ends with it."""
        stream = Stream(last_due=self.scheduler.now, owner=owner)
        if self.replays:
            for logged in self.log:
                stream.put(logged.event)
        self.streams.append(stream)
        return stream

    def page(
        self, place: int, limit: int, since: float | None, types: Sequence[str]
    ) -> tuple[list[Any], int]:
        """Up to `limit` listed events from `place` on; and where the next page begins, -1 for nowhere."""
        found: list[Any] = []
        for index in range(place, len(self.log)):
            logged = self.log[index]
            if logged.visible_at > self.scheduler.now or (since is not None and logged.at < since):
                continue
            if types and logged.type not in types:
                continue
            if len(found) == limit:
                return found, index
            found.append(logged.event)
        return found, -1

    def end_streams(self, failure: Any = None) -> None:
        for stream in self.streams:
            stream.end(failure)

    def _happens(self, trouble: str) -> bool:
        probability = getattr(self.troubles, trouble)
        return probability > 0 and self.scheduler.chance(probability)
