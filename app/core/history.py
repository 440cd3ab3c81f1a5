"""What one read of the history comes to: facts, and the calls that nobody answered.

Facts (answers, verdicts, interrupts, terminations) stand by themselves and survive a read that broke off;
calls and the trailing event are only worth something once the last page was read. Memory is bounded by what
is open, not by the number of events.
"""

from __future__ import annotations

from collections.abc import Container

from app.core import events as ev
from app.core.idle import NEUTRAL
from app.core.ledger import Remembered
from app.core.seen import SeenIds


class History:
    """Folds the pages of one read.

    `kept` are ids whose answers matter although the call is listed too: what we have open or are asked for.
    `since` is where the read began, in seconds since 1970; None is the first event.
    """

    def __init__(self, kept: Container[str], since: float | None, created_at: float | None = None) -> None:
        self.since = since
        self._is_whole = since is None or (created_at is not None and since <= created_at)
        self.uses: dict[str, ev.Use] = {}
        self.answers: dict[str, ev.Answer] = {}
        self.settled: Remembered[None] = Remembered()
        self.verdicts: list[ev.Confirmation] = []
        self.interrupts: list[ev.Interrupt] = []
        self.terminated: set[str] = set()
        self.terminal: ev.Terminated | ev.Deleted | None = None
        self.trailing: ev.AnyEvent | None = None
        self.primary_thread_id: str | None = None
        self.newest_at: float | None = None
        self.recent = SeenIds()
        self.untimed: Remembered[None] = Remembered()
        self.wanted_at: float | None = None
        self._wanted: dict[str | None, tuple[str, ...]] = {}
        self._kept = kept
        self._is_first_thread = True

    def fold(self, event: ev.AnyEvent) -> None:
        """Take in the next event in list order."""
        if isinstance(event, ev.PreviewStart | ev.PreviewDelta):
            return  # never persisted; if a list holds one all the same, it says nothing
        at = event.at
        if at is not None:
            self.newest_at = max(at, self.newest_at or at)
            self.recent.note(event.id, at)
        elif event.id:
            self.untimed.keep(event.id, None)
        if not isinstance(event, NEUTRAL):
            self.trailing = event
        match event:
            case ev.BuiltinUse() | ev.CustomUse() | ev.McpUse():
                if event.id not in self.answers and event.id not in self.settled:
                    self.uses.setdefault(event.id, event)
            case ev.UserToolResult() | ev.CustomToolResult() | ev.AgentToolResult() | ev.McpToolResult():
                id_ = ev.answered_id(event)
                is_paired = self.uses.pop(id_, None) is not None
                if is_paired:
                    self.settled.keep(id_, None)
                if id_ in self._kept or not is_paired:
                    self.answers.setdefault(id_, event)
            case ev.Confirmation():
                self.verdicts.append(event)
            case ev.Interrupt():
                if at is not None:
                    self.interrupts.append(event)
            case ev.ThreadTerminated():
                if event.session_thread_id:
                    self.terminated.add(event.session_thread_id)
                self._see_thread(event)
            case ev.ThreadIdle() | ev.ThreadRunning():
                self._wanted[event.session_thread_id] = (
                    event.wanted if isinstance(event, ev.ThreadIdle) else ()
                )
                self.wanted_at = at
                self._see_thread(event)
            case ev.Idle():
                self.wanted_at = at
                self._wanted = {None: event.wanted}
            case ev.Terminated() | ev.Deleted():
                self.terminal = self.terminal or event
            case _:
                pass

    @property
    def tells_wanted(self) -> bool:
        """Whether the read showed what upstream waits for: a window need not."""
        return self.since is None or bool(self._wanted)

    @property
    def wanted(self) -> frozenset[str]:
        """The calls that upstream waits for at the end of the read."""
        return frozenset(id_ for ids in self._wanted.values() for id_ in ids)

    def _see_thread(self, event: ev.AnyEvent) -> None:
        """The first thread that a whole log names is the primary one."""
        if self._is_first_thread and self._is_whole:
            self.primary_thread_id = event.session_thread_id
        self._is_first_thread = False
