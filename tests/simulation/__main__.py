"""`python -m tests.simulation`: run lives from a seed on, or show one.

--seed S      the first seed (default: drawn anew)
--runs N      how many lives (default 1)
--trace       print the whole record of the first life
--about CALL  print only what concerns one call
--fault NAME  plant a fault (see `faults.py`)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import time

from tests.simulation import lives
from tests.simulation.faults import FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--seed", type=int)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--about")
    parser.add_argument("--fault", choices=sorted(FAULTS))
    options = parser.parse_args()
    first = secrets.randbelow(2**31) if options.seed is None else options.seed
    with contextlib.ExitStack() as stack:
        if options.fault:
            stack.callback(FAULTS[options.fault]())
        if options.trace or options.about:
            print("\n".join(lives.trace(first, options.about)))
            found, _ = lives.violations(first)
            print("\n".join(found) or "no violation")
            return bool(found)
        began = time.monotonic()
        workers = 1 if options.fault else (os.cpu_count() or 1)
        outcome = lives.run(range(first, first + options.runs), workers=workers)
    took_s = time.monotonic() - began
    for seed, found in outcome.violations.items():
        print(f"seed {seed}:", *found, sep="\n  ")
    print(
        f"{outcome.runs} lives from seed {first} in {took_s:.1f} s ({outcome.runs / took_s:.0f} per second)"
    )
    print(f"violations: {len(outcome.violations)}")
    for what, count in sorted(outcome.explained.items()):
        print(f"let pass: {what}: {count}")
    return bool(outcome.violations)


if __name__ == "__main__":
    sys.exit(main())
