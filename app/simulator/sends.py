"""What clients may send to a session: each event is judged against the state before its batch, then
applied."""

from collections.abc import Callable
from typing import Any

from app.simulator.call import Call, denial_text
from app.simulator.journal import Thread
from app.simulator.refusal import Json, Refused
from app.simulator.session import QUEUED_MAX, Session, text_of
from app.simulator.turn import close_with, remember

EVENTS_PER_SEND_MAX = 1_000
DENY_MESSAGE_CHARS_MAX = 10_000
ID_CHARS_MAX = 128

ANSWER_TYPES = ("user.tool_confirmation", "user.custom_tool_result", "user.tool_result", "user.interrupt")
_ALLOWED = f"only {', '.join(ANSWER_TYPES[:3])}, or {ANSWER_TYPES[3]} may be sent"

_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "user.message": ({"content"}, set()),
    "user.interrupt": (set(), {"session_thread_id"}),
    "user.tool_confirmation": ({"tool_use_id", "result"}, {"deny_message"}),
    "user.custom_tool_result": ({"custom_tool_use_id"}, {"content", "is_error"}),
    "user.tool_result": ({"tool_use_id"}, {"content", "is_error"}),
    "user.define_outcome": ({"description", "rubric"}, {"max_iterations"}),
    "system.message": ({"content"}, set()),
}
_BLOCKS = {
    "user.message": {"text", "image", "document"},
    "system.message": {"text"},
    "user.custom_tool_result": {"text", "image", "document", "search_result"},
    "user.tool_result": {"text", "image", "document", "search_result"},
}
_CALL_KEY = {
    "user.tool_confirmation": "tool_use_id",
    "user.custom_tool_result": "custom_tool_use_id",
    "user.tool_result": "tool_use_id",
}

Judged = tuple[Json, Callable[[], None] | None]


def call_named(event: Any) -> str | None:
    """Return the id of the call that a sent event answers, if it is an answer."""
    if not isinstance(event, dict):
        return None
    named = event.get(_CALL_KEY.get(str(event.get("type")), ""))
    return named if isinstance(named, str) else None


def send(session: Session, body: Any) -> list[Json]:
    """Accept a whole request and return its events with ids, or refuse it and change nothing.

    What follows from the events is due at once, but happens when the timeline advances.

    Raises:
        Refused: one of the events is malformed or not allowed now.
    """
    events = body.get("events") if isinstance(body, dict) else None
    if not isinstance(events, list) or not events:
        raise Refused(400, "events: Field required, at least one event")
    if len(events) > EVENTS_PER_SEND_MAX:
        raise Refused(400, f"events: over {EVENTS_PER_SEND_MAX} events")
    for place, event in enumerate(events):
        _check_form(event, place)
    if session.status == "terminated":
        raise Refused(session.switches.terminated_send_status, f"session {session.id} is terminated")
    judged = [_judge(session, events, place) for place in range(len(events))]
    for sent, act in judged:
        session.note("client", "accepted" if act else "ignored", sent)
        if act is not None:
            act()
    return [sent for sent, _act in judged]


def _check_form(event: Any, place: int) -> None:
    if not isinstance(event, dict) or event.get("type") not in _FIELDS:
        name = event.get("type") if isinstance(event, dict) else event
        raise Refused(400, f"events[{place}].type: {name!r} cannot be sent")
    event_type = event["type"]
    required, optional = _FIELDS[event_type]
    missing = sorted(required - event.keys())
    extra = sorted(event.keys() - required - optional - {"type"})
    if missing:
        raise _invalid(event_type, place, f"{', '.join(missing)}: Field required")
    if extra:
        raise _invalid(event_type, place, f"{', '.join(extra)}: Extra inputs are not permitted")
    if event_type in _BLOCKS and event.get("content") is not None:
        _check_content(event, place)
    key = _CALL_KEY.get(event_type)
    if key is not None and not (isinstance(event[key], str) and 1 <= len(event[key]) <= ID_CHARS_MAX):
        raise _invalid(event_type, place, f"{key}: String should have 1 to {ID_CHARS_MAX} characters")
    if event_type == "user.tool_confirmation":
        if event["result"] not in ("allow", "deny"):
            raise _invalid(event_type, place, "result: Input should be 'allow' or 'deny'")
        deny_message = event.get("deny_message")
        if deny_message is not None and event["result"] != "deny":
            raise _invalid(event_type, place, "deny_message: only allowed when result is deny")
        if deny_message is not None and len(deny_message) > DENY_MESSAGE_CHARS_MAX:
            raise _invalid(event_type, place, f"deny_message: over {DENY_MESSAGE_CHARS_MAX} characters")


