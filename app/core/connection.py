"""The stream's life: when to connect again, what ends the run, and which history to read.

Any event resets the backoff; a connect alone does not. `max_reconnects` is a total. A history read that
fails is repeated on the same connection, unless asking again is useless.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.core.protocol import Effect, End, EndReason, Failure, OpenStream, ReadHistory, Retrieve
from app.core.retry import RECONNECT_CAP_S, RECONNECT_START_S, backoff_s, is_fatal
from app.core.seen import OVERLAP_S

FILTERED_TRIES = 3
"""After so many failures the whole log is asked for: some servers fail on the filter by time alone."""
SWEEP_S = 300.0
"""How long after a read the history is read again, whether or not the stream is alive."""
SWEEP_EVENTS = 500
"""After so many live events it is read again earlier: what a reconnect must list stays one page."""


@dataclass(slots=True)
class Connection:
    """State of the stream and of the history read that belongs to it."""

    max_reconnects: int | None
    reconnects: int = 0
    is_open: bool = False
    is_covered: bool = False
    """Whether a history read on this connection reached its end: only then may the cursor move."""
    is_degraded: bool = False
    """Whether upstream refused the history on this connection: only the sweep asks again."""
    has_events: bool = False
    is_reading: bool = False
    read_number: int = 0
    sweep_at: float | None = None
    _unconfirmed: int = 0
    _previews: bool = True
    _failures: int = 0
    _read_failures: int = 0

    def open(self, *, after_s: float = 0.0, floor_s: float | None = None) -> OpenStream:
        return OpenStream(after_s, floor_s, self._previews)

    def opened(self, cursor_at: float | None) -> ReadHistory:
        """The stream stands: now, not before, history is read."""
        self.is_open, self.is_covered, self.is_degraded = True, False, False
        self.has_events, self._read_failures = False, 0
        return self.read(cursor_at)

    def read(self, cursor_at: float | None, *, full: bool = False) -> ReadHistory:
        since = None if full or cursor_at is None else cursor_at - OVERLAP_S
        return self._read(since)

    def _read(self, since: float | None, after_s: float = 0.0, floor_s: float | None = None) -> ReadHistory:
        self.is_reading, self.sweep_at, self._unconfirmed = True, None, 0
        self.read_number += 1
        return ReadHistory(since, after_s, floor_s, self.read_number)

    def event_received(self, *, is_news: bool) -> None:
        """An event came; `is_news` is one of the log that no read has shown yet."""
        self.has_events, self._failures = True, 0
        self._unconfirmed += is_news

    def is_sweep_due(self, now: float) -> bool:
        """Whether the history is to be read again although nothing broke.

        Streams lose events silently. Only a read moves the cursor, so that none of them is ever passed by.
        """
        if self.is_reading:
            return False
        is_late = self.sweep_at is not None and now >= self.sweep_at
        is_behind = self.is_open and not self.is_degraded and self._unconfirmed >= SWEEP_EVENTS
        return is_late or is_behind

    def closed(self, failure: Failure | None, now: float) -> list[Effect]:
        """The stream broke, ended, or could not be opened. A read that went with it is given up."""
        was_empty = self.is_open and not self.has_events and failure is None
        if self.is_open:
            self.is_reading = False
        self.is_open = self.is_covered = self.is_degraded = False
        if self.sweep_at is None and not self.is_reading:
            self.sweep_at = now + SWEEP_S
        if failure is not None and is_fatal(failure.status):
            if self._previews and failure.status == 400 and "event_deltas" in failure.message:
                self._previews = False
                return [self.open()]
            return [End(fatal_reason(failure.status), failure.message or None)]
        if failure is None or not failure.is_silence:
            self.reconnects += 1
            if self.max_reconnects is not None and self.reconnects > self.max_reconnects:
                self.reconnects = self.max_reconnects
                detail = f"the stream was lost {self.max_reconnects + 1} times; max_reconnects allows no more"
                return [End("reconnects_exhausted", detail)]
        self._failures += 1
        effects: list[Effect] = []
        if was_empty and self._failures > 1:
            # Nothing but clean, empty ends: the session may be over, which no stream would say.
            effects.append(Retrieve())
        after_s = backoff_s(self._failures, start_s=RECONNECT_START_S, cap_s=RECONNECT_CAP_S)
        effects.append(self.open(after_s=after_s, floor_s=failure.retry_after_s if failure else None))
        return effects

    def history_read(self, now: float) -> None:
        self.is_reading, self.is_covered, self.is_degraded = False, self.is_open, False
        self._read_failures, self.sweep_at = 0, now + SWEEP_S

    def history_failed(self, failure: Failure, since: float | None, now: float) -> list[ReadHistory]:
        """The read broke off: try again while the stream lives, soon unless that is useless."""
        self.is_reading = False
        if failure.is_paging_loop or is_fatal(failure.status):
            self.is_degraded, self.sweep_at = True, now + SWEEP_S
            return []
        self._read_failures += 1
        after_s = backoff_s(self._read_failures, start_s=RECONNECT_START_S, cap_s=RECONNECT_CAP_S)
        if self._read_failures >= FILTERED_TRIES:
            since = None
        return [self._read(since, after_s, failure.retry_after_s)]


def fatal_reason(status: int | None) -> EndReason:
    """Why a run ends, by the answer that ended it."""
    if status in (401, 403):
        return "auth_failed"
    return "session_gone" if status in (404, 410) else "upstream_rejected"
