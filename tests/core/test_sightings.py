"""Which sessions attach themselves: by what upstream says of them, never by what a webhook says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.sightings import AttachRule, Sighted, has_woken, rule_for

RUNNING = Sighted(
    "sesn_a", "running", agent_id="agent_a", environment_id="env_a", updated_at="t2", updated_s=200.0
)
IDLE = replace(RUNNING, status="idle")
ANY = AttachRule("any", None, None, created_s=100.0)


def test_the_first_rule_by_name_counts() -> None:
    other = replace(ANY, name="a-first")
    assert rule_for([ANY, other], RUNNING, was_told=False) is other


@pytest.mark.parametrize(
    ("rule", "is_about"),
    [
        (ANY, True),
        (replace(ANY, agent_id="agent_a"), True),
        (replace(ANY, agent_id="agent_b"), False),
        (replace(ANY, environment_id="env_a"), True),
        (replace(ANY, agent_id="agent_a", environment_id="env_b"), False),
    ],
)
def test_a_rule_names_an_agent_an_environment_or_both(rule: AttachRule, is_about: bool) -> None:
    assert (rule_for([rule], RUNNING, was_told=True) is not None) is is_about


@pytest.mark.parametrize("over", [{"status": "terminated"}, {"is_archived": True}])
def test_a_session_that_is_over_is_not_attached(over: dict[str, object]) -> None:
    assert rule_for([ANY], replace(RUNNING, **over), was_told=True) is None
    assert not has_woken(replace(RUNNING, **over), ended_s=0.0, seen_updated_at=None)


def test_an_idle_session_that_was_told_of_is_attached() -> None:
    """It may wait for the answer to a call."""
    assert rule_for([ANY], replace(IDLE, updated_s=1.0), was_told=True) is ANY


def test_the_list_attaches_no_session_that_has_slept_since_before_the_rule() -> None:
    assert rule_for([ANY], replace(IDLE, updated_s=99.0), was_told=False) is None
    assert rule_for([ANY], replace(IDLE, updated_s=None), was_told=False) is None
    assert rule_for([ANY], IDLE, was_told=False) is ANY


def test_a_session_that_runs_again_has_woken() -> None:
    assert has_woken(RUNNING, ended_s=1_000.0, seen_updated_at="t2")


def test_an_idle_session_that_moved_since_it_ended_has_woken_once() -> None:
    assert has_woken(IDLE, ended_s=150.0, seen_updated_at=None)
    assert not has_woken(IDLE, ended_s=150.0, seen_updated_at="t2")
    assert not has_woken(IDLE, ended_s=250.0, seen_updated_at=None)
    assert not has_woken(replace(IDLE, updated_at=None, updated_s=None), ended_s=0.0, seen_updated_at=None)
