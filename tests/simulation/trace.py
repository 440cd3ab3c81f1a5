"""A life's record as lines to read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from tests.simulation import record as r


def lines(entries: Iterable[r.Entry], about: str | None = None) -> Iterator[str]:
    """One line for each entry; `about` limits them to one call and what happened to all."""
    for entry in entries:
        text = _text(entry)
        if about is None or about in text or isinstance(entry, r.Note | r.Claimed | r.Failed | r.AtEnd):
            yield f"{entry.at:9.3f}  {text}"


def _text(entry: r.Entry) -> str:
    match entry:
        case r.Emitted():
            fields = {k: v for k, v in entry.event.items() if k not in ("type", "processed_at") and v}
            listed = f" listed at {entry.listed_at:.3f}" if entry.listed_at > entry.at else ""
            return f"log   {entry.event['type']} by {entry.by} {json.dumps(fields)}{listed}"
        case r.SendLeft():
            return f"send  #{entry.number} {entry.replica}/{entry.term} {json.dumps(entry.event)}"
        case r.SendArrived():
            return f"      #{entry.number} {entry.outcome} {entry.message} {json.dumps(entry.event)}"
        case r.Reached():
            what = "runs" if entry.has_run else "is busy"
            attempt = f"attempt {entry.attempt} by {entry.replica}/{entry.term}"
            return f"tool  {entry.tool} ({entry.retry}) {what} for {entry.call_id}, {attempt}"
        case r.Replied():
            return f"tool  answers {entry.replica}/{entry.term} for {entry.call_id}, attempt {entry.attempt}"
        case r.Claimed():
            return f"lease {entry.replica} has term {entry.term}"
        case r.Committed():
            return f"save  {entry.replica}/{entry.term} {_batch(entry)}"
        case r.LeftResult():
            return f"save  the result of {entry.call_id}, attempt {entry.attempt}, after its run"
        case r.ReportTaken():
            return f"save  what the tool reports of {entry.call_id}"
        case r.TakenBack():
            return f"save  {entry.call_id} waits again, attempt {entry.attempt} never left"
        case r.DecisionMade():
            return f"wish  {entry.id}: {entry.result} {entry.call_id} ({entry.reason})"
        case r.ToolsSet():
            return f"wish  tools are {', '.join(entry.names)}"
        case r.Failed():
            return f"FAIL  {entry.replica} {entry.error}"
        case r.AtEnd():
            return f"end   {entry.status} {entry.end_reason} {entry.why}"
        case r.Note():
            return f"note  {entry.replica} {entry.what}"


def _batch(entry: r.Committed) -> str:
    parts = [f"status={entry.status}"] if entry.status else []
    for call in entry.calls:
        decision = call.decision and f"/{call.decision.result}:{call.decision.status}"
        unknown = "?" if call.outcome_unknown else ""
        gate = f" ({call.gate.reason})" if call.gate and call.state == "held" else ""
        parts.append(f"{call.id}={call.state}{unknown}{decision or ''}{gate}")
    parts += [f"starts {call_id}.{attempt}" for call_id, attempt in entry.started]
    parts += [f"{snapshot.id}={snapshot.state}" for snapshot in entry.messages]
    if entry.end is not None:
        parts.append(f"END {entry.end.reason} {entry.end.detail or ''}")
    return " ".join(parts) or "-"
