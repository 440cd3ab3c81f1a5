"""What a session does, as values: no network, no clock."""

import json
from typing import Any

import pytest

from app.simulator.log import Subscription
from app.simulator.script import burst
from app.simulator.session import Session
from app.simulator.world import World
from tests.simulator.client import (
    T0,
    allow,
    answer,
    custom_result,
    deny,
    events_of,
    interrupt,
    message,
    only,
    send,
    started,
    stop_reasons,
    tool_result,
    types_of,
)


def steps(*given: dict[str, Any], environment: str = "cloud", **more: Any) -> dict[str, Any]:
    return {"environment": environment, "turns": [{"steps": list(given)}], **more}


def call(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"do": "call", "calls": list(calls), **more}


CUSTOM = {"tool": "custom", "name": "lookup_order", "input": {"order_id": "A-1042"}}
ASK = {
    "tool": "builtin",
    "name": "bash",
    "input": {"command": "ls"},
    "permission": "ask",
    "output": "total 0",
}


def play_out(world: World, session: Session) -> None:
    for _ in range(10_000):
        waiting = session.waiting_ids()
        if not waiting:
            return
        send(world, session, answer(session, waiting[0]))
    raise AssertionError("the session never comes to rest")


def test_a_turn_with_a_custom_call_has_the_documented_order(world: World) -> None:
    session = started(world, "custom")
    [call_id] = session.waiting_ids()
    send(world, session, custom_result(call_id))
    assert types_of(session) == [
        "user.message",
        "session.status_running",
        "session.thread_status_running",
        "span.model_request_start",
        "agent.thinking",
        "agent.custom_tool_use",
        "span.model_request_end",
        "session.thread_status_idle",
        "session.usage",
        "session.status_idle",
        "user.custom_tool_result",
        "session.status_running",
        "session.thread_status_running",
        "span.model_request_start",
        "agent.message",
        "span.model_request_end",
        "session.thread_status_idle",
        "session.usage",
        "session.status_idle",
    ]
    assert [{"type": "requires_action", "event_ids": [call_id]}, {"type": "end_turn"}] == stop_reasons(
        session
    )


def test_a_result_shows_in_the_messages_that_follow(world: World) -> None:
    session = started(world, "custom")
    send(world, session, custom_result(session.waiting_ids()[0], "on its way"))
    [said] = only(events_of(session), "agent.message")
    assert said["content"] == [{"type": "text", "text": "Order A-1042: on its way"}]


@pytest.mark.parametrize("name", ["demo", "custom", "gated", "parallel", "threads", "mcp", "cloud"])
def test_every_scenario_comes_to_its_end(world: World, name: str) -> None:
    session = started(world, name)
    play_out(world, session)
    assert (session.status, stop_reasons(session)[-1]) == ("idle", {"type": "end_turn"})


def test_the_same_seed_gives_the_same_bytes() -> None:
    logs = []
    for _ in range(2):
        world = World(seed=7, pace=0)
        world.advance(T0)
        session = started(world, "parallel")
        play_out(world, session)
        logs.append([entry.raw for entry in session.primary.log.entries])
    assert logs[0] == logs[1]


def test_ids_have_the_documented_forms(world: World) -> None:
    session = started(world, "custom")
    assert session.id.startswith("sesn_")
    assert session.primary.id.startswith("sthr_")
    assert all(event["id"].startswith("sevt_") for event in events_of(session))
    assert len({event["id"] for event in events_of(session)}) == len(events_of(session))


def test_an_allowed_call_waits_for_its_result_where_the_client_runs_it(world: World) -> None:
    session = started(world, "gated")
    [call_id] = session.waiting_ids()
    send(world, session, allow(call_id))
    assert [call_id] == session.waiting_ids()
    send(world, session, tool_result(call_id))
    assert session.waiting_ids() == []
    assert [call_id] == list(world.answers(session.id))
    assert [each["result"] for each in world.verdicts(session.id)[call_id]] == ["allow"]


def test_an_allowed_call_is_run_by_the_server_in_a_cloud_environment(world: World) -> None:
    session = started(world, steps(call(ASK)))
    [call_id] = session.waiting_ids()
    send(world, session, allow(call_id))
    [result] = only(events_of(session), "agent.tool_result")
    assert (call_id, [{"type": "text", "text": "total 0"}], False) == (
        result["tool_use_id"],
        result["content"],
        result["is_error"],
    )


