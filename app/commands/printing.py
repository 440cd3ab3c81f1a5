"""How answers are shown: as tables for people, or as the JSON that came.

What agents and tools wrote is shown too, so nothing that a terminal would obey or that hides text goes out as
it is: it is written as an escape.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

COLUMN_GAP: Final = "  "
CELL_CHARS_MAX: Final = 60
"""A longer cell of a table is cut and ends in `…`; `show` and `--json` print all of it."""
_UNSAFE: Final = frozenset(("Cc", "Cf", "Co", "Cs", "Zl", "Zp"))


def say(text: str) -> None:
    """Print a line for people."""
    sys.stdout.write(safe(text, keep="\n\t") + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a line beside the output, to standard error."""
    sys.stderr.write(safe(text, keep="\n\t") + "\n")
    sys.stderr.flush()


def write(text: str) -> None:
    """Print text of which more follows on the same line."""
    sys.stdout.write(safe(text, keep="\n\t"))
    sys.stdout.flush()


def print_json(raw: bytes) -> None:
    """Print JSON with line breaks; its values, also the digits of its numbers, stay as they came."""
    sys.stdout.write(safe(msgspec.json.format(raw, indent=2).decode(), keep="\n") + "\n")
    sys.stdout.flush()


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows in columns, or that there are none."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        say("None.")
        return
    lines = [list(headings), *cells]
    widths = [max(len(line[n]) for line in lines) for n in range(len(headings))]
    for line in lines:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        say(COLUMN_GAP.join(padded).rstrip())


def print_fields(fields: Mapping[str, Any]) -> None:
    """Print an object, one member a line; what has members of its own is printed as JSON."""
    width = max(map(len, fields))
    for name, value in fields.items():
        say(f"{name.ljust(width)}{COLUMN_GAP}{_shown(value)}")


def safe(text: str, *, keep: str = "") -> str:
    """Escape what a terminal would obey, or would not show."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        one if one in keep or unicodedata.category(one) not in _UNSAFE else _escape(one) for one in text
    )


def _escape(one: str) -> str:
    return json.dumps(one)[1:-1] if ord(one) != 0x7F else "\\u007f"


def _shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case str():
            return value
        case _:
            return json.dumps(value, ensure_ascii=False)


def _cell(value: Any) -> str:
    text = safe(_shown(value))
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"
