"""A record, indexed by what rules ask of it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.core.calls import Call
from tests.simulation import record as r

RESULTS = ("user.tool_result", "user.custom_tool_result")
ANSWERS = (*RESULTS, "agent.tool_result", "agent.mcp_tool_result")


@dataclass(slots=True)
class Verdict:
    """What the checker found: sentences, each naming its invariant, and what it let pass."""

    violations: list[str] = field(default_factory=list)
    explained: Counter[str] = field(default_factory=Counter)


class Reading:
    """The record of one life. Reads nothing else."""

    def __init__(self, entries: Sequence[r.Entry]) -> None:
        self.entries = entries
        end = entries[-1]
        assert isinstance(end, r.AtEnd), "the record has no end"
        self.end = end
        self.verdict = Verdict()
        self.uses: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, list[r.Emitted]] = defaultdict(list)
        self.verdicts: dict[str, list[r.Emitted]] = defaultdict(list)
        for entry in self.of(r.Emitted):
            type_ = entry.event["type"]
            if type_ in ("agent.tool_use", "agent.custom_tool_use", "agent.mcp_tool_use"):
                self.uses[entry.event["id"]] = dict(entry.event)
            elif type_ in ANSWERS:
                self.answers[call_of(entry.event)].append(entry)
            elif type_ == "user.tool_confirmation":
                self.verdicts[entry.event["tool_use_id"]].append(entry)
        self.decided: dict[str, list[r.DecisionMade]] = defaultdict(list)
        for made in self.of(r.DecisionMade):
            self.decided[made.call_id].append(made)

    def of(self, kind: type[Any]) -> Iterator[Any]:
        return (entry for entry in self.entries if isinstance(entry, kind))

    def was_taken(self, call_id: str) -> bool:
        return any(
            e.outcome == "accepted" and e.event["type"] in RESULTS and call_of(e.event) == call_id
            for e in self.of(r.SendArrived)
        )

    def refused(self, call_id: str) -> bool:
        return any(call_of(e.event) == call_id for e in self.of(r.SendLeft))

    def rulings(self, call_id: str) -> tuple[list[float], list[float]]:
        """When anybody allowed the call, and when anybody denied it."""
        seen = [(e.event["result"], e.at) for e in self.verdicts[call_id]]
        made = [(e.result, e.at) for e in self.decided[call_id]]
        allows = [at for result, at in seen + made if result == "allow"]
        return allows, [at for result, at in seen + made if result != "allow"]


def call_of(event: Any) -> str:
    """The call that a result or verdict is about."""
    for name in ("custom_tool_use_id", "mcp_tool_use_id", "tool_use_id"):
        if name in event:
            return str(event[name])
    return ""


def same(event: Any, call: Call) -> bool:
    return (
        call.result is not None
        and event["type"] in RESULTS
        and event["content"] == json.loads(call.result.content)
        and bool(event.get("is_error")) == call.result.is_error
    )
