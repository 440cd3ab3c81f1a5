"""Invariants about what leaves the process, and what is stored before it does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from app.core.calls import Call
from tests.simulation import record as r
from tests.simulation.reading import RESULTS, Reading, call_of, same


class Leaving(Reading):
    """Rules that look at deliveries, sends and writes."""

    def a_result_is_stored_before_it_is_posted(self) -> Iterator[str]:
        stored: dict[tuple[str, int], Call] = {}
        for entry in self.entries:
            if isinstance(entry, r.Committed):
                for call in entry.calls:
                    stored[call.id, entry.term] = call
            elif isinstance(entry, r.SendLeft) and entry.event["type"] in RESULTS:
                call = stored.get((call_of(entry.event), entry.term))
                posted = json.dumps(entry.event)
                if call is None or call.result is None:
                    # A run that takes up what an earlier one stored commits nothing before it posts again.
                    earlier = [
                        c for (id_, _), c in stored.items() if id_ == call_of(entry.event) and c.result
                    ]
                    call = earlier[-1] if earlier else None
                if call is None or not same(entry.event, call):
                    yield f"posted without a stored result: {posted}"

    def no_gated_call_runs_without_an_allow(self) -> Iterator[str]:
        policy = next((e.what for e in self.of(r.Note) if e.what.startswith("policy ")), "")
        for entry in self.of(r.Reached):
            use = self.uses[entry.call_id]
            permission = use.get("evaluated_permission")
            is_builtin = use["type"] == "agent.tool_use"
            is_free = use["type"] == "agent.custom_tool_use" or permission == "allow"
            if is_builtin and permission is None and use.get("session_thread_id") is None:
                is_free = policy == "policy always_allow"
            is_free = is_free and entry.tool != "asks"
            allows, _ = self.rulings(entry.call_id)
            if use["type"] == "agent.mcp_tool_use" or permission == "deny":
                yield f"{entry.call_id} may never be delivered"
            elif not is_free and not any(at <= entry.at for at in allows):
                yield f"{entry.call_id} was delivered at {entry.at:.3f}, and nobody had allowed it"

    def a_known_deny_is_final(self) -> Iterator[str]:
        denied: dict[str, float] = {}
        started: dict[tuple[str, int], float] = {}
        for entry in self.entries:
            if isinstance(entry, r.Committed):
                for call in entry.calls:
                    if (
                        call.decision is not None
                        and call.decision.result == "deny"
                        and call.state in ("denied", "expired")
                    ):
                        denied.setdefault(call.id, entry.at)
                for key in entry.started:
                    started[key] = entry.at
                    if key[0] in denied:
                        yield f"{key[0]} was denied at {denied[key[0]]:.3f} and dispatched at {entry.at:.3f}"
        for call_id, made in self.decided.items():
            denies = [e for e in made if e.result == "deny"]
            accepted = {id_ for id_, _, status in self.end.decisions if status == "accepted"}
            for deny in denies:
                later = [at for (id_, _), at in started.items() if id_ == call_id and at > deny.at]
                if deny.id in accepted and later:
                    yield f"{call_id} was denied by {deny.id} and dispatched at {later[0]:.3f}"

    def only_the_current_term_writes(self) -> Iterator[str]:
        term = 0
        for entry in self.entries:
            if isinstance(entry, r.Claimed):
                if entry.term != term + 1:
                    yield f"term {entry.term} follows {term}"
                term = entry.term
            elif isinstance(entry, r.Committed) and entry.term != term:
                yield f"{entry.replica} wrote in term {entry.term} at {entry.at:.3f}; the term was {term}"
            elif isinstance(entry, r.SendLeft) and entry.term != term:
                yield f"{entry.replica} sent in term {entry.term} at {entry.at:.3f}; the term was {term}"

    def every_delivery_looks_the_same(self) -> Iterator[str]:
        first: dict[str, tuple[str, bytes]] = {}
        for entry in self.of(r.Reached):
            look = (entry.webhook_id, entry.body)
            if first.setdefault(entry.call_id, look) != look:
                yield f"{entry.call_id} was delivered with another id or body"

    def a_delivered_call_stays_with_who_got_it(self) -> Iterator[str]:
        first: dict[str, str] = {}
        for entry in self.of(r.Reached):
            if first.setdefault(entry.call_id, entry.tool) != entry.tool:
                yield f"{entry.call_id} went to {first[entry.call_id]}, and then to {entry.tool}"
            use = self.uses[entry.call_id]
            if entry.tool == "*" and use["type"] != "agent.custom_tool_use":
                yield f"{entry.call_id} is no custom call, and went to *"
            if entry.tool not in ("*", use["name"]):
                yield f"{entry.call_id} is of {use['name']}, and went to {entry.tool}"

    def a_dispatch_is_stored_before_it_leaves(self) -> Iterator[str]:
        started: set[tuple[str, int]] = set()
        episodes: set[tuple[str, int]] = set()
        for entry in self.entries:
            if isinstance(entry, r.Committed):
                started.update(entry.started)
                episodes.update((call_id, entry.term) for call_id, _ in entry.started)
            elif isinstance(entry, r.Reached) and (entry.call_id, entry.attempt) not in started:
                if (entry.call_id, entry.term) in episodes:
                    # A run that has ended goes on with the delivery that it had begun, and notes no more.
                    self.verdict.explained["an attempt of a delivery that outlived its run"] += 1
                else:
                    yield f"attempt {entry.attempt} of {entry.call_id} was not on record"

    def an_unrepeatable_tool_is_reached_once(self) -> Iterator[str]:
        times: Counter[str] = Counter()
        for entry in self.of(r.Reached):
            if entry.retry == "safe" or not entry.has_run:
                continue
            times[entry.call_id] += 1
            again = [
                e for e in self.decided[entry.call_id] if e.reason == "outcome_unknown" and e.at < entry.at
            ]
            if times[entry.call_id] > 1 + sum(e.result == "allow" for e in again):
                yield f"{entry.call_id} ran again on a tool that is {entry.retry}"

    def a_known_result_is_never_recomputed(self) -> Iterator[str]:
        known: dict[str, bytes] = {}
        for entry in self.entries:
            if isinstance(entry, r.LeftResult):
                known[entry.call_id] = entry.result.content
            elif isinstance(entry, r.Committed):
                for call_id, _ in entry.started:
                    if call_id in known:
                        yield f"{call_id} had a result and was dispatched again at {entry.at:.3f}"
                for call in entry.calls:
                    if call.result is not None and not call.outcome_unknown:
                        known[call.id] = call.result.content
                    else:
                        known.pop(call.id, None) if call.outcome_unknown or call.result is None else None

    def upstream_gets_one_answer(self) -> Iterator[str]:
        for call_id, answers in self.answers.items():
            if sum(e.by == "us" for e in answers) > 1:
                yield f"upstream holds two results of ours for {call_id}"
        for call_id, verdicts in self.verdicts.items():
            if sum(e.by == "us" for e in verdicts) > 1:
                yield f"upstream holds two verdicts of ours for {call_id}"
        accepted: dict[tuple[str, bool], tuple[float, float]] = {}
        logged = {
            (call_of(e.event), e.event["type"] in RESULTS): e.listed_at
            for e in self.of(r.Emitted)
            if e.by == "us"
        }
        for entry in self.entries:
            if isinstance(entry, r.SendArrived) and entry.outcome == "accepted":
                key = (call_of(entry.event), entry.event["type"] in RESULTS)
                if key in logged:  # one that upstream took and ignored shows nowhere
                    accepted.setdefault(key, (entry.at, logged[key]))
            elif isinstance(entry, r.SendLeft):
                key = (call_of(entry.event), entry.event["type"] in RESULTS)
                if key not in accepted:
                    continue
                at, listed_at = accepted[key]
                if listed_at > at:
                    self.verdict.explained["a send repeated because the list lagged"] += 1
                else:
                    yield f"{key[0]} was accepted at {at:.3f} and sent again at {entry.at:.3f}"

    def an_answered_call_is_not_begun(self) -> Iterator[str]:
        """A run that began when the list showed the answer reads it before it delivers anything."""
        begun: dict[int, float] = {e.term: e.at for e in self.of(r.Claimed)}
        replays = any(note.what.startswith("streams replay") for note in self.of(r.Note))
        for entry in self.of(r.Committed):
            for call_id, attempt in entry.started:
                listed = [e.listed_at for e in self.answers[call_id]]
                if not listed or min(listed) > begun[entry.term]:
                    continue
                if replays:
                    # While the list fails, a replayed call cannot be told from a new one.
                    self.verdict.explained["an old call that a stream replayed while the list failed"] += 1
                else:
                    yield f"attempt {attempt} of {call_id} was begun at {entry.at:.3f}, after its answer"

    def a_handover_is_quiet(self) -> Iterator[str]:
        """On a day without anything worse than SIGTERM, no answer of a tool is lost."""
        worse = ("killed", "stands still", "the store is down")
        if any(note.what.startswith(worse) for note in self.of(r.Note)):
            return
        last: dict[str, int] = {}
        replied: set[tuple[str, int]] = set()
        unknown: set[str] = set()
        for entry in self.entries:
            if isinstance(entry, r.Reached):
                last[entry.call_id] = max(last.get(entry.call_id, 0), entry.attempt)
            elif isinstance(entry, r.Replied):
                replied.add((entry.call_id, entry.attempt))
            elif isinstance(entry, r.Committed):
                for call_id, attempt in entry.started:  # one that nobody saw arrive is the last one too
                    last[call_id] = max(last.get(call_id, 0), attempt)
                for call in entry.calls:
                    is_new = call.outcome_unknown and call.id not in unknown
                    if is_new and (call.id, last.get(call.id, 0)) in replied:
                        yield f"{call.id} is said to be unknown at {entry.at:.3f}, and the tool had answered"
                    (unknown.add if call.outcome_unknown else unknown.discard)(call.id)
