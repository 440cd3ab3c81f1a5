"""Drives a session machine in tests: notices in, and what its effects came to.

Nothing here is a fake of ours: the machine is real, time is a number that the test sets, and upstream, the
webhooks and the store are the test's own statements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from app.core import events as ev
from app.core import protocol as p
from app.core.calls import Call, Decision, Result
from app.core.rules import Rule
from app.core.session import SessionMachine, Stored
from app.core.tools import SigningSecret, Tool

T0 = datetime(2026, 10, 29, 14, 0, tzinfo=UTC).timestamp()
ALWAYS_ALLOW = (
    {"type": "agent_toolset_20260401", "default_config": {"permission_policy": {"type": "always_allow"}}},
)
ECHO = Tool(name="echo", url="https://tools.example/echo", secrets=(SigningSecret(b"s" * 32),))
GATED = Tool(name="gated", url="https://tools.example/gated", secrets=(SigningSecret(b"s" * 32),))

_clock = iter(range(1, 10_000_000))


def stamp(at: float) -> str:
    """Seconds after T0 as the API writes times."""
    return datetime.fromtimestamp(T0 + at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def event(type_: str, id: str | None = None, *, at: float | str | None = "next", **fields: Any) -> Any:
    """An event as the wire carries it. `at` is in seconds after T0; None leaves it queued.

    Without `at`, events are a second apart in the order in which the test makes them.
    """
    number = next(_clock)
    body: dict[str, Any] = {"type": type_, "id": id if id is not None else f"sevt_{number}"}
    body["processed_at"] = None if at is None else stamp(float(number if at == "next" else at))
    body.update(fields)
    return ev.parse(json.dumps(body).encode())


def use(
    id: str, name: str = "echo", *, permission: str | None = None, thread: str | None = None, **more: Any
) -> Any:
    """A built-in call."""
    return event(
        "agent.tool_use", id, name=name, evaluated_permission=permission, session_thread_id=thread,
        **{"input": {}, **more},
    )  # fmt: skip


def custom(id: str, name: str = "echo", *, thread: str | None = None, **more: Any) -> Any:
    """A custom call."""
    return event("agent.custom_tool_use", id, name=name, session_thread_id=thread, **{"input": {}, **more})


def mcp(id: str, name: str = "search", *, permission: str | None = None, **more: Any) -> Any:
    """An MCP call."""
    return event(
        "agent.mcp_tool_use", id, name=name, mcp_server_name="github", evaluated_permission=permission,
        **{"input": {}, **more},
    )  # fmt: skip


def verdict(call_id: str, result: str | None, **more: Any) -> Any:
    """A confirmation as seen upstream."""
    return event("user.tool_confirmation", tool_use_id=call_id, result=result, **more)


def text(value: str) -> list[dict[str, str]]:
    """Content of one text block."""
    return [{"type": "text", "text": value}]


def user_result(call_id: str, value: str = "theirs", *, is_error: bool = False, **more: Any) -> Any:
    """A client's result of a built-in call."""
    return event("user.tool_result", tool_use_id=call_id, content=text(value), is_error=is_error, **more)


def custom_result(call_id: str, value: str = "theirs", *, is_error: bool = False, **more: Any) -> Any:
    """A client's result of a custom call."""
    return event(
        "user.custom_tool_result", custom_tool_use_id=call_id, content=text(value), is_error=is_error, **more
    )


def idle(reason: str | None = "end_turn", *wanted: str, id: str | None = None, **more: Any) -> Any:
    """The session goes idle; with `requires_action`, `wanted` are the event ids."""
    stop: dict[str, Any] | None = None if reason is None else {"type": reason}
    if reason == "requires_action" and stop is not None:
        stop["event_ids"] = list(wanted)
    return event("session.status_idle", id, stop_reason=stop, **more)


def result(value: str = "ok", *, is_error: bool = False) -> Result:
    """What a webhook's reply became."""
    return Result(json.dumps(text(value)).encode(), is_error)


def refused(status: int, message: str = "no") -> p.Failure:
    return p.Failure("refused", status, message)


def unknown(status: int | None = None) -> p.Failure:
    return p.Failure("unknown", status, "")


def unsent(status: int | None = None, *, retry_after_s: float | None = None) -> p.Failure:
    return p.Failure("unsent", status, "", retry_after_s)


