"""How a turn is played: each step of a scenario as the events that the server would emit for it.

A turn is a generator. It yields the seconds until it wants to go on, or None when it waits to be woken.
"""

from collections.abc import Generator

from app.simulator.call import Call, call_event, true_permission
from app.simulator.journal import Run, Thread, dump
from app.simulator.log import Frame
from app.simulator.refusal import Json
from app.simulator.script import (
    BadScript,
    Calls,
    Emit,
    End,
    EndThread,
    Join,
    Message,
    Pause,
    Reschedule,
    Spawn,
    Step,
    Terminate,
    Thinking,
    Trouble,
    Wait,
    fill,
)
from app.simulator.session import END_TURN, Session, span_end, text_of
from app.simulator.timeline import parse_stamp_us

THREADS_MAX = 25


def play(session: Session, thread: Thread, steps: tuple[Step, ...]) -> Run:
    """Play a thread's turn to its end."""
    made: list[Call] = []
    for step in steps:
        match step:
            case Thinking() | Message():
                _open_span(session, thread)
                yield from _say(session, thread, step)
            case Calls():
                _open_span(session, thread)
                fresh = yield from _call(session, thread, step)
                made.extend(fresh)
                _close_span(session, thread)
                if step.waits:
                    yield from _settle(session, thread, made)
                    made.clear()
            case Wait():
                _close_span(session, thread)
                yield from _settle(session, thread, made)
                made.clear()
            case Pause():
                yield step.seconds
            case End():
                _close_span(session, thread)
                yield from _settle(session, thread, made)
                _finish(session, thread, step.stop_reason, step.stop_details)
                return
            case Terminate():
                _close_span(session, thread)
                session.terminate()
                return
            case Trouble():
                _close_span(session, thread)
                if _fail(session, thread, step.error):
                    return
            case _:
                _close_span(session, thread)
                yield from _arrange(session, thread, step)
    _close_span(session, thread)
    yield from _settle(session, thread, made)
    _finish(session, thread, END_TURN)


def _say(session: Session, thread: Thread, step: Thinking | Message) -> Run:
    event_id = session.ids.next("sevt")
    event_type = "agent.thinking" if isinstance(step, Thinking) else "agent.message"
    session.preview(
        thread, event_type, event_id, {"type": "event_start", "event": {"type": event_type, "id": event_id}}
    )
    if isinstance(step, Thinking):
        session.emit(thread, event_type, {}, event_id=event_id)
        return
    content = fill(step.content, session.known)
    shed_after = session.switches.deltas_max
    for number, part in enumerate(_parts(text_of(content), step.deltas)):
        yield step.pause_s
        delta = {"type": "content_delta", "index": 0, "content": {"type": "text", "text": part}}
        if shed_after is None or number < shed_after:
            session.preview(
                thread, event_type, event_id, {"type": "event_delta", "event_id": event_id, "delta": delta}
            )
    yield step.pause_s
    if step.is_lost:
        _close_span(session, thread, is_error=True)
        return
    session.emit(thread, event_type, {"content": content}, event_id=event_id)


