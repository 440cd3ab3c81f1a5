"""How often a key may ask, and how often an address may present what is no key, as this replica counts.

Counts are in memory, because a poll that finds nothing new must cost next to nothing: so each of several
replicas lets as much through. A bucket refills evenly: who has emptied it goes on at the rate of the limit.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from fastapi import Request

from app.settings import Settings

WINDOW_S: Final = 60
KEYS_MAX: Final = 100_000
ADDRESSES_MAX: Final = 10_000
"""The one unseen for longest is forgotten for a further one."""
KNOWN_MAX: Final = 10_000
"""Keys that were good lately, whose holders are not held back for what others do at their address."""
HEADERS: Final = {
    "ratelimit-policy": "How many requests (`q`) the key may make in so many seconds (`w`), of each replica.",
    "ratelimit": "How many of them are left (`r`), and if none is, for how many seconds (`t`).",
}
"""By draft-ietf-httpapi-ratelimit-headers; absent where the key has no limit."""
_V6_NETWORK_BITS: Final = 64
"""What one subscriber has of addresses."""


class Buckets:
    """Buckets by name, each with the tokens of a minute. Times are seconds of any one clock."""

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def left(self, name: str, per_min: int, now: float) -> float:
        """Return how many tokens there are."""
        spent, at = self._spent.get(name, (0.0, now))
        return per_min - max(0.0, spent - (now - at) * per_min / WINDOW_S)

    def wait_s(self, name: str, per_min: int, now: float) -> float:
        """Return how long it takes until there is a token, 0 if there is one."""
        return max(0.0, 1.0 - self.left(name, per_min, now)) * WINDOW_S / per_min

    def take(self, name: str, per_min: int, now: float) -> None:
        """Take a token, even where there is none."""
        self._spent[name] = (per_min - self.left(name, per_min, now) + 1.0, now)
        self._spent.move_to_end(name)
        if len(self._spent) > self._names_max:
            self._spent.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a key may ask for: its limit, how long it must wait now, and the headers that tell its client."""

    per_min: int
    wait_s: float
    headers: Mapping[str, str]


class Limits:
    """The limits of one replica. `clock` is in seconds, from any moment."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings, self._clock = settings, clock
        self._keys, self._failures = Buckets(KEYS_MAX), Buckets(ADDRESSES_MAX)
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def spend(self, key_id: str, own_per_min: int | None) -> Allowance | None:
        """Count a request of a key, by its own limit or that of the settings; None if it has none."""
        per_min = own_per_min or self._settings.key_requests_per_min
        if not per_min:
            return None
        now = self._clock()
        wait_s = self._keys.wait_s(key_id, per_min, now)
        if wait_s == 0:
            self._keys.take(key_id, per_min, now)
        left = int(self._keys.left(key_id, per_min, now))
        until = f";t={math.ceil(wait_s)}" if wait_s else ""
        headers = {
            "ratelimit-policy": f'"key";q={per_min};w={WINDOW_S}',
            "ratelimit": f'"key";r={left}{until}',
        }
        return Allowance(per_min, wait_s, headers)

    def wait_s(self, address: str, text: str) -> float:
        """Return how long a key of this address is not looked at, 0 for one that is known as good."""
        per_min = self._settings.address_failures_per_min
        wait_s = self._failures.wait_s(address, per_min, self._clock()) if per_min else 0.0
        return 0.0 if wait_s and _digest(text) in self._known else wait_s

    def failed(self, address: str, text: str) -> None:
        """Count a key that is none."""
        self._known.pop(_digest(text), None)
        if per_min := self._settings.address_failures_per_min:
            self._failures.take(address, per_min, self._clock())

    def succeeded(self, text: str) -> None:
        """Know a key as good."""
        digest = _digest(text)
        self._known[digest] = None
        self._known.move_to_end(digest)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)


def address_of(request: Request) -> str:
    """Return where a request comes from: the peer's address, of IPv6 the network of its subscriber."""
    host = request.client.host if request.client else ""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.IPv6Network((host.partition("%")[0], _V6_NETWORK_BITS), strict=False))
    except ValueError:
        return host


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
