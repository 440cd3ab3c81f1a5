"""What is refused, with which status and text, and that a refused batch changes nothing."""

from typing import Any

import pytest

from app.simulator.refusal import Refused
from app.simulator.session import Session
from app.simulator.world import World
from tests.simulator.client import (
    T0,
    allow,
    custom_result,
    deny,
    events_of,
    interrupt,
    message,
    only,
    send,
    started,
    tool_result,
    types_of,
)

MIXED = {
    "environment": "self_hosted",
    "turns": [
        {
            "steps": [
                {
                    "do": "call",
                    "calls": [
                        {"tool": "custom", "name": "lookup_order", "input": {}},
                        {"tool": "builtin", "name": "read", "input": {}, "permission": "allow"},
                        {"tool": "builtin", "name": "bash", "input": {}, "permission": "ask"},
                        {"tool": "mcp", "server": "github", "name": "push", "input": {}, "permission": "ask"},
                    ],
                }
            ]
        }
    ],
}


def refusal(world: World, session: Session, *events: Any) -> tuple[int, str]:
    before = [entry.raw for entry in session.primary.log.entries]
    with pytest.raises(Refused) as caught:
        send(world, session, *events)
    assert before == [entry.raw for entry in session.primary.log.entries]
    return caught.value.status, caught.value.message


def made(world: World) -> tuple[Session, str, str, str, str]:
    session = started(world, MIXED)
    custom, allowed, asked, mcp = session.calls
    return session, custom, allowed, asked, mcp


def test_a_message_to_a_session_that_waits_names_what_it_waits_for(world: World) -> None:
    session, custom, allowed, asked, mcp = made(world)
    ids = ", ".join((custom, allowed, asked, mcp))
    said = (
        f"Invalid user.message event at events[0]: waiting on responses to events [{ids}]; only "
        "user.tool_confirmation, user.custom_tool_result, user.tool_result, or user.interrupt may be sent"
    )
    assert (400, said) == refusal(world, session, message())


def test_a_result_for_a_call_of_another_kind_matches_nothing(world: World) -> None:
    session, custom, allowed, asked, mcp = made(world)
    said = "does not match any custom_tool_use event in this session"
    for call_id in (allowed, asked, mcp, "sevt_nothing"):
        assert (400, f"tool_use_id {call_id} {said}") == refusal(world, session, custom_result(call_id))
    assert refusal(world, session, tool_result(custom))[0] == 400
    assert refusal(world, session, tool_result(mcp))[0] == 400


def test_a_call_that_did_not_ask_cannot_be_confirmed(world: World) -> None:
    session, custom, allowed, _asked, _mcp = made(world)
    assert "does not require confirmation" in refusal(world, session, allow(allowed))[1]
    assert "does not match any tool_use event" in refusal(world, session, allow(custom))[1]


def test_a_gated_call_takes_no_result_before_its_verdict(world: World) -> None:
    session, _custom, _allowed, asked, _mcp = made(world)
    assert "waits for a user.tool_confirmation" in refusal(world, session, tool_result(asked))[1]
    send(world, session, allow(asked))
    send(world, session, tool_result(asked))
    assert [asked] == list(world.answers(session.id))


def test_a_denied_call_takes_no_result(world: World) -> None:
    session, _custom, _allowed, asked, _mcp = made(world)
    send(world, session, deny(asked))
    assert refusal(world, session, tool_result(asked))[0] == 400


