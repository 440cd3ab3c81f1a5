"""Planted faults: each breaks one rule of the core, or of the way in which its effects are performed.

`FAULTS` maps a fault's name to what plants it and takes it out again. They exist to show that the harness
catches what it claims to catch, so each is one that a person could write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.core import connection, history, messages, posting, routing, sending, session
from tests.simulation import errands, replica, run, store, webhooks, writer

Undo = Callable[[], None]


def patched(owner: Any, **values: Any) -> Undo:
    """Set attributes; return how to take them back."""
    missing = object()
    own = {name: vars(owner).get(name, missing) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)

    def undo() -> None:
        for name, value in own.items():
            delattr(owner, name) if value is missing else setattr(owner, name, value)

    return undo


def _nothing(self: Any, *_: Any, **__: Any) -> None:
    """Leave out what was to be done."""


def _no_work(self: Any, *_: Any, **__: Any) -> Any:
    yield 0.0


# ---- the gate


def unknown_permission_runs() -> Undo:
    """A permission that this version does not know counts as allow."""
    judge = routing.judge

    def judging(call: Any, *rest: Any, **more: Any) -> Any:
        known = (
            call if call.permission in ("allow", "ask", "deny", None) else replace(call, permission="allow")
        )
        return judge(known, *rest, **more)

    return patched(routing, judge=judging)


def unread_policy_runs() -> Undo:
    """A built-in call without a permission runs although its policy was not read."""
    judge = routing.judge

    def judging(call: Any, policies: Any, *rest: Any, **more: Any) -> Any:
        ruling, gate = judge(call, policies, *rest, **more)
        return ("run", None) if gate is not None and gate.reason == "unread_policy" else (ruling, gate)

    return patched(routing, judge=judging)


def own_gate_left_open() -> Undo:
    """A tool that asks first is delivered without asking."""
    return patched(routing, tool_gate=lambda tool: None)


def deny_runs() -> Undo:
    """A person's deny is taken for an allow."""
    ruled = routing.Router.ruled

    def ruling(self: Any, call: Any, decision: Any) -> None:
        ruled(self, call, replace(decision, result="allow"))

    return patched(routing.Router, ruled=ruling)


def allow_before_upstream_took_it() -> Undo:
    """An allow at upstream's gate counts at once, and is never sent."""

    def rule(self: Any, call: Any, decision: Any) -> None:
        self._ledger.save(replace(call, gate=None, decision=replace(decision, status="accepted")), "queued")

    return patched(sending.Sends, rule=rule)


# ---- sends


def repeated_without_looking() -> Undo:
    """A send whose outcome is unknown is sent again, without reading the history first."""
    after_send = posting.after_send

    def after(post: Any, call: Any, failure: Any, now: float) -> Any:
        step = after_send(post, call, failure, now)
        is_blind = isinstance(step, posting.LookFirst) and failure.reach == "unknown"
        return posting.Again(post.delay_s()) if is_blind else step

    return patched(posting, after_send=after)


def taken_up_without_looking() -> Undo:
    """A send that an earlier run may have made is made again, without reading the history first."""

    def resume(self: Any, call: Any) -> None:
        post = posting.Post("verdict" if call.state == "held" else "result", b"")
        post.event = self._event(call, post)
        self._send(call, post)

    return patched(sending.Sends, resume=resume)


def answers_of_others_ignored() -> Undo:
    """A result that another client gave settles nothing."""
    return patched(routing.Router, answer=_nothing)


def verdicts_of_others_ignored() -> Undo:
    """A verdict that was seen upstream changes nothing, and no person is asked any more."""
    return patched(routing.Router, verdict=_nothing)


def post_forgotten() -> Undo:
    """A result that an earlier run left is never posted."""
    return patched(routing.Router, resume=lambda self, unfinished: self._unread.clear())


# ---- deliveries


