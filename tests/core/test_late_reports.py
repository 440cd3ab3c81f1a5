"""Sends of one call that overlap: an earlier one may still be under way when the call moves on."""

from __future__ import annotations

from app.core import protocol as p
from tests.core.life import Life, event, idle, unsent, use, verdict


def _interrupted_while_posting() -> Life:
    """A call whose second send may be under way when an interrupt closes it."""
    life = Life().connect(use("tu1"))
    life.deliver("tu1")
    life.sent("tu1", unsent(429))
    life.receive(event("user.interrupt"))
    life.clear()
    return life


def test_a_revived_result_is_looked_for_before_it_is_sent_again() -> None:
    """R-316, promise 3: the send from before the interrupt may have been accepted."""
    life = _interrupted_while_posting()
    life.receive(idle("requires_action", "tu1"))
    assert (len(life.of(p.Look)), life.sends) == (1, [])


def test_the_report_of_a_verdict_is_not_taken_for_that_of_the_result() -> None:
    """R-072, promise 2: the stream may show our allow before its send has ended, and the tool be fast."""
    life = Life().connect(use("tu1", "gated", permission="ask"))
    life.decide("tu1", "allow")
    of_verdict = life.of(p.Send)[-1].number
    life.receive(verdict("tu1", "allow"))
    life.deliver("tu1")
    life.sent("tu1", number=of_verdict)
    life.sent("tu1", unsent(429))
    assert (life.state("tu1"), [s["type"] for s in life.sends].count("user.tool_result")) == ("posting", 2)
