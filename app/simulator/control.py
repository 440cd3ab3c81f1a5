"""The control surface under `/_sim/`: start sessions, set faults, emit anything, and read what happened."""

import dataclasses
from collections.abc import Callable
from typing import Any

from app.simulator.endpoints import Asked, Reply
from app.simulator.journal import dump
from app.simulator.refusal import Json, Refused
from app.simulator.requests import Request
from app.simulator.script import BadScript, burst
from app.simulator.switches import Fault
from app.simulator.world import World

FIRST_MESSAGE = "Where is order A-1042?"


def _create(world: World, asked: Asked) -> Reply:
    body = _object(asked)
    wanted = body.get("scenario", "demo")
    try:
        script = burst(**body["burst"]) if "burst" in body else world.script(wanted)
        session = world.create(script, session_id=body.get("session_id"))
    except (BadScript, TypeError) as error:
        raise Refused(400, str(error)) from error
    if body.get("switches"):
        _switch(world, session.id, body["switches"])
    return _json(
        {"id": session.id, "thread_id": session.primary.id, "environment_id": session.environment_id}, 201
    )


def _start(world: World, asked: Asked) -> Reply:
    text = _object(asked).get("text", FIRST_MESSAGE)
    return _json({"data": world.say(asked.session_id, text, now=asked.now)})


def _log(world: World, _asked: Asked) -> Reply:
    sessions = {
        session.id: [dataclasses.asdict(record) for record in session.log]
        for session in world.sessions.values()
    }
    return _json({"requests": [_request(each) for each in world.requests], "sessions": sessions})


def _add_fault(world: World, asked: Asked) -> Reply:
    body = _object(asked)
    switches = body.pop("switches", None)
    if switches is not None:
        _switch(world, body.get("session_id"), switches)
    if "kind" in body:
        try:
            world.strike(Fault(**body))
        except (TypeError, ValueError) as error:
            raise Refused(400, str(error)) from error
    if "end_streams" in body:
        world.end_streams(body["session_id"], body["end_streams"])
    return _faults(world, asked)


def _faults(world: World, _asked: Asked) -> Reply:
    waiting = [dataclasses.asdict(each) for each in world.faults.waiting()]
    return _json({"faults": waiting, "switches": dataclasses.asdict(world.switches)})


def _clear_faults(world: World, asked: Asked) -> Reply:
    world.faults.clear()
    world.reset_switches()
    return _faults(world, asked)


def _emit(world: World, asked: Asked) -> Reply:
    body = _object(asked)
    if asked.session_id not in world.sessions:
        raise Refused(404, f"session {asked.session_id} was not found")
    thread_id = body.get("thread_id")
    if "event" in body:
        return _json({"id": world.emit(asked.session_id, body["event"], thread_id=thread_id)})
    if "frame" not in body and "data" not in body:
        raise Refused(400, "give event (an object), data (a line as it is) or frame (a whole frame as it is)")
    world.emit_raw(
        asked.session_id,
        str(body.get("frame", body.get("data"))).encode("utf-8", "surrogateescape"),
        name=body.get("name"),
        on_stream=body.get("stream", True),
        in_list=body.get("list", False),
        is_frame="frame" in body,
        processed_at=body.get("processed_at"),
        thread_id=thread_id,
    )
    return _json({})


def _switch(world: World, session_id: str | None, changes: Json) -> None:
    try:
        world.switch(session_id, **changes)
    except (TypeError, ValueError) as error:
        raise Refused(400, str(error)) from error


def _request(request: Request) -> Json:
    shown = dataclasses.asdict(request)
    shown["fault"] = request.fault.kind if request.fault else None
    return shown


def _object(asked: Asked) -> Json:
    body = asked.body if asked.body is not None else {}
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return dict(body)


def _json(value: Any, status: int = 200) -> Reply:
    return Reply(status, dump(value))


CONTROL_ROUTES: tuple[tuple[str, str, Callable[[World, Asked], Reply]], ...] = (
    ("POST", "/_sim/sessions", _create),
    ("POST", "/_sim/sessions/{session_id}/start", _start),
    ("POST", "/_sim/sessions/{session_id}/emit", _emit),
    ("GET", "/_sim/log", _log),
    ("GET", "/_sim/faults", _faults),
    ("POST", "/_sim/faults", _add_fault),
    ("DELETE", "/_sim/faults", _clear_faults),
)
