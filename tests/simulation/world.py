"""A whole life: one session, its agent, people, other clients, one or two replicas, and all that goes wrong.

`World(seed).live()` lets it go wrong for a while, then stops every trouble, repairs what is broken, and waits
until all is at rest. The record of it is what the checker reads.
"""

from __future__ import annotations

from dataclasses import fields, replace

from app.core import protocol as p
from app.core.calls import END_STATES
from app.core.tools import Tool
from tests.simulation.agent import Agent
from tests.simulation.client import Client
from tests.simulation.others import Others
from tests.simulation.record import AtEnd, Note, Record, UpstreamState
from tests.simulation.replica import Replica
from tests.simulation.schedule import Process, Scheduler
from tests.simulation.store import NOT_ATTACHED, Store
from tests.simulation.troubles import Troubles
from tests.simulation.upstream import Upstream
from tests.simulation.webhooks import Tools
from tests.simulation.writer import Writer

QUIET_S_MAX = 1_500.0
"""So long after the last trouble everything must be at rest."""


class World:
    """Everything of one life. The same seed makes the same life."""

    replica_class: type[Replica] = Replica

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed)
        self.random = self.scheduler.random
        self.record = Record()
        self.troubles = Troubles.draw(self.random)
        if seed % 5 == 2:  # drawn from the seed alone, so that other lives stay what they were
            self.troubles.tool_promises, self.troubles.tool_forgets = 0.5, 0.1
        if seed % 7 == 3:
            self.troubles.rules_change = 0.1
        self.troubles_drawn = self.troubles.names
        self.is_quiet = False
        self.settings = p.Settings(
            max_idle_s=self.random.choice([None, 15.0, 60.0]),
            max_reconnects=self.random.choice([None, None, None, 3]),
            concurrency=self.random.choice([1, 2, 8]),
        )
        self.registry = {tool.name: tool for tool in self._tools()}
        self.store = Store(self.scheduler, self.record, self.settings, self.registry)
        self.upstream = Upstream(self.scheduler, self.record, self.troubles)
        self.tools = Tools(self.scheduler, self.record, self.troubles, self.store, self.hint)
        self.replicas: list[Replica] = []
        self._replica_count = 0
        self.outside = Process(self.scheduler)
        self.agent = Agent(self)
        self.others = Others(self)

    def _tools(self) -> list[Tool]:
        choice = self.random.choice
        names = ["echo", "asks", "other", *(["*"] if self.seed % 4 == 3 else [])]
        return [
            Tool(
                name=name,
                url=f"https://tools.example/{name}",
                retry=choice(["never", "connect_only", "safe"]),
                on_unknown=choice(["answer", "ask"]),
                gate="ask" if name == "asks" else "upstream",
                timeout_s=choice([4.0, 15.0]),
                attempt_timeout_s=choice([None, 3.0]),
                callback_timeout_s=20.0,
            )
            for name in names
        ]

    # ---- the life

    def live(self) -> Record:
        self.note(f"policy {self.upstream.policy}")
        if self.upstream.replays:
            self.note("streams replay the history")
        for _ in range(self.random.choice([1, 2])):
            self.start_replica()
        self.agent.begin()
        self.others.begin()
        self.scheduler.run(self.random.uniform(20.0, 120.0))
        self._calm_down()
        limit = self.scheduler.now + QUIET_S_MAX
        why = "it never ran"
        while why and self.scheduler.now < limit:
            self.scheduler.run(self.scheduler.now + 5.0)
            self.others.repair()
            why = self._why_restless()
        self._write_end(why)
        return self.record

    def start_replica(self) -> None:
        self._replica_count += 1
        replica_id = f"r{self._replica_count}"
        process = Process(
            self.scheduler, rate=self.random.uniform(0.999, 1.001), offset=self.random.uniform(0, 1e4)
        )
        writer = Writer(replica_id, process, self.store, self.record, self.troubles)
        client = Client(process, self.upstream)
        self.replicas.append(self.replica_class(replica_id, process, self.store, writer, self.tools, client))
        self.note("starts", replica_id)

    def hint(self) -> None:
        """Wake-ups travel to every replica, unless they are lost."""
        if not self.scheduler.chance(self.troubles.hint_lost):
            for replica in self.replicas:
                self.scheduler.after(0.005, replica.hint)

    def note(self, what: str, replica_id: str = "") -> None:
        self.record.add(Note(self.scheduler.now, what, replica_id))

    def _calm_down(self) -> None:
        self.note("the troubles end")
        for one in fields(Troubles):
            setattr(self.troubles, one.name, 0.0)
        self.is_quiet = True
        self.store.is_down = self.upstream.is_down = False
        self.upstream.replays = False
        self.store.set_tools(self.registry)
        self.store.set_rules(())
        self.store.change_settings(replace(self.store.attachment.settings, max_reconnects=None))
        is_degraded = "history_degraded" in self.store.attachment.progress.flags
        for stream in self.upstream.streams:
            # A run to which the history was refused reads it again on its next connection.
            if stream.is_mute or is_degraded:
                stream.end(p.Failure("unknown", message="silence", is_silence=True))
        self.others.repair()

    # ---- at rest?

    def _why_restless(self) -> str:
        """What still moves; empty once nothing does."""
        store, upstream = self.store, self.upstream
        a = store.attachment
        if not self.agent.is_done:
            return f"the agent waits for {upstream.waits_for()}"
        for call in store.calls.values():
            if call.state not in END_STATES:
                return f"call {call.id} is {call.state}"
        if any(row.status == "sending" for row in store.decisions):
            return "a decision is on its way"
        if upstream.over is not None:
            return "" if a.status in NOT_ATTACHED else f"the session is over, the attachment {a.status}"
        if a.status in NOT_ATTACHED:
            return "" if self.others.is_served_enough() else "it must be attached again"
        if a.settings.max_idle_s is not None:
            return "the countdown has not ended"
        if a.status != "live":
            return f"the attachment is {a.status}"
        return "" if self.others.is_served_enough() else "messages are missing"

    def _write_end(self, why: str) -> None:
        store, a = self.store, self.store.attachment
        self.record.add(
            AtEnd(
                at=self.scheduler.now,
                is_quiet=not why,
                why=why,
                session_over=self.upstream.over,
                status=a.status,
                end_reason=a.end_reason,
                calls=dict(store.calls),
                upstream=tuple(
                    UpstreamState(c.id, c.kind, c.tool, c.needs, c.end) for c in self.upstream.calls.values()
                ),
                messages=dict(store.messages),
                decisions=tuple((row.id, row.call_id, row.status) for row in store.decisions),
            )
        )
