"""How a page of history is taken apart, so that one damaged entry costs only itself."""

from __future__ import annotations

import re
from typing import Final

import msgspec

CURSOR_CHARS_MAX: Final = 4096
"""A longer cursor would not fit in a request line."""

_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)|[\[\]{},:]', re.DOTALL)
_CLOSING: Final = {0x5B: 0x5D, 0x7B: 0x7D}


class Page(msgspec.Struct, frozen=True):
    """One page: its entries as the bytes that arrived, and the cursor of the next one."""

    entries: list[bytes]
    next_page: str | None


class _Wire(msgspec.Struct):
    data: list[msgspec.Raw] | None = None
    next_page: str | int | None = None


class UnreadablePageError(Exception):
    """The bytes are no page. Nothing may be concluded from what it might have held."""


_decoder = msgspec.json.Decoder(_Wire)


def read_page(body: bytes) -> Page:
    """Read a page. Entries are not looked into: each may turn out to be no event.

    Raises:
        UnreadablePageError: the body is no JSON object, was cut, or its members are of the wrong type.
    """
    try:
        wire = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return _read_slowly(body)
    return _page([bytes(entry) for entry in wire.data or ()], wire.next_page)


def _page(entries: list[bytes], next_page: str | int | None) -> Page:
    cursor = None if next_page is None or next_page == "" else str(next_page)
    if cursor is not None and len(cursor) > CURSOR_CHARS_MAX:
        raise UnreadablePageError(f"next_page is over {CURSOR_CHARS_MAX} characters")
    return Page(entries, cursor)


def _read_slowly(body: bytes) -> Page:
    """Read a page that the strict decoder refused, by its brackets alone."""
    members = _slices(body)
    if members is None:
        raise UnreadablePageError("the page is not a JSON object")
    data, cursor = b"null", b"null"
    for member in members:
        name, _, value = member.partition(b":")
        match name.strip():
            case b'"data"':
                data = value.strip()
            case b'"next_page"':
                cursor = value.strip()
    entries = [] if data == b"null" else _slices(data, opening=b"[")
    if entries is None:
        raise UnreadablePageError("the page's data is not an array")
    try:
        next_page = msgspec.json.decode(cursor, type=str | int | None)
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise UnreadablePageError("the page's next_page is not a string") from None
    return _page(entries, next_page)


def _slices(text: bytes, opening: bytes = b"{") -> list[bytes] | None:
    """The elements of an array, or the members of an object, as bytes; None if the brackets do not match.

    Neither decodes nor recurses, so neither depth nor damage inside an element can hurt the others.
    """
    text = text.strip()
    if not text.startswith(opening):
        return None
    slices: list[bytes] = []
    open_brackets = bytearray()
    start = 1
    for token in _TOKEN.finditer(text):
        char = text[token.start()]
        if char in _CLOSING:
            open_brackets.append(_CLOSING[char])
        elif char in (0x5D, 0x7D):
            if not open_brackets or open_brackets.pop() != char:
                return None
            if not open_brackets:
                slices.append(text[start : token.start()].strip())
                if token.end() != len(text):
                    return None
                return slices if slices != [b""] else []
        elif char == 0x2C and len(open_brackets) == 1:
            slices.append(text[start : token.start()].strip())
            start = token.end()
    return None
