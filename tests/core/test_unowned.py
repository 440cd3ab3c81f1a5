"""Calls of names that nobody registered: left to their owner, and never forgotten."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from app.core import protocol as p
from app.core.tools import Tool
from tests.core.life import ECHO, GATED, Life, custom, event, idle, use, user_result, verdict

MISSING = Tool(name="missing", url="https://tools.example/missing")


def test_an_unregistered_name_is_recorded_and_left_alone() -> None:
    """R-110: no send, and the run goes on."""
    life = Life(tools=()).connect()
    life.receive(use("tu1", "missing"))
    assert {
        "executed": False, "posted": False, "is_error": False, "confirmation": None, "result": None,
        "outcome": "unowned",
    } == life.log("tu1")  # fmt: skip
    assert ([], None) == (life.sends, life.end)


def test_each_owner_gets_only_its_own_calls() -> None:
    """R-111: three records, one send, and its bytes name no other call."""
    life = Life().connect()
    life.receive(use("tu1", "not_ours"), custom("ctu1", "app_tool"), use("tu2"))
    life.answer("tu2")
    assert {"tu1", "ctu1", "tu2"} == set(life.calls)
    assert ["tu2"] == [sent["tool_use_id"] for sent in life.sends]
    assert not [sent for sent in life.of(p.Send) if b"tu1" in sent.event or b"ctu1" in sent.event]


def test_an_unowned_call_in_history_defers_the_countdown() -> None:
    """R-112: its owner may still be at work."""
    life = Life(max_idle_s=0.1).connect(use("tu1", "not_ours"), idle())
    life.at(1)
    assert (None, []) == (life.end, life.sends)


def test_an_unowned_call_seen_live_defers_the_countdown() -> None:
    """R-113: one rule for both paths."""
    life = Life(max_idle_s=0.1).connect()
    life.receive(use("tu1", "not_ours"), idle())
    life.at(1)
    assert (None, []) == (life.end, life.sends)


def test_an_unowned_call_is_reported_once() -> None:
    """R-114: five reconnects list it again, and add nothing."""
    tu1 = use("tu1", "missing")
    life = Life().connect()
    life.receive(tu1)
    for _ in range(5):
        life.reconnect(tu1)
    assert 1 == len(life.of(p.SaveCall))


def test_an_unowned_call_is_reported_once_across_restarts() -> None:
    """R-114: a successor finds it in the store."""
    tu1 = use("tu1", "missing")
    first = Life().connect(tu1)
    life = Life(stored=first.store()).connect(tu1)
    assert [] == life.of(p.SaveCall)


def test_a_tool_that_cannot_be_called_owns_no_calls_until_it_is_mended() -> None:
    """An unreadable secret: nothing is delivered unsigned, the call says why and waits."""
    faulty = replace(MISSING, fault="tools.secrets was encrypted with key 1a2b3c4d.")
    life = Life(tools=(faulty,)).connect()
    life.receive(use("tu1", "missing"))
    assert ("unowned", []) == (life.state("tu1"), life.of(p.Deliver))
    assert "is registered but cannot be called: tools.secrets was" in (life.calls["tu1"].detail or "")
    life.notice(p.ToolsChanged({"missing": MISSING}))
    assert (["tu1"], None) == ([one.call.id for one in life.of(p.Deliver)], life.calls["tu1"].detail)


@pytest.mark.parametrize("type_", ["user.tool_result", "agent.tool_result"])
def test_an_answer_of_its_owner_ends_an_unowned_call(type_: str) -> None:
    """R-115: whoever answers, the id decides."""
    life = Life().connect()
    life.receive(use("tu1", "missing"), event(type_, tool_use_id="tu1"))
    assert "answered_elsewhere" == life.state("tu1")


def test_an_answered_unowned_call_leaves_the_blocker_set() -> None:
    """R-115: the next idle starts the countdown."""
    life = Life(max_idle_s=60).connect()
    life.receive(use("tu1", "missing"), idle())
    life.at(100)
    life.receive(user_result("tu1"), idle())
    life.at(160)
    assert p.End("idle") == life.end


def test_an_unowned_call_runs_once_when_its_tool_is_registered() -> None:
    """R-116: at once, without waiting for a reconnect."""
    tu1 = use("tu1", "missing")
    life = Life().connect(tu1)
    life.notice(p.ToolsChanged({"missing": MISSING}))
    life.notice(p.ToolsChanged({"missing": MISSING, "echo": ECHO}))
    life.reconnect(tu1)
    assert ["tu1"] == life.deliveries


def test_an_unowned_call_is_held_when_the_tool_registered_for_it_asks() -> None:
    """R-116: the gate is included."""
    life = Life().connect(use("tu1", "missing"))
    life.notice(p.ToolsChanged({"missing": replace(MISSING, gate="ask")}))
    assert ("held", []) == (life.state("tu1"), life.deliveries)


def test_an_answered_unowned_call_does_not_run_when_its_tool_is_registered() -> None:
    """R-116: only unanswered calls are routed again."""
    life = Life().connect(use("tu1", "missing"))
    life.receive(user_result("tu1"))
    life.notice(p.ToolsChanged({"missing": MISSING}))
    assert [] == life.deliveries


def test_an_unowned_call_of_an_earlier_run_runs_when_its_tool_was_registered_meanwhile() -> None:
    """R-116: the registry changed while nobody served the session."""
    tu1 = use("tu1", "missing")
    first = Life().connect(tu1)
    life = Life(tools=(MISSING,), stored=first.store()).connect(tu1)
    assert ["tu1"] == life.deliveries


def test_an_unowned_call_runs_when_the_attachment_is_given_its_tool() -> None:
    """R-116: `tools` of the attachment decides as the registry does."""
    life = Life(tools=(ECHO, MISSING))
    life.notice(p.SettingsChanged(p.Settings(max_idle_s=None, tools=frozenset({"echo"}))))
    life.connect(use("tu1", "missing"))
    assert "unowned" == life.state("tu1")
    life.notice(p.SettingsChanged(p.Settings(max_idle_s=None, tools=frozenset({"echo", "missing"}))))
    assert ["tu1"] == life.deliveries


def test_a_gated_unowned_call_is_listed() -> None:
    """R-117: a person may have to confirm a call that another client runs."""
    life = Life().connect()
    life.receive(use("tu1", "not_ours", permission="ask"))
    assert "held" == life.state("tu1")


def test_a_gated_unowned_call_is_left_to_its_owner_once_allowed() -> None:
    """R-117: no delivery, and the countdown still waits for the owner's answer."""
    life = Life(max_idle_s=60).connect()
    life.receive(use("tu1", "not_ours", permission="ask"), verdict("tu1", "allow"), idle())
    life.at(3600)
    assert ("unowned", [], None) == (life.state("tu1"), life.deliveries, life.end)


