"""Everybody else: people who decide, operators, other clients, and whoever pulls the plugs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.core.calls import END_STATES
from app.core.protocol import Failure
from app.core.rules import Rule
from tests.simulation.schedule import Work
from tests.simulation.store import NOT_ATTACHED
from tests.simulation.upstream import PRIMARY, UpstreamCall

if TYPE_CHECKING:
    from tests.simulation.world import World

_RULES = (
    Rule("rul_1", "allow", tool="asks"),
    Rule("rul_2", "ask", tool="echo"),
    Rule("rul_3", "deny", tool="asks", kind="builtin"),
    Rule("rul_4", "deny", tool="other", kind="custom"),
    Rule("rul_5", "allow", tool="echo"),
)
_SILENCE = Failure("unknown", message="nothing came", is_silence=True)


class Others:
    """The rest of the world, each acting about once a second by its own chance."""

    def __init__(self, world: World) -> None:
        self._world, self._store, self._upstream = world, world.store, world.upstream
        self._random, self._troubles = world.random, world.troubles
        self._decisions = 0
        self._is_eager = self._random.random() < 0.5

    def begin(self) -> None:
        for work in (self._people, self._clients, self._operators, self._plugs):
            self._world.outside.spawn(self._again(work))

    def _again(self, act: Any) -> Work:
        while True:
            yield self._random.uniform(0.3, 1.7)
            if self._world.is_quiet:
                return
            act()

    def _happens(self, trouble: str) -> bool:
        probability = getattr(self._troubles, trouble)
        return probability > 0 and self._world.scheduler.chance(probability)

    # ---- people

    def _people(self) -> None:
        for call in list(self._store.calls.values()):
            if call.state == "held" and self._random.random() < (0.5 if self._is_eager else 0.1):
                self._decide(call.id)
        if self._random.random() < 0.02:
            unknown = [c.id for c in self._upstream.pending() if c.id not in self._store.calls]
            if unknown and not self._store.is_down:
                self._store.want(self._random.choice(unknown))
                self._world.hint()

    def _decide(self, call_id: str) -> None:
        if self._store.is_down:
            return
        self._decisions += 1
        result = "allow" if self._random.random() < 0.7 else "deny"
        # Every other deny is one that nobody gave: the call's time was over.
        via = "expiry" if result == "deny" and self._decisions % 2 else "api"
        if self._store.decide(f"dec_{self._decisions}", call_id, result, via):
            self._world.hint()

    # ---- other clients of the same session

    def _clients(self) -> None:
        pending = self._upstream.pending()
        if pending and self._happens("second_result"):
            self._answer(self._random.choice(pending))
        if pending and self._happens("second_verdict"):
            self._rule(self._random.choice(pending))
        if self._happens("interrupt"):
            self._upstream.interrupt(self._random.choice([None, None, "th1", PRIMARY]))
        for call in pending:
            if self._is_nobodys(call) and self._random.random() < 0.2:
                self._answer(call)

    def _answer(self, call: UpstreamCall) -> None:
        type_, name = ("user.tool_result", "tool_use_id")
        if call.kind == "custom":
            type_, name = ("user.custom_tool_result", "custom_tool_use_id")
        content = [{"type": "text", "text": "by another client"}]
        self._upstream.arrive(
            {"type": type_, name: call.id, "content": content, "is_error": False}, by="other"
        )

    def _rule(self, call: UpstreamCall) -> None:
        result = "allow" if self._random.random() < 0.6 else "deny"
        event = {"type": "user.tool_confirmation", "tool_use_id": call.id, "result": result}
        self._upstream.arrive(event, by="other")

    # ---- operators

    def _operators(self) -> None:
        store, random = self._store, self._random
        if store.is_down:
            return
        if self._happens("tools_change"):
            tools = {name: tool for name, tool in self._world.registry.items() if random.random() < 0.7}
            for name, tool in tools.items():
                if random.random() < 0.2:
                    tools[name] = replace(tool, enabled=False)
            store.set_tools(tools)
            self._world.hint()
        if self._happens("settings_change"):
            changes: dict[str, Any] = {"concurrency": random.choice([1, 2, 8])}
            if store.attachment.settings.max_idle_s is not None:
                changes["max_idle_s"] = random.choice([15.0, 60.0])
            store.change_settings(replace(store.attachment.settings, **changes))
            self._world.hint()
        if self._happens("rules_change"):
            store.set_rules(tuple(rule for rule in _RULES if random.random() < 0.4))
            self._world.hint()
        if self._happens("detach"):
            store.detach()
            self._world.hint()
        if store.attachment.status in NOT_ATTACHED and random.random() < 0.3:
            store.attach()
            self._world.hint()

    # ---- plugs

    def _plugs(self) -> None:
        world, random, after = self._world, self._random, self._world.scheduler.after
        alive = [replica for replica in world.replicas if replica.process.is_alive]
        if not alive and random.random() < 0.5:
            world.start_replica()
        for replica in alive:
            process = replica.process
            if self._happens("crash"):
                process.is_alive = False
                world.note("killed", replica.replica_id)
            elif self._happens("pause"):
                process.paused_until = world.scheduler.now + random.choice([2.0, 14.0, 30.0])
                world.note(f"stands still until {process.paused_until:.2f}", replica.replica_id)
            elif self._happens("handover"):
                world.note("SIGTERM", replica.replica_id)
                replica.stop()
                after(random.uniform(0.0, 2.0), world.start_replica)
        if self._happens("stream_ends"):
            self._upstream.end_streams(random.choice([None, Failure("unknown", message="cut")]))
        if self._happens("stream_silent"):
            self._mute()
        if self._happens("store_outage"):
            self._outage(self._store, "the store", random.choice([1.0, 5.0, 20.0]))
        if self._happens("upstream_outage"):
            self._upstream.end_streams(Failure("unknown", message="cut"))
            self._outage(self._upstream, "upstream", random.choice([2.0, 15.0]))
        if self._happens("thread_end"):
            self._upstream.end_thread(random.choice(["th1", "th2"]))
        if self._happens("session_end"):
            self._upstream.end_session()

    def _mute(self) -> None:
        for stream in self._upstream.streams:
            stream.is_mute = True
            self._world.scheduler.after(90.0, lambda s=stream: s.end(_SILENCE))  # type: ignore[misc]

    def _outage(self, what: Any, name: str, for_s: float) -> None:
        if self._world.is_quiet or what.is_down:
            return
        what.is_down = True
        self._world.note(f"{name} is down for {for_s:g} s")

        def up() -> None:
            what.is_down = False

        self._world.scheduler.after(for_s, up)

    # ---- once the troubles are over

    def repair(self) -> None:
        """What people and operators do when all else works: decide, attach, answer what is not ours."""
        world, store, upstream = self._world, self._store, self._upstream
        if not any(replica.process.is_alive for replica in world.replicas):
            world.start_replica()
        for replica in world.replicas:
            replica.process.paused_until = 0.0
        for call in list(store.calls.values()):
            if call.state == "held":
                self._decide(call.id)
        if store.attachment.status in NOT_ATTACHED and not self.is_served_enough():
            store.attach()
            world.hint()
        for pending in upstream.pending():
            call = store.calls.get(pending.id)
            is_given_up = call is not None and call.state in END_STATES
            if pending.needs == "result" and (self._is_nobodys(pending) or is_given_up):
                self._answer(pending)
            elif pending.needs == "verdict" and is_given_up:
                self._rule(pending)

    def _is_nobodys(self, call: UpstreamCall) -> bool:
        return call.tool == "nope" and (call.kind != "custom" or "*" not in self._world.registry)

    def is_served_enough(self) -> bool:
        """Whether nothing is left for us to do: nothing waits upstream, every message is stored."""
        if self._store.attachment.end_reason in ("terminated", "deleted", "session_gone"):
            return True
        missing = [
            logged.event.id
            for logged in self._upstream.log
            if logged.type == "agent.message" and not self._is_final(logged.event.id)
        ]
        is_open = any(call.state not in END_STATES for call in self._store.calls.values())
        return not missing and not is_open and not self._upstream.waits_for()

    def _is_final(self, id_: str) -> bool:
        return id_ in self._store.messages and self._store.messages[id_].state == "final"