@pytest.mark.parametrize("environment", ["cloud", "self_hosted"])
def test_a_denied_call_gets_a_rejecting_result_with_the_reason(world: World, environment: str) -> None:
    session = started(world, steps(call(ASK), environment=environment))
    send(world, session, deny(session.waiting_ids()[0], "Not on the production host."))
    [result] = only(events_of(session), "agent.tool_result")
    assert result["is_error"] is True
    assert "Not on the production host." in result["content"][0]["text"]
    assert stop_reasons(session)[-1] == {"type": "end_turn"}


def test_a_call_that_the_server_denies_waits_for_nobody(world: World) -> None:
    session = started(world, steps(call({**ASK, "permission": "deny"})))
    [result] = only(events_of(session), "agent.tool_result")
    assert result["content"][0]["text"] == "Permission to use bash has been denied."
    assert stop_reasons(session) == [{"type": "end_turn"}]


@pytest.mark.parametrize(
    ("given", "shown", "waits"),
    [
        ({"permission": "ask"}, "ask", True),
        ({"permission": "allow"}, "allow", False),
        ({"permission": "review"}, "review", True),
        ({"permission": "absent"}, None, False),
        ({}, "allow", False),
    ],
)
def test_permissions_are_shown_as_scripted(
    world: World, given: dict[str, str], shown: str | None, waits: bool
) -> None:
    bare = {"tool": "builtin", "name": "read", "input": {}}
    session = started(world, steps(call({**bare, **given})))
    [used] = only(events_of(session), "agent.tool_use")
    assert (shown, waits) == (used.get("evaluated_permission"), bool(session.waiting_ids()))


def test_web_calls_run_on_the_server_even_when_self_hosted(world: World) -> None:
    web = {"tool": "builtin", "name": "web_search", "input": {}, "permission": "allow"}
    session = started(world, steps(call(web), environment="self_hosted"))
    assert [each["type"] for each in only(events_of(session), "agent.tool_result")] == ["agent.tool_result"]


def test_each_part_of_the_answers_brings_an_idle_with_the_rest(world: World) -> None:
    session = started(world, steps(call(CUSTOM, CUSTOM, CUSTOM)))
    first, second, third = session.waiting_ids()
    for call_id in (second, first, third):
        send(world, session, custom_result(call_id))
    listed = [reason.get("event_ids") for reason in stop_reasons(session)]
    assert [[first, second, third], [first, third], [third], None] == listed


def test_a_stale_idle_lists_ids_that_were_just_answered(world: World) -> None:
    world.switch(reidle="stale")
    session = started(world, steps(call(CUSTOM, CUSTOM)))
    first, second = session.waiting_ids()
    send(world, session, custom_result(first))
    assert [[first, second], [first, second]] == [reason["event_ids"] for reason in stop_reasons(session)]


def test_an_idle_may_list_a_window_of_the_ids_only(world: World) -> None:
    world.switch(idle_ids_max=2)
    session = started(world, steps(call(*[CUSTOM] * 5)))
    assert (len(stop_reasons(session)[0]["event_ids"]), len(session.waiting_ids())) == (2, 5)


def test_a_call_answered_before_the_idle_brings_no_idle(world: World) -> None:
    world = World(pace=1)
    world.advance(T0)
    session = started(world, steps(call(CUSTOM, pause_s=2.0)))
    send(world, session, custom_result(session.waiting_ids()[0]), now=T0 + 1)
    world.advance(T0 + 3)
    assert stop_reasons(session) == [{"type": "end_turn"}]


def test_calls_without_wait_block_only_at_the_wait(world: World) -> None:
    script = steps(call(CUSTOM, wait=False), {"do": "message", "text": "Meanwhile."}, {"do": "wait"})
    session = started(world, script)
    assert types_of(session).index("agent.message") < types_of(session).index("session.status_idle")
    assert len(session.waiting_ids()) == 1


def test_unparking_takes_the_time_that_the_switch_says(world: World) -> None:
    world.switch(unpark_s=0.5)
    session = started(world, "custom")
    [call_id] = session.waiting_ids()
    send(world, session, custom_result(call_id))
    assert ("idle", [call_id]) == (session.status, session.blocking_ids())
    world.advance(T0 + 0.6)
    assert stop_reasons(session)[-1] == {"type": "end_turn"}


