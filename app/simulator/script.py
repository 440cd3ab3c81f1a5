"""Scenarios: what an agent does when a user writes to it, as data.

A scenario is a JSON object, in `scenarios/<name>.json` or given inline:

    {"name": "demo",
     "environment": "cloud" | "self_hosted",
     "agent": {"name", "system"?, "model"?, "tools"?: [...], "mcp_servers"?: [...]},
     "agents": {"reviewer": {...}},                    agents of child threads
     "switches": {"unpark_s": 0.2},                    see `Switches`
     "turns": [{"steps": [...]}, ...]}

The first `user.message` plays the first turn, the next one the next; the last turn is played again and again.
`tools` and `mcp_servers` are the API's own objects. A step is one of

    {"do": "message", "text" | "content", "deltas"?: 8, "pause_s"?: 0.05, "lost"?: false}
    {"do": "thinking"}
    {"do": "call", "calls": [call, ...], "pause_s"?: 0, "wait"?: true}     several calls of one model response
    {"do": "wait"}                                       for the calls that were made with "wait": false
    {"do": "pause", "s": 1.5}
    {"do": "thread", "as": "r", "agent": "reviewer", "text": "...", "steps": [...], "join"?: false}
    {"do": "join", "thread": "r"}                        idle until that thread has ended its turn
    {"do": "end_thread", "thread": "r"}                  terminates it
    {"do": "error", "error": {...}}                      its `retry_status` decides what follows
    {"do": "reschedule", "pause_s": 1}
    {"do": "emit", "event": {...}}                       any event; without `id` and time it gets its own
    {"do": "end", "stop_reason"?: "end_turn" | {...}, "stop_details"?: {...}}
    {"do": "terminate"}                                  the whole session

and a call is

    {"tool": "custom" | "builtin" | "mcp", "name", "input", "as"?: "order", "server"?: "github",
     "permission"?: "allow" | "ask" | "deny" | "absent" | any text, "evaluation"?: {...},
     "output"?: "text", "is_error"?: false, "run_s"?: 0}

`permission` defaults to the agent's policy for the tool. "absent" leaves it out of the event and lets the
policy rule; a text that is none of the others is shown as it is and treated as "ask". `output`, `is_error`
and `run_s` (seconds) describe what the server makes of a call that it runs itself.

In texts, inputs and events `${order.text}` is the text of the result of the call named "order",
`${order.is_error}` and `${order.verdict}` its other parts; `${user.text}` is the message that began the turn.
Pauses are in seconds.
"""

import json
import re
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal, TypeVar

from app.simulator.refusal import Json

BURST_CALLS_MAX = 100_000

CallKind = Literal["custom", "builtin", "mcp"]
EnvironmentKind = Literal["cloud", "self_hosted"]

_NAME = re.compile(r"\$\{(\w+)\.(\w+)\}")
_Value = TypeVar("_Value")


class BadScript(ValueError):
    """A scenario that cannot be played; the text names the place."""


@dataclass(frozen=True)
class CallSpec:
    """One tool call, and what becomes of it where the server is the one to run it."""

    kind: CallKind
    name: str
    input: Json = field(default_factory=dict)
    alias: str | None = None
    server: str = ""
    permission: str | None = None
    evaluation: Json | None = None
    output: str = "ok"
    is_error: bool = False
    run_s: float = 0.0


@dataclass(frozen=True)
class Message:
    content: list[Json]
    deltas: int = 0
    pause_s: float = 0.0
    is_lost: bool = False


@dataclass(frozen=True)
class Thinking:
    pass


@dataclass(frozen=True)
class Calls:
    specs: tuple[CallSpec, ...]
    pause_s: float = 0.0
    waits: bool = True


@dataclass(frozen=True)
class Wait:
    pass


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Spawn:
    alias: str
    agent: str
    text: str
    steps: tuple["Step", ...]
    joins: bool = False


