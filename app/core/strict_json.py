"""JSON that every reader takes alike: no name twice in an object, no NaN, no Infinity."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


class Unreadable(ValueError):
    """The text is JSON that different readers read differently, or that cannot be compared."""


def read(
    text: str | bytes,
    *,
    parse_int: Callable[[str], Any] = int,
    parse_float: Callable[[str], Any] = float,
) -> Any:
    """Read a JSON text; numbers become what the two functions make of their digits.

    Raises:
        Unreadable: readers differ in what it says.
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(
        text, object_pairs_hook=_members, parse_int=parse_int, parse_float=parse_float, parse_constant=_refuse
    )


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise Unreadable("it names a member of an object twice, and readers differ in which one counts")
    return members


def _refuse(constant: str) -> Any:
    raise Unreadable(f"{constant} is no JSON number")
