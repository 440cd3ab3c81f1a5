"""Whether to try again, and when. Nominal waits; the runner draws the jitter."""

from __future__ import annotations

from typing import Final

RECONNECT_START_S: Final = 0.5
RECONNECT_CAP_S: Final = 10.0
POST_START_S: Final = 1.0
POST_CAP_S: Final = 30.0
RETRY_AFTER_S_MAX: Final = 60.0
"""A longer `Retry-After` is cut to this."""

_TRANSIENT_4XX: Final = frozenset({408, 409, 429})


def backoff_s(attempt: int, *, start_s: float, cap_s: float) -> float:
    """The nominal wait before the next try, after `attempt` failures (at least 1): doubles up to `cap_s`."""
    if attempt < 1:
        raise ValueError("attempt counts from 1")
    return min(cap_s, start_s * 2.0 ** min(attempt - 1, 32))


def wait_s(nominal_s: float, *, floor_s: float | None, draw: float) -> float:
    """The actual wait: uniform in [nominal/2, nominal] by `draw` in [0, 1), and never below `floor_s`.

    `floor_s` is what the server asked for in `Retry-After`, cut at 60 s.
    """
    wait = nominal_s * (0.5 + 0.5 * draw)
    return max(wait, min(floor_s or 0.0, RETRY_AFTER_S_MAX))


def is_fatal(status: int | None) -> bool:
    """Whether an answer to STREAM or LIST says that asking again is useless: a 4xx but 408, 409, 429."""
    return status is not None and 400 <= status < 500 and status not in _TRANSIENT_4XX
