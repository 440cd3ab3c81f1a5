"""Every connection attempt of this process, seen where the interpreter makes it: below any library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

_dialled: list[str] | None = None
_is_refused = False


def place(host: str, port: int | str) -> str:
    """An address and a port in the one spelling that this Python gives them."""
    return f"{ip_address(host)} {port}"


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.connect" and _dialled is not None:
        _dialled.append(place(*args[1][:2]))
        if _is_refused:
            raise ConnectionRefusedError("nobody is called in this test")


# An audit hook cannot be removed, only told to stop listening.
sys.addaudithook(_on_event)


@contextmanager
def dialling(*, is_refused: bool) -> Iterator[list[str]]:
    """The places, as "address port", that any socket is connected to meanwhile.

    `is_refused` lets no connection be made.
    """
    global _dialled, _is_refused
    _dialled, _is_refused = [], is_refused
    try:
        yield _dialled
    finally:
        _dialled, _is_refused = None, False
