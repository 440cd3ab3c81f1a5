"""A delivery whose outcome is unknown: the tool may have run, and its own declaration says what follows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from app.core import protocol as p
from app.core.calls import Decision
from tests.core.life import ECHO, GATED, Life, custom, idle, result, unknown, use, verdict

ANSWERS = ECHO
ASKS = replace(ECHO, on_unknown="ask")
MAY_HAVE_RUN = result("It may have run.", is_error=True)


def lost(tool: object = ASKS) -> Life:
    """A call whose delivery was cut after the request was written."""
    life = Life(tools=(tool,)).connect(custom("ctu1"))  # type: ignore[arg-type]
    life.deliver("ctu1", MAY_HAVE_RUN, unknown=True)
    return life


def test_the_agent_is_told_that_the_tool_may_have_run() -> None:
    """on_unknown: answer is the default."""
    life = lost(ANSWERS)
    life.sent("ctu1")
    assert ("posted", True, True) == (
        life.state("ctu1"), life.calls["ctu1"].outcome_unknown, life.sends[0]["is_error"]
    )  # fmt: skip


def test_a_tool_that_says_ask_puts_the_call_before_a_person() -> None:
    """on_unknown: ask holds, and posts nothing."""
    life = lost()
    call = life.calls["ctu1"]
    assert ("held", "outcome_unknown", []) == (call.state, call.gate and call.gate.reason, life.sends)


def test_the_mark_is_kept_while_the_call_is_held() -> None:
    """Whoever decides sees that it may have run, and what the agent would be told."""
    call = lost().calls["ctu1"]
    assert (True, MAY_HAVE_RUN) == (call.outcome_unknown, call.result)


def test_an_allow_delivers_once_more() -> None:
    """The same call, its next attempt, and nothing is sent upstream."""
    life = lost()
    life.decide("ctu1", "allow")
    assert (["ctu1", "ctu1"], 2, []) == (life.deliveries, life.calls["ctu1"].attempts, life.sends)


def test_the_result_of_the_allowed_delivery_is_posted() -> None:
    """The earlier error is forgotten."""
    life = lost()
    life.decide("ctu1", "allow")
    life.deliver("ctu1", "done")
    life.sent("ctu1")
    log = life.log("ctu1")
    assert ("posted", False, [{"type": "text", "text": "done"}]) == (
        log["outcome"],
        log["is_error"],
        log["result"],
    )


def test_a_second_unknown_outcome_asks_again() -> None:
    """One allow is one delivery."""
    life = lost()
    life.decide("ctu1", "allow", id="dec_1")
    life.deliver("ctu1", MAY_HAVE_RUN, unknown=True)
    assert ("held", None) == (life.state("ctu1"), life.calls["ctu1"].decision)


def test_a_deny_posts_the_error_and_ends_denied() -> None:
    """The agent learns that the tool may have run."""
    life = lost()
    life.decide("ctu1", "deny")
    life.sent("ctu1")
    assert ("denied", ["ctu1"]) == (life.state("ctu1"), life.deliveries)
    assert [json.loads(MAY_HAVE_RUN.content)] == [sent["content"] for sent in life.sends]


def test_the_echo_of_the_first_allow_does_not_deliver_again() -> None:
    """Upstream's verdict opened the first gate; it says nothing about a second run."""
    tool = replace(GATED, on_unknown="ask")
    life = Life(tools=(tool,)).connect(use("tu1", "gated", permission="ask"))
    life.decide("tu1", "allow")
    life.sent("tu1")
    life.deliver("tu1", MAY_HAVE_RUN, unknown=True)
    life.receive(verdict("tu1", "allow"))
    assert ("held", ["tu1"]) == (life.state("tu1"), life.deliveries)


def test_a_reconnect_that_lists_the_first_allow_does_not_deliver_again() -> None:
    """History shows every verdict again."""
    tool = replace(GATED, on_unknown="ask")
    call, allow = use("tu1", "gated", permission="ask"), verdict("tu1", "allow")
    life = Life(tools=(tool,)).connect(call)
    life.receive(allow)
    life.deliver("tu1", MAY_HAVE_RUN, unknown=True)
    life.reconnect(call, allow)
    assert ("held", ["tu1"]) == (life.state("tu1"), life.deliveries)


def test_a_restart_that_lists_the_first_allow_does_not_deliver_again() -> None:
    """And so does a successor's first read."""
    tool = replace(GATED, on_unknown="ask")
    call, allow = use("tu1", "gated", permission="ask"), verdict("tu1", "allow")
    first = Life(tools=(tool,)).connect(call, allow)
    first.deliver("tu1", MAY_HAVE_RUN, unknown=True)
    life = Life(tools=(tool,), stored=first.store()).connect(call, allow)
    assert ("held", []) == (life.state("tu1") if "tu1" in life.calls else "held", life.deliveries)


def test_a_tool_deleted_and_registered_again_does_not_deliver_again() -> None:
    """The hold for an unknown outcome outlives the registration."""
    life = lost()
    life.notice(p.ToolsChanged({}))
    life.notice(p.ToolsChanged({"echo": ASKS}))
    assert (["ctu1"], []) == (life.deliveries, life.sends)


