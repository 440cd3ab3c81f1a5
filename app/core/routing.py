"""A call's way: gate, queue, slot, webhook; and what cuts it short.

Verdicts, answers, interrupts and thread terminations are facts that may arrive before or after the call they
concern, live or from history; each is applied to what is open and remembered for what is still to come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, Literal

from app.core import events as ev
from app.core.calls import REOPENING, Call, Decision, Gate, Result
from app.core.edits import is_editable
from app.core.gate import UNREAD, changed_gate, judge, tool_gate
from app.core.inputs import UNFIT, InputChecks
from app.core.ledger import Ledger, Remembered
from app.core.outgoing import error_result
from app.core.posting import covers
from app.core.protocol import ConsultRules, Deliver, Delivered, Promised, RefuseDecision, Settings, Watch
from app.core.rules import VIA, Rule, is_promised, over_gate, rule_gate, ruling
from app.core.sending import Sends, denied_state
from app.core.tools import Tool, gating, is_admitted, registration_of

INTERRUPTS_MAX: Final = 100
"""How many processed interrupts are remembered for calls that show up later."""

EPISODES_MAX: Final = 3
"""How often a delivery is begun whose outcome nobody lives to store; then the call itself is to blame."""

_OURS: Final = ("tool_asks", "rule_asks", "rule_denies")
"""Why a call is held that nobody but us asks about, and nobody has decided on before."""

_POLICY_DENY: Final = Decision("deny", "accepted", "upstream", "policy")


class Router:
    """Routes the calls of one session."""

    def __init__(self, settings: Settings, tools: Mapping[str, Tool], ledger: Ledger, sends: Sends) -> None:
        self.settings = settings
        self.policies = UNREAD
        self.checks = InputChecks()
        self.environment: Literal["cloud", "self_hosted"] | None = settings.environment
        self.primary_thread_id: str | None = None
        self.wanted: frozenset[str] = frozenset()
        self.needs_policies = False
        self.is_stopping = False
        self._ledger = ledger
        self._sends = sends
        self.tools = tools
        self.rules: tuple[Rule, ...] = ()
        self._verdicts: Remembered[Decision] = Remembered()
        self._answered: Remembered[bool] = Remembered()  # whether history listed the call with its answer
        self._mcp: Remembered[Call] = Remembered()
        self._terminated: set[str] = set()
        self._interrupts: list[ev.Interrupt] = []
        # Calls of an earlier run wait until history has shown whether somebody settled them meanwhile.
        self._unread: set[str] = set(ledger.calls)
        self._orphans: list[str] = []
        self._again: dict[str, None] = {}

    # ---- in

    def route(self, use: ev.Use) -> None:
        """Take in a call; one that is known is left as it is."""
        if self._ledger.find(use.id) is not None:
            return
        call = _call(use)
        if call.id in self._answered:
            # One that history listed with its answer never was ours to look after.
            if not self._answered[call.id] and call.kind != "mcp":
                self._ledger.finish(call, "answered_elsewhere")
        elif call.thread_id is not None and call.thread_id in self._terminated:
            self._ledger.finish(call, "thread_terminated")
        elif self.is_interrupted(call):
            self._ledger.finish(call, "interrupted")
        else:
            self._judge(call)

    def _judge(self, call: Call) -> None:
        """Pass a call through upstream's gate."""
        verdict = self._verdicts.get(call.id)
        ruling, gate = judge(
            call, self.policies, verdict.result if verdict else None, is_required=call.id in self.wanted
        )
        call = replace(call, gate=gate, decision=verdict or call.decision)
        if ruling == "deny":
            is_verdict = verdict is not None and verdict.result == "deny"
            self._ledger.finish(replace(call, decision=verdict if is_verdict else _POLICY_DENY), "denied")
        elif ruling == "hold":
            self._hold(call, gate)
            self.needs_policies |= gate is not None and gate.reason == "unread_policy"
        elif call.kind == "mcp":
            self._mcp.keep(call.id, call)  # the platform runs it; it may still turn out to ask
        else:
            self._admit(call)

    def _admit(self, call: Call) -> None:
        """Upstream's gate is open: ours is next, then the queue."""
        tool = self._tool(call)
        call = replace(call, detail=None) if call.state == "unowned" else call
        if call.kind == "mcp":
            self._ledger.finish(replace(call, posted=True), "posted")
        elif tool is None:
            self._park(call)
        elif (unfit := self.checks.unfit(call, tool)) is not None:
            # Before our own gate: nobody should have to decide on a call that cannot run.
            self._sends.answer(replace(call, detail=UNFIT), unfit)
        elif (gate := self._own_gate(call, tool)) is not None:
            self._hold(call, gate)
        elif not tool.enabled:
            self._sends.answer(call, _disabled(tool))
        else:
            self._ledger.save(call, "queued")

    def _hold(self, call: Call, gate: Gate | None) -> None:
        """Put a call before a person, for as long as the registration of its name allows."""
        name = gating(self.tools, call.kind, call.tool)
        tool = None if name is None else self.tools.get(name)
        if gate is not None and tool is not None:
            gate = replace(
                gate,
                expires_in_s=tool.expires_in_s,
                on_expiry=tool.on_expiry,
                remind_after_s=tool.remind_after_s,
            )
        rule = self._answering(call, gate)
        if gate is not None and rule is not None:
            gate = replace(gate, rule=rule.id)
        if gate is not None and gate.reason in REOPENING:
            call = replace(call, decision=None)
        self._ledger.save(replace(call, gate=gate), "held")
        if rule is not None:
            self._ledger.emit(ConsultRules(call.id))

    def _own_gate(self, call: Call, tool: Tool) -> Gate | None:
        """Our gate on a call that nobody has allowed, or not as things are now; else None."""
        if call.confirmation == "allow":
            return over_gate(call, {rule.id for rule in self.rules}) or changed_gate(call, tool)
        return tool_gate(tool) or rule_gate(self._ruling(call))

    def _ruling(self, call: Call) -> Rule | None:
        return ruling(self.rules, call.kind, call.tool, call.input)

    def _answering(self, call: Call, gate: Gate | None) -> Rule | None:
        """The rule that answers for a person, as far as is known here.

        None answers whether a delivery whose outcome is unknown shall be repeated.
        """
        if gate is None or gate.reason == "outcome_unknown":
            return None
        rule = self._ruling(call)
        return None if rule is None or rule.effect == "ask" else rule

    def _park(self, call: Call) -> None:
        """Leave a call that is not ours to its owner, and say why it is not ours."""
        if self._is_platforms(call):
            detail = "The platform runs this call itself."
        elif not is_admitted(self.settings.tools, self._registration(call) or call.tool, call.tool):
            detail = f"The attachment's `tools` do not name {call.tool!r}; PATCH the session to add it."
        elif (known := self.tools.get(call.tool)) is not None and known.fault is not None:
            detail = f"The tool {call.tool!r} is registered but cannot be called: {known.fault}"
        else:
            name = call.served_by or call.tool
            detail = f"No tool named {name!r} is registered. PUT /tools/{name} registers it, and the"
            detail += " call is delivered at once."
        self._ledger.save(replace(call, detail=detail), "unowned")

    @property
    def has_unowned(self) -> bool:
        """Whether a call waits for an owner that may not exist; those of the platform have one."""
        calls = self._ledger.calls
        return any(not self._is_platforms(calls[id_]) for id_ in self._ledger.in_state["unowned"])

    def _is_platforms(self, call: Call) -> bool:
        return call.kind == "builtin" and self.environment == "cloud"

    def _tool(self, call: Call) -> Tool | None:
        """The registration that serves this call, or None if it is not ours to run."""
        registration = None if self._is_platforms(call) else self._registration(call)
        if registration is None:
            return None  # the platform runs it and would refuse our result
        if not is_admitted(self.settings.tools, registration, call.tool):
            return None
        tool = self.tools.get(registration)
        return None if tool is None or tool.fault is not None else tool

    def _registration(self, call: Call) -> str | None:
        """Whose call it is. One that was delivered stays with whom it went to: nobody else recognises it."""
        return call.served_by or registration_of(self.tools, call.kind, call.tool)

    # ---- out to the webhook and back

    def fill_slots(self) -> None:
        """While slots last: deliveries of an earlier run, then those asked for again, then what waits."""
        while self._orphans and not self._is_full():
            call = self._ledger.calls.get(self._orphans[0])
            if call is not None and call.id in self._unread:
                break
            del self._orphans[0]
            if call is not None and call.state == "dispatched" and call.id not in self._ledger.running:
                self._redeliver(call)
        for call_id in [call_id for call_id in self._again if call_id not in self._unread]:
            if self._is_full():
                return
            del self._again[call_id]
            self._deliver_again(call_id)
        for call_id in list(self._ledger.in_state["queued"]):
            if self._is_full():
                return
            if call_id in self._unread:
                continue
            call = self._ledger.calls[call_id]
            tool = self._tool(call)
            is_gated = tool is not None and self._own_gate(call, tool) is not None
            if tool is None or not tool.enabled or is_gated or self.checks.unfit(call, tool) is not None:
                self._admit(call)  # the registration, or the rules, changed while it waited
            else:
                self._deliver(call, tool)

    def _is_full(self) -> bool:
        if self.is_stopping:
            return True
        # A delivery of an earlier run may still be under way elsewhere, unless it is known not to be.
        calls = self._ledger.calls
        elsewhere = self._ledger.in_state["dispatched"].keys() - set(self._orphans)
        promised = {call_id for call_id in elsewhere if calls[call_id].awaits_callback}
        busy = self._ledger.running | (elsewhere - promised)
        if len(busy) >= self.settings.concurrency:
            return True
        # One at a time means strict order: the next call starts once this one's post was attempted.
        is_strict = self.settings.concurrency == 1
        return is_strict and (bool(promised) or any(map(self._sends.is_on_its_way, calls.values())))

    def _deliver(self, call: Call, tool: Tool) -> None:
        call = replace(
            call, attempts=call.attempts + 1, episodes=call.episodes + 1, served_by=tool.name,
            outcome_unknown=False, awaits_callback=False,
        )  # fmt: skip
        call = self._ledger.save(call, "dispatched")
        self._ledger.running.add(call.id)
        self._ledger.emit(Deliver(call, tool))

    def delivered(self, notice: Delivered) -> None:
        """A delivery episode ended: keep the result, post it if the call still waits for it."""
        self._ledger.running.discard(notice.call_id)
        call = self._ledger.find(notice.call_id)
        if call is None or call.result is not None:
            return
        call = replace(
            call, result=notice.result, attempts=notice.attempts, outcome_unknown=notice.outcome_unknown,
            awaits_callback=False,
        )  # fmt: skip
        tool = self.tools.get(self._registration(call) or call.tool)
        if call.is_over:
            self._ledger.amend(call)
        elif call.state == "dispatched":
            if notice.outcome_unknown and tool is not None and tool.on_unknown == "ask":
                gate = Gate("tool", None, "outcome_unknown")
                self._hold(call, gate)
            else:
                self._sends.answer(call, notice.result)

    def promised(self, notice: Promised) -> None:
        """The tool took the call and reports its result later; the slot is free meanwhile."""
        self._ledger.running.discard(notice.call_id)
        call = self._ledger.calls.get(notice.call_id)
        if call is not None and call.state == "dispatched":
            self._ledger.save(replace(call, attempts=notice.attempts, awaits_callback=True), "dispatched")
            self._ledger.emit(Watch(call.id))

    def redeliver(self, call_ids: Iterable[str]) -> None:
        """An operator says that the tool has lost its job: deliver once more, whatever its `retry` says."""
        self._again.update(dict.fromkeys(call_ids))

    def _deliver_again(self, call_id: str) -> None:
        call = self._ledger.calls.get(call_id)
        if call is None or call.state != "dispatched" or not call.awaits_callback:
            return  # its result has come meanwhile, or it was settled
        tool = self._tool(call)
        if tool is not None and tool.enabled and self._own_gate(call, tool) is None:
            self._deliver(call, tool)

    def orphaned(self, call_id: str, *, is_unsent: bool) -> None:
        """A delivery of an earlier run will not report any more; one that never left is queued again."""
        call = self._ledger.calls.get(call_id)
        if not is_unsent:
            self._orphans.append(call_id)
        elif call is not None and call.state == "dispatched" and call_id not in self._ledger.running:
            served_by = call.served_by if call.attempts > 1 else None
            episodes = max(call.episodes - 1, 0)
            unmade = replace(call, attempts=call.attempts - 1, episodes=episodes, served_by=served_by)
            self._ledger.save(unmade, "queued")

    def _redeliver(self, call: Call) -> None:
        tool = self._tool(call)
        is_open = tool is not None and self._own_gate(call, tool) is None
        if call.awaits_callback:
            self._give_up(call, tool)
            return
        is_spent = call.episodes >= EPISODES_MAX
        if tool is not None and tool.enabled and tool.retry == "safe" and is_open and not is_spent:
            self._deliver(call, tool)
            return
        text = (
            f"The tool {call.tool!r} was called, but the connection to it was lost before it answered. "
            "It may have run. Check before calling it again."
        )
        if is_spent:
            text = (
                f"The call of the tool {call.tool!r} could not be completed: it was delivered "
                f"{call.episodes} times, and each time its outcome was lost. It may have run. "
                "Check before calling it again."
            )
        self.delivered(Delivered(call.id, error_result(text), call.attempts, outcome_unknown=True))

    def _give_up(self, call: Call, tool: Tool | None) -> None:
        """The tool promised a result and its time for it is over."""
        text = (
            f"The tool {call.tool!r} accepted the call and promised a result, but reported none in time. "
            "It may have run, and may still. Check before calling it again."
        )
        is_unknown = tool is None or tool.retry != "safe"
        self.delivered(Delivered(call.id, error_result(text), call.attempts, outcome_unknown=is_unknown))

    # ---- decisions and verdicts

    def decided(self, call_id: str, decision: Decision) -> None:
        """Somebody decided through the service."""
        call, known = self._ledger.calls.get(call_id), self._ledger.find(call_id)
        if known is not None and known.decision is not None and known.decision.id == decision.id:
            return  # read before it was acted on, and brought once more after that
        if call is None or call.state != "held" or call.gate is None:
            state = known.state if known else "unknown to this session"
            self._ledger.emit(RefuseDecision(call_id, decision.id or "", f"The call is {state}."))
        elif call.decision is not None and call.decision.status == "sending":
            self._ledger.emit(RefuseDecision(call_id, decision.id or "", "Another decision is on its way."))
        elif (why := self._uneditable(call, call.gate, decision)) is not None:
            self._ledger.emit(RefuseDecision(call_id, decision.id or "", why))
        elif call.gate.by == "upstream":
            self._sends.rule(call, decision)
        else:
            self.ruled(call, replace(decision, status="accepted"))

    def _uneditable(self, call: Call, gate: Gate, decision: Decision) -> str | None:
        """Why an edited input cannot be what runs, in a sentence: then the call stays before a person."""
        if decision.edited_input is None:
            return None
        if not is_editable(call.kind, gate.by, gate.reason):
            return "The input of this call cannot be edited."
        tool = self._tool(call)
        edited = replace(call, edited_input=decision.edited_input)
        # The session's agent may have declared the schema; only here is that one known.
        if tool is not None and self.checks.unfit(edited, tool) is not None:
            return "The edited input does not fit the tool's `input_schema`; edit it again."
        return None

    def ruled(self, call: Call, decision: Decision) -> None:
        """A decision on a held call stands."""
        gate, call = call.gate, replace(call, decision=decision)
        is_ours = gate is not None and gate.by != "upstream"
        is_unknown = gate is not None and gate.reason == "outcome_unknown"
        if decision.result == "allow" and is_unknown:
            self._ledger.save(replace(call, result=None, outcome_unknown=False), "queued")
        elif decision.result == "allow":
            self._admit(replace(call, edited_input=decision.edited_input))
        elif is_unknown and call.result is not None:
            self._sends.answer(call, call.result)
        elif is_ours:
            self._sends.answer(call, error_result(_denial(decision)))
        else:
            self._ledger.finish(call, denied_state(decision))

    def verdict(self, confirmation: ev.Confirmation) -> None:
        """A verdict was seen upstream, whoever gave it. Deny is sticky."""
        result: Literal["allow", "deny"] = "allow" if confirmation.result == "allow" else "deny"
        message = confirmation.deny_message if result == "deny" else None
        decision = Decision(result, "accepted", "upstream", "stream", confirmation.at, message)
        call_id = confirmation.tool_use_id
        call = self._ledger.calls.get(call_id)
        if call is None:
            earlier, ended = self._verdicts.get(call_id), self._ledger.over.get(call_id)
            may_matter = ended is None or ended.state == "interrupted"  # which upstream may ask for again
            if may_matter and (earlier is None or earlier.result == "allow"):
                self._verdicts.keep(call_id, decision)
            return
        standing = call.decision
        if standing is not None and standing.result == result and standing.status == "sending":
            decision = replace(standing, status="accepted")
        reason = call.gate.reason if call.state == "held" and call.gate is not None else None
        if reason == "outcome_unknown" or (reason in REOPENING and result == "allow"):
            return  # it is the answer to an earlier question, most likely our own
        if call.state == "held":
            self._ledger.withdraw(call_id)
            self.ruled(call, decision)
        elif call.state in ("queued", "unowned"):
            if result == "deny":
                self._ledger.finish(replace(call, decision=decision), "denied")
            elif standing is None:
                self._ledger.save(replace(call, decision=decision), call.state)
        elif result == "deny" and call.detail is None:
            detail = "A deny arrived after the delivery had started."
            self._ledger.save(replace(call, detail=detail), call.state)

    # ---- what cuts a call short

    def answer(self, answer: ev.Answer) -> None:
        """A result was seen upstream, ours or another's."""
        call_id = ev.answered_id(answer)
        self._mcp.pop(call_id, None)
        call = self._ledger.calls.get(call_id)
        if call is None:
            self._answered.keep(call_id, self._answered.get(call_id, False))
        elif call.state in ("posting", "answered"):
            self._sends.seen(call, answer)
        else:
            self._ledger.finish(call, "answered_elsewhere")

    def settled(self, call_id: str) -> None:
        """History showed a call together with its answer."""
        if call_id not in self._ledger.calls:
            self._answered.keep(call_id, True)

    def adopt(self, call: Call) -> None:
        """Take in an open call that the store held and memory did not."""
        self._ledger.hold(call)
        self._unread.add(call.id)

    def interrupt(self, interrupt: ev.Interrupt) -> None:
        """Somebody interrupted: a processed interrupt settles the earlier calls of its scope."""
        if interrupt.at is None:
            return
        self._interrupts = [*self._interrupts[1 - INTERRUPTS_MAX :], interrupt]
        self._settle(interrupt)

    def _settle(self, interrupt: ev.Interrupt) -> None:
        for call in list(self._ledger.calls.values()):
            is_covered = covers((interrupt,), call, self.primary_thread_id)
            if is_covered and not self._sends.is_on_its_way(call):
                self._ledger.finish(call, "interrupted")

    def primary_known(self, thread_id: str) -> None:
        """The primary thread has a name: interrupts of that name settle calls without a thread."""
        if thread_id != self.primary_thread_id:
            self.primary_thread_id = thread_id
            for interrupt in list(self._interrupts):
                self._settle(interrupt)

    def is_interrupted(self, call: Call) -> bool:
        return covers(tuple(self._interrupts), call, self.primary_thread_id)

    def thread_terminated(self, thread_id: str) -> None:
        """A thread takes no more input: its calls are over, whatever they were about to get."""
        self._terminated.add(thread_id)
        for call in list(self._ledger.calls.values()):
            if call.thread_id == thread_id and not self._sends.is_on_its_way(call):
                self._ledger.finish(call, "thread_terminated")

    def lose(self, use: ev.Use) -> None:
        """Record a call of a session that was over before it could start."""
        is_known = self._ledger.find(use.id) is not None or use.id in self._answered
        if not is_known and not isinstance(use, ev.McpUse):
            self._ledger.finish(_call(use), "session_ended")

    # ---- what upstream waits for

    def want(self, call_ids: Iterable[str], at: float | None = None) -> tuple[str, ...]:
        """Upstream, or a person, named calls that must be waiting; return those that nobody knows.

        `at` is when upstream did, in seconds since 1970.
        """
        unknown: list[str] = []
        for call_id in call_ids:
            call, ended = self._ledger.calls.get(call_id), self._ledger.over.get(call_id)
            if call_id in self._mcp:
                self._judge(self._mcp.pop(call_id))
            elif call is not None:
                self._require(call)
            elif ended is not None:
                asked = replace(ended, asked_at=at)
                is_closed = call_id in self._answered or self.is_interrupted(asked)
                if ended.state == "interrupted" and call_id in self.wanted and not is_closed:
                    self._revive(asked)
            elif call_id not in self._answered and call_id not in self._ledger.foreign:
                unknown.append(call_id)
        return tuple(unknown)

    def _require(self, call: Call) -> None:
        """Upstream waits on a built-in call that it runs itself: it can only be asking."""
        is_parked = call.state == "unowned" and self._is_platforms(call)
        if is_parked and call.decision is None and call.id in self.wanted:
            gate = Gate("upstream", call.permission, "required_action")
            self._hold(replace(call, detail=None), gate)

    def _revive(self, call: Call) -> None:
        """Upstream asks again for a call that an interrupt had closed: back to where it was."""
        del self._ledger.over[call.id]
        if call.result is not None:
            # A send from before the interrupt may still be under way.
            self._sends.resume(self._ledger.save(call, "posting"))
        elif call.attempts > 0:
            call = self._ledger.save(call, "dispatched")
            if call.id not in self._ledger.running:
                self._ledger.emit(Watch(call.id))
        elif call.decision is not None and call.decision.status == "sending":
            self._sends.resume(self._ledger.save(call, "held"))
        elif call.confirmation == "allow":
            self._admit(call)
        elif call.gate is not None and call.gate.reason in REOPENING:
            self._hold(call, call.gate)  # upstream's gate, if it had one, was opened before that
        else:
            self._judge(call)

    # ---- registry, policies, resuming

    def tools_changed(self, tools: Mapping[str, Tool]) -> None:
        """The registry changed: unowned calls may find an owner, waiting ones may lose theirs."""
        self.tools = tools
        for call in list(self._ledger.calls.values()):
            is_owned = self._tool(call) is not None
            is_held_by_us = call.state == "held" and call.gate is not None and call.gate.reason in _OURS
            if call.id in self._unread:
                continue
            if call.state == "unowned" and is_owned:
                self._admit(call)
            elif (call.state == "queued" or is_held_by_us) and not is_owned:
                self._park(call)

    def rules_changed(self, rules: tuple[Rule, ...]) -> None:
        """Rules changed: one that is new may answer for a person who is asked already."""
        if rules == self.rules:
            return
        self.rules = rules
        for call_id in self._ledger.in_state["held"]:
            call = self._ledger.calls[call_id]
            if call.decision is None and self._answering(call, call.gate) is not None:
                self._ledger.emit(ConsultRules(call_id))

    def policies_read(self) -> None:
        """Calls that were held for want of a policy may be free now."""
        for call in list(self._ledger.calls.values()):
            is_unread = call.gate is not None and call.gate.reason == "unread_policy"
            is_waiting = call.state == "held" and is_unread and call.decision is None
            if is_waiting and judge(call, self.policies, None)[0] == "run":
                self._admit(replace(call, gate=None))

    def resume(self, unfinished: Collection[Call]) -> None:
        """History was read once: take up what an earlier run left half done."""
        if not self._unread:
            return
        self._unread.clear()
        for call in unfinished:
            if call.id in self._ledger.posts:
                continue
            is_ruled = call.decision is not None and call.decision.status == "sending"
            is_asked = call.state == "held" and call.decision is None
            if call.state == "answered" and call.result is not None:
                self._sends.answer(call, call.result)
            elif call.state == "posting" or (call.state == "held" and is_ruled):
                self._sends.resume(call)
            elif call.state == "unowned" and self._tool(call) is not None:
                self._admit(call)  # its tool was registered while nobody served the session
            elif is_asked and (is_promised(call) or self._answering(call, call.gate) is not None):
                self._ledger.emit(ConsultRules(call.id))


def _disabled(tool: Tool) -> Result:
    why = "by its operator" if tool.disabled_reason is None else "since its endpoint answered that it is gone"
    return error_result(f"The tool {tool.name!r} is disabled {why}. Nothing was sent to it.")


def _denial(decision: Decision) -> str:
    """What the agent is told of a deny on a gate of ours."""
    if decision.via == "expiry" and decision.deny_message:
        return decision.deny_message
    message = decision.deny_message or "no reason was given"
    who = "a standing rule" if decision.via == VIA else "a reviewer"
    return f"Denied by {who}: {message.rstrip('.')}. Do not retry without new instructions."


def _call(use: ev.Use) -> Call:
    return Call(
        id=use.id,
        kind=ev.kind(use),
        tool=use.name,
        input=bytes(use.input),
        state="queued",
        thread_id=use.session_thread_id,
        processed_at=use.processed_at,
        permission=use.evaluated_permission,
    )
