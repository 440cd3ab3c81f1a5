"""Whether a call may run: promise 1. Nothing unknown runs.

`judge` looks at one call and what is known about it, and says what to do with it. It never looks at
whose tool it is beyond "ours or not"; that a tool of ours also asks first is a second gate, below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from app.core.calls import Call, Gate
from app.core.tools import Tool

Ruling = Literal["run", "hold", "deny", "ignore"]


ALLOW: Final = "always_allow"
UNREADABLE: Final = "unreadable"


@dataclass(frozen=True, slots=True)
class Policies:
    """The permission policies of the session's own agent, as far as they were read.

    Each toolset says something of tools by name and something of all others; None: nothing was read.
    """

    toolsets: tuple[tuple[Mapping[str, str], str], ...] = ()

    def of(self, tool: str) -> str | None:
        """The policy of a built-in tool, the strictest if several toolsets speak; None if none does."""
        said = [by_name.get(tool, default) for by_name, default in self.toolsets]
        return next((policy for policy in said if policy != ALLOW), said[0] if said else None)


UNREAD: Final = Policies()


def read_policies(agent_tools: Sequence[Any] | None) -> Policies:
    """Read the policies of the built-in toolsets out of a session's `agent.tools`.

    A toolset that names no policy has the documented default, `always_allow`. What cannot be read stays
    unknown, and the calls that it may concern are held.
    """
    entries = [entry for entry in agent_tools or () if isinstance(entry, Mapping)]
    toolsets = [entry for entry in entries if str(entry.get("type", "")).startswith("agent_toolset")]
    return Policies(tuple(_toolset(toolset) for toolset in toolsets))


def _toolset(entry: Mapping[str, Any]) -> tuple[Mapping[str, str], str]:
    default = _policy(entry.get("default_config"), ALLOW)
    configs = entry.get("configs")
    if configs is None:
        return {}, default
    if not isinstance(configs, list | tuple):
        return {}, UNREADABLE
    by_name: dict[str, str] = {}
    for config in configs:
        name = config.get("name") if isinstance(config, Mapping) else None
        if not isinstance(name, str):
            return {}, UNREADABLE  # it may have been about any tool
        by_name[name] = _policy(config, default)
    return by_name, default


def _policy(config: object, default: str) -> str:
    if config is None:
        return default
    if not isinstance(config, Mapping):
        return UNREADABLE
    policy = config.get("permission_policy")
    if policy is None:
        return default
    type_ = policy.get("type") if isinstance(policy, Mapping) else None
    return type_ if isinstance(type_, str) else UNREADABLE


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
            if policy == ALLOW:
                return None
            return "unread_policy" if policy is None else "ask"


def changed_gate(call: Call, tool: Tool) -> Gate | None:
    """The gate of a call that was allowed when its tool was registered otherwise, or None.

    Whoever allowed it saw where it would go. One that was delivered stays with whom it went to.
    """
    decision = call.decision
    if decision is None or decision.tool_version in (None, tool.version) or call.attempts > 0:
        return None
    return Gate("tool", None, "tool_changed")


def tool_gate(tool: Tool) -> Gate | None:
    """Our own gate on a call of this tool, or None."""
    return Gate("tool", None, "tool_asks") if tool.gate == "ask" else None
