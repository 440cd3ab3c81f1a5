"""Carries out what `posting` rules: results and verdicts on their way upstream.

What goes beyond the one call (the run must end, a verdict was found) is handed back to the session machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.core import posting
from app.core.calls import Call, Decision, Result, State
from app.core.connection import FILTERED_TRIES
from app.core.events import Answer, Confirmation
from app.core.ledger import Ledger
from app.core.outgoing import error_result, is_same_result, result_event, told, verdict_event
from app.core.protocol import EndReason, Failure, Look, Looked, Send, Sent


@dataclass(frozen=True, slots=True)
class Ruled:
    """A decision stands: upstream took it, or never asked."""

    call: Call
    decision: Decision


@dataclass(frozen=True, slots=True)
class Over:
    """The run must end."""

    reason: EndReason
    detail: str | None


Outcome = Ruled | Over | Confirmation | None


def denied_state(decision: Decision) -> State:
    """How a call ends that this deny was about."""
    return "expired" if decision.via == "expiry" else "denied"


class Sends:
    """The sends of one session. `may_post` turns false once the run can send nothing any more."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.may_post = True
        self.is_session_over = False

    @property
    def is_degraded(self) -> bool:
        """Whether a send has been failing for five minutes."""
        return any(post.is_degraded for post in self._ledger.posts.values())

    def answer(self, call: Call, result: Result) -> None:
        """Store the result and post it; past posting it stays stored."""
        call = self._ledger.save(replace(call, result=result), "posting" if self.may_post else "answered")
        if self.may_post:
            self._send(call, posting.Post("result", result_event(call, result)))

    def rule(self, call: Call, decision: Decision) -> None:
        """Send a decision on upstream's gate; the call stays held until upstream took it."""
        call = self._ledger.save(replace(call, decision=replace(decision, status="sending")), "held")
        self._send(call, posting.Post("verdict", verdict_event(call, decision)))

    def resume(self, call: Call) -> None:
        """Take up a send of an earlier run, whose outcome nobody noted: look before sending again."""
        is_verdict = call.state == "held"
        post = posting.Post("verdict" if is_verdict else "result", b"", is_in_flight=False)
        post.event = self._event(call, post)
        post.looking_for = Failure("unknown", message="the service stopped during the send")
        self._ledger.posts[call.id] = post
        self._look(call, post, posting.LookFirst(posting.LOOK_ROUNDS, retrieve=False))

    def sent(self, notice: Sent, now: float, *, is_interrupted: bool) -> Outcome:
        """A send ended. `is_interrupted` says that an interrupt covers the call by now."""
        call_id, failure = notice.call_id, notice.failure
        post, call = self._ledger.posts.get(call_id), self._ledger.calls.get(call_id)
        if post is None or call is None or post.number != notice.number:
            return None
        post.is_in_flight = False
        if failure is None:
            del self._ledger.posts[call_id]
            return self._accepted(call, post)
        if post.seen is not None:
            self._settle(call, post.seen)
        elif is_interrupted and post.purpose == "result" and failure.reach == "unsent":
            self._ledger.finish(call, "interrupted")
        elif self.is_session_over and failure.reach == "refused":
            self._ledger.finish(call, "session_ended")
        else:
            return self._after_send(call, post, failure, now)
        return None

    def looked(self, notice: Looked, now: float, primary_thread_id: str | None) -> Outcome:
        """A look at history ended."""
        call_id = notice.call_id
        post, call = self._ledger.posts.get(call_id), self._ledger.calls.get(call_id)
        if post is None or call is None or post.number != notice.number:
            return None
        step = posting.after_look(post, call, notice.findings, now, primary_thread_id)
        match step:
            case posting.Substitute() | posting.Refused() if self.is_session_over:
                self._ledger.finish(call, "session_ended")
            case posting.Again():
                self._send(call, post, step.after_s, step.floor_s)
            case posting.LookFirst():
                self._look(call, post, step)
            case posting.Settle():
                if step.state == "posted":
                    return self._accepted(call, post)
                self._ledger.finish(call, step.state)
            case posting.Verdict():
                del self._ledger.posts[call_id]
                return step.confirmation
            case posting.Substitute():
                result = error_result(step.text)
                call = self._ledger.save(replace(call, result=result), "posting")
                self._send(call, posting.Post("result", result_event(call, result), is_substitute=True))
            case posting.SessionOver():
                self._ledger.finish(call, "session_ended")
                return Over(step.reason, post.looking_for.message if post.looking_for else None)
            case posting.Refused():
                return self._refused(call, post, step.message)
        return None

    def seen(self, call: Call, answer: Answer) -> None:
        """An answer to a call that has a result showed up: ours, or another client's."""
        post = self._ledger.posts.get(call.id)
        if post is not None and post.is_in_flight and post.failures == 0:
            post.seen = post.seen or answer  # most likely our own: the send's answer will tell
        else:
            self._settle(call, answer)

    def is_on_its_way(self, call: Call) -> bool:
        """Whether the call's first send is under way, so that its answer decides."""
        post = self._ledger.posts.get(call.id)
        return call.state == "posting" and post is not None and post.is_in_flight and post.failures == 0

    def _after_send(self, call: Call, post: posting.Post, failure: Failure, now: float) -> Outcome:
        step = posting.after_send(post, call, failure, now)
        match step:
            case posting.Again():
                self._send(call, post, step.after_s, step.floor_s)
            case posting.WithThread():
                post.has_thread = True
                post.event = self._event(call, post)
                self._send(call, post)
            case posting.LookFirst():
                self._look(call, post, step)
            case posting.Unauthorized():
                del self._ledger.posts[call.id]
                if post.purpose == "result":
                    self._ledger.save(call, "answered")
                return Over("auth_failed", step.message)
        return None

    def _accepted(self, call: Call, post: posting.Post) -> Outcome:
        if post.purpose == "verdict":
            if call.decision is None or call.state != "held":
                return None
            return Ruled(call, replace(call.decision, status="accepted"))
        # A deny here is one of a gate of ours: the refusal was the result.
        denial = call.decision if call.decision is not None and call.decision.result == "deny" else None
        state = "posted" if denial is None else denied_state(denial)
        self._ledger.finish(replace(call, posted=True), state)
        return None

    def _refused(self, call: Call, post: posting.Post, message: str) -> Outcome:
        del self._ledger.posts[call.id]
        if post.purpose == "result":
            self._ledger.finish(replace(call, detail=message), "rejected")
        elif call.decision is not None:
            is_conflict = post.looking_for is not None and post.looking_for.status == 409
            if call.decision.result == "allow" and call.permission is None and not is_conflict:
                # Upstream may never have asked: it left the permission out, so the recorded allow is enough.
                return Ruled(call, replace(call.decision, status="accepted"))
            refused = replace(call.decision, status="refused", refusal=message)
            self._ledger.save(replace(call, decision=refused), "held")
        return None

    def _settle(self, call: Call, answer: Answer) -> None:
        assert call.result is not None
        if is_same_result(answer, told(call, call.result)):
            self._accepted(call, posting.Post("result", b""))
        else:
            self._ledger.finish(call, "answered_elsewhere")

    def _send(
        self, call: Call, post: posting.Post, after_s: float = 0.0, floor_s: float | None = None
    ) -> None:
        post.is_in_flight, post.number = True, self._ledger.next_number()
        self._ledger.posts[call.id] = post
        self._ledger.emit(Send(call.id, post.event, after_s, floor_s, post.number))

    def _look(self, call: Call, post: posting.Post, step: posting.LookFirst) -> None:
        post.number = self._ledger.next_number()
        since = posting.look_since(call) if post.failures < FILTERED_TRIES else None
        is_for_verdict = post.purpose == "verdict"
        look = Look(
            call.id,
            since,
            step.rounds,
            step.retrieve,
            step.after_s,
            step.floor_s,
            is_for_verdict,
            post.number,
        )
        self._ledger.emit(look)

    def _event(self, call: Call, post: posting.Post) -> bytes:
        if post.purpose == "verdict":
            assert call.decision is not None
            return verdict_event(call, call.decision, with_thread=post.has_thread)
        assert call.result is not None
        return result_event(call, call.result, with_thread=post.has_thread)
