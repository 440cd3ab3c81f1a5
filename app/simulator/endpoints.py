"""The API's endpoints as functions of the world: a request in, an answer out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from app.simulator.journal import dump
from app.simulator.log import Cursor, Query, Subscription
from app.simulator.objects import environment_object, session_object, thread_object
from app.simulator.refusal import Json, Refused
from app.simulator.script import BadScript
from app.simulator.switches import Endpoint
from app.simulator.timeline import parse_stamp_us
from app.simulator.world import World

INITIAL_EVENTS_MAX = 50
DELTA_VALUES_MAX = 100
METADATA_PAIRS_MAX = 16
DELTA_TYPES = ("agent.message", "agent.thinking")


@dataclass(frozen=True)
class Asked:
    """A request, taken apart."""

    params: dict[str, str]
    query: list[tuple[str, str]]
    body: Any
    now: float

    @property
    def session_id(self) -> str:
        """The session that the path names."""
        return self.params["session_id"]

    def one(self, name: str) -> str | None:
        """Return the last value of a query parameter."""
        found = [value for key, value in self.query if key == name]
        return found[-1] if found else None

    def many(self, name: str) -> frozenset[str] | None:
        """Return the values of an array parameter, with or without brackets; None when it is not there."""
        found = frozenset(value for key, value in self.query if key in (name, f"{name}[]"))
        return found or None


@dataclass(frozen=True)
class Reply:
    """An answer: a status and a JSON body."""

    status: int
    body: bytes


Handler = Callable[[World, Asked], Reply]


def page_number(asked: Asked) -> int:
    """Return which page of a walk a list request is for, from 0."""
    page = asked.one("page")
    try:
        return Cursor.parse(page, asked.one("order") or "asc").page if page else 0
    except Refused:
        return 0


def _json(value: Any, status: int = 200) -> Reply:
    return Reply(status, dump(value))


def _create(world: World, asked: Asked) -> Reply:
    body = _object(asked.body)
    agent, environment_id = body.get("agent"), body.get("environment_id")
    if agent is None or environment_id is None:
        raise Refused(400, f"{'agent' if agent is None else 'environment_id'}: Field required")
    named = agent if isinstance(agent, str) else str(_object(agent).get("id"))
    initial = body.get("initial_events") or []
    if len(initial) > INITIAL_EVENTS_MAX:
        raise Refused(400, f"initial_events: over {INITIAL_EVENTS_MAX}")
    if any(each.get("type") not in ("user.message", "user.define_outcome") for each in initial):
        raise Refused(400, "initial_events: only user.message and user.define_outcome may be given")
    metadata = body.get("metadata") or {}
    if len(metadata) > METADATA_PAIRS_MAX:
        raise Refused(400, f"metadata: over {METADATA_PAIRS_MAX} pairs", code="invalid_metadata")
    try:
        session = world.create(
            named,
            environment_id=environment_id,
            title=body.get("title"),
            metadata=metadata,
            budget=body.get("budget"),
        )
    except BadScript as error:
        raise Refused(404, f"agent {named} was not found: {error}") from error
    if initial:
        world.send(session.id, {"events": initial}, now=asked.now)
    return _json(session_object(session))


def _retrieve(world: World, asked: Asked) -> Reply:
    return _json(session_object(world.find(asked.session_id)))


def _update(world: World, asked: Asked) -> Reply:
    session = world.find(asked.session_id)
    body = _object(asked.body)
    if "vault_ids" in body:
        raise Refused(400, "vault_ids: cannot be changed")
    if session.status == "terminated":
        raise Refused(409, f"session {session.id} is terminated")
    changed: Json = {}
    if "title" in body:
        session.title = changed["title"] = body["title"]
    if "metadata" in body:
        merged = {**session.metadata, **_object(body["metadata"])}
        session.metadata = changed["metadata"] = {
            key: value for key, value in merged.items() if value is not None
        }
    if "budget" in body:
        if session.budget is None:
            raise Refused(400, "budget: can only be set at creation", code="budget_create_only")
        session.budget = changed["budget"] = body["budget"]
        session.is_capped = False
    if "agent" in body:
        if session.shown_status() != "idle":
            raise Refused(
                400, f"session {session.id} is {session.shown_status()}; its agent can change when idle"
            )
        session.agent.update(_object(body["agent"]))
        changed["agent"] = session.agent
    if changed:
        session.emit(session.primary, "session.updated", changed)
    world.changed()
    return _json(session_object(session))


def _sessions(world: World, asked: Asked) -> Reply:
    descending = (asked.one("order") or "desc") == "desc"
    statuses = asked.many("statuses")
    archived = asked.one("include_archived") == "true"
    found = [each for each in world.sessions.values() if not each.is_deleted]
    found = [each for each in found if (archived or each.archived_us is None)]
    found = [each for each in found if statuses is None or each.shown_status() in statuses]
    found.sort(key=lambda each: each.created_us, reverse=descending)
    first = _offset(asked)
    limit = _limit(asked) or 100
    shown = [session_object(each) for each in found[first : first + limit]]
    following = f"page_{first + limit}" if first + limit < len(found) else None
    return _json({"data": shown, "next_page": following, "prev_page": None})


def _delete(world: World, asked: Asked) -> Reply:
    return _json(world.delete(asked.session_id))


def _archive(world: World, asked: Asked) -> Reply:
    return _json(world.archive(asked.session_id))


def _send(world: World, asked: Asked) -> Reply:
    accepted = world.send(asked.session_id, asked.body, now=asked.now)
    session = world.session(asked.session_id)
    if session.switches.send_reply == "empty":
        return Reply(202, b"")
    return Reply(200, b'{"data":[' + b",".join(session.render(each) for each in accepted) + b"]}")


def _list(world: World, asked: Asked) -> Reply:
    return Reply(200, world.list_events(asked.session_id, list_query(asked)))


def _thread_list(world: World, asked: Asked) -> Reply:
    query = Query(limit=_limit(asked), page=asked.one("page"))
    return Reply(200, world.list_events(asked.session_id, query, thread_id=asked.params["thread_id"]))


def _threads(world: World, asked: Asked) -> Reply:
    session = world.find(asked.session_id)
    statuses = asked.many("statuses")
    found = [each for each in session.threads.values() if statuses is None or each.status in statuses]
    first = _offset(asked)
    limit = _limit(asked) or 1000
    following = f"page_{first + limit}" if first + limit < len(found) else None
    shown = [thread_object(session, each) for each in found[first : first + limit]]
    return _json({"data": shown, "next_page": following})


def _thread(world: World, asked: Asked) -> Reply:
    return _json(thread_object(*world.find_thread(asked.session_id, asked.params["thread_id"])))


def _thread_archive(world: World, asked: Asked) -> Reply:
    thread = world.archive_thread(asked.session_id, asked.params["thread_id"])
    return _json(thread_object(world.find(asked.session_id), thread))


def _environment(world: World, asked: Asked) -> Reply:
    environment_id = asked.params["environment_id"]
    if environment_id not in world.environments:
        raise Refused(404, f"environment {environment_id} was not found", code="environment_not_found")
    return _json(
        environment_object(environment_id, world.environments[environment_id], world.timeline.now_us)
    )


def _resources(world: World, asked: Asked) -> Reply:
    world.find(asked.session_id)
    return _json({"data": [], "next_page": None})


def subscribe(world: World, asked: Asked, on_ready: Callable[[], None]) -> Subscription:
    """Open the stream that a request asks for.

    Raises:
        Refused: no such session or thread, or previews of a type that has none.
    """
    wanted = [value for key, value in asked.query if key in ("event_deltas", "event_deltas[]")]
    if len(wanted) > DELTA_VALUES_MAX:
        raise Refused(400, f"event_deltas: over {DELTA_VALUES_MAX} values")
    unknown = sorted(set(wanted) - set(DELTA_TYPES))
    if unknown:
        raise Refused(400, f"event_deltas: {', '.join(unknown)} has no previews")
    return world.subscribe(
        asked.session_id, thread_id=asked.params.get("thread_id"), deltas=frozenset(wanted), on_ready=on_ready
    )


def list_query(asked: Asked) -> Query:
    """Return what a list request asks for.

    Raises:
        Refused: a parameter is malformed.
    """
    order = asked.one("order") or "asc"
    if order not in ("asc", "desc"):
        raise Refused(400, f"order: {order!r} is neither asc nor desc")
    bounds: dict[str, int | None] = {}
    for name in ("gt", "gte", "lt", "lte"):
        given = asked.one(f"created_at[{name}]")
        try:
            bounds[f"{name}_us"] = parse_stamp_us(given) if given is not None else None
        except ValueError as error:
            raise Refused(400, f"created_at[{name}]: {error}") from error
    direction: Literal["asc", "desc"] = "asc" if order == "asc" else "desc"
    return Query(
        order=direction, types=asked.many("types"), limit=_limit(asked), page=asked.one("page"), **bounds
    )


def _limit(asked: Asked) -> int | None:
    given = asked.one("limit")
    if given is None:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise Refused(400, f"limit: {given!r} is no positive number")
    return int(given)


def _offset(asked: Asked) -> int:
    page = asked.one("page")
    if page is None:
        return 0
    digits = page.removeprefix("page_")
    if not digits.isdecimal():
        raise Refused(400, "page: invalid cursor")
    return int(digits)


def _object(value: Any) -> Json:
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object")
    return value


_SESSION = "/v1/sessions/{session_id}"
_THREAD = _SESSION + "/threads/{thread_id}"

ROUTES: tuple[tuple[str, str, Endpoint, Handler | None], ...] = (
    ("POST", "/v1/sessions", "create", _create),
    ("GET", "/v1/sessions", "sessions", _sessions),
    ("GET", _SESSION, "retrieve", _retrieve),
    ("POST", _SESSION, "update", _update),
    ("DELETE", _SESSION, "delete", _delete),
    ("POST", _SESSION + "/archive", "archive", _archive),
    ("GET", _SESSION + "/events", "list", _list),
    ("POST", _SESSION + "/events", "send", _send),
    ("GET", _SESSION + "/events/stream", "stream", None),
    ("GET", _SESSION + "/resources", "resources", _resources),
    ("GET", _SESSION + "/threads", "threads", _threads),
    ("GET", _THREAD, "thread", _thread),
    ("POST", _THREAD + "/archive", "thread_archive", _thread_archive),
    ("GET", _THREAD + "/events", "thread_list", _thread_list),
    ("GET", _THREAD + "/stream", "thread_stream", None),
    ("GET", "/v1/environments/{environment_id}", "environment", _environment),
)
"""Method, path, name and function of each endpoint; streams have no function, for `streaming` serves them."""
