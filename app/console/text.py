"""Hostile text made visible: what agents and tools wrote, with nothing hidden and nothing cut silently.

Text becomes markup in `visible` alone, where every character is escaped. What no eye sees, what moves other
characters about, and what poses as a Latin letter is shown as its code.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from markupsafe import Markup, escape

INLINE_CHARS_MAX: Final = 4_000
"""An input up to this is shown whole on its card; a longer one begins there and goes on in pages."""
PAGE_CHARS: Final = 20_000
FIELDS_MAX: Final = 50
BLANK_LINES_MAX: Final = 2
SPACES_MAX: Final = 40

_NOTABLE: Final = re.compile(
    rf"\n(?:[ \t\r]*\n){{{BLANK_LINES_MAX + 1},}}| {{{SPACES_MAX + 1},}}|[^\x20-\x7e\n]"
)
_ODD_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
# Letters and marks by their category, and yet nothing to see.
_BLANKS: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
_SELECTORS: Final = (range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0))
_POSERS: Final = ("CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC", "FULLWIDTH", "MATHEMATICAL")
"""Scripts with letters that look like Latin ones: marked where they stand beside those."""
_BEYOND_ASCII: Final = re.compile(r"[^\x00-\x7e]")
_LATIN: Final = re.compile("[A-Za-z]")
_MARK: Final = '<i class="odd">{}</i>'
_NAMES: Final = {"\t": "⇥\t", "\r": "␍"}


@dataclass(frozen=True, slots=True)
class Field:
    """A member of an input: a text as it reads, or any other value as the agent wrote it."""

    name: str
    value: str
    is_text: bool


@dataclass(frozen=True, slots=True)
class Input:
    """An input to show. `fields` is None where only the JSON itself may be shown; `is_ambiguous` says that it
    names a member twice, which readers of JSON take differently."""

    raw: str
    fields: tuple[Field, ...] | None
    is_ambiguous: bool

    @property
    def is_whole(self) -> bool:
        return len(self.raw) <= INLINE_CHARS_MAX

    @property
    def beginning(self) -> str:
        return self.raw[:INLINE_CHARS_MAX]

    @property
    def pages(self) -> int:
        return max(1, -(-len(self.raw) // PAGE_CHARS))

    def page(self, number: int) -> str:
        """The page of this number, counted from 1."""
        return self.raw[(number - 1) * PAGE_CHARS : number * PAGE_CHARS]


def visible(text: str) -> Markup:
    """Return the text as markup in which every character can be seen."""
    # Escaped first: what is put in afterwards is ours, and none of it stands for markup.
    return Markup(_NOTABLE.sub(_shown, escape(text)))  # noqa: S704


def editable(raw: str) -> str:
    """Return JSON for a text field, in which no mark-up can show what is not seen: as escapes of JSON."""
    return _BEYOND_ASCII.sub(_escaped, raw)


def line(text: str, chars_max: int) -> str:
    """Return the first line of a text, with an ellipsis where something follows."""
    text = text.strip()
    first = text.partition("\n")[0]
    return text if text == first[:chars_max] else first[:chars_max].rstrip() + " …"


def read_input(raw: str) -> Input:
    """Read an input for a card."""
    if len(raw) > INLINE_CHARS_MAX:
        return Input(raw, None, is_ambiguous=False)
    repeated = False

    def pairs(members: list[tuple[str, Any]]) -> None:
        nonlocal repeated
        repeated = repeated or len({name for name, _ in members}) < len(members)

    try:
        fields = tuple(_fields(raw, pairs))
    except (ValueError, RecursionError):
        return Input(raw, None, is_ambiguous=False)
    names = {field.name for field in fields}
    is_ambiguous = repeated or len(names) < len(fields)
    return Input(raw, None if is_ambiguous or len(fields) > FIELDS_MAX else fields, is_ambiguous)


def _escaped(match: re.Match[str]) -> str:
    one = match[0]
    # Only a character that is shown as itself is left as it is.
    shown = _character(one, is_beside_latin=False)
    return one if shown == one else json.dumps(one)[1:-1]


def _shown(match: re.Match[str]) -> str:
    found = match[0]
    if found[0] == "\n":
        return "\n" + _MARK.format(f"{found.count(chr(10)) - 1} blank lines") + "\n"
    if found[0] == " ":
        return _MARK.format(f"{len(found)} spaces")
    begin, end = match.span()
    beside = match.string[max(0, begin - 1) : end + 1]
    return _character(found, _LATIN.search(beside) is not None)


@functools.lru_cache(maxsize=4096)
def _character(one: str, is_beside_latin: bool) -> str:
    if one in _NAMES:
        return _MARK.format(_NAMES[one])
    is_odd = unicodedata.category(one) in _ODD_CATEGORIES or one in _BLANKS
    if is_odd or any(ord(one) in some for some in _SELECTORS):
        return _MARK.format(f"U+{ord(one):04X}")
    if is_beside_latin and unicodedata.name(one, "").startswith(_POSERS):
        return _MARK.format(f"{one} U+{ord(one):04X}")
    return one


_SPACE: Final = re.compile(r"[ \t\r\n]*")


def _fields(raw: str, pairs: Callable[[list[tuple[str, Any]]], None]) -> Iterator[Field]:
    """Yield the members of a JSON object, each value as it stands in the text.

    Raises:
        ValueError: it is no object, or no JSON.
    """
    decoder = json.JSONDecoder(object_pairs_hook=pairs)

    def skip(at: int, wanted: str) -> int:
        match = _SPACE.match(raw, at)
        assert match is not None, "it matches nothing, too"
        if raw[match.end() : match.end() + 1] not in (*wanted,):
            raise ValueError(f"no {wanted} at {match.end()}")
        return match.end()

    at = skip(0, "{") + 1
    if raw[at:].strip() == "}":
        return
    while True:
        name, at = decoder.raw_decode(raw, skip(at, '"'))
        begin = _SPACE.match(raw, skip(at, ":") + 1).end()  # type: ignore[union-attr]  # as above
        value, end = decoder.raw_decode(raw, begin)
        yield Field(name, value if isinstance(value, str) else raw[begin:end], isinstance(value, str))
        at = skip(end, ",}")
        if raw[at] == "}":
            break
        at += 1
    if raw[at + 1 :].strip(" \t\r\n"):
        raise ValueError("something follows the object")
