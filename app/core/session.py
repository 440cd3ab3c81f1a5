"""The session machine: takes notices, decides, returns effects.

`handle` is the only way in. The rules stand in their own files: `gate` (may a call run), `routing` (its
way), `posting` and `sending` (what becomes of a send), `connection` (when to connect and read), `idle` (when
a quiet session is over), `messages` (text). Here they meet: history, live events, and the end of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, assert_never

from app.core import events as ev
from app.core import protocol as p
from app.core.calls import STATES, Call
from app.core.connection import Connection
from app.core.gate import UNREAD, read_policies
from app.core.history import History
from app.core.idle import NEUTRAL, IdleClock
from app.core.inputs import agent_schemas
from app.core.ledger import Ledger, Remembered
from app.core.messages import Messages
from app.core.routing import Router
from app.core.rules import Rule
from app.core.seen import OVERLAP_S, SeenIds
from app.core.sending import Outcome, Over, Ruled, Sends
from app.core.tools import Tool

DRAIN_S: Final = 30.0
"""How long deliveries under way may still finish once a run is ending."""
LAST_POSTS_S: Final = 60.0
"""How long posts are still tried after the session's terminal event."""
MISSING_MAX: Final = 20
"""How many unknown ids of `requires_action` the attachment's status names."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store holds when a run starts.

    `calls` are the open ones in the order of their first record; `over` those that ended within the overlap
    of the cursor. `progress.idle_deadline` is monotonic. `open_messages` are previews of an earlier run.
    """

    calls: tuple[Call, ...] = ()
    over: tuple[Call, ...] = ()
    progress: p.Progress = field(default_factory=p.Progress)
    open_messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Ending:
    """A run that is over but for what is under way. Times are monotonic."""

    reason: p.EndReason
    detail: str | None
    event_id: str | None
    deliver_until: float
    post_until: float


