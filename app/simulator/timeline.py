"""Time and identity as the world sees them: both are handed in or counted, never asked of the machine."""

import hashlib
import heapq
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

US_PER_S = 1_000_000
ACTS_PER_ADVANCE_MAX = 1_000_000

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Ids:
    """Ids in the documented forms, the same ones for the same seed and order of asking."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = 0

    def next(self, prefix: str) -> str:
        """Return a new id such as `sevt_011C…`: the prefix and 24 base-58 characters."""
        self._count += 1
        digest = hashlib.sha256(f"{self._seed}/{prefix}/{self._count}".encode()).digest()
        number = int.from_bytes(digest[:16], "big")
        letters = []
        for _ in range(20):
            number, digit = divmod(number, 58)
            letters.append(_ALPHABET[digit])
        return f"{prefix}_011C{''.join(letters)}"


class Timeline:
    """The world's time, in microseconds since 1970, and what is due at which of them."""

    def __init__(self) -> None:
        self.now_us = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Have `act` done once `delay_s` seconds have gone by, after everything that was due before."""
        self._count += 1
        heapq.heappush(self._due, (self.now_us + round(delay_s * US_PER_S), self._count, act))

    def advance(self, now: float) -> None:
        """Do what is due at `now` (seconds since 1970), in order; time never goes back.

        Each act sees the time at which it was due, so a long leap gives the same world as many short ones.
        """
        now_us = round(now * US_PER_S)
        for _ in range(ACTS_PER_ADVANCE_MAX):
            if not self._due or self._due[0][0] > now_us:
                self.now_us = max(self.now_us, now_us)
                return
            due_us, _order, act = heapq.heappop(self._due)
            self.now_us = max(self.now_us, due_us)
            act()
        raise RuntimeError(
            f"more than {ACTS_PER_ADVANCE_MAX} acts were due at once; the script runs in circles"
        )

    def next_due(self) -> float | None:
        """Return when the next act is due, in seconds since 1970, or None when nothing is."""
        return self._due[0][0] / US_PER_S if self._due else None


def stamp_text(stamp_us: int) -> str:
    """Return a timestamp as the API writes it: RFC 3339 in UTC with six digits."""
    return (_EPOCH + timedelta(microseconds=stamp_us)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_stamp_us(text: str) -> int:
    """Return the microseconds since 1970 of an RFC 3339 timestamp.

    Raises:
        ValueError: `text` is no timestamp, or names no offset from UTC.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} names no offset from UTC")
    return (moment - _EPOCH) // timedelta(microseconds=1)
