"""How answers are shown: as tables for people, or as the JSON that came.

What agents and tools wrote is shown too, so nothing that a terminal would obey or that hides text goes out as
it is: it is written as an escape.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TextIO

import msgspec

COLUMN_GAP: Final = "  "
CELL_CHARS_MAX: Final = 60
"""A longer cell of a table is cut and ends in `…`; `show` and `--json` print all of it."""
NOTHING: Final = "-"
_UNSAFE: Final = frozenset(("Cc", "Cf", "Co", "Cs", "Zl", "Zp"))

Row = Callable[[dict[str, Any]], Sequence[Any]]
"""Makes the cells of an item."""


class Page(msgspec.Struct):
    """Items of a list as they came; `next_cursor` is not null if there are more than were asked for."""

    data: list[msgspec.Raw]
    next_cursor: str | None


def say(text: str) -> None:
    """Print a line for people."""
    _put(sys.stdout, safe(text, keep="\n\t") + "\n")


def print_line(text: str) -> None:
    """Print what others wrote as one line, whatever it holds."""
    _put(sys.stdout, safe(text) + "\n")


def note(text: str) -> None:
    """Print a line beside the output, to standard error."""
    _put(sys.stderr, safe(text, keep="\n\t") + "\n")


def write(text: str) -> None:
    """Print text of which more follows on the same line."""
    _put(sys.stdout, safe(text, keep="\n\t"))


def print_json(raw: bytes, *, in_one_line: bool = False) -> None:
    """Print JSON; its values, also the digits of its numbers, stay as they came."""
    formatted = msgspec.json.format(raw, indent=-1 if in_one_line else 2)
    _put(sys.stdout, safe(formatted.decode(), keep="\n") + "\n")


def print_object(raw: bytes, as_json: bool) -> None:
    """Print an object as JSON, or one member a line."""
    if as_json:
        print_json(raw)
    else:
        print_members(members_of(raw))


def print_members(fields: Mapping[str, str]) -> None:
    """Print members, one a line."""
    width = max(map(len, fields))
    for name, value in fields.items():
        print_line(f"{name.ljust(width)}{COLUMN_GAP}{value}")


def print_page(page: Page, as_json: bool, headings: Sequence[str], row: Row) -> None:
    """Print a list as JSON, or in columns; a list that was cut short says so."""
    if as_json:
        print_json(msgspec.json.encode(page))
    else:
        print_table(headings, (row(json.loads(bytes(one))) for one in page.data))
    if page.next_cursor is not None:
        note(f"There are more than these {len(page.data)}; --limit prints more.")


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


def members_of(raw: bytes) -> dict[str, str]:
    """Return an object's members as text for people: JSON as it came, texts without their quotes."""
    found = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return {name: _bare(bytes(value)) for name, value in found.items()}


def safe(text: str, *, keep: str = "") -> str:
    """Escape what a terminal would obey, or would not show."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        one if one in keep or unicodedata.category(one) not in _UNSAFE else _escape(one) for one in text
    )


def _put(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:  # a terminal or a pipe of another encoding
        stream.write("".join(one if one.isascii() else _escape(one) for one in text))
    stream.flush()


def _escape(one: str) -> str:
    return json.dumps(one)[1:-1] if ord(one) != 0x7F else "\\u007f"


def _bare(value: bytes) -> str:
    if value == b"null":
        return NOTHING
    return str(json.loads(value)) if value.startswith(b'"') else value.decode()


def _cell(value: Any) -> str:
    shown = NOTHING if value is None else value if isinstance(value, str) else json.dumps(value)
    text = safe(shown)
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"
