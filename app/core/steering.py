"""What clients of the service send to a session: messages, interrupts, outcomes, and what becomes of a send.

Unlike an answer to a call, such an event has nothing by which upstream, or we, could tell a second copy from
the first. So it is sent again only when it surely has not arrived; what may have arrived is `unknown`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from app.core.protocol import Failure
from app.core.retry import backoff_s

KEPT_S: Final = 600.0
"""So long after it was asked for an event is still sent; later nobody expects it any more."""
AGAIN_S_MIN: Final = 0.5
AGAIN_S_MAX: Final = 15.0
UNPARKING_S: Final = 0.3
"""A session whose last call was just answered refuses messages for a moment more."""
UNPARKING_TRIES: Final = 8

RefusalCode = Literal["waiting_on_calls", "refused_by_upstream", "upstream_unreachable"]

_WAITING: Final = re.compile(r"waiting on responses to events \[([^\]]*)(\]?)")


@dataclass(frozen=True, slots=True)
class Again:
    """Nothing has arrived: send it once more, after a wait."""

    after_s: float
    floor_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Upstream has not taken it and will not. `waiting_on` are ids of calls that it wants answered first."""

    code: RefusalCode
    message: str
    waiting_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unknown:
    """It may have been taken, or not."""

    message: str


def after_send(
    failure: Failure, *, tries: int, age_s: float, are_answered: bool = False
) -> Again | Refused | Unknown:
    """Say what follows from a send that failed, the `tries`-th one of events that are `age_s` old.

    `are_answered` says that every call in `waiting_on` of the failure is over as far as we know.
    """
    if failure.reach == "unknown":
        return Unknown(failure.message)
    if failure.reach == "unsent":
        wait_s = backoff_s(tries, start_s=AGAIN_S_MIN, cap_s=AGAIN_S_MAX)
        if age_s + max(wait_s, failure.retry_after_s or 0.0) > KEPT_S:
            return Refused("upstream_unreachable", failure.message)
        return Again(wait_s, failure.retry_after_s)
    waits_for = waiting_on(failure)
    if waits_for and are_answered and tries <= UNPARKING_TRIES:
        return Again(0.0, UNPARKING_S)
    code: RefusalCode = "waiting_on_calls" if waits_for else "refused_by_upstream"
    return Refused(code, failure.message, waits_for)


def waiting_on(failure: Failure) -> tuple[str, ...]:
    """Return the calls that upstream names as unanswered; none where it refused for another reason.

    Source: the refusal's text as seen from three servers; the sessions API gives no code for it.
    """
    found = _WAITING.search(failure.message) if failure.status == 400 else None
    if found is None:
        return ()
    ids = [id_ for id_ in re.split(r"[,\s]+", found[1]) if id_]
    return tuple(ids if found[2] else ids[:-1])  # the message may be cut in the middle of an id
