"""One tool call: who must answer it, and what it came to."""

from dataclasses import dataclass
from typing import Literal

from app.simulator.refusal import Json
from app.simulator.script import CallSpec, EnvironmentKind, policy

Awaited = Literal["result", "verdict", "server"]
Verdict = Literal["allow", "deny"]
Closing = Literal["answered", "denied", "interrupted", "thread_terminated"]

INTERRUPTED_TEXT = "Tool execution was interrupted before completion. Please retry."

_TRUTH_OF_POLICY = {"always_allow": "allow", "always_ask": "ask", "auto": "ask"}
_EVALUATION = {
    "allow": {"type": "always_allow"},
    "ask": {"type": "always_ask"},
    "deny": {"type": "auto", "evaluated_permission": {"type": "deny", "reason_code": "high_risk"}},
}


@dataclass(eq=False)
class Call:
    """A call that an agent has made."""

    id: str
    thread_id: str
    spec: CallSpec
    input: Json
    permission: str
    """What the server goes by: `allow`, `ask` or `deny`, whatever the event shows."""
    environment: EnvironmentKind
    verdict: Verdict | None = None
    closing: Closing | None = None

    @property
    def runs_at_client(self) -> bool:
        """Whether the result comes from outside: custom calls, and built-in ones in a self-hosted
        environment."""
        if self.spec.kind == "custom":
            return True
        return self.spec.kind == "builtin" and self.environment == "self_hosted" and not self.is_web

    @property
    def is_web(self) -> bool:
        """Whether it is one of the built-in calls that run on the server in every environment."""
        return self.spec.kind == "builtin" and self.spec.name.startswith("web_")

    @property
    def awaits(self) -> Awaited | None:
        """What it waits for; None once it is closed."""
        if self.closing is not None:
            return None
        if self.spec.kind != "custom" and self.permission == "ask" and self.verdict is None:
            return "verdict"
        return "result" if self.runs_at_client else "server"

    @property
    def awaits_client(self) -> bool:
        """Whether a client must act before it can go on."""
        return self.awaits in ("result", "verdict")

    @property
    def result_type(self) -> str:
        """The type of the event in which the server gives its result."""
        return "agent.mcp_tool_result" if self.spec.kind == "mcp" else "agent.tool_result"

    @property
    def result_key(self) -> str:
        """The field in which that event names the call."""
        return "mcp_tool_use_id" if self.spec.kind == "mcp" else "tool_use_id"


def true_permission(agent: Json, spec: CallSpec) -> str:
    """Return what the server goes by for a call: `allow`, `ask` or `deny`."""
    if spec.kind == "custom":
        return "allow"
    if spec.permission in ("allow", "ask", "deny"):
        return spec.permission
    if spec.permission in (None, "absent"):
        return _TRUTH_OF_POLICY.get(policy(agent, spec), "ask")
    return "ask"


def call_event(call: Call, *, shows_permission: bool) -> tuple[str, Json]:
    """Return the type and the fields of the event that announces a call."""
    fields: Json = {"name": call.spec.name, "input": call.input}
    if call.spec.kind == "custom":
        return "agent.custom_tool_use", {**fields, "session_thread_id": None}
    if call.spec.kind == "mcp":
        fields = {"mcp_server_name": call.spec.server, **fields}
    if shows_permission and call.spec.permission != "absent":
        fields["evaluated_permission"] = call.spec.permission or call.permission
        evaluation = call.spec.evaluation or _EVALUATION.get(fields["evaluated_permission"])
        if evaluation is not None:
            fields["evaluation"] = evaluation
    event_type = "agent.mcp_tool_use" if call.spec.kind == "mcp" else "agent.tool_use"
    return event_type, {**fields, "session_thread_id": None}


def denial_text(name: str, deny_message: str | None) -> str:
    """Return what the agent is told when a person denies a call."""
    return f"The user denied permission to use {name}." + (f" {deny_message}" if deny_message else "")
