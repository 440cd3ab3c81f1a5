from typing import Any

import pytest

from app.simulator.script import BadScript, Calls, CallSpec, burst, fill, load, names, parse, policy


@pytest.mark.parametrize("name", names())
def test_every_scenario_that_comes_along_can_be_read(name: str) -> None:
    assert name == load(name).name


def test_the_scenarios_that_others_rely_on_are_there() -> None:
    assert {"demo", "custom", "gated", "parallel", "threads", "mcp"} <= set(names())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({}, "'turns' is missing"),
        ({"turns": []}, "at least one turn"),
        ({"turns": [{"steps": [{"do": "dance"}]}]}, "no step 'dance'"),
        ({"turns": [{"steps": [{"do": "pause"}]}]}, "'s' is missing"),
        ({"turns": [{"steps": [{"do": "call", "calls": [{"tool": "x", "name": "y"}]}]}]}, "tool is 'x'"),
        ({"turns": [{"steps": []}], "environment": "moon"}, "environment is 'moon'"),
        ({"turns": 7}, "not a scenario"),
    ],
)
def test_a_bad_scenario_is_refused_with_the_place(source: dict[str, Any], said: str) -> None:
    with pytest.raises(BadScript, match=said):
        parse(source)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BadScript, match="demo"):
        load("nothing")


def test_texts_take_up_results_and_leave_the_unknown_alone() -> None:
    known = {"order": {"text": "shipped"}}
    assert fill({"a": ["It is ${order.text}.", 1, "${other.text} ${order.nose}"]}, known) == {
        "a": ["It is shipped.", 1, "${other.text} ${order.nose}"]
    }


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (CallSpec("builtin", "bash"), "always_ask"),
        (CallSpec("builtin", "read"), "always_allow"),
        (CallSpec("mcp", "list_issues", server="github"), "auto"),
        (CallSpec("mcp", "list_issues", server="other"), "always_ask"),
    ],
)
def test_policies_come_from_the_agent_and_mcp_asks_by_default(spec: CallSpec, expected: str) -> None:
    agent = {
        "tools": [
            {
                "type": "agent_toolset_20260401",
                "configs": [{"name": "bash", "permission_policy": {"type": "always_ask"}}],
            },
            {
                "type": "mcp_toolset",
                "mcp_server_name": "github",
                "default_config": {"permission_policy": {"type": "auto"}},
            },
        ]
    }
    assert expected == policy(agent, spec)


@pytest.mark.parametrize(("calls", "gated", "parallel"), [(1, 0, 1), (7, 3, 2), (1000, 50, 8), (5, 5, 10)])
def test_a_burst_has_as_many_calls_and_gates_as_asked(calls: int, gated: int, parallel: int) -> None:
    batches = [step for step in burst(calls, gated, parallel).turns[0] if isinstance(step, Calls)]
    specs = [spec for batch in batches for spec in batch.specs]
    assert (calls, gated) == (len(specs), sum(spec.permission == "ask" for spec in specs))
    assert max(len(batch.specs) for batch in batches) == min(parallel, calls)


def test_a_burst_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(BadScript):
        burst(3, 4, 1)
