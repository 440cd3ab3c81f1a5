"""Sessions that the service hears of and may have to attach: by a webhook of the platform, or from its list.

What is heard is a hint. Whether a session is attached follows from what upstream says of it when asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

ACTIVE: Final = frozenset({"running", "rescheduling"})
TELLING: Final = "session."
"""Webhooks of other families tell of nothing that is served."""
OVER_EVENTS: Final = frozenset(
    {"session.status_terminated", "session.deleted", "session.archived", "session.terminated"}
)
"""After these there is nothing to attach to; a run that goes on sees them by itself."""


@dataclass(frozen=True, slots=True)
class Sighted:
    """What upstream says of a session. `updated_at` is its text; the other times are seconds since 1970."""

    session_id: str
    status: str
    agent_id: str | None = None
    environment_id: str | None = None
    is_archived: bool = False
    updated_at: str | None = None
    updated_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self.is_archived or self.status == "terminated"


@dataclass(frozen=True, slots=True)
class AttachRule:
    """Which sessions are attached by themselves. None for an id means any; `created_s` is when it began."""

    name: str
    agent_id: str | None
    environment_id: str | None
    created_s: float

    def is_about(self, sighted: Sighted) -> bool:
        return self.agent_id in (None, sighted.agent_id) and self.environment_id in (
            None,
            sighted.environment_id,
        )


def rule_for(rules: Iterable[AttachRule], sighted: Sighted, *, was_told: bool) -> AttachRule | None:
    """Return the first rule by name that attaches a session which nobody has attached yet.

    A session that was merely listed (not `was_told`) and is idle must have moved since the rule was made:
    else the first look at a workspace would attach everything that ever ended there.
    """
    if sighted.is_over:
        return None
    for rule in sorted(rules, key=lambda one: one.name):
        has_moved = sighted.updated_s is not None and sighted.updated_s >= rule.created_s
        if rule.is_about(sighted) and (was_told or sighted.status in ACTIVE or has_moved):
            return rule
    return None


def has_woken(sighted: Sighted, *, ended_s: float, seen_updated_at: str | None) -> bool:
    """Whether a session whose attachment ended by idleness at `ended_s` has to be looked at again.

    `seen_updated_at` is what its `updated_at` was when it was woken last: the same says nothing new.
    """
    if sighted.is_over:
        return False
    if sighted.status in ACTIVE:
        return True
    is_news = sighted.updated_at is not None and sighted.updated_at != seen_updated_at
    return is_news and sighted.updated_s is not None and sighted.updated_s > ended_s
