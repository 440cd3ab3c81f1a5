"""When a quiet session is over.

The countdown starts at an idle that ends a turn, waits while anything of ours is unfinished, and fires only
on fresh evidence: never while the stream is down, nor after a reconnect until history was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from app.core.events import (
    AnyEvent,
    Confirmation,
    Idle,
    Interrupt,
    SessionUpdated,
    ThreadTerminated,
    Usage,
)

NEUTRAL: Final = (Confirmation, ThreadTerminated, SessionUpdated, Usage, Interrupt)
"""Each can follow the last idle without another idle ever coming, so none of them stops the countdown."""


@dataclass(slots=True)
class IdleClock:
    """The countdown of one session. Times are monotonic seconds; `window_s` None disables it.

    `idle_id` names the idle event that armed it; `deadline` is None while something unfinished defers it.
    """

    window_s: float | None
    idle_id: str | None = None
    deadline: float | None = None
    is_stale: bool = False

    def observe(self, event: AnyEvent, now: float, *, is_blocked: bool) -> None:
        """Take note of a live event."""
        if isinstance(event, NEUTRAL):
            return
        self.is_stale = False
        self._conclude(event, now, is_blocked)

    def observe_history(self, trailing: AnyEvent | None, now: float, *, is_blocked: bool) -> None:
        """Take note of a complete history read; `trailing` is its last event that is not neutral.

        None means that the read showed nothing new, which confirms whatever was known.
        """
        self.is_stale = False
        if trailing is None:
            self.unblock(now, is_blocked=is_blocked)
        else:
            self._conclude(trailing, now, is_blocked)

    def unblock(self, now: float, *, is_blocked: bool) -> None:
        """Take note that the set of unfinished calls changed."""
        if self.idle_id is None or self.window_s is None:
            return
        if is_blocked:
            self.deadline = None
        elif self.deadline is None and not self.is_stale:
            self.deadline = now + self.window_s

    def disconnected(self) -> None:
        """The stream is gone: what is known may be old."""
        self.is_stale = True

    def resize(self, window_s: float | None, now: float, *, is_blocked: bool) -> None:
        """Change the window; a running countdown starts again with the new one."""
        if window_s != self.window_s:
            self.window_s, self.deadline = window_s, None
            self.unblock(now, is_blocked=is_blocked)

    def is_expired(self, now: float) -> bool:
        return self.deadline is not None and not self.is_stale and now >= self.deadline

    def _conclude(self, event: AnyEvent, now: float, is_blocked: bool) -> None:
        if not isinstance(event, Idle) or event.is_requires_action:
            self.idle_id = self.deadline = None
            return
        if event.id != self.idle_id or not event.id:
            # The same idle seen again keeps its first deadline, so that a flapping link cannot extend it.
            self.idle_id, self.deadline = event.id, None
        self.unblock(now, is_blocked=is_blocked)