def _check_content(event: Json, place: int) -> None:
    event_type, content = event["type"], event["content"]
    if not isinstance(content, list):
        raise _invalid(event_type, place, "content: Input should be a list")
    if not content and event_type in ("user.message", "system.message"):
        raise _invalid(event_type, place, "content: List should have at least 1 item")
    for number, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") not in _BLOCKS[event_type]:
            raise _invalid(event_type, place, f"content[{number}]: this block cannot be sent")
        if block["type"] == "text" and not (isinstance(block.get("text"), str) and block["text"]):
            raise _invalid(
                event_type, place, f"content[{number}].text: String should have at least 1 character"
            )


def _judge(session: Session, events: list[Json], place: int) -> Judged:
    event = events[place]
    event_type = event["type"]
    if session.is_capped and event_type not in ANSWER_TYPES:
        raise _invalid(event_type, place, f"the session has reached its budget; {_ALLOWED}")
    match event_type:
        case "user.interrupt":
            return _judge_interrupt(session, event, place)
        case "user.tool_confirmation":
            return _judge_confirmation(session, event, place)
        case "user.custom_tool_result" | "user.tool_result":
            return _judge_result(session, event, place)
        case _:
            return _judge_input(session, events, place)


def _judge_input(session: Session, events: list[Json], place: int) -> Judged:
    event = events[place]
    event_type = event["type"]
    if event_type == "system.message" and session.switches.strict_system_message:
        follows = place > 0 and events[place - 1]["type"] != "user.interrupt"
        if place != len(events) - 1 or not follows:
            raise _invalid(event_type, place, "must be the last event and follow a message or a result")
    blocking = session.blocking_ids()
    if blocking and session.switches.parked_messages == "refuse" and place == 0:
        raise _invalid(
            event_type, place, f"waiting on responses to events [{', '.join(blocking)}]; {_ALLOWED}"
        )
    if len(session.queued) >= QUEUED_MAX:
        raise _invalid(event_type, place, f"{QUEUED_MAX} events are queued already")
    sent = _sent(session, event)
    if event_type == "user.define_outcome":
        sent = {**sent, "outcome_id": session.ids.next("outc"), "processed_at": session.stamp_now()}

    def act() -> None:
        if event_type == "system.message":
            session.emit(session.primary, event_type, {"content": event["content"]}, event_id=sent["id"])
        else:
            session.accept_input(sent)

    return sent, act


def _judge_interrupt(session: Session, event: Json, place: int) -> Judged:
    target: Thread | None = None
    named = event.get("session_thread_id")
    if named is not None:
        target = session.threads.get(named)
        if target is None:
            raise _invalid("user.interrupt", place, f"no thread {named} in this session")
        if target.status == "terminated":
            raise _invalid("user.interrupt", place, f"thread {named} is terminated")
    sent = _sent(session, {**event, "session_thread_id": named})
    if session.is_capped:
        return sent, None

    def apply() -> None:
        if session.status != "terminated":
            session.emit(session.primary, "user.interrupt", {"session_thread_id": named}, event_id=sent["id"])
            session.interrupt(target)

    return sent, lambda: session.timeline.after(session.switches.interrupt_s, apply)


