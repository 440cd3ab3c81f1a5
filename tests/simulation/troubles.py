"""What goes wrong in a life, and how often: drawn from the seed, all of it off once the world is quiet."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

LIST_LAG_S_MAX = 5.0
"""How late upstream's list may show an event, in lives whose list lags."""


@dataclass(slots=True)
class Troubles:
    """Probabilities, each for one occasion; rates are per second. 0 means that it does not happen."""

    send_unsent: float = 0.0
    send_lost: float = 0.0
    send_answer_lost: float = 0.0
    send_late: float = 0.0
    send_conflict: float = 0.0
    send_race: float = 0.0
    send_unauthorized: float = 0.0
    list_fails: float = 0.0
    list_forbidden: float = 0.0
    list_lags: float = 0.0
    retrieve_fails: float = 0.0
    open_fails: float = 0.0
    stream_ends: float = 0.0
    stream_silent: float = 0.0
    event_lost: float = 0.0
    event_doubled: float = 0.0
    event_delayed: float = 0.0
    wanted_partial: float = 0.0
    wanted_stale: float = 0.0
    tool_refuses: float = 0.0
    tool_cut: float = 0.0
    tool_slow: float = 0.0
    tool_busy: float = 0.0
    tool_fails: float = 0.0
    tool_odd: float = 0.0
    tool_promises: float = 0.0
    tool_forgets: float = 0.0
    commit_fails: float = 0.0
    commit_unknown: float = 0.0
    store_outage: float = 0.0
    upstream_outage: float = 0.0
    hint_lost: float = 0.0
    crash_at_commit: float = 0.0
    crash_at_effect: float = 0.0
    crash: float = 0.0
    pause: float = 0.0
    handover: float = 0.0
    second_result: float = 0.0
    second_verdict: float = 0.0
    interrupt: float = 0.0
    revive: float = 0.0
    thread_end: float = 0.0
    session_end: float = 0.0
    tools_change: float = 0.0
    detach: float = 0.0
    settings_change: float = 0.0
    rules_change: float = 0.0

    @classmethod
    def draw(cls, random_: random.Random) -> Troubles:
        """Some of the troubles, at some strength: a life with all of them at once would show little."""
        drawn = {name: random_.choice(_USUAL[name]) for name in _USUAL if random_.random() < 0.4}
        kind = random_.random()
        if kind > 0.9:
            # Processes that stand still with sends in the making: who goes on in which term?
            drawn |= {"pause": 0.04, "send_unsent": 0.4, "send_lost": 0.3}
        if kind < 0.15:
            # A day of deploys and nothing worse: on such a day the agent must notice none of it.
            drawn |= dict.fromkeys(_VIOLENT, 0.0)
            drawn["handover"] = 0.05
        return cls(**drawn)

    @property
    def names(self) -> list[str]:
        return [f"{f.name}={getattr(self, f.name):g}" for f in fields(self) if getattr(self, f.name)]


_VIOLENT = (
    "commit_fails",
    "commit_unknown",
    "store_outage",
    "crash_at_commit",
    "crash_at_effect",
    "crash",
    "pause",
)
_USUAL: dict[str, tuple[float, ...]] = {
    "send_unsent": (0.1, 0.4),
    "send_lost": (0.1, 0.3),
    "send_answer_lost": (0.1, 0.4),
    "send_late": (0.1, 0.3),
    "send_conflict": (0.05, 0.2),
    "send_race": (0.1, 0.3),
    "send_unauthorized": (0.01,),
    "list_fails": (0.1, 0.4),
    "list_forbidden": (0.03,),
    "list_lags": (0.1, 0.5),
    "retrieve_fails": (0.2, 0.9),
    "open_fails": (0.1, 0.5),
    "stream_ends": (0.02, 0.1),
    "stream_silent": (0.005, 0.02),
    "event_lost": (0.02, 0.15),
    "event_doubled": (0.05, 0.2),
    "event_delayed": (0.05, 0.2),
    "wanted_partial": (0.2, 0.5),
    "wanted_stale": (0.2, 0.5),
    "tool_refuses": (0.1, 0.4),
    "tool_cut": (0.1, 0.3),
    "tool_slow": (0.1, 0.3),
    "tool_busy": (0.1, 0.3),
    "tool_fails": (0.1, 0.3),
    "tool_odd": (0.05, 0.2),
    "commit_fails": (0.02, 0.1),
    "commit_unknown": (0.02, 0.1),
    "store_outage": (0.005, 0.02),
    "upstream_outage": (0.005, 0.02),
    "hint_lost": (0.3, 1.0),
    "crash_at_commit": (0.005, 0.02),
    "crash_at_effect": (0.005, 0.02),
    "crash": (0.01, 0.05),
    "pause": (0.01, 0.03),
    "handover": (0.01, 0.05),
    "second_result": (0.02, 0.1),
    "second_verdict": (0.02, 0.1),
    "interrupt": (0.01, 0.05),
    "revive": (0.2, 0.5),
    "thread_end": (0.01, 0.03),
    "session_end": (0.002,),
    "tools_change": (0.02, 0.1),
    "detach": (0.005,),
    "settings_change": (0.01, 0.03),
}