@dataclass(frozen=True)
class Join:
    alias: str


@dataclass(frozen=True)
class EndThread:
    alias: str


@dataclass(frozen=True)
class Trouble:
    error: Json


@dataclass(frozen=True)
class Reschedule:
    pause_s: float


@dataclass(frozen=True)
class Emit:
    event: Json


@dataclass(frozen=True)
class End:
    stop_reason: Json
    stop_details: Json | None = None


@dataclass(frozen=True)
class Terminate:
    pass


Step = (
    Message
    | Thinking
    | Calls
    | Wait
    | Pause
    | Spawn
    | Join
    | EndThread
    | Trouble
    | Reschedule
    | Emit
    | End
    | Terminate
)


@dataclass(frozen=True)
class Script:
    """A scenario that is ready to play."""

    name: str
    environment: EnvironmentKind
    agent: Json
    turns: tuple[tuple[Step, ...], ...]
    agents: dict[str, Json] = field(default_factory=dict)
    switches: dict[str, Any] = field(default_factory=dict)

    def turn(self, number: int) -> tuple[Step, ...]:
        """Return the steps of the turn that the message with this number (from 0) begins."""
        return self.turns[min(number, len(self.turns) - 1)]


def names() -> list[str]:
    """Return the names of the scenarios that come with the simulator."""
    found = (each.name for each in resources.files("app.simulator").joinpath("scenarios").iterdir())
    return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


def load(name: str) -> Script:
    """Return a scenario that comes with the simulator.

    Raises:
        BadScript: there is none of that name.
    """
    if name not in names():
        raise BadScript(f"no scenario {name!r}; there are {', '.join(names())}")
    text = resources.files("app.simulator").joinpath("scenarios", f"{name}.json").read_text(encoding="utf-8")
    return parse(json.loads(text))


def parse(source: Json) -> Script:
    """Return the scenario that a JSON object describes.

    Raises:
        BadScript: something in it is missing, unknown or of the wrong kind.
    """
    try:
        turns = tuple(tuple(_step(step) for step in turn["steps"]) for turn in source["turns"])
        environment = source.get("environment", "cloud")
        if environment not in ("cloud", "self_hosted"):
            raise BadScript(f"environment is {environment!r}; it is cloud or self_hosted")
        if not turns:
            raise BadScript("a scenario needs at least one turn")
        return Script(
            name=source.get("name", "inline"),
            environment=environment,
            agent=source.get("agent", {"name": "agent"}),
            turns=turns,
            agents=source.get("agents", {}),
            switches=source.get("switches", {}),
        )
    except KeyError as error:
        raise BadScript(f"{error.args[0]!r} is missing") from error
    except (TypeError, AttributeError) as error:
        raise BadScript(f"not a scenario: {error}") from error


def _step(source: Json) -> Step:
    match source["do"]:
        case "message":
            content = source.get("content") or [{"type": "text", "text": source["text"]}]
            return Message(
                content,
                int(source.get("deltas", 0)),
                float(source.get("pause_s", 0)),
                source.get("lost", False),
            )
        case "thinking":
            return Thinking()
        case "call":
            specs = tuple(_call(call) for call in source["calls"])
            return Calls(specs, float(source.get("pause_s", 0)), source.get("wait", True))
        case "wait":
            return Wait()
        case "pause":
            return Pause(float(source["s"]))
        case "thread":
            steps = tuple(_step(step) for step in source["steps"])
            return Spawn(source["as"], source["agent"], source["text"], steps, source.get("join", False))
        case "join":
            return Join(source["thread"])
        case "end_thread":
            return EndThread(source["thread"])
        case "error":
            return Trouble(source["error"])
        case "reschedule":
            return Reschedule(float(source.get("pause_s", 0)))
        case "emit":
            return Emit(source["event"])
        case "end":
            reason = source.get("stop_reason", "end_turn")
            return End({"type": reason} if isinstance(reason, str) else reason, source.get("stop_details"))
        case "terminate":
            return Terminate()
        case unknown:
            raise BadScript(f"no step {unknown!r}")