def _judge_confirmation(session: Session, event: Json, place: int) -> Judged:
    call = session.calls.get(event["tool_use_id"])
    if call is None or call.spec.kind == "custom":
        raise Refused(
            400, f"tool_use_id {event['tool_use_id']} does not match any tool_use event in this session"
        )
    if call.permission != "ask":
        raise _invalid(
            "user.tool_confirmation", place, f"tool_use_id {call.id} does not require confirmation"
        )
    sent = _sent(session, {**event, "deny_message": event.get("deny_message"), "session_thread_id": None})
    if call.awaits != "verdict":
        if _is_dead(session, call) and session.switches.dead_thread_answers == "ignore":
            return sent, None
        if session.switches.late_confirmations == "ignore":
            return sent, None
        raise _invalid(
            "user.tool_confirmation", place, f"tool_use_id {call.id} is already confirmed or closed"
        )

    def apply() -> None:
        if call.awaits != "verdict":
            return
        session.verdicts.setdefault(call.id, []).append(sent)
        call.verdict = event["result"]
        _emit_answer(session, call, sent)
        if call.verdict == "deny":
            text = denial_text(call.spec.name, event.get("deny_message"))
            close_with(session, call, text, is_error=True)
        session.answered(call)

    return sent, lambda: session.timeline.after(session.switches.confirm_s, apply)


def _judge_result(session: Session, event: Json, place: int) -> Judged:
    event_type = event["type"]
    key = _CALL_KEY[event_type]
    wanted = "custom_tool_use" if event_type == "user.custom_tool_result" else "tool_use"
    call = session.calls.get(event[key])
    if event_type == "user.tool_result" and session.script.environment == "cloud":
        raise _invalid(event_type, place, "only sessions in a self-hosted environment take it")
    if (
        call is None
        or (call.spec.kind == "custom") != (wanted == "custom_tool_use")
        or not call.runs_at_client
    ):
        raise Refused(400, f"tool_use_id {event[key]} does not match any {wanted} event in this session")
    sent = _sent(session, {**event, "session_thread_id": None, "processed_at": session.stamp_now()})
    if call.awaits == "verdict":
        raise _invalid(event_type, place, f"{key} {call.id} waits for a user.tool_confirmation")
    if call.awaits is None:
        return sent, _late_act(session, call, sent, place)

    def act() -> None:
        if call.awaits != "result":
            return
        call.closing = "answered"
        session.answers.setdefault(call.id, []).append(sent)
        remember(session, call, text_of(event.get("content")), is_error=bool(event.get("is_error")))
        _emit_answer(session, call, sent)
        session.answered(call)

    return sent, act


def _late_act(session: Session, call: Call, sent: Json, place: int) -> Callable[[], None] | None:
    """Return what a result for a closed call does: nothing, or a line in the log; or refuse it."""
    event_type = sent["type"]
    if call.closing == "answered":
        kept = session.switches.duplicate_answers
        text = f"{_CALL_KEY[event_type]} {call.id} already has a result"
    elif _is_dead(session, call):
        kept = session.switches.dead_thread_answers
        text = f"thread {call.thread_id} is terminated"
    else:
        kept = session.switches.late_answers
        text = f"{_CALL_KEY[event_type]} {call.id} is closed"
    if kept == "refuse":
        raise _invalid(event_type, place, text)
    session.answers.setdefault(call.id, []).append(sent)
    return (lambda: _emit_answer(session, call, sent)) if kept == "append" else None


def _emit_answer(session: Session, call: Call, sent: Json) -> None:
    """Record a client's answer; for a child's call on both logs, under different ids."""
    fields = {key: value for key, value in sent.items() if key not in ("type", "id", "processed_at")}
    thread = session.threads[call.thread_id]
    if thread is session.primary:
        session.emit(thread, sent["type"], fields, event_id=sent["id"], at=sent["processed_at"])
        return
    session.emit(thread, sent["type"], fields, at=sent["processed_at"])
    fields["session_thread_id"] = thread.id
    session.emit(session.primary, sent["type"], fields, event_id=sent["id"], at=sent["processed_at"])


def _is_dead(session: Session, call: Call) -> bool:
    return session.threads[call.thread_id].status == "terminated"


def _sent(session: Session, event: Json) -> Json:
    rest = {key: value for key, value in event.items() if key not in ("type", "processed_at")}
    return {
        "type": event["type"],
        "id": session.ids.next("sevt"),
        **rest,
        "processed_at": event.get("processed_at"),
    }


def _invalid(event_type: str, place: int, text: str) -> Refused:
    return Refused(400, f"Invalid {event_type} event at events[{place}]: {text}")
