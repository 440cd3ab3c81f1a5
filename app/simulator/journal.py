"""What a session writes down: the logs of its threads, the streams on them, and a record for inspectors."""

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

from app.simulator.call import Call
from app.simulator.log import Entry, EventLog, Frame, Subscription
from app.simulator.refusal import Json
from app.simulator.switches import Switches
from app.simulator.timeline import US_PER_S, Ids, Timeline, parse_stamp_us, stamp_text

RECORDS_MAX = 200_000
STREAMS_MAX = 10_000

Status = Literal["running", "idle", "rescheduling", "terminated"]
Run = Generator[float | None, None, None]


@dataclass(eq=False)
class Thread:
    """One agent's conversation. `run` is the turn that it plays, and `generation` tells stale wake-ups
    apart."""

    id: str
    agent: Json
    parent_id: str | None
    created_us: int
    log: EventLog = field(default_factory=EventLog)
    status: Status = "idle"
    updated_us: int = 0
    archived_us: int | None = None
    run: Run | None = None
    generation: int = 0
    parked: list[Call] = field(default_factory=list)
    joins: str | None = None
    is_unparking: bool = False
    span_id: str | None = None

    @property
    def name(self) -> str:
        """The agent's name, as events give it."""
        return str(self.agent["name"])

    @property
    def in_turn(self) -> bool:
        """Whether a turn is under way, even if it waits for somebody."""
        return self.run is not None


@dataclass(frozen=True)
class Record:
    """Something that happened to a session: who did it and the event it was about.

    `what` is `accepted`, `ignored` (a send that was answered 200 and changed nothing), `refused`, or
    `emitted`.
    """

    at_us: int
    who: Literal["client", "server"]
    what: Literal["accepted", "ignored", "refused", "emitted"]
    event: Json
    thread_id: str


class Journal:
    """The events of one session. Times are microseconds since 1970."""

    def __init__(
        self, *, agent: Json, ids: Ids, timeline: Timeline, switches: Callable[[], Switches]
    ) -> None:
        self.ids = ids
        self.timeline = timeline
        self._switches = switches
        self.updated_us = timeline.now_us
        self.primary = Thread(ids.next("sthr"), agent, None, timeline.now_us, updated_us=timeline.now_us)
        self.threads: dict[str, Thread] = {self.primary.id: self.primary}
        self.log: list[Record] = []
        self.subscriptions: list[Subscription] = []
        self._last_stamp_us = 0
        self._sequence = 0

    @property
    def switches(self) -> Switches:
        """The switches that hold for this session now."""
        return self._switches()

    def emit(
        self,
        thread: Thread,
        event_type: str,
        fields: Json,
        *,
        event_id: str | None = None,
        at: str | None = None,
        copies: bool = False,
    ) -> str:
        """Add an event to a thread's log and streams and return its id.

        `at` is its `processed_at` where it was stamped before. With `copies`, a child's event goes to the
        primary thread as well, under the same id and naming the child.
        """
        stamp_us = parse_stamp_us(at) if at else self._stamp()
        event_id = event_id or self.ids.next("sevt")
        event = {"type": event_type, "id": event_id, **fields, "processed_at": stamp_text(stamp_us)}
        self._put(thread, event, stamp_us)
        if copies and thread is not self.primary:
            self._put(self.primary, {**event, "session_thread_id": thread.id}, stamp_us)
        return event_id

    def emit_raw(
        self,
        data: bytes,
        *,
        event_type: str,
        event_id: str,
        thread: Thread,
        frame: Frame | None,
        stamp_us: int | None,
    ) -> None:
        """Put bytes as they are on the streams (`frame`) and in the list (`stamp_us`); either may be left
        out."""
        if stamp_us is not None:
            self._sequence += 1
            thread.log.add(
                Entry((stamp_us, self._sequence), event_id, event_type, data, self.timeline.now_us)
            )
        if frame is not None:
            self._push(thread, frame)
        self.note(
            "server", "emitted", {"type": event_type, "id": event_id, "raw": data.decode("utf-8", "replace")}
        )

    def stamp_now(self) -> str:
        """Return what `processed_at` of an event that is stamped on receipt will be."""
        return stamp_text(self._stamp())

    def preview(self, thread: Thread, event_type: str, event_id: str, event: Json) -> None:
        """Show a part of a coming message to the streams that asked for previews of its type."""
        raw = dump(event)
        for each in [] if self.switches.silent else self.subscriptions:
            if each.thread_id != thread.id or event_type not in each.deltas:
                continue
            if event["type"] == "event_start":
                each.started.add(event_id)
            elif event_id not in each.started:
                continue
            each.push(Frame("event", event["type"], raw))

    def render(self, event: Json) -> bytes:
        """Return the bytes of an event, with its nulls written or left out as the switches say."""
        nulls = self.switches.nulls
        drops = nulls == "absent" or (nulls == "mixed" and self._sequence % 2 == 1)
        if drops and event["type"] != "session.updated":
            event = {key: value for key, value in event.items() if value is not None}
        return dump(event)

    def note(
        self, who: Literal["client", "server"], what: Any, event: Json, thread: Thread | None = None
    ) -> None:
        """Write down what happened, for whoever inspects the world."""
        if len(self.log) >= RECORDS_MAX:
            del self.log[: RECORDS_MAX // 10]
        self.log.append(Record(self.timeline.now_us, who, what, event, (thread or self.primary).id))

    def subscribe(self, subscription: Subscription) -> None:
        """Open a stream on one of the threads."""
        self.subscriptions = [each for each in self.subscriptions if not each.is_closed]
        if len(self.subscriptions) >= STREAMS_MAX:
            raise RuntimeError(f"over {STREAMS_MAX} streams are open on one session")
        if self.switches.replay_on_connect:
            for entry in self.threads[subscription.thread_id].log.entries:
                subscription.push(Frame("event", entry.type, entry.raw))
        self.subscriptions.append(subscription)

    def end_streams(
        self, kind: Literal["eof", "cut", "truncate", "error_frame"] = "eof", data: bytes = b""
    ) -> int:
        """End every open stream in the given way and return how many there were."""
        ended = [each for each in self.subscriptions if not each.is_closed]
        for each in ended:
            each.push(Frame(kind, "", data))
        self.subscriptions = []
        return len(ended)

    def _put(self, thread: Thread, event: Json, stamp_us: int) -> None:
        self._sequence += 1
        raw = self.render(event)
        thread.log.add(
            Entry((stamp_us, self._sequence), event["id"], event["type"], raw, self.timeline.now_us)
        )
        self.note("server", "emitted", event, thread)
        for _ in range(2 if self.switches.stream_duplicates else 1):
            self._push(thread, Frame("event", event["type"], raw))

    def _push(self, thread: Thread, frame: Frame) -> None:
        for each in [] if self.switches.silent else self.subscriptions:
            if each.thread_id == thread.id:
                each.push(frame)

    def _stamp(self) -> int:
        step_us = round(self.switches.stamp_step_s * US_PER_S)
        now_us = self.timeline.now_us
        rounded_us = now_us - now_us % step_us if step_us else max(now_us, self._last_stamp_us + 1)
        self._last_stamp_us = max(rounded_us, self._last_stamp_us)
        self.updated_us = now_us
        return self._last_stamp_us


def dump(event: Json) -> bytes:
    """Return JSON as it goes over the wire; what UTF-8 cannot carry is escaped."""
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
