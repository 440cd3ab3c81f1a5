"""Plays one recording of `tests/captures` as the upstream of one session.

The stream gives the recorded bytes, the list the recorded entries. What a recording does not hold (the
session object, answers to sends, refusals) is as that server did it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

CAPTURES = Path(__file__).parents[1] / "captures"
STREAM_ONLY = {"event_start", "event_delta"}
TARGETS = {
    "user.tool_confirmation": "tool_use_id",
    "user.custom_tool_result": "custom_tool_use_id",
    "user.tool_result": "tool_use_id",
}
"""The events by which a client answers a call, with the field that names it."""
USES = ("agent.tool_use", "agent.custom_tool_use", "agent.mcp_tool_use")

Event = dict[str, Any]
Environment = Literal["cloud", "self_hosted"]
Way = Literal["ours", "waiting", "theirs", "late"]
"""Who answers the calls: we do, while the rest of the turn waits for it; we do, but came when the first one
was already waiting; somebody else does, while we watch; somebody else did, before we came. The last stream is
cut once after its last event."""


@dataclass(frozen=True)
class Server:
    """What is peculiar to a server that was recorded."""

    replays: bool = False
    """Whether each connect gives the whole history again."""
    is_paging_endless: bool = False
    """Whether each page is the first page, with the same cursor."""
    send_status: int = 200
    takes_results: bool = True
    """Whether `user.tool_result` is known to it."""
    refuses_duplicates: bool = False


SERVERS: Mapping[str, Server] = {
    "oma-pypi": Server(replays=True, refuses_duplicates=True),
    "console-mock-platform": Server(takes_results=False),
    "openma-workerd": Server(is_paging_endless=True, send_status=202),
}


@dataclass(frozen=True)
class Frame:
    """A part of the stream up to its blank line; `event` is None for a comment."""

    data: bytes
    event: Event | None


@dataclass(frozen=True)
class Recording:
    """One recorded turn."""

    folder: str
    name: str
    session_id: str
    frames: tuple[Frame, ...]
    listed: tuple[Any, ...]
    page: Event

    @property
    def server(self) -> Server:
        return SERVERS.get(self.folder, Server())

    @property
    def events(self) -> list[Event]:
        """Every event once, in order: what only the list holds, and what only the stream does."""
        listed = {unwrapped(entry)["id"]: unwrapped(entry) for entry in self.listed}
        streamed = [frame.event for frame in self.frames if frame.event is not None]
        return [*listed.values(), *(event for event in streamed if event.get("id", "") not in listed)]

    @property
    def uses(self) -> dict[str, Event]:
        return {event["id"]: event for event in self.events if event["type"] in USES}

    @property
    def gated(self) -> set[str]:
        """The calls that must not run without a verdict, however the server says so."""
        return {id_ for id_, event in self.uses.items() if _is_gated(event)}

    @property
    def answers(self) -> list[Event]:
        """What clients answered, in order."""
        return [event for event in self.events if event["type"] in TARGETS]

    @property
    def is_turn_over(self) -> bool:
        """Whether it ends idle, waiting for nobody."""
        last = unwrapped(self.listed[-1])
        stop_reason = last.get("stop_reason") or {}
        return last["type"] == "session.status_idle" and stop_reason.get("type") != "requires_action"

    @property
    def texts(self) -> dict[str, str]:
        """The text of each message of the agent."""
        return {
            event["id"]: _text(event["content"]) for event in self.events if event["type"] == "agent.message"
        }

    @property
    def agent_tools(self) -> list[Event]:
        """The tools of the session's agent, as RETRIEVE shows them."""
        tools: list[Event] = []
        for event in self.uses.values():
            if event["type"] == "agent.custom_tool_use":
                schema = {"type": "object", "properties": {}}
                custom = {"type": "custom", "name": event["name"], "description": "", "input_schema": schema}
                tools.append(event.get("tool", custom))
            else:
                tools.append(event.get("tool", _toolset(event["name"], is_gated=_is_gated(event))))
        return tools


def recordings() -> list[Recording]:
    """Read all that is recorded; a new file shows up by itself."""
    stems = {
        (path.parent, path.name.removesuffix(".sse").removesuffix(".list.json"))
        for path in CAPTURES.glob("*/*")
    }
    return [_read(folder, name) for folder, name in sorted(stems)]


def target(event: Event) -> str | None:
    """The call that an event of a client answers."""
    name = TARGETS.get(event["type"])
    return None if name is None else event[name]


def unwrapped(entry: Event) -> Event:
    """The event in an entry of a list: some servers put it under `data`."""
    return entry["data"] if isinstance(entry.get("data"), dict) else entry


@dataclass(frozen=True)
class Post:
    """A send of the service, the status that it got, and how many lists had been read by then."""

    event: Event
    status: int
    lists: int

    @property
    def is_accepted(self) -> bool:
        return self.status < 300


