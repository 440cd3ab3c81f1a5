"""One session: its threads, logs and open calls, and when it runs, rests and ends.

What its agents do is played by `turn`; what clients may send is judged in `sends`.
"""

from collections.abc import Callable
from typing import Any

from app.simulator.call import INTERRUPTED_TEXT, Call, Closing
from app.simulator.journal import Journal, Run, Status, Thread
from app.simulator.log import UNSTAMPED_US, Entry
from app.simulator.refusal import Json
from app.simulator.script import Script, Step
from app.simulator.switches import Switches
from app.simulator.timeline import US_PER_S, Ids, Timeline

STEPS_PER_RESUME_MAX = 100_000
QUEUED_MAX = 1_000


END_TURN: Json = {"type": "end_turn"}


class Session(Journal):
    """A session of the simulated API. Times are microseconds since 1970."""

    def __init__(
        self,
        *,
        session_id: str,
        script: Script,
        environment_id: str,
        ids: Ids,
        timeline: Timeline,
        switches: Callable[[], Switches],
        pace: float,
        play: Callable[["Session", Thread, tuple[Step, ...]], Run],
    ) -> None:
        super().__init__(agent=script.agent, ids=ids, timeline=timeline, switches=switches)
        self.id = session_id
        self.script = script
        self.environment_id = environment_id
        self._pace = pace
        self._play = play
        self.agent = script.agent
        self.created_us = timeline.now_us
        self.title: str | None = None
        self.metadata: dict[str, str] = {}
        self.budget: Json | None = None
        self.archived_us: int | None = None
        self.is_deleted = False
        self.is_capped = False
        self.status: Status = "idle"
        self.status_history: list[tuple[int, Status]] = [(timeline.now_us, "idle")]
        self.calls: dict[str, Call] = {}
        self.open_calls: dict[str, Call] = {}
        self.queued: list[tuple[Entry, Json]] = []
        self.turns_begun = 0
        self.known: dict[str, dict[str, str]] = {}
        self.answers: dict[str, list[Json]] = {}
        self.verdicts: dict[str, list[Json]] = {}
        self.thread_of_alias: dict[str, Thread] = {}
        self._last_idle_ids: list[str] = []
        self._stop: tuple[Json, Json | None] = (END_TURN, None)
        self.usage = {"input_tokens": 0, "output_tokens": 0}

    def accept_input(self, event: Json) -> None:
        """Take up a message or an outcome: at once if the session is free, else after the turn under way."""
        busy = self.primary.in_turn or bool(self.queued) or bool(self.blocking_ids())
        if busy:
            self.enqueue(event)
        else:
            self.begin(event)

    def enqueue(self, event: Json) -> None:
        """Keep an accepted event until the session comes to it; lists show it without a stamp."""
        self._sequence += 1
        raw = self.render({**event, "processed_at": None})
        entry = Entry((UNSTAMPED_US, self._sequence), event["id"], event["type"], raw, self.timeline.now_us)
        self.primary.log.add(entry)
        self.queued.append((entry, event))

    def begin(self, event: Json) -> None:
        """Start a turn of the primary thread on an accepted user event."""
        fields = {key: value for key, value in event.items() if key not in ("type", "id", "processed_at")}
        self.emit(self.primary, event["type"], fields, event_id=event["id"], at=event["processed_at"])
        self.known["user"] = {"text": text_of(event.get("content"))}
        self.start(self.primary, self.script.turn(self.turns_begun))
        self.turns_begun += 1

    def start(self, thread: Thread, steps: tuple[Step, ...]) -> None:
        """Have a thread play these steps."""
        self.wake(thread)
        thread.generation += 1
        thread.run = self._play(self, thread, steps)
        self.resume_after(0.0, thread)

    def wake(self, thread: Thread) -> None:
        """Mark a thread, and with it the session, as running."""
        thread.is_unparking = False
        thread.parked, thread.joins = [], None
        if self.status != "running":
            self.set_status("running")
            self.emit(self.primary, "session.status_running", {})
        self._set_thread(thread, "running")

    def park(self, thread: Thread, calls: list[Call]) -> None:
        """Let a thread rest until clients have dealt with these calls."""
        thread.parked = calls
        ids = [call.id for call in calls if call.awaits_client]
        self._set_thread(thread, "idle", {"type": "requires_action", "event_ids": self._shown(ids)})
        self.rest()

    def park_on_child(self, thread: Thread, child: Thread) -> None:
        """Let a thread rest until a child has ended its turn."""
        thread.joins = child.id
        self._set_thread(thread, "idle", END_TURN)
        self.rest()

    def finish(self, thread: Thread, stop_reason: Json, stop_details: Json | None = None) -> None:
        """End a thread's turn; whoever waits for it, and then the next queued event, goes on."""
        thread.run = None
        self._set_thread(thread, "idle", stop_reason, stop_details)
        if thread is self.primary:
            self._stop = (stop_reason, stop_details)
            self.is_capped = stop_reason["type"] == "budget_reached"
        self._release_joiners(thread)
        self.rest()
        self.timeline.after(0.0, self._begin_next)

    def rest(self) -> None:
        """Go idle if nothing runs, with the ids that are waited for, or else the last stop reason."""
        if any(each.status in ("running", "rescheduling") for each in self.threads.values()):
            return
        if any(each.joins is not None and each.is_unparking for each in self.threads.values()):
            return
        if self.status == "terminated":
            return
        waiting = self.waiting_ids()
        if not waiting and any(each.is_unparking for each in self.threads.values()):
            return
        self._emit_idle(waiting)

    def answered(self, call: Call) -> None:
        """Go on, or idle again with what remains, after a client has dealt with a call."""
        if call.closing is not None:
            self.open_calls.pop(call.id, None)
        thread = self.threads[call.thread_id]
        if not thread.parked or thread.is_unparking:
            return
        if not any(each.awaits_client for each in thread.parked):
            thread.is_unparking = True
            self.resume_after(self.switches.unpark_s, thread, paced=False)
        if self.status == "idle" and self.waiting_ids():
            if self.switches.reidle == "remainder":
                self._emit_idle(self.waiting_ids())
            elif self.switches.reidle == "stale":
                self._emit_idle(self._last_idle_ids)

    def waiting_ids(self) -> list[str]:
        """Return the ids of the calls that clients must deal with, in the order in which they were made."""
        return [call.id for call in self.open_calls.values() if call.awaits_client]

    def blocking_ids(self) -> list[str]:
        """Return the ids that keep new messages out: those waited for, or just answered and not yet taken
        up."""
        if self.status != "idle":
            return []
        unparking = [call.id for each in self.threads.values() if each.is_unparking for call in each.parked]
        return self.waiting_ids() or unparking

    def resume_after(self, delay_s: float, thread: Thread, *, paced: bool = True) -> None:
        """Have a thread go on with its turn after a while, unless something ends the turn before."""
        generation = thread.generation
        self.timeline.after(
            delay_s * (self._pace if paced else 1.0), lambda: self._resume(thread, generation)
        )

    def _resume(self, thread: Thread, generation: int) -> None:
        for _ in range(STEPS_PER_RESUME_MAX):
            if thread.run is None or thread.generation != generation:
                return
            try:
                pause_s = next(thread.run)
            except StopIteration:
                return
            if pause_s is None:
                return
            if pause_s * self._pace > 0:
                self.resume_after(pause_s, thread)
                return
        raise RuntimeError(f"over {STEPS_PER_RESUME_MAX} steps without a pause; the script runs in circles")

    def _begin_next(self) -> None:
        if (
            self.queued
            and not self.primary.in_turn
            and not self.blocking_ids()
            and self.status != "terminated"
        ):
            entry, event = self.queued.pop(0)
            self.primary.log.remove(entry.key)
            self.begin(event)

    def _release_joiners(self, child: Thread) -> None:
        for each in self.threads.values():
            if each.joins == child.id and not each.is_unparking:
                each.is_unparking = True
                self.resume_after(0.0, each)

    def _emit_idle(self, waiting: list[str]) -> None:
        self.set_status("idle")
        self.usage = {
            "input_tokens": self.usage["input_tokens"] + 420,
            "output_tokens": self.usage["output_tokens"] + 60,
        }
        reason, details = self._stop
        if waiting:
            if not self.switches.session_idle:
                return
            self._last_idle_ids = waiting
            reason, details = {"type": "requires_action", "event_ids": self._shown(waiting)}, None
        self.emit(self.primary, "session.usage", {"usage": self.usage, "budget": self.budget})
        self.emit(self.primary, "session.status_idle", {"stop_reason": reason, "stop_details": details})

    def _shown(self, ids: list[str]) -> list[str]:
        return ids[: self.switches.idle_ids_max]

    def set_status(self, status: Status) -> None:
        """Change the session's status and remember since when."""
        if status != self.status:
            self.status = status
            self.status_history = [*self.status_history[-99:], (self.timeline.now_us, status)]

    def shown_status(self) -> Status:
        """Return the status that the session object shows, which may lag behind."""
        at_us = self.timeline.now_us - round(self.switches.status_lag_s * US_PER_S)
        shown = [status for since_us, status in self.status_history if since_us <= at_us]
        return shown[-1] if shown else self.status_history[0][1]

    def _set_thread(
        self, thread: Thread, status: Status, reason: Json | None = None, details: Json | None = None
    ) -> None:
        thread.status = status
        thread.updated_us = self.timeline.now_us
        name = "rescheduled" if status == "rescheduling" else status
        fields: Json = {"session_thread_id": thread.id, "agent_name": thread.name}
        if status == "idle":
            fields |= {"stop_reason": reason, "stop_details": details}
        self.emit(thread, f"session.thread_status_{name}", fields, copies=True)

    def reschedule(self, thread: Thread) -> None:
        """Show that the server tries again after a passing failure."""
        self.set_status("rescheduling")
        self.emit(self.primary, "session.status_rescheduled", {})
        self._set_thread(thread, "rescheduling")

    def interrupt(self, target: Thread | None) -> None:
        """End the turn of one thread, or of all, and close their open calls."""
        touched = [each for each in ([target] if target else self.threads.values()) if each.in_turn]
        for thread in touched:
            for call in [each for each in self.open_calls.values() if each.thread_id == thread.id]:
                self._close(call, "interrupted")
                self._emit_interrupted(thread, call)
            if thread.span_id is not None:
                self.emit(thread, "span.model_request_end", span_end(thread.span_id, is_error=True))
            self._drop_turn(thread)
            self._set_thread(thread, "idle", END_TURN)
            self._release_joiners(thread)
        if touched:
            self._stop = (END_TURN, None)
            self.rest()
            self.timeline.after(0.0, self._begin_next)

    def terminate_thread(self, thread: Thread) -> None:
        """End a thread for good; its open calls can never be answered."""
        was_waited_for = any(
            each.thread_id == thread.id and each.awaits_client for each in self.open_calls.values()
        )
        self._end_thread(thread)
        self._release_joiners(thread)
        if self.status == "running" or was_waited_for:
            self.rest()

    def terminate(self) -> None:
        """End the session for good; its history stays."""
        if self.status == "terminated":
            return
        for thread in self.threads.values():
            self._end_thread(thread)
        for entry, _event in self.queued:
            self.primary.log.remove(entry.key)
        self.queued.clear()
        self.set_status("terminated")
        self.emit(self.primary, "session.status_terminated", {})
        if self.switches.close_terminated_streams:
            self.end_streams()

    def delete(self) -> None:
        """Say goodbye on the open streams and end them."""
        self.is_deleted = True
        self.emit(self.primary, "session.deleted", {})
        self.end_streams()

    def drop_queue(self) -> None:
        """Forget the queued input, as after an error that exhausted its retries."""
        for entry, _event in self.queued:
            self.primary.log.remove(entry.key)
        self.queued.clear()

    def _end_thread(self, thread: Thread) -> None:
        if thread.status == "terminated":
            return
        for call in [each for each in self.open_calls.values() if each.thread_id == thread.id]:
            self._close(call, "thread_terminated")
        self._drop_turn(thread)
        self._set_thread(thread, "terminated")

    def _close(self, call: Call, closing: Closing) -> None:
        call.closing = closing
        self.open_calls.pop(call.id, None)

    def _drop_turn(self, thread: Thread) -> None:
        thread.generation += 1
        thread.run = None
        thread.parked, thread.joins, thread.span_id, thread.is_unparking = [], None, None, False

    def _emit_interrupted(self, thread: Thread, call: Call) -> None:
        content = [{"type": "text", "text": INTERRUPTED_TEXT}]
        if call.spec.kind != "custom":
            fields: Json = {call.result_key: call.id, "content": content, "is_error": True}
            self.emit(thread, call.result_type, fields)
        elif self.switches.interrupt_closes_custom_calls:
            fields = {
                "custom_tool_use_id": call.id,
                "content": content,
                "is_error": True,
                "session_thread_id": None,
            }
            self.emit(thread, "user.custom_tool_result", fields, copies=True)


def text_of(content: Any) -> str:
    """Return the text blocks of a content list, joined."""
    if not isinstance(content, list):
        return ""
    return "".join(str(each.get("text", "")) for each in content if isinstance(each, dict))


def span_end(span_id: str, *, is_error: bool) -> Json:
    """Return the fields of a `span.model_request_end`."""
    usage = {
        "input_tokens": 420,
        "output_tokens": 60,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
    return {"model_request_start_id": span_id, "is_error": is_error, "model_usage": usage}
