"""Whether a call may run: promise 1. Nothing unknown runs.

`judge` looks at one call and what is known about it, and says what to do with it. It never looks at
whose tool it is beyond "ours or not"; that a tool of ours also asks first is a second gate, below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.core.calls import Call, Gate
from app.core.tools import Tool

Ruling = Literal["run", "hold", "deny", "ignore"]


@dataclass(frozen=True, slots=True)
class Policies:
    """The permission policies of the session's own agent, as far as they were read.

    `by_name` holds what a toolset says of one tool, `default` what it says of all others; None: unread.
    """

    by_name: Mapping[str, str]
    default: str | None

    def of(self, tool: str) -> str | None:
        """The policy of a built-in tool, or None if it is not known."""
        return self.by_name.get(tool, self.default)


UNREAD = Policies({}, None)


def read_policies(agent_tools: Sequence[Mapping[str, Any]] | None) -> Policies:
    """Read the policies of the built-in toolset out of a session's `agent.tools`.

    A toolset that names no policy has the documented default, `always_allow`. What cannot be read stays
    unknown, and the calls it concerns are held.
    """
    by_name: dict[str, str] = {}
    default: str | None = None
    for entry in agent_tools or ():
        if not str(entry.get("type", "")).startswith("agent_toolset"):
            continue
        config = entry.get("default_config")
        default = _policy(config, "always_allow")
        configs = entry.get("configs")
        for tool in configs if isinstance(configs, Sequence) else ():
            name = tool.get("name") if isinstance(tool, Mapping) else None
            if isinstance(name, str):
                by_name[name] = _policy(tool, default)
    return Policies(by_name, default)


def _policy(config: object, default: str) -> str:
    if config is None:
        return default
    if not isinstance(config, Mapping):
        return "unreadable"
    policy = config.get("permission_policy")
    if policy is None:
        return default
    type_ = policy.get("type") if isinstance(policy, Mapping) else None
    return type_ if isinstance(type_, str) else "unreadable"


def judge(
    call: Call,
    policies: Policies,
    verdict: Literal["allow", "deny"] | None,
    *,
    is_required: bool = False,
) -> tuple[Ruling, Gate | None]:
    """Rule on a call by upstream's gate.

    `verdict` is the standing one, deny being sticky. `is_required` says that upstream named the call in
    `requires_action`. `ignore` is for MCP calls that need nothing from us.
    """
    if call.permission == "deny" or verdict == "deny":
        return "deny", None
    reason = _why_held(call, policies, is_required)
    if reason is None:
        return ("ignore" if call.kind == "mcp" else "run"), None
    return ("run" if verdict == "allow" else "hold"), Gate("upstream", call.permission, reason)


def _why_held(call: Call, policies: Policies, is_required: bool) -> str | None:
    if call.permission == "allow":
        return None
    if call.permission is not None:
        return "ask" if call.permission == "ask" else "unknown_permission"
    match call.kind:
        case "custom":
            return None
        case "mcp":
            return "required_action" if is_required else None
        case "builtin":
            # A child thread runs another agent, whose policies RETRIEVE does not show.
            policy = policies.of(call.tool) if call.thread_id is None else None
            if policy == "always_allow":
                return None
            return "unread_policy" if policy is None else "ask"


def tool_gate(tool: Tool) -> Gate | None:
    """Our own gate on a call of this tool, or None."""
    return Gate("tool", None, "tool_asks") if tool.gate == "ask" else None
