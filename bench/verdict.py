"""What is checked once everything has settled, from the records of upstream, the tools and the database.

None of it asks the service: a call counts as answered because upstream took an answer.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from app.core.calls import END_STATES
from app.simulator.call import Call
from app.simulator.refusal import Json
from app.simulator.session import Session
from bench.load import BUILTIN, OURS, RETRY, Delivery, People, Tools

EXAMPLES_MAX: Final = 10
UNKNOWN: Final = "may have run"
"""What the agent is told about a call whose outcome nobody knows."""


@dataclass
class Findings:
    """What was counted, and what contradicts a promise: by name, how often and some examples."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def accuse(self, name: str, example: str) -> None:
        self.violations[name].append(example)

    def report(self) -> dict[str, Any]:
        """Return both as JSON."""
        return {
            "counts": dict(sorted(self.counts.items())),
            "violations": {
                name: {"count": len(each), "examples": each[:EXAMPLES_MAX]}
                for name, each in sorted(self.violations.items())
            },
        }


def judge(sessions: Iterable[Session], tools: Tools, people: People, rows: Iterable[Any]) -> Findings:
    """Compare the records. `rows` are all calls in the database."""
    findings = Findings()
    deliveries: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in tools.deliveries:
        deliveries[delivery.call_id].append(delivery)
    stored = {row["id"]: row for row in rows}
    made: set[str] = set()
    for session in sessions:
        verdicts_at = _verdicts_at(session, findings)
        for call in session.calls.values():
            made.add(call.id)
            came = deliveries.get(call.id, [])
            _judge_answers(session, call, tools, people, findings)
            _judge_deliveries(call, came, findings)
            _judge_gate(session, call, came, people, verdicts_at, findings)
            _judge_row(session, call, stored.get(call.id), findings)
    for call_id in stored.keys() - made:
        findings.accuse("row_of_no_call", call_id)
    for call_id in deliveries.keys() - made:
        findings.accuse("delivery_of_no_call", call_id)
    by_id: dict[str, set[str]] = defaultdict(set)
    for delivery in tools.deliveries:
        by_id[delivery.id].add(delivery.call_id)
    for webhook_id, calls in by_id.items():
        if len(calls) > 1:
            findings.accuse("webhook_id_of_two_calls", webhook_id)
    findings.counts["calls"] = len(made)
    findings.counts["deliveries"] = len(tools.deliveries)
    findings.counts["deliveries_repeated"] = sum(len(each) - 1 for each in deliveries.values())
    return findings


def _verdicts_at(session: Session, findings: Findings) -> dict[str, float]:
    """When upstream took each verdict, in seconds since 1970; what it refused is counted on the way."""
    taken: dict[str, float] = {}
    for record in session.log:
        if record.who != "client":
            continue
        kind = str(record.event.get("type"))
        if record.what == "refused":
            findings.counts[f"refused {kind}"] += 1
        elif kind == "user.tool_confirmation":
            call_id = record.event["tool_use_id"]
            if record.what == "ignored" or call_id in taken:
                findings.accuse("second_verdict_upstream", call_id)
            taken.setdefault(call_id, record.at_us / 1e6)
    return taken


def _judge_answers(session: Session, call: Call, tools: Tools, people: People, findings: Findings) -> None:
    answers = session.answers.get(call.id, [])
    verdicts = session.verdicts.get(call.id, [])
    is_denied = call.spec.name in BUILTIN and call.verdict == "deny"
    wanted = 0 if is_denied else 1
    if len(answers) < wanted or (call.spec.name in BUILTIN and not verdicts):
        findings.accuse("call_lost", f"{call.id} {call.spec.name}")
    if len(answers) > wanted:
        findings.accuse("second_result_upstream", f"{call.id} {call.spec.name}")
    findings.counts["verdicts"] += len(verdicts)
    for answer in answers[:1]:
        text = _text(answer)
        findings.counts["results"] += 1
        if UNKNOWN in text:
            findings.counts["told_may_have_run"] += 1
        elif answer.get("is_error"):
            refused = call.spec.name == OURS and people.wishes.get(call.id) == "deny"
            findings.counts["told_denied" if refused else "told_error"] += 1
        else:
            findings.counts["told_success"] += 1
            if text not in tools.replies.get(call.id, ()):
                findings.accuse("result_of_no_tool", f"{call.id} {text[:80]}")


def _judge_deliveries(call: Call, came: list[Delivery], findings: Findings) -> None:
    if len({each.id for each in came}) > 1:
        findings.accuse("delivery_id_changed", call.id)
    if len({each.digest for each in came}) > 1:
        findings.accuse("delivery_body_changed", call.id)
    retry = RETRY[call.spec.name]
    # `never` may not even come back to a tool that asked for it.
    ran = [each for each in came if each.was_run or retry == "never"]
    if retry != "safe" and len(ran) > 1:
        attempts = [each.attempt for each in came]
        findings.accuse("second_delivery_reached", f"{call.id} {call.spec.name} {retry} attempts {attempts}")


def _judge_gate(
    session: Session,
    call: Call,
    came: list[Delivery],
    people: People,
    verdicts_at: dict[str, float],
    findings: Findings,
) -> None:
    name = call.spec.name
    if not came or (name not in BUILTIN and name != OURS):
        return
    first = min(each.at for each in came)
    if name == OURS:
        allowed_at = people.asked_at.get(call.id) if people.wishes.get(call.id) == "allow" else None
    else:
        allowed_at = verdicts_at.get(call.id) if call.verdict == "allow" else None
    findings.counts["gated_and_delivered"] += 1
    if allowed_at is None or first < allowed_at:
        findings.accuse("delivered_before_allow", f"{session.id} {call.id} {name}")


def _judge_row(session: Session, call: Call, row: Any, findings: Findings) -> None:
    if row is None:
        findings.accuse("call_not_in_database", f"{session.id} {call.id}")
        return
    findings.counts[f"state {row['state']}"] += 1
    if row["state"] not in END_STATES:
        findings.accuse("not_in_an_end_state", f"{session.id} {call.id} {row['tool']} {row['state']}")
    answers = session.answers.get(call.id, [])
    if row["state"] == "posted" and not answers:
        findings.accuse("posted_only_here", call.id)
    if row["result"] is not None and answers and row["state"] == "posted":
        told = [(each["type"], each.get("text")) for each in answers[0].get("content") or []]
        kept = [(each["type"], each.get("text")) for each in json.loads(row["result"])]
        if told != kept:
            findings.accuse("posted_is_not_stored", call.id)


def _text(answer: Json) -> str:
    return " ".join(str(each.get("text", "")) for each in answer.get("content") or [])