class SessionMachine:
    """One run of one attachment. Not thread-safe; times passed in are monotonic seconds."""

    def __init__(
        self,
        settings: p.Settings,
        tools: Mapping[str, Tool],
        stored: Stored | None = None,
        rules: tuple[Rule, ...] = (),
    ) -> None:
        stored = stored or Stored()
        progress = stored.progress
        self.ledger = Ledger(stored.calls, stored.over)
        self.messages = Messages(stored.open_messages)
        self._sends = Sends(self.ledger)
        self._router = Router(settings, tools, self.ledger, self._sends)
        self._router.rules = rules
        self._router.environment = settings.environment or progress.environment
        self._router.primary_thread_id = progress.primary_thread_id
        self._router.wanted = frozenset(progress.missing)
        self._connection = Connection(settings.max_reconnects, progress.reconnects)
        self._idle = IdleClock(settings.max_idle_s, progress.idle_id, progress.idle_deadline, is_stale=True)
        self._history: History | None = None
        self._is_full_read_wanted = False
        self._cursor_at = progress.cursor_at
        self._created_at: float | None = None
        self._seen = SeenIds()
        self._untimed: Remembered[None] = Remembered()
        self._missing: tuple[str, ...] = ()
        self._live_at = 0.0
        self._is_retrieving = False
        self._is_steered = False
        self._has_started = False
        self._has_connected = progress.status != "attaching"
        self._ending: _Ending | None = None
        self._is_over = False

    # ---- the way in

    def start(self) -> list[p.Effect]:
        """Begin the run: the session object first, because no stream event ever says that it is over."""
        self._is_retrieving = True
        return [p.Retrieve()]

    def handle(self, notice: p.Notice, now: float) -> list[p.Effect]:
        """Take one notice and return what is to be done, in order. After `End` nothing follows."""
        if self._is_over:
            return []
        self._dispatch(notice, now)
        if self._ending is None:
            self._router.fill_slots()
            self._idle.unblock(now, is_blocked=self._is_blocked)
            if self._router.needs_policies:
                self._router.needs_policies = False
                self._retrieve()
        self._check_ending(now)
        return self.ledger.take()

    def _dispatch(self, notice: p.Notice, now: float) -> None:
        match notice:
            case p.Retrieved():
                self._retrieved(notice.facts, now)
            case p.StreamOpened():
                self._opened()
            case p.StreamClosed():
                self._closed(notice.failure, now)
            case p.HistoryPage() | p.HistoryRead() | p.HistoryFailed():
                if notice.number == self._connection.read_number:
                    self._read_on(notice, now)
            case p.Received():
                self._received(notice.event, now)
            case p.ToolsChanged():
                self._router.rules_changed(notice.rules)
                self._router.tools_changed(notice.tools)
            case p.SettingsChanged():
                self._settings_changed(notice.settings, now)
            case p.Wanted():
                self._look_for(notice.call_ids)
            case p.Redeliver():
                self._router.redeliver(notice.call_ids)
            case p.Steered():
                self._is_steered = notice.is_under_way
            case p.Decided():
                self._router.decided(notice.call_id, notice.decision)
            case p.Delivered():
                self._router.delivered(notice)
            case p.Promised():
                self._router.promised(notice)
            case p.Orphaned():
                self._router.orphaned(notice.call_id, is_unsent=notice.is_unsent)
            case p.Sent():
                call = self.ledger.calls.get(notice.call_id)
                is_interrupted = call is not None and self._router.is_interrupted(call)
                self._conclude(self._sends.sent(notice, now, is_interrupted=is_interrupted), now)
            case p.Looked():
                self._conclude(self._sends.looked(notice, now, self._router.primary_thread_id), now)
            case p.DetachRequested():
                self._end("detached", now=now)
            case p.Stopping():
                self._router.is_stopping = True
            case p.Tick():
                self._tick(now)
            case _:
                assert_never(notice)

    # ---- what the runner asks

    @property
    def progress(self) -> p.Progress:
        """How the attachment stands now."""
        flags = {
            "history_degraded": self._connection.is_degraded,
            "posting_degraded": self._sends.is_degraded,
            "upstream_contradiction": bool(self._missing),
            "unowned_calls": self._router.has_unowned,
        }
        status: Literal["attaching", "live", "reconnecting", "detaching"]
        if self._ending is not None and self._ending.reason == "detached":
            status = "detaching"
        elif self._connection.is_open:
            status = "live"
        else:
            status = "reconnecting" if self._has_connected else "attaching"
        return p.Progress(
            status=status,
            cursor_at=self._cursor_at,
            reconnects=self._connection.reconnects,
            idle_id=self._idle.idle_id,
            idle_deadline=self._idle.deadline,
            flags=frozenset(name for name, is_up in flags.items() if is_up),
            missing=self._missing,
            primary_thread_id=self._router.primary_thread_id,
            environment=self._router.environment,
        )

    @property
    def to_recall(self) -> tuple[str, ...]:
        """Calls that the history read shows unanswered and that memory does not hold: look them up."""
        uses = self._history.uses if self._history is not None else ()
        return tuple(id_ for id_ in uses if self.ledger.find(id_) is None)

    @property
    def read_number(self) -> int:
        """The number of the last `ReadHistory`: what other reads report is not taken."""
        return self._connection.read_number

    def next_wake(self, now: float) -> float | None:
        """When to send `Tick` at the latest; None if time alone changes nothing."""
        times: list[float | None]
        if self._ending is not None:
            times = [t for t in (self._ending.deliver_until, self._ending.post_until) if t > now]
        else:
            times = [self._connection.sweep_at, None if self._idle.is_stale else self._idle.deadline]
        return min((time for time in times if time is not None), default=None)

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def _is_blocked(self) -> bool:
        """Every open call is unfinished business: held, ours, or left for another client.

        So is what our own clients send: the turn that it begins must not be missed.
        """
        return bool(self.ledger.calls or self.ledger.foreign or self._is_steered)

    # ---- connection

    def _retrieved(self, facts: p.SessionFacts | None, now: float) -> None:
        self._is_retrieving = False
        if facts is not None:
            if facts.is_over:
                self._end("terminated", now=now, is_session_over=True)
                return
            if facts.agent_tools is not None:
                self._router.policies = read_policies(facts.agent_tools)
                self._router.checks.agent = agent_schemas(facts.agent_tools)
            self._created_at = facts.created_at or self._created_at
            settings = self._router.settings
            self._router.environment = settings.environment or facts.environment or self._router.environment
            self._router.policies_read()
        if not self._has_started:
            self._has_started = True
            self.ledger.emit(self._connection.open())

    def _retrieve(self) -> None:
        if not self._is_retrieving:
            self._is_retrieving = True
            self.ledger.emit(p.Retrieve())

    def _opened(self) -> None:
        if self._ending is not None:
            return
        self._has_connected = True
        self.messages.connected()
        self._begin_read(self._connection.opened(self._cursor_at))

    def _closed(self, failure: p.Failure | None, now: float) -> None:
        if self._ending is not None:
            return
        if self._connection.is_open:
            self._history = None
        self._idle.disconnected()
        for effect in self._connection.closed(failure, now):
            match effect:
                case p.End():
                    is_gone = effect.reason == "session_gone"
                    self._end(effect.reason, effect.detail, now=now, is_session_over=is_gone, may_post=False)
                case p.Retrieve():
                    self._retrieve()
                case _:
                    self.ledger.emit(effect)

    # ---- history

    def _begin_read(self, read: p.ReadHistory) -> None:
        self._history = History(_Kept(self.ledger.calls, self._router), read.since, self._created_at)
        self.ledger.emit(read)

    def _read(self, *, full: bool) -> None:
        """Read the history on the live connection; at most one read runs at a time."""
        if self._connection.is_reading:
            self._is_full_read_wanted = True
        else:
            self._begin_read(self._connection.read(self._cursor_at, full=full))

    def _read_on(self, notice: p.HistoryPage | p.HistoryRead | p.HistoryFailed, now: float) -> None:
        match notice:
            case p.HistoryPage():
                self._page(notice.events)
            case p.HistoryRead():
                self._history_read(notice.known, now)
            case p.HistoryFailed():
                self._history_failed(notice.failure, now)

    def _page(self, events: Iterable[ev.AnyEvent]) -> None:
        if self._history is None:
            return
        for event in events:
            self._history.fold(event)
            self.ledger.emit(*self.messages.replay(event))

    def _history_read(self, known: Mapping[str, Call], now: float) -> None:
        history, self._history = self._history, None
        if history is None:
            return
        self._connection.history_read(now)
        if history.primary_thread_id is not None:
            self._router.primary_known(history.primary_thread_id)
        for call in known.values():
            if call.is_over:
                self.ledger.over.keep(call.id, call)
            elif call.state not in STATES:
                self.ledger.foreign[call.id] = call
            else:
                self._router.adopt(call)
        unfinished = tuple(self.ledger.calls.values())
        self._apply_facts(history)
        if history.terminal is not None:
            for use in history.uses.values():
                self._router.lose(use)
            self._terminal(history.terminal, now)
            return
        if history.tells_wanted:
            self._router.wanted = history.wanted
        for use in history.uses.values():
            self._router.route(use)
        self._missing = self._router.want(self._router.wanted, history.wanted_at)[:MISSING_MAX]
        if self._missing and history.since is not None:
            self._is_full_read_wanted, self._missing = True, ()
        self._observe_history(history, now)
        self._router.resume([self.ledger.calls[c.id] for c in unfinished if c.id in self.ledger.calls])
        if self._is_full_read_wanted:
            self._is_full_read_wanted = False
            self._read(full=True)

    def _observe_history(self, history: History, now: float) -> None:
        trailing = history.trailing
        if trailing is not None and trailing.at is not None and trailing.at < self._live_at:
            trailing = None  # the list was made before what came live since
        is_news = trailing is not None and trailing.id not in self._seen
        # A late event may have stopped the countdown that the newest one starts.
        is_current = trailing is not None and trailing.at is not None and self._idle.idle_id is None
        if self._connection.is_open and (self._idle.is_stale or is_news or is_current):
            self._idle.observe_history(trailing, now, is_blocked=self._is_blocked)
        self._seen.merge(history.recent)
        for id_ in history.untimed:
            self._untimed.keep(id_, None)
        if history.newest_at is not None:
            self._cursor_at = max(history.newest_at, self._cursor_at or history.newest_at)

    def _history_failed(self, failure: p.Failure, now: float) -> None:
        history, self._history = self._history, None
        if history is None:
            return
        self._apply_facts(history)
        if history.terminal is not None:
            self._terminal(history.terminal, now)
            return
        repeats = self._connection.history_failed(failure, history.since, now)
        if not repeats:
            # Nobody looks again soon: what was seen waiting is named, though not judged.
            unknown = [id_ for id_ in history.uses if self.ledger.find(id_) is None]
            self._missing = tuple({*self._missing, *unknown})[:MISSING_MAX]
        for effect in repeats:
            self._begin_read(effect)

    def _apply_facts(self, history: History) -> None:
        """What stands by itself, whether or not the read reached its end."""
        for thread_id in history.terminated:
            self._router.thread_terminated(thread_id)
        for interrupt in history.interrupts:
            if interrupt.id not in self._seen:
                self._router.interrupt(interrupt)
        for confirmation in history.verdicts:
            self._router.verdict(confirmation)
        for answer in history.answers.values():
            self._router.answer(answer)
        for call_id in history.settled:
            self._router.settled(call_id)

    # ---- live events

    def _received(self, event: ev.AnyEvent, now: float) -> None:
        if self._ending is not None:
            return
        is_old = self._is_old(event)
        self._connection.event_received(is_news=event.at is not None and not is_old)
        if is_old:
            if isinstance(event, ev.ModelRequestEnd):
                # History told of it first, but the previews that it ends began on this connection.
                self.ledger.emit(*self.messages.live(event))
            return
        match event:
            case ev.BuiltinUse() | ev.CustomUse() | ev.McpUse():
                self._router.route(event)
            case ev.UserToolResult() | ev.CustomToolResult() | ev.AgentToolResult() | ev.McpToolResult():
                self._router.answer(event)
            case ev.Confirmation():
                self._router.verdict(event)
            case ev.Interrupt():
                self._router.interrupt(event)
            case ev.ThreadTerminated():
                if event.session_thread_id:
                    self._router.thread_terminated(event.session_thread_id)
            case ev.Idle():
                self._router.wanted, self._missing = frozenset(event.wanted), ()
                self._look_for(event.wanted, event.at)
            case ev.ThreadIdle():
                self._router.wanted |= set(event.wanted)
                self._look_for(event.wanted, event.at)
            case ev.Terminated() | ev.Deleted():
                self._terminal(event, now)
                return
            case ev.SessionUpdated():
                self._retrieve()
            case ev.Message() | ev.PreviewStart() | ev.PreviewDelta() | ev.ModelRequestEnd():
                self.ledger.emit(*self.messages.live(event))
            case ev.ThreadRunning() | ev.Usage() | ev.Other():
                pass
            case _:
                assert_never(event)
        if not self._was_listed(event):
            self._idle.observe(event, now, is_blocked=self._is_blocked)
        if event.at is not None:
            if not isinstance(event, NEUTRAL):
                self._live_at = max(self._live_at, event.at)
            self._seen.note(event.id, event.at)
        if self._connection.is_sweep_due(now):
            self._read(full=False)

    def _is_old(self, event: ev.AnyEvent) -> bool:
        """Whether a history read covered this event already.

        Either it was handled by its id, or it lies before the window that reads overlap: some servers replay
        the whole history on each connect, and its calls were all judged with their answers at hand.
        """
        if event.at is None or (isinstance(event, ev.Idle | ev.ThreadIdle) and event.wanted):
            return False  # upstream waits for us: asking twice costs nothing
        if event.id in self._seen:
            return True
        is_settled = self._connection.is_covered and self._cursor_at is not None
        return is_settled and event.at < (self._cursor_at or 0.0) - OVERLAP_S

    def _was_listed(self, event: ev.AnyEvent) -> bool:
        """Whether history told of this event, and of what followed it: it says nothing about now."""
        match event:
            case ev.PreviewStart():
                return self.messages.is_final(event.event.id)
            case ev.PreviewDelta():
                return self.messages.is_final(event.event_id)
            case _:
                return event.id in (self._untimed if event.at is None else self._seen)

    def _look_for(self, call_ids: Iterable[str], at: float | None = None) -> None:
        """Named calls that nobody knows: an event was lost, or came before us; history has it."""
        unknown = self._router.want(call_ids, at)
        if unknown and self._connection.is_degraded:
            self._missing = tuple(id_ for id_ in unknown if id_ in self._router.wanted)[:MISSING_MAX]
        elif unknown:
            self._read(full=False)

    def _conclude(self, outcome: Outcome, now: float) -> None:
        match outcome:
            case Ruled():
                self._router.ruled(outcome.call, outcome.decision)
            case Over():
                is_over = outcome.reason != "auth_failed"
                self._end(outcome.reason, outcome.detail, now=now, is_session_over=is_over, may_post=is_over)
            case ev.Confirmation():
                self._router.verdict(outcome)
            case None:
                pass
            case _:
                assert_never(outcome)

    def _settings_changed(self, settings: p.Settings, now: float) -> None:
        self._router.settings = settings
        self._router.environment = settings.environment or self._router.environment
        self._connection.max_reconnects = settings.max_reconnects
        self._idle.resize(settings.max_idle_s, now, is_blocked=self._is_blocked)
        self._router.tools_changed(self._router.tools)

    # ---- the end of a run

    def _tick(self, now: float) -> None:
        if self._ending is not None:
            return
        if self._idle.is_expired(now):
            self._end("idle", now=now)
        elif self._connection.is_sweep_due(now):
            if self._router.policies == UNREAD:
                self._retrieve()
            self._read(full=False)

    def _terminal(self, event: ev.Terminated | ev.Deleted, now: float) -> None:
        reason: p.EndReason = "terminated" if isinstance(event, ev.Terminated) else "deleted"
        self._end(reason, event_id=event.id or None, now=now, is_session_over=True)

    def _end(
        self,
        reason: p.EndReason,
        detail: str | None = None,
        *,
        now: float,
        event_id: str | None = None,
        is_session_over: bool = False,
        may_post: bool = True,
    ) -> None:
        """Stop taking in work; what is under way may finish."""
        if self._ending is not None:
            return
        self._sends.may_post, self._sends.is_session_over = may_post, is_session_over
        if is_session_over:
            for call in list(self.ledger.calls.values()):
                is_posting = call.state == "posting" and call.id in self.ledger.posts
                if call.id not in self.ledger.running and not is_posting:
                    self.ledger.finish(call, "session_ended")
        post_s = LAST_POSTS_S if is_session_over else DRAIN_S
        self._ending = _Ending(reason, detail, event_id, now + DRAIN_S, now + (post_s if may_post else 0.0))
        self._history = None
        self._connection.is_open = self._connection.is_reading = False
        self.ledger.emit(p.CloseStream(), *self.messages.end())

    def _check_ending(self, now: float) -> None:
        """End once nothing is under way any more, or its time is up."""
        ending = self._ending
        if ending is None:
            return
        running = self.ledger.running & set(self.ledger.calls)
        if (running and now < ending.deliver_until) or (self.ledger.posts and now < ending.post_until):
            return
        if self._sends.is_session_over:
            for call in list(self.ledger.calls.values()):
                self.ledger.finish(call, "session_ended")
        self._is_over = True
        self.ledger.emit(p.End(ending.reason, ending.detail, ending.event_id))


@dataclass(frozen=True, slots=True)
class _Kept:
    """The ids whose answers a history read keeps, as they stand while it runs."""

    calls: Mapping[str, Call]
    router: Router

    def __contains__(self, id_: object) -> bool:
        return id_ in self.calls or id_ in self.router.wanted