def test_messages_sent_during_a_turn_wait_for_their_turn(world: World) -> None:
    world = World(pace=1)
    world.advance(T0)
    session = started(
        world, steps({"do": "pause", "s": 5}, {"do": "message", "text": "You said ${user.text}"})
    )
    [sent] = send(world, session, message("second"), now=T0 + 1)
    assert sent["processed_at"] is None
    [queued] = [event for event in events_of(session) if event["processed_at"] is None]
    assert sent["id"] == queued["id"]
    world.advance(T0 + 11)
    assert [
        each["content"][0]["text"].removeprefix("You said ")
        for each in only(events_of(session), "agent.message")
    ] == ["Where is order A-1042?", "second"]
    assert [event["id"] for event in events_of(session)].count(sent["id"]) == 1


def test_a_childs_calls_are_copied_to_the_session_with_the_threads_id(world: World) -> None:
    session = started(world, "threads")
    child_id = next(each for each in session.threads if each != session.primary.id)
    [copy] = [
        each
        for each in only(events_of(session), "agent.custom_tool_use")
        if each["session_thread_id"] == child_id
    ]
    [own] = only(events_of(session, child_id), "agent.custom_tool_use")
    assert (copy["id"], None) == (own["id"], own["session_thread_id"])


def test_an_answer_to_a_childs_call_has_another_id_on_the_childs_log(world: World) -> None:
    session = started(world, "threads")
    call_id = session.waiting_ids()[0]
    child_id = session.calls[call_id].thread_id
    [sent] = send(world, session, custom_result(call_id))
    [copy] = only(events_of(session), "user.custom_tool_result")
    [own] = only(events_of(session, child_id), "user.custom_tool_result")
    assert (sent["id"], child_id) == (copy["id"], copy["session_thread_id"])
    assert own["id"] != copy["id"]
    assert own["custom_tool_use_id"] == copy["custom_tool_use_id"] == call_id


def test_a_session_runs_while_one_of_its_threads_does(world: World) -> None:
    world = World(pace=1)
    world.advance(T0)
    child = {"do": "thread", "as": "c", "agent": "child", "text": "Go.", "steps": [call(CUSTOM)]}
    session = started(world, steps(child, {"do": "pause", "s": 10}))
    world.advance(T0 + 1)
    assert (session.status, len(session.waiting_ids()), stop_reasons(session)) == ("running", 1, [])
    world.advance(T0 + 11)
    assert stop_reasons(session)[-1]["type"] == "requires_action"


def test_the_calls_of_a_terminated_thread_are_dropped(world: World) -> None:
    session = started(world, "threads")
    reviewed, audited = session.waiting_ids()
    send(world, session, custom_result(reviewed))
    assert audited not in session.waiting_ids()
    assert session.calls[audited].closing == "thread_terminated"
    [ended] = only(events_of(session), "session.thread_status_terminated")
    assert session.calls[audited].thread_id == ended["session_thread_id"]


def test_an_interrupt_closes_open_calls_and_ends_the_turn(world: World) -> None:
    session = started(world, steps(call(CUSTOM, ASK)))
    [sent] = send(world, session, interrupt())
    assert sent["processed_at"] is None
    [result] = only(events_of(session), "agent.tool_result")
    assert result["content"][0]["text"] == "Tool execution was interrupted before completion. Please retry."
    assert only(events_of(session), "user.custom_tool_result") == []
    assert (session.waiting_ids(), stop_reasons(session)[-1]) == ([], {"type": "end_turn"})


def test_an_interrupt_of_one_thread_leaves_the_others_alone(world: World) -> None:
    session = started(world, "threads")
    reviewed, audited = session.waiting_ids()
    send(world, session, interrupt(session.calls[audited].thread_id))
    assert [reviewed] == session.waiting_ids()


def test_an_interrupt_of_an_idle_session_does_nothing(world: World) -> None:
    session = world.create("custom")
    send(world, session, interrupt())
    assert types_of(session) == ["user.interrupt"]


def test_an_interrupt_in_the_middle_of_a_response_ends_its_span_with_an_error(world: World) -> None:
    world = World(pace=1)
    world.advance(T0)
    session = started(world, steps({"do": "message", "text": "A long story.", "deltas": 5, "pause_s": 1}))
    send(world, session, interrupt(), now=T0 + 2)
    [span] = only(events_of(session), "span.model_request_end")
    assert (span["is_error"], only(events_of(session), "agent.message")) == (True, [])
    world.advance(T0 + 60)
    assert only(events_of(session), "agent.message") == []


