"""Which events were handled already, bounded to the window that a reconnect lists again."""

from __future__ import annotations

from typing import Final

OVERLAP_S: Final = 120.0
"""A read of history begins this much before the cursor: events can become visible late."""

IDS_MAX: Final = 5_000
"""Beyond this many ids, those that left the window are forgotten, then the oldest."""


class SeenIds:
    """Ids of handled events with their time, newest window only."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._newest = 0.0

    def __contains__(self, id_: str) -> bool:
        return id_ in self._at

    def note(self, id_: str, at: float) -> None:
        """Remember an event; one without an id cannot be recognised and is not kept."""
        if not id_:
            return
        self._at[id_] = at
        self._newest = max(self._newest, at)
        if len(self._at) > IDS_MAX:
            horizon = self._newest - OVERLAP_S
            recent = [(id_, at) for id_, at in self._at.items() if at >= horizon]
            self._at = dict(recent[-IDS_MAX // 2 :])

    def merge(self, other: SeenIds) -> None:
        """Remember all that `other` does."""
        for id_, at in other._at.items():
            self.note(id_, at)