class Replay:
    """The upstream of one session, playing a recording; `posts` and `lists` tell what the service did.

    `bytes_max` is the size of the pieces in which the stream is written; None writes frame by frame.
    `is_fenced` adds a message of our own to the end of each stream.
    """

    def __init__(
        self,
        recording: Recording,
        way: Way,
        *,
        environment: Environment | None = "self_hosted",
        bytes_max: int | None = None,
        is_fenced: bool = True,
    ) -> None:
        self.url = ""
        self.recording = recording
        self.posts: list[Post] = []
        self.lists = 0
        self.connections = 0
        self.verdicts: dict[str, str] = {}
        """What upstream knows of verdicts by now, by call."""
        self.closing = asyncio.Event()
        self.way = way
        self._environment = environment
        self._bytes_max = bytes_max
        self._is_fenced = is_fenced
        self._answered: set[str] = set()
        self._echoes: list[Event] = []
        self._changed = asyncio.Condition()
        self._frames = recording.frames
        if way == "waiting":
            answered = [bool(frame.event and target(frame.event)) for frame in recording.frames]
            self._frames = recording.frames[answered.index(True) :]
        self._listed: list[Event] = []
        self._show(list(recording.listed) if way == "late" else self._before_the_stream())

    def fence(self, connection: int) -> str:
        """The id of the message that ends a connection's stream: once it is text, all before was handled."""
        return f"{self.recording.session_id}_fence_{connection}"

    def accepted(self, call_id: str) -> list[Event]:
        """What the service answered to a call and upstream took."""
        return [post.event for post in self.posts if post.is_accepted and target(post.event) == call_id]

    # ---- endpoints

    async def retrieve(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "type": "session",
                "id": self.recording.session_id,
                "status": "idle",
                "environment_id": "env_1",
                "agent": {
                    "type": "agent",
                    "id": "agent_1",
                    "version": 1,
                    "tools": self.recording.agent_tools,
                },
                "metadata": {},
                "archived_at": None,
            }
        )

    async def environment(self, _: web.Request) -> web.Response:
        if self._environment is None:
            return _refusal(404, "not_found_error", "no such environment")
        return web.json_response({"type": "environment", "config": {"type": self._environment}})

    async def history(self, _: web.Request) -> web.Response:
        self.lists += 1
        endless = {"has_more": True, "next_page": "eyJvIjowfQ"}
        paging = endless if self.recording.server.is_paging_endless else {}
        return web.json_response({**self.recording.page, **paging, "data": self._listed})

    async def send(self, request: web.Request) -> web.Response:
        [event] = (await request.json())["events"]
        answer = self._answer(event)
        self.posts.append(Post(event, answer.status, self.lists))
        if answer.status < 300:
            async with self._changed:
                self._answered.add(target(event) or "")
                if event["type"] == "user.tool_confirmation":
                    self.verdicts.setdefault(event["tool_use_id"], event["result"])
                self._changed.notify_all()
        return answer

    async def stream(self, request: web.Request) -> web.StreamResponse:
        number, self.connections = self.connections, self.connections + 1
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for frame in self._frames if number == 0 or self.recording.server.replays else ():
            if self.way in ("ours", "waiting") and frame.event is not None and frame.event["type"] in TARGETS:
                await self._wait_for_answer(frame.event, response)
            self._play(frame)
            await self._write(response, frame.data)
        if self._is_fenced:
            await self._write(response, _frame(self._message(self.fence(number))))
        if self.way != "late" or number:
            await self.closing.wait()
        return response

    # ---- how it goes on

    def _before_the_stream(self) -> list[Event]:
        streamed = {frame.event.get("id") for frame in self._frames if frame.event is not None}
        before: list[Event] = []
        for entry in self.recording.listed:
            if unwrapped(entry)["id"] in streamed:
                break
            before.append(entry)
        return before

    def _play(self, frame: Frame) -> None:
        """What the stream is about to show is in the list, too, with what only the list holds before it."""
        event = frame.event
        if event is None or event["type"] in STREAM_ONLY:
            return
        ids = [unwrapped(entry)["id"] for entry in self.recording.listed]
        shown = {unwrapped(entry)["id"] for entry in self._listed}
        upto = self.recording.listed[: ids.index(event["id"]) + 1]
        self._show([entry for entry in upto if unwrapped(entry)["id"] not in shown])

    def _show(self, entries: list[Event]) -> None:
        self._listed += entries
        for event in map(unwrapped, entries):
            if answered := target(event):
                self._answered.add(answered)
                if event["type"] == "user.tool_confirmation":
                    self.verdicts.setdefault(answered, event["result"])

    async def _wait_for_answer(self, recorded: Event, response: web.StreamResponse) -> None:
        """Hold back what followed an answer until the service gave one; show it if it is another one."""
        async with self._changed:
            await self._changed.wait_for(lambda: target(recorded) in self._answered)
        for echo in self._echoes:
            await self._write(response, _frame(echo))
        self._echoes.clear()

    def _answer(self, event: Event) -> web.Response:
        server, call_id = self.recording.server, target(event)
        if event["type"] == "user.tool_result" and not server.takes_results:
            return _refusal(400, "invalid_request_error", "unsupported event type: user.tool_result")
        if server.refuses_duplicates and self._is_answered(call_id):
            return _refusal(409, "conflict_error", "Session is not waiting for action results")
        echo = {**event, "id": f"echo_{len(self.posts)}", "processed_at": None}
        if not any(_is_same_answer(event, recorded) for recorded in self.recording.answers):
            self._listed.append(echo)
            self._echoes.append(echo)
        if server.send_status == 202:
            return web.Response(status=202)
        return web.json_response({"data": [echo]}, status=server.send_status)

    def _is_answered(self, call_id: str | None) -> bool:
        is_interrupted = any(unwrapped(entry)["type"] == "user.interrupt" for entry in self._listed)
        return call_id in self._answered or is_interrupted

    def _message(self, id_: str) -> Event:
        times = [event["processed_at"] for event in self.recording.events if event.get("processed_at")]
        newest = max(datetime.fromisoformat(time) for time in times)
        at = (newest + timedelta(seconds=1)).isoformat()
        return {"type": "agent.message", "id": id_, "processed_at": at, "content": "the recording ended"}

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        size = self._bytes_max or len(data)
        for start in range(0, len(data), size):
            await response.write(data[start : start + size])