def test_a_cloud_environment_takes_no_tool_results(world: World) -> None:
    session = started(world, MIXED | {"environment": "cloud"})
    assert "self-hosted" in refusal(world, session, tool_result(list(session.calls)[1]))[1]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"type": "agent.message"}, "cannot be sent"),
        ("text", "cannot be sent"),
        ({"type": "user.message"}, "content: Field required"),
        ({"type": "user.message", "content": []}, "at least 1 item"),
        ({"type": "user.message", "content": "hello"}, "should be a list"),
        ({"type": "user.message", "content": [{"type": "redacted"}]}, "cannot be sent"),
        ({"type": "user.message", "content": [{"type": "text", "text": ""}]}, "at least 1 character"),
        ({**message(), "id": "sevt_1"}, "id: Extra inputs"),
        ({**custom_result("CUSTOM"), "session_thread_id": "sthr_1"}, "session_thread_id: Extra inputs"),
        (custom_result("CUSTOM", ""), "at least 1 character"),
        (custom_result("x" * 129), "1 to 128 characters"),
        ({"type": "user.tool_confirmation", "tool_use_id": "ASKED", "result": "maybe"}, "'allow' or 'deny'"),
        ({**allow("ASKED"), "deny_message": "no"}, "only allowed when result is deny"),
        (deny("ASKED", "x" * 10_001), "over 10000 characters"),
        (interrupt("sthr_nothing"), "no thread"),
    ],
)
def test_malformed_events_are_refused(world: World, event: Any, said: str) -> None:
    session, custom, _allowed, asked, _mcp = made(world)
    if isinstance(event, dict):
        names = {"CUSTOM": custom, "ASKED": asked}
        event = {
            key: names.get(value, value) if isinstance(value, str) else value for key, value in event.items()
        }
    status, text = refusal(world, session, event)
    assert (status, said in text) == (400, True), text


@pytest.mark.parametrize("body", [None, [], {}, {"events": []}, {"events": "x"}])
def test_a_body_without_events_is_refused(world: World, body: Any) -> None:
    session = world.create("custom")
    with pytest.raises(Refused, match="events"):
        world.send(session.id, body, now=T0)


def test_a_batch_with_one_bad_event_changes_nothing(world: World) -> None:
    session, custom, _allowed, _asked, _mcp = made(world)
    refusal(world, session, custom_result(custom), custom_result("sevt_nothing"))
    assert world.answers(session.id) == {}
    assert [each.what for each in session.log if each.who == "client"][1:] == ["refused", "refused"]


def test_a_batch_is_judged_against_the_state_before_it(world: World) -> None:
    session, custom, _allowed, _asked, _mcp = made(world)
    sent = send(world, session, custom_result(custom, "first"), custom_result(custom, "second"))
    assert len(sent) == 2
    assert [each["content"][0]["text"] for each in world.answers(session.id)[custom]] == ["first"]


@pytest.mark.parametrize(("kept", "listed", "counted"), [("ignore", 1, 2), ("append", 2, 2)])
def test_the_first_result_counts_whatever_becomes_of_a_second(
    world: World, kept: str, listed: int, counted: int
) -> None:
    world.switch(duplicate_answers=kept)
    session = started(world, "custom")
    [call_id] = session.waiting_ids()
    send(world, session, custom_result(call_id, "first"))
    send(world, session, custom_result(call_id, "second"))
    assert listed == len(only(events_of(session), "user.custom_tool_result"))
    assert counted == len(world.answers(session.id)[call_id])
    assert "first" in only(events_of(session), "agent.message")[0]["content"][0]["text"]


def test_a_second_result_is_refused_by_default(world: World) -> None:
    session = started(world, "custom")
    [call_id] = session.waiting_ids()
    send(world, session, custom_result(call_id))
    assert "already has a result" in refusal(world, session, custom_result(call_id))[1]


def test_results_are_stamped_on_receipt_and_verdicts_when_processed(world: World) -> None:
    session, custom, _allowed, asked, _mcp = made(world)
    [result] = send(world, session, custom_result(custom))
    [verdict] = send(world, session, allow(asked))
    logged = {event["id"]: event["processed_at"] for event in events_of(session)}
    assert result["processed_at"] == logged[result["id"]]
    assert (verdict["processed_at"], bool(logged[verdict["id"]])) == (None, True)