def test_errors_act_as_their_retry_status_says(world: World) -> None:
    session = started(world, "trouble")
    assert "session.status_rescheduled" in types_of(session)
    for _ in range(2):
        send(world, session, message())
    assert [each["type"] for each in stop_reasons(session)] == ["end_turn", "retries_exhausted", "refusal"]
    assert only(events_of(session), "session.status_idle")[-1]["stop_details"]["category"] == "cyber"


def test_a_terminal_error_terminates_the_session(world: World) -> None:
    trouble = {"type": "unknown_error", "message": "x", "retry_status": {"type": "terminal"}}
    session = started(world, steps({"do": "error", "error": trouble}))
    assert (session.status, types_of(session)[-1]) == ("terminated", "session.status_terminated")


def test_previews_are_a_prefix_and_go_to_those_who_asked(world: World) -> None:
    session = world.create(
        steps({"do": "thinking"}, {"do": "message", "text": "Order A-1042 shipped.", "deltas": 4})
    )
    previews = world.subscribe(session.id, deltas=frozenset({"agent.message"}))
    plain = world.subscribe(session.id)
    world.say(session.id, "Where?", now=T0)
    frames = [json.loads(frame.data) for frame in previews.drain()]
    kinds = [
        each["type"] for each in frames if each["type"] in ("event_start", "event_delta", "agent.message")
    ]
    assert ["event_start", *["event_delta"] * 4, "agent.message"] == kinds
    deltas = [each["delta"]["content"]["text"] for each in frames if each["type"] == "event_delta"]
    assert "".join(deltas) == "Order A-1042 shipped."
    assert not {"event_start", "event_delta"} & {frame.name for frame in plain.drain()}


def test_previews_are_in_no_list(world: World) -> None:
    session = started(world, steps({"do": "message", "text": "Hello.", "deltas": 2}))
    assert not {"event_start", "event_delta"} & set(types_of(session))


def test_a_stream_opened_in_the_middle_of_a_message_gets_no_deltas_of_it(world: World) -> None:
    world = World(pace=1)
    world.advance(T0)
    session = started(world, steps({"do": "message", "text": "abcdef", "deltas": 6, "pause_s": 1}))
    world.advance(T0 + 2)
    late = world.subscribe(session.id, deltas=frozenset({"agent.message"}))
    world.advance(T0 + 20)
    assert "event_delta" not in {frame.name for frame in late.drain()}


def test_a_stream_replays_nothing(world: World) -> None:
    session = started(world, "custom")
    assert world.subscribe(session.id).drain() == []


def test_a_thread_stream_carries_that_threads_own_events(world: World) -> None:
    session = started(world, "threads")
    call_id = session.waiting_ids()[0]
    stream = world.subscribe(session.id, thread_id=session.calls[call_id].thread_id)
    send(world, session, custom_result(call_id))
    assert "agent.message" in {frame.name for frame in stream.drain()}


def test_a_reader_that_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.simulator.log.FRAMES_MAX", 3)
    world = World(pace=0)
    session = world.create("custom")
    stream: Subscription = world.subscribe(session.id)
    world.say(session.id, "Where?", now=T0)
    assert [frame.kind for frame in stream.drain()] == ["eof"]


def test_archiving_keeps_the_history_and_terminates(world: World) -> None:
    session = started(world, "custom")
    assert world.archive(session.id)["status"] == "terminated"
    assert types_of(session)[-1] == "session.status_terminated"


def test_deleting_says_so_on_the_streams_and_ends_them(world: World) -> None:
    session = started(world, "custom")
    stream = world.subscribe(session.id)
    world.delete(session.id)
    assert [frame.name or frame.kind for frame in stream.drain()] == ["session.deleted", "eof"]


@pytest.mark.parametrize("parallel", [1, 25])
def test_a_thousand_calls_take_seconds(world: World, parallel: int) -> None:
    session = started(world, burst(1000, 50, parallel))
    play_out(world, session)
    assert (len(world.answers(session.id)), len(world.verdicts(session.id))) == (1000, 50)
    assert all(len(each) == 1 for each in world.answers(session.id).values())


def test_a_script_that_runs_in_circles_is_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.simulator.session.STEPS_PER_RESUME_MAX", 10)
    pauses = [{"do": "pause", "s": 0}] * 20
    with pytest.raises(RuntimeError, match="in circles"):
        started(world, steps(*pauses))