def result_computed_again() -> Undo:
    """A result that an earlier run stored and did not post is computed again."""

    rest = routing.Router.resume

    def resume(self: Any, unfinished: Any) -> None:
        for call in unfinished:
            if call.state in ("answered", "posting"):
                self._ledger.save(replace(call, state="unowned", result=None), "queued")
        self._unread.update(call.id for call in unfinished)
        rest(self, [call for call in unfinished if call.state not in ("answered", "posting")])

    return patched(routing.Router, resume=resume)


def unknown_delivered_again() -> Undo:
    """A delivery whose outcome is unknown after a crash is repeated, whatever the tool declared."""
    redeliver = routing.Router._redeliver

    def redelivering(self: Any, call: Any) -> None:
        tool = self._tool(call)
        self._deliver(call, tool) if tool is not None and tool.enabled else redeliver(self, call)

    return patched(routing.Router, _redeliver=redelivering)


def cut_delivered_again() -> Undo:
    """A delivery that was cut after it had reached the tool is repeated, whatever the tool declared."""
    always = frozenset({"unsent", "asked", "sent"})
    return patched(webhooks, _REPEATED={"never": always, "connect_only": always, "safe": always})


def orphans_left_alone() -> Undo:
    """Nobody looks after the deliveries of a run that died."""
    return patched(errands.Errands, _watch_orphans=_no_work)


def reports_overlooked() -> Undo:
    """What a tool reports after its 202 is stored, and nobody reads it."""
    return patched(store.Store, called_back=lambda self, ids: {})


def late_results_dropped() -> Undo:
    """What a delivery came to after its run had ended is thrown away."""
    return patched(store.Store, leave_result=_nothing)


def new_id_at_each_attempt() -> Undo:
    """Each delivery has a webhook-id of its own."""
    numbers = itertools.count()
    webhook_id = webhooks.webhook_id

    def making(*names: str) -> str:
        return f"{webhook_id(*names)}{next(numbers)}"

    return patched(webhooks, webhook_id=making)


# ---- the store


def effects_before_the_commit() -> Undo:
    """What is to leave leaves first, and is stored afterwards."""

    def perform(self: Any, effects: Any) -> Any:
        batch = self._batch(effects)
        for effect in effects:
            self._errands.do(effect)
        yield 0.1
        yield from self._save(batch)

    return patched(run.Run, _perform=perform)


def failed_commit_taken_for_done() -> Undo:
    """A commit that failed counts as one whose answer was lost, and is not repeated."""

    def submit(self: Any, batch: Any) -> Any:
        yield 0.002
        if not self._store.is_down and not self._process.scheduler.chance(self._troubles.commit_fails):
            self._store.write(self._replica_id, batch)

    return patched(writer.Writer, submit=submit)


def writes_not_fenced() -> Undo:
    """A run writes although its lease is another's."""
    return patched(store.Store, holds=lambda self, replica_id, lease: True)


def lease_left_behind() -> Undo:
    """A lease that could not be given back is held by nobody's run for ever."""

    def compare(self: Any, held: Any) -> Any:
        yield 0.0
        if self._run is not None and self._lease != held:
            self._run.lose()

    return patched(replica.Replica, _compare=compare)


def trust_comes_back() -> Undo:
    """A process that stood still past its lease goes on with its run once it has renewed."""

    def compare(self: Any, held: Any) -> Any:
        if held is not None and (self._task is None or held != self._lease):
            yield from self._release(held)

    return patched(replica.Replica, _lose_if_late=_nothing, _compare=compare)


def term_not_raised() -> Undo:
    """A claim takes the lease and leaves the term."""
    claim = store.Store.claim

    def claiming(self: Any, replica_id: str) -> Any:
        lease = claim(self, replica_id)
        if lease is None or lease.term == 1:
            return lease
        self.attachment.term -= 1
        return replace(lease, term=lease.term - 1)

    return patched(store.Store, claim=claiming)


def decisions_not_brought() -> Undo:
    """A decision is stored, and the run is not told."""
    return patched(store.Store, decided=lambda self: [])