def test_a_gated_unowned_call_confirmed_through_the_service_is_left_to_its_owner() -> None:
    """R-117: the confirmation is the only thing sent."""
    life = Life().connect()
    life.receive(use("tu1", "not_ours", permission="ask"))
    life.decide("tu1", "allow")
    life.sent("tu1")
    assert ("unowned", 1, []) == (life.state("tu1"), len(life.sends), life.deliveries)


def test_an_allowed_unowned_call_runs_when_its_tool_is_registered() -> None:
    """R-117, R-116: the allow stands."""
    life = Life().connect()
    life.receive(use("tu1", "missing", permission="ask"), verdict("tu1", "allow"))
    life.notice(p.ToolsChanged({"missing": replace(MISSING, gate="ask")}))
    assert (["tu1"], "allow") == (life.deliveries, life.calls["tu1"].confirmation)


def test_an_attachment_without_tools_serves_messages() -> None:
    """R-118: text is kept whatever is registered."""
    life = Life(tools=()).connect()
    life.receive(event("agent.message", "m1", content=[{"type": "text", "text": "hello"}]))
    assert [[{"type": "text", "text": "hello"}]] == [
        json.loads(effect.snapshot.content) for effect in life.of(p.SaveMessage)
    ]


def test_an_attachment_without_tools_serves_confirmations() -> None:
    """R-118: a call is held and a decision sent."""
    life = Life(tools=()).connect()
    life.receive(use("tu1", "bash", permission="ask"))
    life.decide("tu1", "deny")
    life.sent("tu1")
    assert "denied" == life.state("tu1")


def test_a_waiting_call_of_a_deleted_tool_becomes_unowned() -> None:
    """D-042: nothing is posted in the owner's place."""
    life = Life(concurrency=1).connect(use("tu1"), use("tu2", "gated"))
    life.notice(p.ToolsChanged({"echo": ECHO}))
    life.answer("tu1")
    assert ("unowned", ["tu1"], 1) == (life.state("tu2"), life.deliveries, len(life.sends))


def test_a_call_of_a_tool_deleted_in_flight_is_posted() -> None:
    """D-043: it was ours when it started."""
    life = Life().connect(use("tu1"))
    life.notice(p.ToolsChanged({}))
    life.answer("tu1")
    assert "posted" == life.state("tu1")


def test_a_call_of_a_tool_deleted_and_registered_again_runs_once() -> None:
    """D-044: picked up again under the same id."""
    life = Life(concurrency=1).connect(use("tu1"), use("tu2", "gated"))
    life.notice(p.ToolsChanged({"echo": ECHO}))
    life.notice(p.ToolsChanged({"echo": ECHO, "gated": GATED}))
    life.answer("tu1")
    assert ["tu1", "tu2"] == life.deliveries


def test_a_call_of_a_disabled_tool_is_answered_with_an_error() -> None:
    """A disabled tool answers for itself: no delivery, and the agent is told."""
    life = Life(tools=(replace(ECHO, enabled=False),)).connect()
    life.receive(use("tu1"))
    assert ([], True) == (life.deliveries, life.sends[0]["is_error"])


def test_a_call_that_waits_while_its_tool_is_disabled_is_answered_with_an_error() -> None:
    """The registration at the moment of delivery counts."""
    life = Life(concurrency=1).connect(use("tu1"), use("tu2", "gated"))
    life.notice(p.ToolsChanged({"echo": ECHO, "gated": replace(GATED, enabled=False)}))
    life.answer("tu1")
    assert (["tu1"], True) == (life.deliveries, life.sends[-1]["is_error"])


def test_a_waiting_call_of_an_earlier_run_whose_tool_was_disabled_meanwhile_is_not_delivered() -> None:
    """A restart reads the registry anew."""
    first = Life(concurrency=1).connect(use("tu1"), use("tu2", "gated"))
    life = Life(tools=(ECHO, replace(GATED, enabled=False)), stored=first.store()).connect()
    assert "tu2" not in life.deliveries


def test_a_call_that_waits_while_its_tool_begins_to_ask_is_held() -> None:
    """Whatever was not delivered yet meets the gate."""
    life = Life(concurrency=1).connect(use("tu1"), use("tu2", "gated"))
    life.notice(p.ToolsChanged({"echo": ECHO, "gated": replace(GATED, gate="ask")}))
    life.answer("tu1")
    assert ("held", ["tu1"]) == (life.state("tu2"), life.deliveries)
