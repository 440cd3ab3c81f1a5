"""What the console says of a call, in sentences: what it would do, why it was asked, what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from app.console.text import Field, Input, line
from app.core.rules import ArgumentTest, Rule
from app.store.calls import CallView, Gate
from app.store.decisions import DEFAULT_DENY_MESSAGE

OBJECT_CHARS_MAX: Final = 160
OPERATOR: Final = "the operator’s key"

DENY_REASONS: Final[Sequence[str]] = (
    "Not now. Ask again before you try it once more.",
    "Wrong target. Check the arguments with the user first.",
    "Too broad. Do it in smaller, reversible steps.",
    "Not allowed. Find another way that does not need this.",
)

# The agent toolset's own tools: what each does, and the member that says to what.
_BUILTIN: Final[Mapping[str, tuple[str, Sequence[str]]]] = {
    "bash": ("Run the command", ("command",)),
    "read": ("Read the file", ("file_path", "path")),
    "write": ("Write the file", ("file_path", "path")),
    "edit": ("Change the file", ("file_path", "path")),
    "glob": ("List the files", ("pattern",)),
    "grep": ("Search files for", ("pattern",)),
    "web_fetch": ("Fetch the page", ("url",)),
    "web_search": ("Search the web for", ("query",)),
}

_REASONS: Final[Mapping[str, str]] = {
    "ask": "The agent’s own policy asks a person before this tool runs.",
    "unread_policy": "The agent’s policy for this tool could not be read, so it is held.",
    "required_action": "The platform waits for a person’s word on this call.",
    "tool_asks": "The tool is registered with gate: ask, so each of its calls is held.",
    "rule_asks": "A standing rule asks a person before such calls run.",
    "rule_denies": "A standing rule is about to deny it.",
    "rule_over": "The rule that had allowed it was revoked, or has expired, before the call was sent.",
    "tool_changed": "It was allowed, and then its tool was registered anew before the call was sent.",
    "outcome_unknown": "It was delivered once and nobody knows whether it ran. Allow delivers it once more.",
}

_STATES: Final[Mapping[str, str]] = {
    "held": "waits for a person",
    "queued": "waits for its turn at the tool",
    "dispatched": "is with the tool",
    "answered": "was answered, the result is about to be posted",
    "posting": "was answered, the result is being posted",
    "posted": "is done, the result was posted",
    "unowned": "is run by the platform or another client",
    "answered_elsewhere": "was answered by another client",
    "denied": "was denied, the agent was told",
    "expired": "expired, the agent was told",
    "interrupted": "was interrupted by a user",
    "thread_terminated": "ended with its thread",
    "session_ended": "ended with its session",
    "rejected": "is over, upstream refused the result",
}


def sentence(call: CallView, shown: Input) -> tuple[str, str]:
    """Return what the call would do, as a verb and its object; the object is the agent’s own text."""
    fields = {field.name: field for field in shown.fields or ()}
    if call.kind == "builtin" and call.tool in _BUILTIN:
        verb, names = _BUILTIN[call.tool]
        told = next((fields[name] for name in names if name in fields), None)
        if told is not None:
            return verb, line(told.value, OBJECT_CHARS_MAX)
    where = " on an MCP server" if call.kind == "mcp" else ""
    if not fields:
        return f"Call {call.tool}{where}", "" if shown.raw.strip() == "{}" else "with the input below"
    return f"Call {call.tool}{where} with", line(", ".join(map(_told, fields.values())), OBJECT_CHARS_MAX)


def reason(gate: Gate | None) -> str:
    """Return why a person is asked."""
    if gate is None:
        return "It is held."
    if gate.reason == "unknown_permission":
        return f"Upstream says “{gate.permission}”, which this version does not know; the unknown is held."
    return _REASONS.get(gate.reason or "", f"It is held: {gate.reason}.")


def needs(gate: Gate | None, names: Mapping[str, str]) -> str:
    """Return whose word it takes beyond one person's, and who gave theirs; `names` are those of keys."""
    if gate is None:
        return ""
    sentences = []
    if gate.approvals:
        given = ", ".join(names.get(one.by, OPERATOR) for one in gate.approvals)
        sentences.append(f"Allowed so far by {given}.")
    if gate.rules.approvals_required > 1:
        sentences.append(
            f"It takes {gate.rules.approvals_required} different people to allow it, one to deny."
        )
    if gate.rules.approvers is not None:
        sentences.append(f"Only {', '.join(gate.rules.approvers) or 'nobody'} may decide.")
    return " ".join(sentences)


def rule(one: Rule) -> str:
    """Return what a standing rule does; names and values in it are other people's text."""
    which = "every call" if one.tool is None else f"calls of {one.tool}"
    if one.kind is not None:
        which += f" ({_KINDS[one.kind]})"
    if one.session_id is not None:
        which += f" in session {one.session_id}"
    tests = " and ".join(_test(test) for test in one.tests)
    if one.only is not None:
        others = ", ".join(sorted(one.only))
        which += f", with no arguments but {others}" if others else ", without arguments"
    return f"{_EFFECTS[one.effect]} {which}" + (f", where {tests}." if tests else ".")


def _test(test: ArgumentTest) -> str:
    name = test.argument.removeprefix("/") or "the input"
    if test.operator == "is_given":
        return f"{name} is {'given' if test.value == 'true' else 'not given'}"
    return f"{name} is {_OPERATORS[test.operator]}{test.value}"


_EFFECTS: Final = {"allow": "Allows", "ask": "Asks a person before", "deny": "Denies"}
_KINDS: Final = {"custom": "custom tool", "builtin": "built-in tool", "mcp": "MCP"}
_OPERATORS: Final = {"equals": "", "one_of": "one of ", "at_most": "at most ", "at_least": "at least "}


def tally(results: Sequence[str]) -> str:
    """Return how the last calls of a tool were decided, as the beginning of a sentence."""
    counts = {"allowed": results.count("allow"), "denied": len(results) - results.count("allow")}
    if len(results) == 1:
        return f"The last one of this tool was {next(word for word, count in counts.items() if count)}"
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"The last {len(results)} of this tool: {told}"


def deny_reason(messages: Sequence[str | None]) -> str:
    """Return the newest reason that somebody gave to an agent; it is that person's own text."""
    given = (message for message in messages if message and message != DEFAULT_DENY_MESSAGE)
    return line(next(given, ""), OBJECT_CHARS_MAX)


def destination(call: CallView, url: str | None) -> str:
    """Return where an allow leads; `url` is the registered tool's, without secrets."""
    if call.kind == "mcp":
        return "Allowed, the platform sends it to the MCP server."
    if url is None:
        return "Allowed, the platform or another client runs it; no webhook of this session does."
    return f"Allowed, it goes to {url}."


def state(call: CallView) -> str:
    """Return what becomes of the call, as the rest of a sentence that begins with it."""
    decision = call.decision
    if call.state == "held" and decision is not None and decision.status in ("sending", "accepted"):
        return "waits for upstream to take the decision" if decision.status == "sending" else "is on its way"
    if call.kind == "mcp" and call.state == "posted":
        return "is allowed, the platform runs it"
    return _STATES.get(call.state, f"is {call.state}")


def _told(field: Field) -> str:
    return f"{field.name} {field.value}"
