"""Canaries: values that appear nowhere else, planted where nobody may see them, and the search for them."""

from __future__ import annotations

import base64
import secrets
import string
from collections.abc import Iterable

WINDOW_CHARS = 12
"""So much of a canary in a row is a leak; a shorter end may be shown to tell keys apart."""


class Canaries:
    """Values by the name of their place. A canary is letters and digits, so no escaping changes it."""

    def __init__(self) -> None:
        self._forms: dict[str, list[bytes]] = {}

    def plant(self, name: str) -> str:
        """A new canary of 32 characters."""
        value = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(32))
        self.know(name, value)
        return value

    def know(self, name: str, value: str, *more: bytes) -> None:
        """Search for a value that somebody else made, and for other bytes that tell it."""
        self._forms[name] = sorted({form for raw in (value.encode(), *more) for form in _forms(raw)})

    def found(self, where: bytes, names: Iterable[str] | None = None) -> list[str]:
        """The names of those that the bytes hold, whole or in part, plain or encoded; all by default."""
        haystack = where.lower()
        return [
            name
            for name in (self._forms if names is None else names)
            if any(form in haystack for form in self._forms[name])
        ]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._forms)


def _forms(raw: bytes) -> Iterable[bytes]:
    """What to look for, in lower case: each window; the whole in base64, wherever it begins, and in hex."""
    for start in range(max(1, len(raw) - WINDOW_CHARS + 1)):
        yield raw[start : start + WINDOW_CHARS].lower()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):
            # The characters at the ends also hold what stands beside.
            encoded = encode(b"\0" * before + raw)
            yield encoded[4 if before else 0 : len(encoded) // 4 * 4 - 4].lower()
    yield raw.hex().encode()