def test_a_late_confirmation_is_taken_without_effect_or_refused(world: World) -> None:
    session, _custom, _allowed, asked, _mcp = made(world)
    send(world, session, deny(asked))
    send(world, session, allow(asked))
    assert session.calls[asked].verdict == "deny"
    assert [each["result"] for each in world.verdicts(session.id)[asked]] == ["deny"]
    world.switch(late_confirmations="refuse")
    assert "already confirmed" in refusal(world, session, allow(asked))[1]


def test_an_answer_after_an_interrupt_is_refused_or_ignored(world: World) -> None:
    session = started(world, "custom")
    [call_id] = session.waiting_ids()
    send(world, session, interrupt())
    assert "is closed" in refusal(world, session, custom_result(call_id))[1]
    world.switch(late_answers="ignore")
    send(world, session, custom_result(call_id))
    assert "user.custom_tool_result" not in types_of(session)


def test_an_answer_for_a_terminated_thread_has_no_effect_or_is_refused(world: World) -> None:
    session = started(world, "threads")
    call_id = session.waiting_ids()[1]
    world.archive_thread(session.id, session.calls[call_id].thread_id)
    send(world, session, custom_result(call_id))
    assert "user.custom_tool_result" not in types_of(session)
    world.switch(dead_thread_answers="refuse")
    assert "terminated" in refusal(world, session, custom_result(call_id))[1]
    assert "terminated" in refusal(world, session, interrupt(session.calls[call_id].thread_id))[1]


@pytest.mark.parametrize("status", [400, 404, 409])
def test_a_terminated_session_refuses_every_send(world: World, status: int) -> None:
    world.switch(terminated_send_status=status)
    session = started(world, "custom")
    world.archive(session.id)
    assert status == refusal(world, session, message())[0]


def test_a_session_at_its_budget_takes_answers_only(world: World) -> None:
    script = {"turns": [{"steps": [{"do": "end", "stop_reason": "budget_reached"}]}]}
    session = started(world, script)
    assert "user.tool_confirmation" in refusal(world, session, message())[1]
    send(world, session, interrupt())
    assert "user.interrupt" not in types_of(session)


def test_a_system_message_must_follow_something_and_be_last(world: World) -> None:
    session = world.create("custom")
    system = {"type": "system.message", "content": [{"type": "text", "text": "Priority."}]}
    assert refusal(world, session, system)[0] == 400
    assert refusal(world, session, system, message())[0] == 400
    send(world, session, message(), system)
    assert "system.message" in types_of(session)


def test_an_unknown_session_is_a_404(world: World) -> None:
    with pytest.raises(Refused) as caught:
        world.send("sesn_nothing", {"events": [message()]}, now=T0)
    assert (caught.value.status, caught.value.error_type) == (404, "not_found_error")


def test_an_outcome_is_stamped_on_receipt_and_begins_a_turn(world: World) -> None:
    session = world.create("custom")
    outcome = {
        "type": "user.define_outcome",
        "description": "A report.",
        "rubric": {"type": "text", "content": "x"},
    }
    [sent] = send(world, session, outcome)
    assert sent["outcome_id"].startswith("outc_")
    assert sent["processed_at"] == events_of(session)[0]["processed_at"]
    assert "agent.custom_tool_use" in types_of(session)


@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_interrupts_and_confirmations_can_take_their_time(world: World, seconds: float) -> None:
    world.switch(interrupt_s=seconds, confirm_s=seconds)
    session = started(world, "gated")
    [call_id] = session.waiting_ids()
    send(world, session, allow(call_id))
    assert "user.tool_confirmation" not in types_of(session)
    world.advance(T0 + seconds)
    assert "user.tool_confirmation" in types_of(session)
    send(world, session, interrupt(), now=T0 + seconds)
    assert "user.interrupt" not in types_of(session)
    world.advance(T0 + 2 * seconds)
    assert "user.interrupt" in types_of(session)
