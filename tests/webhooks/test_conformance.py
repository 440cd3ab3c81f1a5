"""The page that compares this sender with others names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs/webhooks-conformance.md").read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]


def test_each_of_the_fourteen_rows_is_done_and_names_its_tests() -> None:
    assert list(range(1, 15)) == [int(row.split("|")[1]) for row in ROWS]
    for row in ROWS:
        assert "yes" == row.split("|")[3].strip()
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert named, row
        for path, test in named:
            text = (ROOT / path).read_text()
            assert f"def {test}" in text if test else "def test_" in text, (path, test)
