"""Edits: a person allows a call with another input than the agent's.

Only a custom call can be edited: for the others upstream runs what the agent wrote, or takes a plain verdict
on it, and has none that says "with this instead".
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from app.core.events import Kind
from app.core.inputs import INPUT_BYTES_MAX
from app.core.strict_json import Unreadable, read

# Possessive: linear on any text. Spaces in strings stay.
_STRING_OR_SPACE: Final = re.compile(r'("(?:[^"\\]++|\\.)*+")|[ \t\n\r]++')


class EditRefused(ValueError):
    """A text cannot be an input. The message is a sentence that says where and what to do."""


def is_editable(kind: Kind, gate_by: str | None, gate_reason: str | None) -> bool:
    """Whether an allow of a call that is held so may carry an edited input.

    One whose outcome is unknown was delivered: its tool knows it by the body that it had.
    """
    return kind == "custom" and gate_by != "upstream" and gate_reason != "outcome_unknown"


def read_edit(text: str, original: bytes) -> bytes | None:
    """Read an edited input: a JSON object. Return it without spaces between its values, else as written.

    None: it says the same as the original, so it is no edit. Numbers are compared digit for digit, objects
    whatever the order of their members.

    Raises:
        EditRefused: it is too large, no JSON object, or JSON that readers take differently.
    """
    size = len(text.encode("utf-8", "replace"))
    if size > INPUT_BYTES_MAX:
        raise EditRefused(f"It has {size} bytes; send at most {INPUT_BYTES_MAX}.")
    try:
        edited = _read(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise EditRefused(f"It is no JSON: {error.msg} at {place}. Correct it there.") from error
    except Unreadable as error:
        raise EditRefused(f"It is ambiguous: {error}. Correct that.") from error
    except (ValueError, RecursionError) as error:
        raise EditRefused("It is nested too deeply. Send fewer levels.") from error
    if not isinstance(edited, dict):
        raise EditRefused("It is no JSON object; send one, as the tool takes it.")
    if _is_same(edited, original):
        return None
    try:
        return _STRING_OR_SPACE.sub(lambda match: match[1] or "", text).encode()
    except UnicodeEncodeError as error:
        raise EditRefused("It holds half a character; write it as an escape or leave it out.") from error


def _read(text: str) -> Any:
    return read(text, parse_int=_number, parse_float=_number)


def _is_same(edited: Any, original: bytes) -> bool:
    try:
        return bool(edited == _read(original.decode()))
    except (ValueError, RecursionError):
        return False


def _number(digits: str) -> tuple[str]:
    # A tuple equals no other JSON value, so 1 is not true, and 1.0 is not 1.
    return (digits,)
