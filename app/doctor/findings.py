"""What a check of the set-up says, and for how long it may look."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

CHECK_LIMIT_S: Final = 20.0
"""A check that takes longer has failed."""

Check = Literal[
    "settings", "database", "schema", "wakeups", "secrets", "upstream", "clock", "webhooks", "callbacks"
]
Status = Literal["ok", "warning", "failed", "unchecked"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of a check. `remedy` says what to do about a warning or a failure."""

    check: Check
    status: Status
    detail: str
    remedy: str | None = None


async def within(check: Check, look: Awaitable[Sequence[Finding]]) -> Sequence[Finding]:
    """Return what a check finds within `CHECK_LIMIT_S`."""
    try:
        async with asyncio.timeout(CHECK_LIMIT_S):
            return await look
    except TimeoutError:
        detail = f"The check took over {CHECK_LIMIT_S:g} s and was given up."
        return [Finding(check, "failed", detail, "See whether the network or the server is overloaded.")]
