"""What the pages tell a reader to type, and what they show of the answers.

A comment before a block says what a reader knows without it: `<!-- not run: REASON -->`,
`<!-- run by TEST -->`, `<!-- stays in the foreground -->`, `<!-- file NAME -->`, and `<!-- output -->` of the
JSON that the block above answers. Below a heading, `<!-- this section is run by TEST -->` speaks for it all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]
_PART = re.compile(
    r"^<!-- this section is (?P<section>run by \S+) -->$"
    r"|^(?P<indent> *)(?:<!-- (?P<mark>[^\n]*) -->\n *)?```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$"
    r"|^##? (?P<heading>[^\n]*)$",
    re.MULTILINE | re.DOTALL,
)
SHELLS = ("sh", "bash", "shell", "console")


@dataclass(frozen=True)
class Block:
    """Commands. `mark` is what the page's comment says of them, `output` the JSON that it shows below."""

    page: Path
    text: str
    mark: str = ""
    output: Any = None

    @property
    def is_typed(self) -> bool:
        """Whether the test of the pages types them."""
        return not self.mark.startswith(("not run: ", "run by "))

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0]}"


def blocks(page: Path) -> list[Block]:
    """The commands of a page, in their order."""
    found: list[Block] = []
    of_section = ""
    for part in _PART.finditer(page.read_text(encoding="utf-8")):
        mark, text = part["mark"] or "", dedent(part["text"] or "")
        if part["heading"]:
            of_section = ""
        elif part["section"]:
            of_section = part["section"]
        elif part["language"] in SHELLS:
            found.append(Block(page, text, of_section or mark))
        elif mark == "output":
            found[-1] = replace(found[-1], output=json.loads(text))
    return found


def files(page: Path) -> dict[str, str]:
    """The files that a page has its reader make."""
    text = page.read_text(encoding="utf-8")
    return {
        part["mark"].removeprefix("file "): part["text"]
        for part in _PART.finditer(text)
        if (part["mark"] or "").startswith("file ")
    }


def fits(shown: Any, actual: Any) -> bool:
    """Whether an answer is what the page shows of it: the same members, and anything for each `…`."""
    if isinstance(shown, dict):
        return isinstance(actual, dict) and all(
            key in actual and fits(value, actual[key]) for key, value in shown.items()
        )
    if isinstance(shown, list):
        return (
            isinstance(actual, list)
            and len(shown) == len(actual)
            and all(fits(one, other) for one, other in zip(shown, actual, strict=True))
        )
    if isinstance(shown, str) and isinstance(actual, str):
        return re.fullmatch(re.escape(shown).replace("…", ".*"), actual, re.DOTALL) is not None
    return bool(shown == actual)


def typed() -> Iterator[tuple[Path, list[Block]]]:
    """The pages with commands that are typed by the test, with those commands."""
    for page in PAGES:
        if those := [block for block in blocks(page) if block.is_typed]:
            yield page, those
