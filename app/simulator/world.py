"""The simulated API as values: no I/O, no clock, no chance of its own.

Time comes in with `advance`; everything else follows from the seed, the scripts and what clients send.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from app.simulator import sends
from app.simulator.journal import Record, Thread
from app.simulator.log import Frame, Query, Subscription
from app.simulator.objects import agent_object, session_object
from app.simulator.refusal import Json, Refused
from app.simulator.requests import Request
from app.simulator.script import EnvironmentKind, Script, load, parse
from app.simulator.session import Session
from app.simulator.switches import Fault, FaultBook, Switches
from app.simulator.timeline import Ids, Timeline, parse_stamp_us
from app.simulator.turn import emit_object, play

REQUESTS_MAX = 200_000
SESSIONS_MAX = 100_000


class World:
    """A whole simulated API.

    `seed` fixes every id. `pace` scales the pauses of scripts: 0 leaves them out, 1 plays them as written.
    `keys` are the credentials that are accepted; None accepts any.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        switches: Switches | None = None,
        pace: float = 1.0,
        keys: Iterable[str] | None = None,
    ) -> None:
        self.ids = Ids(seed)
        self.timeline = Timeline()
        self.switches = switches or Switches()
        self.pace = pace
        self.keys = frozenset(keys) if keys is not None else None
        self.faults = FaultBook()
        self.requests: deque[Request] = deque(maxlen=REQUESTS_MAX)
        self.sessions: dict[str, Session] = {}
        self.scripts: dict[str, Script] = {}
        self.environments: dict[str, EnvironmentKind] = {
            self.ids.next("env"): "cloud",
            self.ids.next("env"): "self_hosted",
        }
        self._own_switches: dict[str, dict[str, Any]] = {}
        self._settled: dict[str, Switches] = {}
        self._watchers: list[Callable[[], None]] = []

    # For whoever drives the world

    def advance(self, now: float) -> None:
        """Let time pass up to `now`, in seconds since 1970, and do what is due."""
        self.timeline.advance(now)
        self.changed()

    def next_due(self) -> float | None:
        """Return when `advance` has something to do next, in seconds since 1970; None if nothing is
        planned."""
        return self.timeline.next_due()

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` whenever something may have changed; return what ends that."""
        self._watchers.append(on_change)
        return lambda: self._watchers.remove(on_change)

    def changed(self) -> None:
        """Tell the watchers."""
        for each in list(self._watchers):
            each()

    # Sessions

    def add_script(self, script: Script, *, name: str | None = None) -> None:
        """Make a script available to `POST /v1/sessions`, whose `agent` names it."""
        self.scripts[name or script.name] = script

    def script(self, wanted: str | Json | Script) -> Script:
        """Return a script: one that was added, one that comes with the simulator, or one given inline.

        Raises:
            BadScript: there is none, or it cannot be read.
        """
        if isinstance(wanted, Script):
            return wanted
        if isinstance(wanted, dict):
            return parse(wanted)
        name = wanted.removeprefix("agent_")
        return self.scripts[name] if name in self.scripts else load(name)

    def create(
        self,
        wanted: str | Json | Script,
        *,
        environment_id: str | None = None,
        title: str | None = None,
        metadata: dict[str, str] | None = None,
        budget: Json | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Create a session that plays a script and return it; it is idle until a message comes.

        Without `environment_id` it is put in the environment of the script's kind.

        Raises:
            BadScript: the script cannot be had.
            Refused: there is no such environment.
        """
        script = self.script(wanted)
        if len(self.sessions) >= SESSIONS_MAX:
            raise Refused(400, f"over {SESSIONS_MAX} sessions")
        if environment_id is None:
            environment_id = next(
                each for each, kind in self.environments.items() if kind == script.environment
            )
        elif environment_id in ("env_cloud", "env_self_hosted"):
            kind = environment_id.removeprefix("env_")
            environment_id = next(each for each, found in self.environments.items() if found == kind)
        if environment_id not in self.environments:
            raise Refused(404, f"environment {environment_id} was not found", code="environment_not_found")
        new_id = session_id or self.ids.next("sesn")
        if script.switches:
            self.switch(new_id, **script.switches)
        agent = agent_object(script.agent, self.ids.next("agent"))
        children = {name: agent_object(each, self.ids.next("agent")) for name, each in script.agents.items()}
        session = Session(
            session_id=new_id,
            script=Script(
                script.name, self.environments[environment_id], agent, script.turns, children, script.switches
            ),
            environment_id=environment_id,
            ids=self.ids,
            timeline=self.timeline,
            switches=lambda: self.switches_of(new_id),
            pace=self.pace,
            play=play,
        )
        session.title, session.metadata, session.budget = title, dict(metadata or {}), budget
        self.sessions[new_id] = session
        self.changed()
        return session

    def session(self, session_id: str) -> Session:
        """Return a session, also one that was deleted.

        Raises:
            KeyError: there never was one of that id.
        """
        return self.sessions[session_id]

    def find(self, session_id: str) -> Session:
        """Return a session as the API finds it.

        Raises:
            Refused: there is none, or it was deleted.
        """
        found = self.sessions.get(session_id)
        if found is None or found.is_deleted:
            raise Refused(404, f"session {session_id} was not found")
        return found

    def find_thread(self, session_id: str, thread_id: str) -> tuple[Session, Thread]:
        """Return a session and one of its threads.

        Raises:
            Refused: there is none.
        """
        session = self.find(session_id)
        if thread_id not in session.threads:
            raise Refused(404, f"thread {thread_id} was not found")
        return session, session.threads[thread_id]

    def say(self, session_id: str, text: str, *, now: float) -> list[Json]:
        """Send a `user.message`, as the API would get it."""
        event = {"type": "user.message", "content": [{"type": "text", "text": text}]}
        return self.send(session_id, {"events": [event]}, now=now)

    def send(self, session_id: str, body: Any, *, now: float) -> list[Json]:
        """Take the body of a send request and return the accepted events; what follows at once has followed.

        Raises:
            Refused: nothing was accepted.
        """
        self.timeline.advance(now)
        session = self.find(session_id)
        try:
            accepted = sends.send(session, body)
        except Refused:
            given = body.get("events", []) if isinstance(body, dict) else []
            for event in given if isinstance(given, list) else []:
                session.note("client", "refused", event if isinstance(event, dict) else {"event": event})
            raise
        self.advance(now)
        return accepted

    def list_events(self, session_id: str, query: Query, *, thread_id: str | None = None) -> bytes:
        """Return the body of a list response.

        Raises:
            Refused: no such session or thread, or a cursor that does not fit.
        """
        session = self.find(session_id)
        thread = self.find_thread(session_id, thread_id)[1] if thread_id else session.primary
        switches = session.switches
        return thread.log.page(query, switches, self.timeline.now_us).body(switches.nulls)

    def subscribe(
        self,
        session_id: str,
        *,
        thread_id: str | None = None,
        deltas: frozenset[str] = frozenset(),
        on_ready: Callable[[], None] = lambda: None,
    ) -> Subscription:
        """Open a stream. Its frames wait in `frames` and `on_ready` is called for each.

        Raises:
            Refused: no such session or thread.
        """
        session = self.find(session_id)
        thread = self.find_thread(session_id, thread_id)[1] if thread_id else session.primary
        subscription = Subscription(thread.id, deltas, on_ready)
        session.subscribe(subscription)
        return subscription

    # Ends

    def archive(self, session_id: str) -> Json:
        """Archive a session and return it.

        Raises:
            Refused: it runs, or seems to.
        """
        session = self.find(session_id)
        self._need_rest(session, "archived")
        if session.archived_us is None:
            session.archived_us = self.timeline.now_us
            session.terminate()
        self.changed()
        return session_object(session)

    def delete(self, session_id: str) -> Json:
        """Delete a session.

        Raises:
            Refused: it runs, or seems to.
        """
        session = self.find(session_id)
        self._need_rest(session, "deleted")
        session.delete()
        self.changed()
        return {"id": session.id, "type": "session_deleted"}

    def archive_thread(self, session_id: str, thread_id: str) -> Thread:
        """Archive a thread that rests, which terminates it.

        Raises:
            Refused: it runs, or is the primary one.
        """
        session, thread = self.find_thread(session_id, thread_id)
        if thread is session.primary:
            raise Refused(400, "the primary thread cannot be archived; archive the session")
        if thread.status in ("running", "rescheduling"):
            raise Refused(400, f"thread {thread.id} is {thread.status}; interrupt it first")
        if thread.archived_us is None:
            thread.archived_us = self.timeline.now_us
            session.terminate_thread(thread)
        self.changed()
        return thread

    def _need_rest(self, session: Session, wish: str) -> None:
        if "running" in (session.status, session.shown_status()):
            raise Refused(400, f"session {session.id} is running and cannot be {wish}; interrupt it first")

    # Faults, and things that nobody sent

    def switch(self, session_id: str | None = None, **changes: Any) -> None:
        """Change switches of one session, or of the whole world when `session_id` is None.

        Raises:
            ValueError: a name is no switch.
        """
        if session_id is None:
            self.switches = self.switches.with_changes(changes)
        else:
            self.switches.with_changes(changes)
            self._own_switches.setdefault(session_id, {}).update(changes)
        self._settled.clear()

    def switches_of(self, session_id: str) -> Switches:
        """Return the switches that hold for a session: its own before the world's."""
        if session_id not in self._settled:
            self._settled[session_id] = self.switches.with_changes(self._own_switches.get(session_id, {}))
        return self._settled[session_id]

    def reset_switches(self) -> None:
        """Forget the switches of single sessions and put the world's back to the documented API."""
        self.switches = Switches()
        self._own_switches.clear()
        self._settled.clear()

    def strike(self, fault: Fault) -> None:
        """Have a fault strike the next requests that match."""
        self.faults.add(fault)

    def end_streams(self, session_id: str, kind: Any = "eof", data: bytes = b"") -> int:
        """End a session's open streams now: `eof`, `cut`, `truncate` or `error_frame`. Returns how many."""
        return self.sessions[session_id].end_streams(kind, data)

    def emit(self, session_id: str, event: Json, *, thread_id: str | None = None) -> str:
        """Have the server emit an event of any type and shape; `id` and `processed_at` are added when
        absent."""
        session = self.sessions[session_id]
        event_id = emit_object(session, session.threads[thread_id] if thread_id else session.primary, event)
        self.changed()
        return event_id

    def emit_raw(
        self,
        session_id: str,
        data: bytes,
        *,
        name: str | None = None,
        on_stream: bool = True,
        in_list: bool = False,
        is_frame: bool = False,
        processed_at: str | None = None,
        thread_id: str | None = None,
    ) -> None:
        """Put bytes as they are on the streams and, if wished, in the list.

        `data` is one event's JSON, well formed or not, or with `is_frame` a whole frame with its line
        endings. `name` is what the `event:` line says. `processed_at` places it in the list; without it it
        goes last.
        """
        session = self.sessions[session_id]
        frame = Frame("verbatim" if is_frame else "event", name or "", data) if on_stream else None
        stamp_us = parse_stamp_us(processed_at) if processed_at else self.timeline.now_us
        session.emit_raw(
            data,
            event_type=name or "",
            event_id="",
            thread=session.threads[thread_id] if thread_id else session.primary,
            frame=frame,
            stamp_us=stamp_us if in_list else None,
        )
        self.changed()

    # For whoever inspects the world

    def answers(self, session_id: str) -> dict[str, list[Json]]:
        """Return the results that were answered 200, by call id; more than one is a duplicate that got
        through."""
        return self.sessions[session_id].answers

    def verdicts(self, session_id: str) -> dict[str, list[Json]]:
        """Return the confirmations that counted, by call id."""
        return self.sessions[session_id].verdicts

    def attempts(self, session_id: str) -> dict[str, list[Request]]:
        """Return every send request that names a call, refused and lost ones included, by call id."""
        found: dict[str, list[Request]] = {}
        for request in self.requests:
            if (
                request.endpoint != "send"
                or request.session_id != session_id
                or not isinstance(request.body, dict)
            ):
                continue
            for event in request.body.get("events") or []:
                named = sends.call_named(event)
                if named is not None:
                    found.setdefault(named, []).append(request)
        return found

    def history(self, session_id: str) -> list[Record]:
        """Return what happened to a session, in order."""
        return self.sessions[session_id].log
