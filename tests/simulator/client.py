"""What the tests of the simulator say to it, and how they read its streams."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from app.simulator.session import Session
from app.simulator.world import World

HEADERS = {
    "x-api-key": "key",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "managed-agents-2026-04-01",
}
T0 = 1_793_282_400.0
READ_LIMIT_S = 10.0


def message(text: str = "Where is order A-1042?") -> dict[str, Any]:
    return {"type": "user.message", "content": [{"type": "text", "text": text}]}


def custom_result(call_id: str, text: str = "shipped", **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    return {"type": "user.custom_tool_result", "custom_tool_use_id": call_id, "content": content, **more}


def tool_result(call_id: str, text: str = "total 0") -> dict[str, Any]:
    return {"type": "user.tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": text}]}


def allow(call_id: str) -> dict[str, Any]:
    return {"type": "user.tool_confirmation", "tool_use_id": call_id, "result": "allow"}


def deny(call_id: str, why: str | None = None) -> dict[str, Any]:
    more = {} if why is None else {"deny_message": why}
    return {"type": "user.tool_confirmation", "tool_use_id": call_id, "result": "deny", **more}


def interrupt(thread_id: str | None = None) -> dict[str, Any]:
    return {"type": "user.interrupt"} | ({} if thread_id is None else {"session_thread_id": thread_id})


def started(world: World, wanted: Any, **settings: Any) -> Session:
    """Return a session whose first turn has begun."""
    session = world.create(wanted, **settings)
    world.say(session.id, "Where is order A-1042?", now=T0)
    return session


def send(world: World, session: Session, *events: dict[str, Any], now: float = T0) -> list[dict[str, Any]]:
    return world.send(session.id, {"events": list(events)}, now=now)


def answer(session: Session, call_id: str) -> dict[str, Any]:
    """Return what a client that says yes to everything would send for a call."""
    call = session.calls[call_id]
    if call.awaits == "verdict":
        return allow(call_id)
    return custom_result(call_id) if call.spec.kind == "custom" else tool_result(call_id)


def events_of(session: Session, thread_id: str | None = None) -> list[dict[str, Any]]:
    thread = session.threads[thread_id] if thread_id else session.primary
    return [json.loads(entry.raw) for entry in thread.log.entries]


def types_of(session: Session, thread_id: str | None = None) -> list[str]:
    return [event["type"] for event in events_of(session, thread_id)]


def only(events: list[dict[str, Any]], event_type: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == event_type]


def stop_reasons(session: Session) -> list[dict[str, Any]]:
    return [event["stop_reason"] for event in only(events_of(session), "session.status_idle")]


class Stream:
    """An open stream, read frame by frame."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.taken = b""
        self._chunks = response.aiter_raw()

    async def frame(self) -> bytes:
        """Return the next whole frame; b"" at the end. A part of one at the end stays in `taken`."""
        async with asyncio.timeout(READ_LIMIT_S):
            while b"\n\n" not in self.taken:
                try:
                    self.taken += await anext(self._chunks)
                except StopAsyncIteration:
                    return b""
        frame, self.taken = self.taken.split(b"\n\n", 1)
        return frame

    async def event(self) -> dict[str, Any]:
        """Return the next event; an empty one at the end."""
        frame = await self.frame()
        return json.loads(frame.split(b"data: ", 1)[1]) if frame else {}

    async def until(self, event_type: str) -> list[dict[str, Any]]:
        """Return the events up to and with the next one of this type."""
        found: list[dict[str, Any]] = []
        while not found or found[-1]["type"] != event_type:
            event = await self.event()
            assert event, f"the stream ended before {event_type}; it had {[each['type'] for each in found]}"
            found.append(event)
        return found

    async def rest(self) -> bytes:
        """Return everything up to the end."""
        async with asyncio.timeout(READ_LIMIT_S):
            async for chunk in self._chunks:
                self.taken += chunk
        return self.taken


@contextlib.asynccontextmanager
async def opened(
    api: httpx.AsyncClient, session_id: str, query: str = "", path: str = ""
) -> AsyncIterator[Stream]:
    url = f"/v1/sessions/{session_id}{path or '/events/stream'}{query}"
    async with api.stream("GET", url) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response)
