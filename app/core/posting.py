"""What becomes of a send: result or verdict, one answer per call upstream.

A refused send is never simply repeated and an unknown one never without looking: history decides.
`after_send` and `after_look` are the rules; the session machine carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from app.core import events as ev
from app.core.calls import Call
from app.core.outgoing import is_same_result, told
from app.core.protocol import Failure, Findings
from app.core.retry import POST_CAP_S, POST_START_S, RECONNECT_CAP_S, RECONNECT_START_S, backoff_s
from app.core.seen import OVERLAP_S

RACE_TRIES_MAX: Final = 8
"""How often "no such call" is taken for a call that upstream has not committed yet."""

DEGRADED_AFTER_S: Final = 300.0
SEND_S: Final = 6.0
"""How long a send may take. One that was cut without an answer is given that long before history is asked."""
LOOK_ROUNDS: Final = 2
"""How many lists must show no answer before a send of unknown outcome is repeated."""


@dataclass(slots=True)
class Post:
    """One send in the making. Mutable: it lives in the session machine and is never stored."""

    purpose: Literal["result", "verdict"]
    event: bytes
    number: int = 0
    failures: int = 0
    race_tries: int = 0
    conflicts: int = 0
    failing_since: float | None = None
    is_in_flight: bool = True
    has_thread: bool = False
    is_substitute: bool = False
    looking_for: Failure | None = None
    seen: ev.Answer | None = None
    is_degraded: bool = False

    def delay_s(self) -> float:
        """The nominal wait before the next try."""
        if self.failures == 0:
            return 0.0
        return backoff_s(self.failures, start_s=POST_START_S, cap_s=POST_CAP_S)


# ---- what to do next


@dataclass(frozen=True, slots=True)
class Again:
    """Send again after the wait."""

    after_s: float
    floor_s: float | None = None


@dataclass(frozen=True, slots=True)
class WithThread:
    """Send again, once, naming the thread."""


@dataclass(frozen=True, slots=True)
class LookFirst:
    """Read history, and the session too if `retrieve`, then decide."""

    rounds: int
    retrieve: bool
    after_s: float = 0.0
    floor_s: float | None = None


@dataclass(frozen=True, slots=True)
class Settle:
    """The call is settled in this state; `posted` if our own result is the one upstream holds."""

    state: Literal["posted", "answered_elsewhere", "interrupted", "thread_terminated"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Upstream holds this verdict."""

    confirmation: ev.Confirmation


@dataclass(frozen=True, slots=True)
class Substitute:
    """Send one short error result instead."""

    text: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Upstream refused for good."""

    message: str


@dataclass(frozen=True, slots=True)
class SessionOver:
    """The session takes nothing any more."""

    reason: Literal["terminated", "session_gone"]


@dataclass(frozen=True, slots=True)
class Unauthorized:
    """The credential is refused."""

    message: str


AfterSend = Again | WithThread | LookFirst | Unauthorized
AfterLook = Again | LookFirst | Settle | Verdict | Substitute | Refused | SessionOver


def after_send(post: Post, call: Call, failure: Failure, now: float) -> AfterSend:
    """Rule on a send that failed; updates the post's counters."""
    post.is_in_flight = False
    message = failure.message.lower()
    if failure.reach == "refused":
        if failure.status in (401, 403):
            return Unauthorized(failure.message)
        if "session_thread_id" in message and not post.has_thread and call.thread_id is not None:
            return WithThread()
        if failure.status == 400 and "does not match any" in message and post.race_tries < RACE_TRIES_MAX - 1:
            post.race_tries += 1
            return Again(backoff_s(post.race_tries, start_s=RECONNECT_START_S, cap_s=RECONNECT_CAP_S))
        post.looking_for = failure
        return LookFirst(rounds=1, retrieve=_may_be_over(failure))
    _count_failure(post, now)
    if failure.reach == "unsent":
        return Again(post.delay_s(), failure.retry_after_s)
    post.looking_for = failure
    post.conflicts += failure.status == 409
    floor_s = SEND_S if failure.status is None else None
    return LookFirst(rounds=LOOK_ROUNDS, retrieve=failure.status == 409, floor_s=floor_s)


def after_look(
    post: Post, call: Call, findings: Findings | None, now: float, primary_thread_id: str | None
) -> AfterLook:
    """Rule on what history showed after a send whose outcome is unknown or refused."""
    failure = post.looking_for or Failure("unknown")
    if findings is None:
        _count_failure(post, now)
        return LookFirst(LOOK_ROUNDS, retrieve=_may_be_over(failure), after_s=post.delay_s())
    if findings.answers:
        ours = None if call.result is None else told(call, call.result)
        is_ours = ours is not None and any(is_same_result(a, ours) for a in findings.answers)
        return Settle("posted" if is_ours and post.purpose == "result" else "answered_elsewhere")
    if post.purpose == "verdict" and findings.verdicts:
        denies = [v for v in findings.verdicts if v.result != "allow"]
        return Verdict((denies or list(findings.verdicts))[0])
    if covers(findings.interrupts, call, primary_thread_id):
        return Settle("interrupted")
    if call.thread_id is not None and call.thread_id in findings.terminated_threads:
        return Settle("thread_terminated")
    if findings.is_gone or (findings.session is not None and findings.session.is_over):
        return SessionOver("session_gone" if findings.is_gone else "terminated")
    if failure.reach == "unknown" and post.conflicts < 2:
        return Again(post.delay_s(), failure.retry_after_s)
    if post.purpose == "result" and not post.is_substitute and is_about_content(failure):
        return Substitute(_substitute_text(failure))
    return Refused(failure.message or f"upstream answered {failure.status}")


def covers(interrupts: tuple[ev.Interrupt, ...], call: Call, primary_thread_id: str | None) -> bool:
    """Whether one of these interrupts settles the call: processed, of its scope, and not before it.

    One that came before upstream asked for the call again does not.
    """
    called_at = ev.seconds(call.processed_at)
    if called_at is None:
        return False
    for interrupt in interrupts:
        at = interrupt.at
        if at is None or called_at > at or (call.asked_at is not None and at <= call.asked_at):
            continue
        scope = interrupt.session_thread_id
        if scope is None or scope == call.thread_id:
            return True
        if call.thread_id is None and scope == primary_thread_id:
            return True
    return False


def look_since(call: Call) -> float | None:
    """From where a look for this call's answer reads: its own time, less the overlap."""
    at = ev.seconds(call.processed_at)
    return None if at is None else at - OVERLAP_S


def is_about_content(failure: Failure) -> bool:
    """Whether a refusal is about what the tool returned, so that other content could be accepted."""
    if failure.status == 413:
        return True
    return failure.status in (400, 422) and "content" in failure.message.lower()


def _count_failure(post: Post, now: float) -> None:
    post.failures += 1
    post.failing_since = now if post.failing_since is None else post.failing_since
    post.is_degraded = now - post.failing_since >= DEGRADED_AFTER_S


def _may_be_over(failure: Failure) -> bool:
    message = failure.message.lower()
    return failure.status in (404, 409, 410) or "archived" in message or "terminated" in message


def _substitute_text(failure: Failure) -> str:
    why = "it is too large" if failure.status == 413 else (failure.message or "no reason was given")
    return f"The tool ran, but the platform refused its result: {why}"[:4096]
