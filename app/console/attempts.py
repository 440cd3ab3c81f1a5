"""Bounds failed sign-ins: some per minute and address, as this replica sees them.

Keys are too long to guess; this keeps the log and the database from somebody who tries all the same.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

FAILURES_MAX: Final = 10
WINDOW_S: Final = 60.0
ADDRESSES_MAX: Final = 10_000
"""The longest unseen address is forgotten for a further one."""


class Attempts:
    """Failed sign-ins of the last minute, by address. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str, now: float) -> float:
        """Return how long the address has to wait before it may try again, 0 if it may."""
        failures = self._failures.get(address, deque())
        while failures and failures[0] <= now - WINDOW_S:
            failures.popleft()
        return failures[0] + WINDOW_S - now if len(failures) >= FAILURES_MAX else 0.0

    def failed(self, address: str, now: float) -> None:
        self._failures.setdefault(address, deque(maxlen=FAILURES_MAX)).append(now)
        self._failures.move_to_end(address)
        if len(self._failures) > ADDRESSES_MAX:
            self._failures.popitem(last=False)
