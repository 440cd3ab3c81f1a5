"""Posting results: shapes, waits, refusals, and outcomes that nobody knows."""

from __future__ import annotations

import pytest

from app.core import protocol as p
from app.core.calls import Result
from tests.core.life import (
    Life,
    custom,
    idle,
    refused,
    text,
    unknown,
    unsent,
    use,
    user_result,
)


def posting(value: str = "ok") -> Life:
    """A session whose only call is being posted."""
    life = Life().connect(use("tu1"))
    life.deliver("tu1", value)
    return life


def ours(value: str = "ok") -> p.Findings:
    return p.Findings(answers=(user_result("tu1", value),))


def test_a_builtin_result_holds_four_members() -> None:
    """R-200: type, id, content, is_error, and nothing else."""
    expected = {"type": "user.tool_result", "tool_use_id": "tu1", "content": text("ok"), "is_error": False}
    assert [expected] == posting().sends


def test_a_custom_result_holds_four_members() -> None:
    """R-200: with the id under its own name."""
    life = Life().connect(custom("ctu1"))
    life.deliver("ctu1")
    [sent] = life.sends
    assert {"type", "custom_tool_use_id", "content", "is_error"} == set(sent)
    assert ("user.custom_tool_result", "ctu1") == (sent["type"], sent["custom_tool_use_id"])


def test_the_content_leaves_byte_for_byte() -> None:
    """R-200: the stored blocks are not encoded anew."""
    life = Life().connect(use("tu1"))
    content = b'[{"type":"text", "text":"\\u00e9 1.0e2"}]'
    life.deliver("tu1", Result(content, is_error=False))
    assert content in life.of(p.Send)[0].event


def test_an_accepted_result_ends_the_call() -> None:
    """R-218: whatever the body of the 2xx was."""
    life = posting()
    life.sent("tu1")
    assert ("posted", True) == (life.state("tu1"), life.log("tu1")["posted"])


def test_a_result_that_fails_is_sent_again_with_growing_waits() -> None:
    """R-201: 1, 2, 4, 8, 16 s, six attempts."""
    life = posting()
    for _ in range(5):
        life.sent("tu1", unknown(503))
        life.looked("tu1")
    life.sent("tu1")
    assert [0.0, 1.0, 2.0, 4.0, 8.0, 16.0] == [send.after_s for send in life.of(p.Send)]
    assert "posted" == life.state("tu1")


def test_the_waits_grow_to_thirty_seconds() -> None:
    """R-201, R-202: the cap."""
    life = posting()
    for _ in range(12):
        life.sent("tu1", unsent(429))
    assert [30.0, 30.0] == [send.after_s for send in life.of(p.Send)][-2:]


def test_a_retry_after_is_the_floor_of_the_wait() -> None:
    """R-201, K-09."""
    life = posting()
    life.sent("tu1", unsent(429, retry_after_s=20))
    assert (1.0, 20) == (life.of(p.Send)[-1].after_s, life.of(p.Send)[-1].floor_s)


def failing_for(seconds: float) -> Life:
    life = posting()
    life.sent("tu1", unsent())
    life.at(seconds)
    life.sent("tu1", unsent())
    return life


@pytest.mark.parametrize(("seconds", "is_flagged"), [(299.0, False), (300.0, True), (1200.0, True)])
def test_a_post_that_fails_for_long_is_flagged(seconds: float, is_flagged: bool) -> None:
    """R-202: after 300 s."""
    assert is_flagged is ("posting_degraded" in failing_for(seconds).machine.progress.flags)


def test_a_post_that_succeeds_clears_the_flag() -> None:
    """R-202: and the tool was called once."""
    life = failing_for(1200)
    life.sent("tu1")
    assert (frozenset(), ["tu1"]) == (life.machine.progress.flags, life.deliveries)


def test_a_post_that_cannot_be_looked_for_is_flagged_too() -> None:
    """R-202, R-212: a result that waits for a LIST for five minutes must not wait unseen."""
    life = posting()
    life.sent("tu1", unknown())
    for moment in range(30, 601, 30):
        life.at(float(moment))
        life.looked("tu1", failed=True)
    assert "posting_degraded" in life.machine.progress.flags


def test_a_refused_result_is_looked_for() -> None:
    """R-203: before anything else."""
    life = posting()
    life.sent("tu1", refused(400))
    assert ([p.Look], 1) == ([type(e) for e in life.effects if isinstance(e, p.Look)], len(life.sends))


@pytest.mark.parametrize(("value", "state"), [("theirs", "answered_elsewhere"), ("ok", "posted")])
def test_a_refused_result_is_settled_by_the_answer_that_history_shows(value: str, state: str) -> None:
    """R-203: ours, if it is equal."""
    life = posting()
    life.sent("tu1", refused(400))
    life.looked("tu1", ours(value))
    assert (state, state == "posted", 1) == (life.state("tu1"), life.calls["tu1"].posted, len(life.sends))