def test_a_delivery_after_an_unknown_outcome_is_never_ignored() -> None:
    """Whatever way a second delivery came about, its result ends the call."""
    life = lost()
    life.notice(p.ToolsChanged({}))
    life.notice(p.ToolsChanged({"echo": ASKS}))
    life.decide("ctu1", "allow")
    life.deliver("ctu1", "done")
    life.sent("ctu1")
    assert ("posted", [{"type": "text", "text": "done"}]) == (life.state("ctu1"), life.log("ctu1")["result"])


def test_a_call_of_unknown_outcome_can_still_be_decided_when_its_tool_is_gone() -> None:
    """It must not wait unseen: a deny posts the stored error."""
    life = lost()
    life.notice(p.ToolsChanged({}))
    life.decide("ctu1", "deny")
    assert [True] == [sent["is_error"] for sent in life.sends]


def test_a_hold_for_an_unknown_outcome_defers_the_countdown() -> None:
    """A person has to look."""
    life = Life(tools=(ASKS,), max_idle_s=60).connect(custom("ctu1"), idle())
    life.deliver("ctu1", MAY_HAVE_RUN, unknown=True)
    life.at(3600)
    assert None is life.end


# ---- deliveries of an earlier run


def test_a_delivery_of_an_earlier_run_that_never_left_is_made_now() -> None:
    """D-026: its run ended while it waited for its turn; it counts as no attempt."""
    call = custom("ctu1")
    once = replace(ASKS, retry="never")
    first = Life(tools=(once,)).connect(call)
    life = Life(tools=(once,), stored=first.store()).connect(call)
    life.notice(p.Orphaned("ctu1", is_unsent=True))
    assert (["ctu1"], "dispatched") == (life.deliveries, life.state("ctu1"))
    assert [1] == [call.attempts for call in life.store().calls]


def orphaned(tool: object) -> Life:
    """A call that was `dispatched` when its process died."""
    call = custom("ctu1")
    first = Life(tools=(tool,)).connect(call)  # type: ignore[arg-type]
    life = Life(tools=(tool,), stored=first.store()).connect(call)  # type: ignore[arg-type]
    life.notice(p.Orphaned("ctu1"))
    return life


def test_nothing_is_delivered_again_before_the_earlier_attempt_is_given_up() -> None:
    """D-003: it may still finish and store its outcome."""
    call = custom("ctu1")
    first = Life().connect(call)
    life = Life(stored=first.store()).connect(call)
    assert ([], []) == (life.deliveries, life.sends)


def test_an_orphaned_delivery_is_repeated_where_the_tool_recognises_it() -> None:
    """D-003, D-004: retry safe; the attempt counts on."""
    life = orphaned(replace(ECHO, retry="safe"))
    assert (["ctu1"], 2) == (life.deliveries, life.calls["ctu1"].attempts)


@pytest.mark.parametrize("retry", ["never", "connect_only"])
def test_an_orphaned_delivery_is_not_repeated_otherwise(retry: str) -> None:
    """Promise 4: the agent is told that the tool may have run."""
    life = orphaned(replace(ECHO, retry=retry))
    assert ([], True, True) == (
        life.deliveries,
        life.calls["ctu1"].outcome_unknown,
        life.sends[0]["is_error"],
    )


def test_an_orphaned_delivery_asks_where_the_tool_says_so() -> None:
    """on_unknown: ask, after a crash."""
    life = orphaned(ASKS)
    assert ("held", [], []) == (life.state("ctu1"), life.deliveries, life.sends)


def test_an_orphan_waits_for_the_history_to_be_read() -> None:
    """Somebody may have answered it meanwhile."""
    first = Life(tools=(replace(ECHO, retry="safe"),)).connect(custom("ctu1"))
    life = Life(tools=(replace(ECHO, retry="safe"),), stored=first.store())
    life.retrieved()
    life.opened()
    life.notice(p.Orphaned("ctu1"))
    assert [] == life.deliveries
    life.read()
    assert ["ctu1"] == life.deliveries


def test_an_outcome_that_the_earlier_process_stored_is_posted() -> None:
    """A deploy does not tell the agent that a tool may have run."""
    call = custom("ctu1")
    first = Life().connect(call)
    life = Life(stored=first.store()).connect(call)
    life.notice(p.Delivered("ctu1", result("done"), 1))
    assert ([], [{"type": "text", "text": "done"}]) == (life.deliveries, life.sends[0]["content"])


def test_a_decision_on_an_unknown_outcome_that_crashed_is_taken_up() -> None:
    """D-010: the allow was committed and nobody acted on it."""
    first = lost()
    life = Life(tools=(ASKS,), stored=first.store()).connect()
    life.notice(p.Decided("ctu1", Decision("allow", "accepted", "ana", "api", None, None, "dec_9")))
    assert ["ctu1"] == life.deliveries


def test_an_error_result_of_unknown_outcome_is_posted_like_any_other() -> None:
    """A send that fails is looked into and repeated; the tool is not."""
    life = lost(ANSWERS)
    life.sent("ctu1", unknown(500))
    life.looked("ctu1")
    assert (["ctu1"], 2) == (life.deliveries, len(life.sends))
