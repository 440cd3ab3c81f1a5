"""Live events: each call runs once, whatever else the stream says around it."""

from __future__ import annotations

import pytest

from app.core import events as ev
from app.core import protocol as p
from tests.core.life import (
    Life,
    custom,
    custom_result,
    event,
    idle,
    text,
    use,
    user_result,
)

# ---- the two kinds


def test_a_builtin_call_is_answered_as_one() -> None:
    """R-020: `user.tool_result` with `tool_use_id`."""
    life = Life().connect()
    life.receive(use("tu1", input={"x": "a"}))
    life.deliver("tu1", "a")
    assert life.sends == [
        {"type": "user.tool_result", "tool_use_id": "tu1", "content": text("a"), "is_error": False}
    ]


def test_the_log_tells_that_a_call_ran_and_was_posted() -> None:
    """R-020: the record of an ungated call that went well."""
    life = Life().connect()
    life.receive(use("tu1"))
    life.answer("tu1", "a")
    assert life.log("tu1") == {
        "executed": True,
        "posted": True,
        "is_error": False,
        "confirmation": None,
        "result": text("a"),
        "outcome": "posted",
    }


def test_a_custom_call_is_answered_as_one() -> None:
    """R-021: `user.custom_tool_result` with `custom_tool_use_id`, and nothing else is sent."""
    life = Life().connect()
    life.receive(custom("ctu1", input={"x": "b"}))
    life.answer("ctu1", "b")
    assert life.sends == [
        {
            "type": "user.custom_tool_result",
            "custom_tool_use_id": "ctu1",
            "content": text("b"),
            "is_error": False,
        }
    ]


def test_calls_of_both_kinds_with_one_tool_name_are_answered_each_by_its_kind() -> None:
    """R-022: two deliveries, and each result has its own type and id field."""
    life = Life().connect()
    life.receive(use("tu1"), custom("ctu1"))
    life.answer("ctu1")
    life.answer("tu1")
    answered = [(s["type"], s.get("tool_use_id") or s.get("custom_tool_use_id")) for s in life.sends]
    assert answered == [("user.custom_tool_result", "ctu1"), ("user.tool_result", "tu1")]


def test_calls_of_both_kinds_with_one_tool_name_are_delivered_each() -> None:
    """R-022: the name does not make them one call."""
    life = Life().connect()
    life.receive(use("tu1"), custom("ctu1"))
    assert life.deliveries == ["tu1", "ctu1"]


# ---- repeats


def test_a_call_seen_twice_while_it_runs_is_delivered_once() -> None:
    """R-023: the second event changes nothing."""
    life = Life().connect()
    tu1 = use("tu1")
    life.receive(tu1, tu1)
    assert life.deliveries == ["tu1"]


def test_a_call_seen_again_after_its_post_is_posted_once() -> None:
    """R-023: one post and one record."""
    life = Life().connect()
    tu1 = use("tu1")
    life.receive(tu1)
    life.answer("tu1")
    life.clear()
    life.receive(tu1)
    assert life.effects == []


def test_a_repeat_without_a_time_is_known_by_its_id() -> None:
    """R-023: `processed_at` plays no part in telling a call."""
    life = Life().connect()
    life.receive(use("tu1", at=None), use("tu1", at=None))
    assert life.deliveries == ["tu1"]


# ---- reading goes on


def test_a_terminal_event_is_handled_while_a_tool_runs() -> None:
    """R-024: the stream is closed at the second of the event, not when the tool is done."""
    life = Life().connect()
    life.receive(use("tu1"))
    life.at(1)
    assert p.CloseStream() in life.receive(event("session.status_terminated", "e9"))


def test_nothing_that_follows_a_terminal_event_is_routed() -> None:
    """R-024: the run only waits for what was under way."""
    life = Life().connect()
    life.receive(use("tu1"), event("session.status_terminated", "e9"), use("tu2"))
    assert life.deliveries == ["tu1"]


# ---- what cannot be used


def test_an_unknown_event_type_leaves_the_calls_around_it_alone() -> None:
    """R-025: both run."""
    life = Life().connect()
    life.receive(use("tu1"), event("agent.hologram", "h1", anything=True), use("tu2"))
    assert life.deliveries == ["tu1", "tu2"]


def test_an_unknown_event_type_triggers_nothing() -> None:
    """R-025: no effect at all."""
    life = Life().connect()
    assert life.receive(event("agent.hologram", "h1", anything=True)) == []


def test_an_unknown_event_type_stops_the_countdown() -> None:
    """R-025: it is activity."""
    life = Life(max_idle_s=60).connect()
    life.receive(idle(), event("agent.hologram", "h1", anything=True))
    life.at(200)
    assert life.end is None


@pytest.mark.parametrize(
    "frame",
    [
        b'{"type":"agent.tool_use","id":"tu1","name":null,"input":{}}',
        b'{"id":"tu1","name":"echo"}',
        b"data that is not JSON",
    ],
    ids=["name is null", "no type", "not JSON"],
)
def test_a_damaged_event_never_becomes_a_notice(frame: bytes) -> None:
    """R-026: it is told apart when it is read, so that the runner counts it and goes on."""
    assert isinstance(ev.parse(frame), ev.Malformed)


