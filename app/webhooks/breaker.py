"""When an endpoint counts as down, and when it is tried again. The time is an argument, in seconds.

It opens on sustained failure only: so many failures, over so long, with no success among them. While it is
open nothing is sent; after a pause one attempt is let through as a *probe*, and each probe that fails doubles
the pause. Any success closes it.
"""

from __future__ import annotations

from typing import Final, Literal

from app.core.retry import backoff_s

FAILURES_MIN: Final = 10
SUSTAINED_S: Final = 30.0
PAUSE_START_S: Final = 5.0
PAUSE_CAP_S: Final = 60.0
PROBE_LOOK_S: Final = 0.5
"""How soon whoever waits for another's probe looks again."""

State = Literal["closed", "open", "half_open"]


class Breaker:
    """The breaker of one endpoint: `wait_s`, `begin` once that is 0, then what the attempt came to.

    `since` is the time of the first failure after the last success; `half_open` means that a probe is under
    way.
    """

    def __init__(self) -> None:
        self.state: State = "closed"
        self.failures = 0
        self.since: float | None = None
        self.last_error: str | None = None
        self._pauses = 0
        self._retry_at = 0.0

    def wait_s(self, now: float) -> float:
        """How long an attempt has to wait at least; 0 if it may begin."""
        if self.state == "half_open":
            return PROBE_LOOK_S
        return max(0.0, self._retry_at - now) if self.state == "open" else 0.0

    def begin(self) -> bool:
        """Begin an attempt; return whether it is the probe, whose end must be told whatever happens."""
        is_probe = self.state == "open"
        if is_probe:
            self.state = "half_open"
        return is_probe

    def succeeded(self) -> None:
        """The endpoint worked."""
        self.state, self.failures, self.since, self.last_error = "closed", 0, None, None
        self._pauses = 0

    def failed(self, now: float, error: str, *, is_probe: bool) -> None:
        """The endpoint failed. Attempts that began before it opened prolong nothing."""
        self.failures += 1
        self.last_error = error
        if self.since is None:
            self.since = now
        is_sustained = self.failures >= FAILURES_MIN and now - self.since >= SUSTAINED_S
        if (self.state == "closed" and is_sustained) or (self.state == "half_open" and is_probe):
            self.state = "open"
            self._pauses += 1
            self._retry_at = now + backoff_s(self._pauses, start_s=PAUSE_START_S, cap_s=PAUSE_CAP_S)

    def released(self) -> None:
        """The probe ended and said nothing of the endpoint: the next attempt is the probe."""
        if self.state == "half_open":
            self.state = "open"