class Life:
    """One run of one attachment to session S, with what came of it.

    `effects` are all effects so far; `deliveries`, `sends` and `saved` read them; `clear` forgets them.
    """

    def __init__(
        self,
        *,
        tools: Iterable[Tool] = (ECHO, GATED),
        stored: Stored | None = None,
        max_idle_s: float | None = None,
        environment: str | None = "self_hosted",
        agent_tools: Sequence[Any] | None = ALWAYS_ALLOW,
        rules: Iterable[Rule] = (),
        **settings: Any,
    ) -> None:
        self.now = 0.0
        self.effects: list[p.Effect] = []
        self.calls: dict[str, Call] = {}
        self._numbers: dict[tuple[type, str], int] = {}
        registry = {tool.name: tool for tool in tools}
        self.machine = SessionMachine(
            p.Settings(max_idle_s=max_idle_s, **settings), registry, stored, tuple(rules)
        )
        self.facts = p.SessionFacts(False, agent_tools, environment)  # type: ignore[arg-type]
        self._take(self.machine.start())

    def notice(self, notice: p.Notice) -> list[p.Effect]:
        """Feed one notice now; return its effects."""
        return self._take(self.machine.handle(notice, self.now))

    def _take(self, effects: list[p.Effect]) -> list[p.Effect]:
        self.effects += effects
        for effect in effects:
            if isinstance(effect, p.ReadHistory | p.Send | p.Look):
                self._numbers[type(effect), getattr(effect, "call_id", "")] = effect.number
            if isinstance(effect, p.SaveCall):
                self.calls[effect.call.id] = effect.call
        return effects

    # ---- connecting

    def retrieved(self, facts: p.SessionFacts | str | None = "default") -> list[p.Effect]:
        return self.notice(p.Retrieved(self.facts if facts == "default" else facts))  # type: ignore[arg-type]

    def opened(self) -> list[p.Effect]:
        return self.notice(p.StreamOpened())

    def page(self, *events: Any) -> list[p.Effect]:
        return self.notice(p.HistoryPage(events, self._last(p.ReadHistory)))

    def read(self, *known: Call) -> list[p.Effect]:
        return self.notice(p.HistoryRead({call.id: call for call in known}, self._last(p.ReadHistory)))

    def read_failed(self, failure: p.Failure | None = None) -> list[p.Effect]:
        return self.notice(p.HistoryFailed(failure or unknown(500), self._last(p.ReadHistory)))

    def closed(self, failure: p.Failure | None = None) -> list[p.Effect]:
        return self.notice(p.StreamClosed(failure))

    def connect(self, *history: Any) -> Life:
        """RETRIEVE, STREAM and a history of one page, all well."""
        self.retrieved()
        self.opened()
        self.page(*history)
        self.read()
        return self

    def reconnect(self, *history: Any, failure: p.Failure | None = None) -> Life:
        """The stream breaks and comes back with this history."""
        self.closed(failure)
        self.opened()
        self.page(*history)
        self.read()
        return self

    def _last(self, kind: type[Any], call_id: str = "") -> int:
        """The number of the last effect of this kind; 0 if there was none."""
        return self._numbers.get((kind, call_id), 0)

    # ---- what happens

    def receive(self, *events: Any) -> list[p.Effect]:
        effects: list[p.Effect] = []
        for one in events:
            effects += self.notice(p.Received(one))
        return effects

    def deliver(self, call_id: str, value: str | Result = "ok", *, unknown: bool = False) -> list[p.Effect]:
        """The webhook of a call answered."""
        outcome = value if isinstance(value, Result) else result(value)
        attempts = self.calls[call_id].attempts
        return self.notice(p.Delivered(call_id, outcome, attempts, outcome_unknown=unknown))

    def sent(
        self, call_id: str, failure: p.Failure | None = None, *, number: int | None = None
    ) -> list[p.Effect]:
        """The call's last send ended, or the one of this number."""
        return self.notice(p.Sent(call_id, failure, number or self._last(p.Send, call_id)))

    def looked(
        self, call_id: str, findings: p.Findings | None = None, *, failed: bool = False
    ) -> list[p.Effect]:
        found = None if failed else findings or p.Findings()
        return self.notice(p.Looked(call_id, found, self._last(p.Look, call_id)))

    def answer(self, call_id: str, value: str = "ok") -> None:
        """The webhook answered and upstream took the result."""
        self.deliver(call_id, value)
        self.sent(call_id)

    def decide(
        self,
        call_id: str,
        result: str,
        *,
        id: str = "dec_1",
        message: str | None = None,
        via: str = "api",
        by: str = "ana",
        tool_version: int | None = None,
    ) -> list[p.Effect]:
        """Somebody decided through the service."""
        given: Any = (result, "sending", by, via, None, message, id)
        decision = Decision(*given, tool_version=tool_version)
        return self.notice(p.Decided(call_id, decision))

    def at(self, now: float) -> list[p.Effect]:
        """Let time pass, waking the machine when it asks to be."""
        effects: list[p.Effect] = []
        for _ in range(1_000):
            due = self.machine.next_wake(self.now)
            if due is None or due > now:
                self.now = now
                return effects
            self.now = max(self.now, due)
            effects += self.notice(p.Tick())
        raise AssertionError("the machine never sleeps")

    # ---- what came of it

    def of(self, kind: type[Any]) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def deliveries(self) -> list[str]:
        """The calls whose webhook was called, in order."""
        return [effect.call.id for effect in self.of(p.Deliver)]

    @property
    def sends(self) -> list[dict[str, Any]]:
        """The events sent upstream, in order."""
        return [json.loads(effect.event) for effect in self.of(p.Send)]

    @property
    def end(self) -> p.End | None:
        ends = self.of(p.End)
        return ends[0] if ends else None

    def state(self, call_id: str) -> str:
        return self.calls[call_id].state

    def log(self, call_id: str) -> dict[str, Any]:
        """The call's log record in the terms of the scenarios."""
        call = self.calls[call_id]
        return {
            "executed": call.executed,
            "posted": call.posted,
            "is_error": call.result is not None and call.result.is_error,
            "confirmation": call.confirmation,
            "result": None if call.result is None else json.loads(call.result.content),
            "outcome": call.state,
        }

    def clear(self) -> None:
        self.effects = []

    def store(self, **progress: Any) -> Stored:
        """What a successor would find: the calls as saved, and the progress."""
        open_ = tuple(call for call in self.calls.values() if not call.is_over)
        over = tuple(call for call in self.calls.values() if call.is_over)
        return Stored(open_, over, replace(self.machine.progress, **progress))