def _call(source: Json) -> CallSpec:
    kind = source["tool"]
    if kind not in ("custom", "builtin", "mcp"):
        raise BadScript(f"tool is {kind!r}; it is custom, builtin or mcp")
    return CallSpec(
        kind=kind,
        name=source["name"],
        input=source.get("input", {}),
        alias=source.get("as"),
        server=source.get("server", ""),
        permission=source.get("permission"),
        evaluation=source.get("evaluation"),
        output=source.get("output", "ok"),
        is_error=source.get("is_error", False),
        run_s=float(source.get("run_s", 0)),
    )


def fill(value: _Value, known: dict[str, dict[str, str]]) -> _Value:
    """Return `value` with every `${name.part}` in its texts replaced by what is known; the unknown stay."""

    def one(found: re.Match[str]) -> str:
        return known.get(found[1], {}).get(found[2], found[0])

    def walk(part: Any) -> Any:
        if isinstance(part, str):
            return _NAME.sub(one, part) if "${" in part else part
        if isinstance(part, list):
            return [walk(each) for each in part]
        if isinstance(part, dict):
            return {key: walk(each) for key, each in part.items()}
        return part

    return walk(value)  # type: ignore[no-any-return]


def policy(agent: Json, spec: CallSpec) -> str:
    """Return the policy that the agent has for a call: `always_allow`, `always_ask` or `auto`."""
    kind, default = (
        ("mcp_toolset", "always_ask") if spec.kind == "mcp" else ("agent_toolset_20260401", "always_allow")
    )
    for tool in agent.get("tools", []):
        if tool.get("type") != kind or (spec.kind == "mcp" and tool.get("mcp_server_name") != spec.server):
            continue
        for config in tool.get("configs", []):
            if config.get("name") == spec.name and "permission_policy" in config:
                return str(config["permission_policy"]["type"])
        return str(tool.get("default_config", {}).get("permission_policy", {}).get("type", default))
    return default


def burst(calls: int, gated: int, parallel: int, *, environment: EnvironmentKind = "self_hosted") -> Script:
    """Return a scenario of one turn with `calls` calls, `parallel` at a time, of which `gated` ask first.

    The calls are `lookup_order` (custom), and `bash` where they ask, spread evenly. Each input says which
    call it is.

    Raises:
        BadScript: the numbers contradict each other, or are over `BURST_CALLS_MAX`.
    """
    if not (0 <= gated <= calls and parallel >= 1 and 1 <= calls <= BURST_CALLS_MAX):
        raise BadScript(
            f"burst of {calls} calls, {gated} gated, {parallel} at a time; up to {BURST_CALLS_MAX} calls"
        )
    specs = []
    for number in range(calls):
        asks = (number + 1) * gated // calls > number * gated // calls
        if asks:
            specs.append(CallSpec("builtin", "bash", {"command": f"echo {number}"}, permission="ask"))
        else:
            specs.append(CallSpec("custom", "lookup_order", {"order_id": f"A-{number}"}))
    batches = [Calls(tuple(specs[first : first + parallel])) for first in range(0, calls, parallel)]
    agent = {
        "name": "burst",
        "tools": [
            {
                "type": "agent_toolset_20260401",
                "default_config": {"enabled": True, "permission_policy": {"type": "always_ask"}},
                "configs": [],
            },
            {
                "type": "custom",
                "name": "lookup_order",
                "description": "Look up one order.",
                "input_schema": {
                    "type": "object",
                    "properties": {"order_id": {"type": "string"}},
                    "required": ["order_id"],
                },
            },
        ],
    }
    done = Message([{"type": "text", "text": f"All {calls} calls are done."}])
    return Script("burst", environment, agent, ((*batches, done),))
