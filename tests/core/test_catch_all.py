"""A tool named `*` serves the custom calls whose own name nobody registered."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from app.core import protocol as p
from app.core.tools import Tool
from tests.core.life import ECHO, Life, custom, mcp, use

ALL = Tool(name="*", url="https://tools.example/all", secrets=(b"s" * 32,))
FOO = Tool(name="foo", url="https://tools.example/foo", secrets=(b"s" * 32,))


def served(life: Life) -> dict[str, str]:
    """Which registration each call was delivered to last."""
    return {effect.call.id: effect.tool.name for effect in life.of(p.Deliver)}


def change(life: Life, *tools: Tool) -> None:
    life.notice(p.ToolsChanged({tool.name: tool for tool in tools}))


def test_a_custom_call_without_a_registration_goes_to_the_catch_all_under_its_own_name() -> None:
    life = Life(tools=(ALL, ECHO)).connect()
    life.receive(custom("ctu1", "foo"), custom("ctu2"))
    assert {"ctu1": "*", "ctu2": "echo"} == served(life)
    assert ["foo", "echo"] == [effect.call.tool for effect in life.of(p.Deliver)]


def test_a_call_of_the_literal_name_goes_to_the_catch_all() -> None:
    life = Life(tools=(ALL,)).connect()
    life.receive(custom("ctu1", "*"), use("tu1", "*"))
    assert ({"ctu1": "*"}, "unowned") == (served(life), life.state("tu1"))


def test_without_a_catch_all_such_a_call_stays_unowned() -> None:
    life = Life(tools=(ECHO,)).connect()
    life.receive(custom("ctu1", "foo"))
    assert "unowned" == life.state("ctu1")


def test_builtin_and_mcp_calls_never_go_to_the_catch_all() -> None:
    """The platform, or a worker with a file system, runs them."""
    life = Life(tools=(ALL,)).connect()
    life.receive(use("tu1", "bash"), mcp("m1", permission="allow"))
    assert ("unowned", {}) == (life.state("tu1"), served(life))


def test_a_disabled_registration_is_not_absent() -> None:
    """Disabling is an answer, not an invitation to others."""
    life = Life(tools=(ALL, replace(FOO, enabled=False))).connect()
    life.receive(custom("ctu1", "foo"))
    assert ({}, "posting") == (served(life), life.state("ctu1"))


def test_a_registration_that_cannot_be_read_is_not_absent() -> None:
    """Its secrets are lost, not its owner: the call waits for a mended registration."""
    life = Life(tools=(ALL, replace(FOO, fault="its key is gone"))).connect()
    life.receive(custom("ctu1", "foo"))
    assert "unowned" == life.state("ctu1")
    change(life, ALL, FOO)
    assert {"ctu1": "foo"} == served(life)


@pytest.mark.parametrize(
    ("allowed", "delivered"),
    [
        (None, {"listed": "*", "other": "*", "own": "echo"}),
        ({"listed"}, {"listed": "*"}),
        ({"*"}, {"listed": "*", "other": "*"}),
        ({"*", "echo"}, {"listed": "*", "other": "*", "own": "echo"}),
        ({"echo"}, {"own": "echo"}),
        (set(), {}),
    ],
)
def test_the_attachments_list_names_calls_and_its_star_all_without_a_registration(
    allowed: set[str] | None, delivered: dict[str, str]
) -> None:
    tools = None if allowed is None else frozenset(allowed)
    life = Life(tools=(ALL, ECHO)).connect()
    life.notice(p.SettingsChanged(p.Settings(max_idle_s=None, tools=tools)))
    life.receive(custom("listed", "listed"), custom("other", "other"), custom("own", "echo"))
    assert delivered == served(life)


def test_the_gate_of_the_catch_all_holds_what_it_serves() -> None:
    life = Life(tools=(replace(ALL, gate="ask"), ECHO)).connect()
    life.receive(custom("ctu1", "foo"), custom("ctu2"))
    assert ("held", "dispatched") == (life.state("ctu1"), life.state("ctu2"))
    life.decide("ctu1", "allow")
    assert "*" == served(life)["ctu1"]


def test_the_input_schema_of_the_catch_all_checks_what_it_serves() -> None:
    life = Life(tools=(replace(ALL, input_schema=json.dumps({"required": ["x"]})),)).connect()
    life.receive(custom("ctu1", "foo"))
    [sent] = life.sends
    assert (True, {}) == ('lacks the member "x"' in sent["content"][0]["text"], served(life))


def test_an_unknown_outcome_follows_the_policy_of_the_catch_all() -> None:
    life = Life(tools=(replace(ALL, on_unknown="ask"),)).connect()
    life.receive(custom("ctu1", "foo"))
    life.deliver("ctu1", unknown=True)
    assert "held" == life.state("ctu1")


# ---- the registry changes


def test_unowned_calls_are_picked_up_once_the_catch_all_is_registered() -> None:
    life = Life(tools=()).connect()
    life.receive(custom("ctu1", "foo"), use("tu1", "bash"))
    change(life, ALL)
    assert ({"ctu1": "*"}, "unowned") == (served(life), life.state("tu1"))


def test_without_the_catch_all_its_waiting_calls_become_unowned() -> None:
    life = Life(tools=(ALL,), concurrency=1).connect()
    life.receive(custom("ctu1", "foo"), custom("ctu2", "foo"))
    change(life)
    assert ("dispatched", "unowned") == (life.state("ctu1"), life.state("ctu2"))


def test_without_the_catch_all_what_it_held_becomes_unowned() -> None:
    life = Life(tools=(replace(ALL, gate="ask"),)).connect()
    life.receive(custom("ctu1", "foo"))
    change(life)
    assert "unowned" == life.state("ctu1")


def test_a_name_that_is_registered_takes_over_its_waiting_calls_only() -> None:
    life = Life(tools=(ALL,), concurrency=1).connect()
    life.receive(custom("ctu1", "foo"), custom("ctu2", "foo"), custom("ctu3", "bar"))
    change(life, ALL, FOO)
    for call_id in ("ctu1", "ctu2", "ctu3"):
        life.answer(call_id)
    assert {"ctu1": "*", "ctu2": "foo", "ctu3": "*"} == served(life)


def test_a_waiting_call_meets_the_gate_of_the_name_that_is_registered() -> None:
    life = Life(tools=(ALL,), concurrency=1).connect()
    life.receive(custom("ctu1", "foo"), custom("ctu2", "foo"))
    change(life, ALL, replace(FOO, gate="ask"))
    life.answer("ctu1")
    assert "held" == life.state("ctu2")


def test_a_held_call_stays_held_until_somebody_decides_whoever_serves_it_then() -> None:
    """No change of a registration turns a hold into a run."""
    life = Life(tools=(replace(ALL, gate="ask"),)).connect()
    life.receive(custom("ctu1", "foo"))
    change(life, replace(ALL, gate="ask"), FOO)
    assert "held" == life.state("ctu1")
    life.decide("ctu1", "allow")
    assert {"ctu1": "foo"} == served(life)


def test_a_name_that_is_deleted_leaves_its_waiting_calls_to_the_catch_all() -> None:
    life = Life(tools=(ALL, FOO), concurrency=1).connect()
    life.receive(custom("ctu1", "foo"), custom("ctu2", "foo"))
    change(life, ALL)
    life.answer("ctu1")
    assert {"ctu1": "foo", "ctu2": "*"} == served(life)


def test_a_delivered_call_keeps_the_policies_of_who_got_it() -> None:
    """Registering its name meanwhile does not change who may be asked, or called again."""
    life = Life(tools=(replace(ALL, on_unknown="ask"),)).connect()
    life.receive(custom("ctu1", "foo"))
    change(life, replace(ALL, on_unknown="ask"), FOO)
    life.deliver("ctu1", unknown=True)
    assert "held" == life.state("ctu1")
    life.decide("ctu1", "allow")
    assert {"ctu1": "*"} == served(life)


@pytest.mark.parametrize(("retry", "times"), [("safe", 2), ("connect_only", 1)])
def test_a_lost_delivery_is_repeated_by_the_retry_policy_of_who_got_it(retry: str, times: int) -> None:
    """After a crash the name is registered: it would not recognise the call."""
    all_ = replace(ALL, retry=retry)  # type: ignore[arg-type]
    first = Life(tools=(all_,)).connect()
    first.receive(custom("ctu1", "foo"))
    other = "connect_only" if retry == "safe" else "safe"
    life = Life(tools=(all_, replace(FOO, retry=other)), stored=first.store()).connect()  # type: ignore[arg-type]
    life.notice(p.Orphaned("ctu1"))
    assert times - 1 == len(life.deliveries)
    assert set(served(life).values()) <= {"*"}


def test_a_delivery_that_never_left_may_go_to_the_name_that_is_registered() -> None:
    first = Life(tools=(ALL,)).connect()
    first.receive(custom("ctu1", "foo"))
    life = Life(tools=(ALL, FOO), stored=first.store()).connect()
    life.notice(p.Orphaned("ctu1", is_unsent=True))
    assert {"ctu1": "foo"} == served(life)
