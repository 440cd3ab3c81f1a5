"""Invariants about how things end: calls, decisions, messages, runs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from app.core.calls import END_STATES
from tests.simulation import record as r
from tests.simulation.reading import Reading, same


class Ends(Reading):
    """Rules that look at the end of a life."""

    def everything_comes_to_rest(self) -> Iterator[str]:
        if not self.end.is_quiet:
            yield f"after the troubles ended, {self.end.why}"

    def every_call_ends_once(self) -> Iterator[str]:
        state: dict[str, str] = {}
        for entry in self.of(r.Committed):
            for call in entry.calls:
                before = state.get(call.id)
                if before in END_STATES - {"interrupted"} and before != call.state:
                    yield f"{call.id} was {before} and became {call.state}"
                state[call.id] = call.state
        for call in self.end.calls.values():
            if call.state not in END_STATES:
                yield f"{call.id} is {call.state} at the end"
        if self.end.session_over is not None:
            return
        for there in self.end.upstream:
            if there.end is None:
                yield f"upstream still waits for {there.id} ({there.needs})"
            call = self.end.calls.get(there.id)
            if (
                call is None
                and there.kind != "mcp"
                and not self.answers[there.id]
                and there.end == "answered"
            ):
                yield f"{there.id} was never recorded"

    def end_states_tell_the_truth(self) -> Iterator[str]:
        interrupted = any(e.event["type"] == "user.interrupt" for e in self.of(r.Emitted))
        for call in self.end.calls.values():
            answers, use = self.answers[call.id], self.uses[call.id]
            ours = [e for e in answers if e.by == "us"]
            allows, denies = self.rulings(call.id)
            match call.state:
                case "posted" if call.kind == "mcp":
                    if not allows:
                        yield f"{call.id} is posted, and nobody allowed it"
                case "posted":
                    if not any(same(e.event, call) for e in answers):
                        if self.was_taken(call.id):
                            self.verdict.explained["a late result that upstream took and ignored"] += 1
                            continue
                        yield f"{call.id} is posted, and upstream holds no such result"
                case "answered_elsewhere":
                    if not answers and not self.refused(call.id):
                        yield f"{call.id} is answered_elsewhere, and nobody answered"
                    elif ours and call.result is not None and same(ours[0].event, call):
                        yield f"{call.id} is answered_elsewhere by our own result"
                case "denied" | "expired":
                    if not denies and use.get("evaluated_permission") != "deny":
                        yield f"{call.id} is {call.state}, and nobody denied it"
                    elif call.state == "expired" and not any(e.is_expiry for e in self.decided[call.id]):
                        yield f"{call.id} is expired, and its time was not over"
                case "interrupted":
                    if not interrupted:
                        yield f"{call.id} is interrupted, and nobody interrupted"
                case "thread_terminated":
                    if call.thread_id is None:
                        yield f"{call.id} is thread_terminated, and is of the primary thread"
                case "session_ended":
                    if self.end.session_over is None:
                        yield f"{call.id} is session_ended, and the session is not"
                case "rejected":
                    if not self.refused(call.id):
                        yield f"{call.id} is rejected, and upstream refused nothing"

    def a_taken_report_is_not_lost(self) -> Iterator[str]:
        """What the store took from a tool is the result, unless another delivery's came first."""
        taken = {e.call_id: e for e in self.of(r.ReportTaken)}
        for call in self.end.calls.values():
            if call.id in taken and call.state == "posted" and call.outcome_unknown:
                yield f"{call.id} was reported at {taken[call.id].at:.3f} and is said to be unknown"

    def final_texts_are_canonical(self) -> Iterator[str]:
        canonical = {e.event["id"]: e.event for e in self.of(r.Emitted) if e.event["type"] == "agent.message"}
        for id_, snapshot in self.end.messages.items():
            if snapshot.state != "final":
                yield f"{id_} is still {snapshot.state}"
            elif json.loads(snapshot.content) != canonical[id_]["content"]:
                yield f"{id_} differs from the message"

    def no_run_ends_idle_with_an_open_call(self) -> Iterator[str]:
        state: dict[str, str] = {}
        for entry in self.of(r.Committed):
            state.update({call.id: call.state for call in entry.calls})
            if entry.end is not None and entry.end.reason == "idle":
                open_ = [id_ for id_, state_ in state.items() if state_ not in END_STATES]
                if open_:
                    yield f"the run ended idle at {entry.at:.3f} with {', '.join(open_)} open"

    def every_decision_ends(self) -> Iterator[str]:
        for id_, call_id, status in self.end.decisions:
            if status == "sending":
                yield f"{id_} on {call_id} is still on its way"

    def nothing_fails_by_a_defect(self) -> Iterator[str]:
        for entry in self.of(r.Failed):
            yield entry.error