@contextlib.asynccontextmanager
async def replaying(replay: Replay) -> AsyncIterator[Replay]:
    """Serve a replay on loopback."""
    app = web.Application()
    session = f"/v1/sessions/{replay.recording.session_id}"
    app.router.add_get(session, replay.retrieve)
    app.router.add_get("/v1/environments/env_1", replay.environment)
    app.router.add_get(f"{session}/events", replay.history)
    app.router.add_post(f"{session}/events", replay.send)
    app.router.add_get(f"{session}/events/stream", replay.stream)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    replay.url = f"http://{host}:{port}"
    try:
        yield replay
    finally:
        replay.closing.set()
        await runner.cleanup()


# ---- reading


def _read(folder: Path, name: str) -> Recording:
    sse, listing = folder / f"{name}.sse", folder / f"{name}.list.json"
    page: Any = json.loads(listing.read_text()) if listing.exists() else {}
    if isinstance(page, list):
        page = {"data": page, "next_page": None}
    listed: Sequence[Event] = page.get("data", [])
    if sse.exists():
        raw = sse.read_bytes()
        frames = tuple(_frames(raw))
        [session_id] = re.findall(rb"/v1/sessions/([^/]+)/", raw.split(b"\n", 1)[0])
        session_id = session_id.decode()
    else:
        frames = tuple(Frame(_frame(unwrapped(entry)), unwrapped(entry)) for entry in listed)
        session_id = unwrapped(listed[0])["session_id"]
    if not listed:
        events = [frame.event for frame in frames if frame.event is not None]
        listed = [event for event in events if event["type"] not in STREAM_ONLY]
    return Recording(folder.name, name, session_id, frames, tuple(listed), page)


def _frames(raw: bytes) -> Iterator[Frame]:
    """Cut a recorded stream at its blank lines; the recorder's own lines begin with a `#`."""
    stream = b"".join(line for line in raw.splitlines(keepends=True) if not line.startswith(b"#"))
    for part in re.findall(rb".+?\n\n+", stream.lstrip(b"\n"), re.DOTALL):
        data = re.search(rb"^data: (.*)$", part, re.MULTILINE)
        yield Frame(part, json.loads(data[1]) if data else None)


def _frame(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def _is_gated(event: Event) -> bool:
    policy = event.get("permission_policy") or {}
    return event.get("evaluated_permission") == "ask" or policy.get("type") == "always_ask"


def _is_same_answer(one: Event, other: Event) -> bool:
    return (one["type"], target(one), one.get("result")) == (
        other["type"],
        target(other),
        other.get("result"),
    )


def _toolset(name: str, *, is_gated: bool) -> Event:
    policy = {"type": "always_ask" if is_gated else "always_allow"}
    return {
        "type": "agent_toolset_20260401",
        "default_config": {"enabled": True, "permission_policy": {"type": "always_allow"}},
        "configs": [{"type": name, "name": name, "enabled": True, "permission_policy": policy}],
    }


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in content if block["type"] == "text")


def _refusal(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"type": "error", "error": {"type": kind, "message": message}}, status=status)
