"""Lives run and checked, one seed at a time or many."""

from __future__ import annotations

import concurrent.futures
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.simulation.checker import check
from tests.simulation.trace import lines
from tests.simulation.world import World

CHUNK = 50
"""How many lives one worker takes at a time."""


@dataclass(slots=True)
class Outcome:
    """What some lives came to: violations by seed, and what the checker let pass."""

    runs: int = 0
    violations: dict[int, list[str]] = field(default_factory=dict)
    explained: Counter[str] = field(default_factory=Counter)

    def add(self, other: Outcome) -> None:
        self.runs += other.runs
        self.violations |= other.violations
        self.explained.update(other.explained)


def violations(seed: int) -> tuple[list[str], Counter[str]]:
    """Run one life and check it. A life that the harness cannot finish is a violation too."""
    try:
        verdict = check(World(seed).live().entries)
    except Exception:
        return [f"the harness failed: {traceback.format_exc()}"], Counter()
    return verdict.violations, verdict.explained


def trace(seed: int, about: str | None = None) -> Iterator[str]:
    """The record of one life, as lines; `about` limits it to one call."""
    world = World(seed)
    world.live()
    yield f"seed {seed}: {world.settings}"
    yield f"troubles: {' '.join(world.troubles_drawn) or 'none'}"
    for tool in world.registry.values():
        policy = f"retry {tool.retry}, on_unknown {tool.on_unknown}, timeout {tool.timeout_s:g} s"
        yield f"tool {tool.name}: {policy}"
    yield from lines(world.record.entries, about)


def run(seeds: Iterable[int], *, workers: int = 1) -> Outcome:
    """Run many lives."""
    seeds = list(seeds)
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    total = Outcome()
    if workers == 1:
        for chunk in chunks:
            total.add(_run_chunk(chunk))
        return total
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        for outcome in pool.map(_run_chunk, chunks):
            total.add(outcome)
    return total


def _run_chunk(seeds: list[int]) -> Outcome:
    outcome = Outcome()
    for seed in seeds:
        found, explained = violations(seed)
        outcome.runs += 1
        outcome.explained.update(explained)
        if found:
            outcome.violations[seed] = found
    return outcome
