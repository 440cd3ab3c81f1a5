"""The agent of the modelled session: turns of messages and calls, and the idles in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.schedule import Work
from tests.simulation.upstream import PRIMARY, UpstreamCall

if TYPE_CHECKING:
    from tests.simulation.world import World

_KINDS = ("custom", "custom", "builtin", "builtin", "builtin", "mcp")
_NAMES = ("echo", "echo", "other", "asks", "nope")
_PERMISSIONS = ("allow", "allow", "ask", "ask", "deny", None, None, "zz")


class Agent:
    """Calls tools and waits for what upstream needs, turn after turn, until the world is quiet."""

    def __init__(self, world: World) -> None:
        self._world, self._upstream, self._random = world, world.upstream, world.random
        self.is_done = False
        self._messages = 0

    def begin(self) -> None:
        if self._upstream.names_primary:
            self._upstream.emit("session.thread_status_running", session_thread_id=PRIMARY)
        self._world.outside.spawn(self._work())

    def _work(self) -> Work:
        uniform = self._random.uniform
        yield uniform(0.0, 3.0)
        while not self._world.is_quiet and self._upstream.over is None:
            yield from self._turn()
            if self._random.random() < 0.4 and self._upstream.over is None:
                self._idle("end_turn")
                yield uniform(0.5, self._random.choice([2.0, 5.0, 40.0]))
        if self._upstream.over is None:
            self._idle("end_turn")
        self.is_done = True

    def _turn(self) -> Work:
        yield from self._message()
        calls = [self._call() for _ in range(self._random.choice([0, 1, 2, 3, 6]))]
        told: list[str] | None = None
        told_at = 0.0
        while self._upstream.over is None and any(call.end is None for call in calls):
            yield self._random.uniform(0.05, 0.4)
            waits = self._upstream.waits_for()
            is_interrupted = self._world.scheduler.now > told_at + 5.0
            if waits and (waits != told or is_interrupted) and self._upstream.over is None:
                told, told_at = waits, self._world.scheduler.now
                if not self._world.is_quiet or is_interrupted:
                    self._ask(waits)
        yield 0.05

    def _call(self) -> UpstreamCall:
        threads = [thread for thread in ("th1", "th2") if thread not in self._upstream.terminated]
        thread = self._random.choice(threads) if threads and self._random.random() < 0.25 else None
        kind = self._random.choice(_KINDS)
        name = self._random.choice(_NAMES) if kind != "mcp" else "search"
        return self._upstream.call(kind, name, self._random.choice(_PERMISSIONS), thread)

    def _message(self) -> Work:
        """A message, as a preview first and then whole."""
        self._messages += 1
        id_ = f"sevt_msg{self._messages}"
        text = f"message {self._messages} of {self._world.seed}"
        self._upstream.show_preview({"type": "event_start", "event": {"type": "agent.message", "id": id_}})
        for piece in (text[:7], text[7:]):
            delta = {"type": "content_delta", "index": 0, "content": {"type": "text", "text": piece}}
            self._upstream.show_preview({"type": "event_delta", "event_id": id_, "delta": delta})
            yield self._random.uniform(0.01, 0.6)
        if self._upstream.over is None:
            self._upstream.emit("agent.message", id=id_, content=[{"type": "text", "text": text}])
            self._upstream.emit("span.model_request_end", model_request_start_id="x", is_error=False)

    def _idle(self, reason: str) -> None:
        self._upstream.emit("session.usage")
        self._upstream.emit("session.status_idle", stop_reason={"type": reason})

    def _ask(self, waits: list[str]) -> None:
        """Say what is waited for: at least some of it, and perhaps what was answered already."""
        troubles, chance = self._upstream.troubles, self._world.scheduler.chance
        ids: list[str] = list(waits)
        if len(ids) > 1 and chance(troubles.wanted_partial):
            ids = self._random.sample(ids, self._random.randrange(1, len(ids)))
        if chance(troubles.wanted_stale):
            ids += [call.id for call in self._upstream.calls.values() if call.end == "answered"][-2:]
        stop: dict[str, Any] = {"type": "requires_action", "event_ids": ids}
        self._upstream.emit("session.usage")
        self._upstream.emit("session.status_idle", stop_reason=stop)