def test_interrupts_without_an_id_are_not_taken_for_one_another() -> None:
    """R-027: the second settles the call that came after the first."""
    life = Life(concurrency=1).connect()
    life.receive(use("tu1"), use("tu2"), event("user.interrupt", ""))
    life.receive(use("tu3"), event("user.interrupt", ""))
    assert (life.state("tu2"), life.state("tu3")) == ("interrupted", "interrupted")


def test_previews_are_not_taken_for_one_another() -> None:
    """R-027: fragments have no id of their own, and equal ones all count."""
    life = Life().connect()
    life.receive(event("event_start", "", at=None, event={"id": "m1", "type": "agent.message"}))
    fragment = {"type": "content_delta", "index": 0, "content": {"type": "text", "text": "ha"}}
    life.receive(*(event("event_delta", "", at=None, event_id="m1", delta=fragment) for _ in range(3)))
    assert [s.content for s in life.machine.messages.partials()] == [b'[{"type":"text","text":"hahaha"}]']


# ---- somebody else answers


def test_a_queued_call_that_another_client_answered_is_not_delivered() -> None:
    """R-028: its turn never comes."""
    life = Life(concurrency=1).connect()
    life.receive(use("tu1"), use("tu2"), user_result("tu2"))
    life.answer("tu1")
    assert life.deliveries == ["tu1"]


def test_the_log_tells_that_another_client_answered_a_queued_call() -> None:
    """R-028: neither executed nor posted."""
    life = Life(concurrency=1).connect()
    life.receive(use("tu1"), use("tu2"), user_result("tu2"))
    log = life.log("tu2")
    assert (log["executed"], log["posted"], log["outcome"]) == (False, False, "answered_elsewhere")


def test_the_result_of_a_call_that_was_answered_meanwhile_is_not_posted() -> None:
    """R-029: the delivery may finish, and that is all."""
    life = Life().connect()
    life.receive(use("tu1"), user_result("tu1"))
    life.deliver("tu1")
    assert life.sends == []


def test_the_result_of_a_call_that_was_answered_meanwhile_is_kept() -> None:
    """R-029: the record says what the tool came to."""
    life = Life().connect()
    life.receive(use("tu1"), user_result("tu1"))
    life.deliver("tu1", "late")
    assert life.log("tu1") == {
        "executed": True,
        "posted": False,
        "is_error": False,
        "confirmation": None,
        "result": text("late"),
        "outcome": "answered_elsewhere",
    }


def test_an_answered_call_still_takes_its_slot_until_its_delivery_ends() -> None:
    """R-029: the tool is busy with it, so concurrency counts it."""
    life = Life(concurrency=1).connect()
    life.receive(use("tu1"), user_result("tu1"), use("tu2"))
    before = life.deliveries
    life.deliver("tu1")
    assert (before, life.deliveries) == (["tu1"], ["tu1", "tu2"])


def test_the_kind_of_an_answer_is_not_compared() -> None:
    """R-028: the id alone decides."""
    life = Life(concurrency=1).connect()
    life.receive(use("tu1"), use("tu2"), custom_result("tu2"))
    assert life.state("tu2") == "answered_elsewhere"


def test_a_call_that_the_platform_ran_is_settled_by_its_result() -> None:
    """R-030: a built-in call of a tool that is not ours needs nothing from us."""
    life = Life().connect()
    life.receive(use("tu1", "bash"), event("agent.tool_result", "r1", tool_use_id="tu1"))
    assert (life.state("tu1"), life.sends) == ("answered_elsewhere", [])


def test_a_call_that_the_platform_ran_does_not_keep_the_run_alive() -> None:
    """R-030: it leaves the blockers."""
    life = Life(max_idle_s=60).connect()
    life.receive(use("tu1", "bash"), event("agent.tool_result", "r1", tool_use_id="tu1"), idle())
    life.at(60)
    assert life.end == p.End("idle")


# ---- a burst


def test_a_burst_is_recorded_at_once() -> None:
    """R-031: each of a thousand calls is stored when it is seen, although few can run."""
    life = Life().connect()
    life.receive(*(use(f"tu{n}") for n in range(1_000)))
    assert len(life.calls) == 1_000


def test_a_burst_runs_no_more_at_once_than_was_asked_for() -> None:
    """R-031: eight by default, and the next one as soon as one is done."""
    life = Life().connect()
    life.receive(*(use(f"tu{n}") for n in range(1_000)))
    at_once = [len(life.deliveries)]
    for n in range(100):
        life.answer(f"tu{n}")
        at_once.append(len(life.deliveries) - (n + 1))
    assert set(at_once) == {8}


def test_a_burst_is_answered_call_by_call() -> None:
    """R-031: in the end each has exactly one answer."""
    life = Life().connect()
    ids = [f"tu{n}" for n in range(1_000)]
    life.receive(*(use(id_) for id_ in ids))
    for id_ in ids:
        life.answer(id_)
    assert [s["tool_use_id"] for s in life.sends] == ids
