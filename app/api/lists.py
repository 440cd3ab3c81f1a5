"""What lists and hot reads share: page size, cursor, the forms of ids, and answers of ready bytes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from fastapi import Path, Query, Response
from pydantic import AfterValidator, BaseModel

from app.api.problems import invalid

LIMIT_DEFAULT: Final = 50
LIMIT_MAX: Final = 200
CURSOR_CHARS_MAX: Final = 1024
POSITION_MAX: Final = 2**63 - 1
ID_CHARS_MAX: Final = 256
"""Of the ids of events: calls and messages."""
TOOL_NAME_CHARS_MAX: Final = 128

T = TypeVar("T")


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must hold printable characters only")
    return text


printable: Final = AfterValidator(_printable)


def _tool_name(text: str) -> str:
    if "/" in text:
        raise ValueError("must hold no slash")
    return _printable(text)


SessionId = Annotated[str, Path(pattern="^[A-Za-z0-9_-]{1,128}$", description="The session's id upstream.")]
EventId = Annotated[str, Path(min_length=1, max_length=ID_CHARS_MAX), printable]
ToolName = Annotated[
    str,
    Path(
        min_length=1, max_length=TOOL_NAME_CHARS_MAX, description="The tool's exact name, or `*`; no slash."
    ),
    AfterValidator(_tool_name),
]
KeyId = Annotated[str, Path(pattern="^key_[0-9a-f]{24}$")]
TestId = Annotated[str, Path(pattern="^test_[0-9a-f]{24}$")]
SendId = Annotated[str, Path(pattern="^send_[0-9a-f]{24}$")]
NAME: Final = "^[A-Za-z0-9._-]{1,64}$"
"""Of subscriptions and credentials, which tenants name themselves."""
RuleId = Annotated[str, Path(pattern="^rul_[0-9a-f]{24}$")]
Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="The most items to return.")]
Cursor = Annotated[
    str | None,
    Query(max_length=CURSOR_CHARS_MAX, description="`next_cursor` of the page before; absent for the first."),
]


class ListOf(BaseModel, Generic[T]):
    """A page of a list; `next_cursor` is null on the last one."""

    data: list[T]
    next_cursor: str | None


def encode_cursor(place: Sequence[Any]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def decode_cursor(cursor: str | None, type_: type[T]) -> T | None:
    """Return the place that a cursor names.

    Raises:
        Problem: it is not one that this list gave.
    """
    if cursor is None:
        return None
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        return msgspec.json.decode(base64.b64decode(padded, b"-_", validate=True), type=type_)
    except (ValueError, binascii.Error) as error:
        raise invalid("cursor", "must be the next_cursor of this list's page before, unchanged") from error


def position_after(cursor: str | None) -> int:
    """Return the position that a cursor over a rising number names, 0 for the first page."""
    place = decode_cursor(cursor, tuple[Annotated[int, msgspec.Meta(ge=0, le=POSITION_MAX)]])
    return 0 if place is None else place[0]


def moment_after(cursor: str | None) -> tuple[datetime, str] | None:
    """Return the time and id that a cursor over them names."""
    place = decode_cursor(cursor, tuple[datetime, str])
    if place is not None and (place[0].tzinfo is None or "\0" in place[1]):
        raise invalid("cursor", "must be the next_cursor of this list's page before, unchanged")
    return place


def json_response(body: Any, status: int = 200) -> Response:
    """Answer with JSON whose `msgspec.Raw` members go out byte for byte."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
