"""Print the scenario numbers that no test names.

`tests/scenarios.txt` lists each number with the part of the plan that brings it. `--part N` asks for the
parts up to N (default: those that are done); with `--missing` an unnamed number is a failure.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
PARTS_DONE = 6
NUMBER = re.compile(r"\b[RAD]-\d{3}\b")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, default=PARTS_DONE)
    parser.add_argument("--missing", action="store_true", help="fail when a number is not named")
    options = parser.parse_args()
    lines = (TESTS / "scenarios.txt").read_text(encoding="utf-8").splitlines()
    entries = [line.split() for line in lines if line and not line.startswith("#")]
    wanted = {number for number, part in entries if int(part) <= options.part}
    named: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for number in set(NUMBER.findall(path.read_text(encoding="utf-8"))):
            named.setdefault(number, []).append(str(path.relative_to(TESTS)))
    missing = sorted(wanted - named.keys())
    print(f"{len(wanted)} scenarios up to part {options.part}: {len(wanted) - len(missing)} named by a test.")
    for number in missing:
        print(f"  {number} is named by none")
    return 1 if missing and options.missing else 0


if __name__ == "__main__":
    sys.exit(main())
