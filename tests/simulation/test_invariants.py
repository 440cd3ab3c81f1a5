"""The published invariants hold in seeded lives: `SIM_RUNS` of them, from seed `SIM_SEED` on."""

from __future__ import annotations

import os

import pytest

from tests.simulation import lives
from tests.simulation.world import World

RUNS = int(os.environ.get("SIM_RUNS", "500"))
FIRST = int(os.environ.get("SIM_SEED", "0"))
PARTS = 4
"""The lives are split, so that each test is short."""
SHOWN_MAX = 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_invariant_is_broken(part: int) -> None:
    outcome = lives.run(range(FIRST + part, FIRST + RUNS, PARTS))

    print(f"let pass: {dict(outcome.explained)}")
    assert not outcome.violations, _story(outcome)


def test_the_same_seed_makes_the_same_life() -> None:
    assert World(7).live().entries == World(7).live().entries


def _story(outcome: lives.Outcome) -> str:
    seeds = sorted(outcome.violations)
    told = [f"{len(seeds)} of {outcome.runs} lives break an invariant: seeds {seeds[:20]}"]
    for seed in seeds[:SHOWN_MAX]:
        told += [f"seed {seed}:", *outcome.violations[seed]]
    told.append(f"python -m tests.simulation --seed {seeds[0]} --trace")
    told += list(lives.trace(seeds[0]))[-200:]
    return "\n".join(told)
