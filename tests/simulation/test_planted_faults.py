"""Every planted fault is caught, within so many seeds: what the harness does not catch, it does not test."""

from __future__ import annotations

import pytest

from tests.simulation import lives
from tests.simulation.faults import FAULTS

SEEDS_MAX = 500
"""A fault that shows in fewer than one life of so many is as good as not caught."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    undo = FAULTS[name]()
    try:
        for seed in range(SEEDS_MAX):
            found, _ = lives.violations(seed)
            if found:
                print(f"{name}: caught by seed {seed}: {found[0]}")
                return
    finally:
        undo()
    pytest.fail(f"{name} was not caught in {SEEDS_MAX} lives: {FAULTS[name].__doc__}")