def partial_keeps_its_place() -> Undo:
    """A final text does not replace the partial one that is stored."""

    def writing(self: Any, batch: Any) -> None:
        for snapshot in batch.messages:
            self.messages.setdefault(snapshot.id, snapshot)

    return patched(store.Store, _write_messages=writing)


# ---- history, interrupts, idleness


def final_made_of_the_preview() -> Undo:
    """A final text is what the preview had grown to."""
    finish = messages.Messages._finish

    def finishing(self: Any, event: Any) -> Any:
        open_ = self._open.get(event.id)
        saved = finish(self, event)
        if open_ is None or not len(open_.preview):
            return saved
        content = messages._encoded(open_.preview)
        return [replace(one, snapshot=replace(one.snapshot, content=content)) for one in saved]

    return patched(messages.Messages, _finish=finishing)


def history_read_once() -> Undo:
    """A history read that failed is not repeated, and no sweep comes."""

    def failed(self: Any, failure: Any, since: Any) -> Any:
        self.is_reading = False
        return []

    def read(self: Any, now: float) -> None:
        self.is_reading, self.is_covered, self.sweep_at = False, self.is_open, None

    return patched(connection.Connection, history_failed=failed, history_read=read)


def half_a_history_believed() -> Undo:
    """A history read that broke off counts as one that reached its end."""
    return patched(
        session.SessionMachine,
        _history_failed=lambda self, failure, now: self._history_read({}, now),
    )


def answers_in_history_overlooked() -> Undo:
    """A call that history lists together with its answer counts as unanswered."""
    fold = history.History.fold

    def folding(self: Any, event: Any) -> None:
        fold(self, replace_answer(event))

    def replace_answer(event: Any) -> Any:
        return routing.ev.Other(id=event.id, type="x") if isinstance(event, routing.ev.Answer) else event

    return patched(history.History, fold=folding)


def catch_all_takes_builtin_calls() -> Undo:
    """Whatever has no registration of its own goes to `*`."""
    return patched(
        routing,
        registration_of=lambda tools, kind, name: None if kind == "mcp" else name if name in tools else "*",
    )


def interrupts_ignored() -> Undo:
    """An interrupt settles nothing."""
    return patched(routing.Router, interrupt=_nothing)


def ended_threads_ignored() -> Undo:
    """The end of a thread settles nothing."""
    return patched(routing.Router, thread_terminated=_nothing)


def open_calls_do_not_defer() -> Undo:
    """The countdown runs out although a call is open."""
    return patched(session.SessionMachine, _is_blocked=property(lambda self: False))


def unowned_calls_forgotten() -> Undo:
    """A call whose tool is registered later stays unowned."""
    return patched(routing.Router, tools_changed=_nothing)


FAULTS: dict[str, Callable[[], Undo]] = {
    fault.__name__: fault
    for fault in (
        unknown_permission_runs,
        unread_policy_runs,
        own_gate_left_open,
        deny_runs,
        allow_before_upstream_took_it,
        repeated_without_looking,
        taken_up_without_looking,
        answers_of_others_ignored,
        verdicts_of_others_ignored,
        post_forgotten,
        result_computed_again,
        unknown_delivered_again,
        cut_delivered_again,
        orphans_left_alone,
        reports_overlooked,
        late_results_dropped,
        new_id_at_each_attempt,
        effects_before_the_commit,
        failed_commit_taken_for_done,
        writes_not_fenced,
        lease_left_behind,
        trust_comes_back,
        term_not_raised,
        decisions_not_brought,
        partial_keeps_its_place,
        final_made_of_the_preview,
        history_read_once,
        half_a_history_believed,
        answers_in_history_overlooked,
        catch_all_takes_builtin_calls,
        interrupts_ignored,
        ended_threads_ignored,
        open_calls_do_not_defer,
        unowned_calls_forgotten,
    )
}
