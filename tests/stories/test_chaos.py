"""Faults of production against real processes, small: `bench.chaos` does the same at length.

A report's violations come from the records of the simulator, the tools and the database, compared after
everything has settled: calls lost, answered twice, delivered twice to a tool that forbids it, under a changed
id, before an allow, or left in a state that is none of the end states.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bench.chaos import Options, run_fault

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(150)]

SMALL = Options(replicas=2, sessions=12, calls_per_s=12.0, settle_s=60.0, is_brief=True)


async def kept(fault: str, **scale: Any) -> dict[str, Any]:
    """Run a fault, assert that no promise was broken, and return the report."""
    report = await run_fault(fault, replace(SMALL, **scale))
    assert {} == report["violations"], json.dumps(report, indent=1)
    assert report["counts"]["calls"] > 0
    return report


async def test_killed_replicas_lose_nothing_and_repeat_nothing() -> None:
    """D-001…D-009 as they come, D-020, D-025, D-028: two die in turn, their clocks minutes apart."""
    report = await kept("kills", kills=2, every_s=(2.0, 4.0), skew_s=150.0)
    assert report["takeover"]["leased_s"]["count"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(400)
async def test_two_minutes_of_kills_while_calls_flow_break_no_promise() -> None:
    """D-018: a kill every 3 to 7 s; every call has one result and one key, and none is left without."""
    report = await kept("kills", kills=24, every_s=(3.0, 7.0), calls_per_s=2.0, settle_s=120.0)
    assert report["counts"]["calls"] >= 100


async def test_a_replica_that_sleeps_past_its_lease_wakes_among_others() -> None:
    """D-021, D-022, D-023: it writes nothing more, here or upstream."""
    await kept("pause", pauses=1, pause_s=15.0)


async def test_restarts_of_postgres_are_outlived() -> None:
    """D-030, D-031, D-033: one in order and one crash, in the middle of commits."""
    await kept("postgres", for_s=8.0, restart_every_s=(3.0, 5.0))


async def test_a_postgres_that_stands_still_is_outlived() -> None:
    """D-024: for longer than a lease is trusted, with commits under way."""
    await kept("freeze", freeze_s=14.0)


async def test_bad_links_to_upstream_and_postgres_are_outlived() -> None:
    """Slow, cut in mid-stream, refused and half-open, each replica by itself."""
    await kept("network", for_s=20.0)


async def test_nothing_is_lost_while_upstream_is_away() -> None:
    """D-034: results wait in the store and are posted once when it is back."""
    await kept("upstream", down_s=8.0)