def _parts(text: str, count: int) -> list[str]:
    """Cut a text into about `count` parts that together are the text."""
    if count < 1 or not text:
        return []
    size = max(1, -(-len(text) // count))
    return [text[first : first + size] for first in range(0, len(text), size)]


def _call(session: Session, thread: Thread, step: Calls) -> Generator[float | None, None, list[Call]]:
    made: list[Call] = []
    for spec in step.specs:
        if made:
            yield step.pause_s
        call = Call(
            id=session.ids.next("sevt"),
            thread_id=thread.id,
            spec=spec,
            input=fill(spec.input, session.known),
            permission=true_permission(thread.agent, spec),
            environment=session.script.environment,
        )
        session.calls[call.id] = session.open_calls[call.id] = call
        made.append(call)
        event_type, fields = call_event(call, shows_permission=not session.switches.omit_evaluated_permission)
        session.emit(thread, event_type, fields, event_id=call.id, copies=call.awaits_client)
    yield step.pause_s
    return made


def _settle(session: Session, thread: Thread, calls: list[Call]) -> Run:
    """Wait until clients have dealt with their part, then let the server run the rest."""
    while any(call.awaits_client for call in calls):
        session.park(thread, [call for call in calls if call.closing is None])
        yield None
        session.wake(thread)
    for call in calls:
        if call.awaits == "server":
            yield call.spec.run_s
            text = fill(call.spec.output, session.known)
            if call.permission == "deny":
                text = f"Permission to use {call.spec.name} has been denied."
            close_with(session, call, text, is_error=call.spec.is_error or call.permission == "deny")


def close_with(session: Session, call: Call, text: str, *, is_error: bool) -> None:
    """Close a call with a result that the server makes."""
    call.closing = "denied" if call.permission == "deny" or call.verdict == "deny" else "answered"
    session.open_calls.pop(call.id, None)
    remember(session, call, text, is_error=is_error)
    fields: Json = {
        call.result_key: call.id,
        "content": [{"type": "text", "text": text}],
        "is_error": is_error,
    }
    session.emit(session.threads[call.thread_id], call.result_type, fields)


def remember(session: Session, call: Call, text: str, *, is_error: bool) -> None:
    """Let later steps use what a call came to."""
    if call.spec.alias is not None:
        verdict = call.verdict or ""
        session.known[call.spec.alias] = {"text": text, "is_error": str(is_error).lower(), "verdict": verdict}


def _arrange(session: Session, thread: Thread, step: Step) -> Run:
    match step:
        case Spawn():
            child = _spawn(session, thread, step)
            if step.joins:
                yield from _join(session, thread, child)
        case Join():
            yield from _join(session, thread, _child(session, step.alias))
        case EndThread():
            session.terminate_thread(_child(session, step.alias))
        case Reschedule():
            session.reschedule(thread)
            yield step.pause_s
            session.wake(thread)
        case Emit():
            emit_object(session, thread, fill(step.event, session.known))
        case _:
            raise BadScript(f"step {step} cannot be played here")


def _spawn(session: Session, thread: Thread, step: Spawn) -> Thread:
    alive = [each for each in session.threads.values() if each.status != "terminated"]
    if len(alive) > THREADS_MAX:
        raise BadScript(f"over {THREADS_MAX} child threads at a time")
    agent = session.script.agents.get(step.agent, {"name": step.agent})
    now_us = session.timeline.now_us
    child = Thread(session.ids.next("sthr"), agent, thread.id, now_us, updated_us=now_us)
    session.threads[child.id] = session.thread_of_alias[step.alias] = child
    created = {"session_thread_id": child.id, "agent_name": child.name, "workflow_run_id": None}
    session.emit(session.primary, "session.thread_created", created)
    content = [{"type": "text", "text": fill(step.text, session.known)}]
    _message_between(session, thread, child, content)
    session.start(child, step.steps)
    return child


def _join(session: Session, thread: Thread, child: Thread) -> Run:
    if child.in_turn and child.status != "terminated":
        session.park_on_child(thread, child)
        yield None
        session.wake(thread)


def _child(session: Session, alias: str) -> Thread:
    if alias not in session.thread_of_alias:
        raise BadScript(f"no thread {alias!r} has been started")
    return session.thread_of_alias[alias]


def _message_between(session: Session, sender: Thread, receiver: Thread, content: list[Json]) -> None:
    sent = {"to_session_thread_id": receiver.id, "to_agent_name": receiver.name, "content": content}
    session.emit(sender, "agent.thread_message_sent", sent)
    received = {"from_session_thread_id": sender.id, "from_agent_name": sender.name, "content": content}
    session.emit(receiver, "agent.thread_message_received", received)


def _finish(session: Session, thread: Thread, stop_reason: Json, stop_details: Json | None = None) -> None:
    if thread.parent_id is not None:
        parent = session.threads[thread.parent_id]
        _message_between(session, thread, parent, [{"type": "text", "text": "Done."}])
    session.finish(thread, stop_reason, stop_details)


def _fail(session: Session, thread: Thread, error: Json) -> bool:
    """Emit an error and say whether it ended the turn."""
    session.emit(thread, "session.error", {"error": error})
    match error.get("retry_status", {}).get("type"):
        case "exhausted":
            session.drop_queue()
            session.finish(thread, {"type": "retries_exhausted"})
            return True
        case "terminal":
            session.terminate()
            return True
    return False


def emit_object(session: Session, thread: Thread, event: Json) -> str:
    """Put an arbitrary event on a thread's log and streams, filling in `id` and `processed_at` when absent.

    Previews, which have neither, go to the streams that asked for them; `session.deleted` to the streams
    only.
    """
    event_type = str(event.get("type", ""))
    if event_type in ("event_start", "event_delta"):
        start = event.get("event", {})
        event_id = str(event.get("event_id") or start.get("id"))
        session.preview(thread, str(start.get("type", "agent.message")), event_id, event)
        return event_id
    event_id = str(event.get("id") or session.ids.next("sevt"))
    if "processed_at" not in event:
        fields = {key: value for key, value in event.items() if key not in ("type", "id")}
        return session.emit(thread, event_type, fields, event_id=event_id)
    raw = dump(event)
    stamp = event["processed_at"]
    stamp_us = parse_stamp_us(stamp) if isinstance(stamp, str) else session.timeline.now_us
    listed_us = None if event_type == "session.deleted" else stamp_us
    frame = Frame("event", event_type, raw)
    session.emit_raw(
        raw, event_type=event_type, event_id=event_id, thread=thread, frame=frame, stamp_us=listed_us
    )
    return event_id


def _open_span(session: Session, thread: Thread) -> None:
    if thread.span_id is None:
        thread.span_id = session.emit(thread, "span.model_request_start", {})


def _close_span(session: Session, thread: Thread, *, is_error: bool = False) -> None:
    if thread.span_id is not None:
        session.emit(thread, "span.model_request_end", span_end(thread.span_id, is_error=is_error))
        thread.span_id = None