@pytest.mark.parametrize("status", [400, 422])
def test_a_result_refused_for_its_content_is_replaced_by_a_short_error(status: int) -> None:
    """R-204: with the reason, and the tool is not run again."""
    life = posting()
    life.sent("tu1", refused(status, "events.0.content.0: could not process image"))
    life.looked("tu1")
    sent = life.sends[-1]
    assert (2, ["tu1"], True) == (len(life.sends), life.deliveries, sent["is_error"])
    assert "could not process image" in sent["content"][0]["text"]


def test_an_accepted_substitute_ends_the_call_as_an_error() -> None:
    """R-204: posted, is_error."""
    life = posting()
    life.sent("tu1", refused(400, "content: bad image"))
    life.looked("tu1")
    life.sent("tu1")
    assert ("posted", True, True) == (
        life.state("tu1"),
        life.log("tu1")["posted"],
        life.log("tu1")["is_error"],
    )


def test_a_substitute_refused_too_is_the_end() -> None:
    """R-205: two sends, no more."""
    life = posting()
    for _ in range(2):
        life.sent("tu1", refused(400, "content: bad"))
        life.looked("tu1")
    assert ("rejected", 2) == (life.state("tu1"), len(life.sends))


def rejected() -> Life:
    life = posting()
    life.sent("tu1", refused(400, "no such thing"))
    life.looked("tu1")
    return life


def test_a_result_refused_for_another_reason_is_rejected_after_one_attempt() -> None:
    """R-205: executed, not posted."""
    log = rejected().log("tu1")
    assert ("rejected", True, False, 1) == (
        log["outcome"],
        log["executed"],
        log["posted"],
        len(rejected().sends),
    )


def test_a_rejected_call_keeps_its_result_and_the_reason() -> None:
    """R-332: what the tool returned can be read."""
    life = rejected()
    assert (text("ok"), "no such thing") == (life.log("tu1")["result"], life.calls["tu1"].detail)


def test_a_rejected_post_does_not_end_the_run() -> None:
    """R-219: the next call is served."""
    life = rejected()
    life.receive(use("tu2"))
    life.answer("tu2")
    assert ("posted", None) == (life.state("tu2"), life.end)


def test_a_rejected_call_does_not_defer_the_countdown() -> None:
    """R-205: it is over."""
    life = Life(max_idle_s=60).connect(use("tu1"), idle())
    life.deliver("tu1")
    life.sent("tu1", refused(400))
    life.looked("tu1")
    life.at(60)
    assert p.End("idle") == life.end


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_credential_ends_the_run_and_keeps_the_result(status: int) -> None:
    """R-206: answered, for a later run."""
    life = posting()
    life.sent("tu1", refused(status, "invalid x-api-key"))
    assert (p.End("auth_failed", "invalid x-api-key"), "answered") == (life.end, life.state("tu1"))


def test_a_kept_result_is_posted_by_the_next_run_without_a_delivery() -> None:
    """R-206: history is read first."""
    first = posting()
    first.sent("tu1", refused(401))
    life = Life(stored=first.store())
    life.retrieved()
    life.opened()
    assert [] == life.sends
    life.read()
    assert ([], ["tu1"]) == (life.deliveries, [sent["tool_use_id"] for sent in life.sends])


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, ""), (410, ""), (400, "the session is archived"), (400, "the session is terminated")],
)
def test_a_refusal_that_may_mean_the_end_asks_for_the_session(status: int, message: str) -> None:
    """R-207: RETRIEVE decides."""
    life = posting()
    life.sent("tu1", refused(status, message))
    assert [True] == [look.retrieve for look in life.of(p.Look)]


@pytest.mark.parametrize(
    ("findings", "reason"),
    [
        (p.Findings(session=p.SessionFacts(is_over=True)), "terminated"),
        (p.Findings(is_gone=True), "session_gone"),
    ],
)
def test_a_session_that_is_over_ends_the_run_and_its_calls(findings: p.Findings, reason: str) -> None:
    """R-207: the open calls with it."""
    life = Life().connect(use("tu1"), use("tu2", "gated", permission="ask"))
    life.deliver("tu1")
    life.sent("tu1", refused(404))
    life.looked("tu1", findings)
    assert (reason, "session_ended", "session_ended") == (
        life.end and life.end.reason, life.state("tu1"), life.state("tu2")
    )  # fmt: skip


@pytest.mark.parametrize("session", [None, p.SessionFacts(is_over=False)])
def test_a_session_that_is_not_over_rejects_only_the_call(session: p.SessionFacts | None) -> None:
    """R-207: not over, or no answer, is R-205."""
    life = posting()
    life.sent("tu1", refused(404))
    life.looked("tu1", p.Findings(session=session))
    assert ("rejected", None) == (life.state("tu1"), life.end)


def test_a_result_that_is_too_large_is_replaced_by_an_error_that_says_so() -> None:
    """R-208."""
    life = posting()
    life.sent("tu1", refused(413))
    life.looked("tu1")
    assert (True, True) == (life.sends[-1]["is_error"], "too large" in life.sends[-1]["content"][0]["text"])
