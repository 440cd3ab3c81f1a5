"""Reads a stream of server-sent events, as a client of the service would."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Event:
    """One event; `id` is that of the last one that had one, as a browser keeps it."""

    type: str
    id: str | None
    data: Any


class Reader:
    """The events of one connection, in their order."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self.last_id: str | None = None
        self.pings = 0
        self._chunks = answer.aiter_bytes()
        self._rest = b""

    async def next(self, limit_s: float = 10.0) -> Event:
        """The next event.

        Raises:
            EOFError: the stream has ended.
        """
        async with asyncio.timeout(limit_s):
            type_, data = "message", []
            while True:
                name, _, value = (await self._line()).partition(":")
                value = value.removeprefix(" ")
                if (name, value) == ("", "") and data:
                    return Event(type_, self.last_id, json.loads("\n".join(data)))
                if name == "":
                    self.pings += value == "ping"
                elif name == "event":
                    type_ = value
                elif name == "id":
                    self.last_id = value
                elif name == "data":
                    data.append(value)

    async def _line(self) -> str:
        # Not `aiter_lines`, which ends lines at characters that do not end lines here.
        while b"\n" not in self._rest:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                raise EOFError
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    async def some(self, count: int) -> list[Event]:
        return [await self.next() for _ in range(count)]

    async def until(self, type_: str) -> list[Event]:
        """The events up to the first one of this type, without it."""
        events = []
        while (event := await self.next()).type != type_:
            events.append(event)
        return events


@contextlib.asynccontextmanager
async def reading(
    http: httpx.AsyncClient, path: str, *, headers: Mapping[str, str] | None = None, **params: Any
) -> AsyncIterator[Reader]:
    """Open a stream."""
    headers = {"accept": "text/event-stream", **(headers or {})}
    async with http.stream("GET", path, params=params, headers=headers, timeout=30) as answer:
        assert answer.status_code == 200, await answer.aread()
        yield Reader(answer)
