"""The other side of a contest: upstream and the tool in one fast process, so that the contestant is measured.

`python -m bench.world` prints its URL and then answers for one session per id, whatever it is called: each
plays `calls` custom calls, `parallel` at a time, once `POST /_go` has come. The webhook `POST /tool` answers
after `delay_ms`. `GET /_report` tells how far it is, `GET /_latencies` the time of each call, from the
moment it was written to its stream to the moment its result was there. Events and history are as upstream's,
as far as these turns need them; a framework here would be what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import httptools
import uvloop

PAGE_MAX: Final = 1_000
AGENT: Final = {
    "type": "agent",
    "id": "agent_bench",
    "version": 1,
    "name": "bench",
    "description": None,
    "system": None,
    "model": {"id": "claude-opus-5"},
    "tools": [
        {
            "type": "custom",
            "name": "lookup_order",
            "description": "Look up one order.",
            "input_schema": {"type": "object", "properties": {"order_id": {"type": "string"}}},
        }
    ],
    "mcp_servers": [],
    "skills": [],
}


def stamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Session:
    """One session that plays its calls: a batch, its answers, the next batch."""

    def __init__(self, world: World, id_: str) -> None:
        self.world, self.id = world, id_
        self.created_at = stamp()
        self.streams: list[Connection] = []
        self.history: list[tuple[str, bytes]] = []
        self.begun: dict[str, float] = {}
        self.done = self.number = 0

    def emit(self, event: dict[str, Any]) -> None:
        event["processed_at"] = at = stamp()
        raw = json.dumps(event, separators=(",", ":")).encode()
        self.history.append((at, raw))
        frame = b"event: " + event["type"].encode() + b"\ndata: " + raw + b"\n\n"
        for stream in self.streams:
            stream.chunk(frame)

    def event(self, type_: str, **fields: Any) -> dict[str, Any]:
        self.number += 1
        return {"type": type_, "id": f"sevt_{self.id[5:]}x{self.number}", **fields}

    def play(self) -> None:
        """Ask for the next calls, or end the turn."""
        left = self.world.calls - self.done
        if left <= 0:
            self.emit(self.event("session.status_idle", stop_reason={"type": "end_turn"}))
            return
        ids = []
        for _ in range(min(left, self.world.parallel)):
            use = self.event("agent.custom_tool_use", name="lookup_order", input={"order_id": "A-1042"})
            use["session_thread_id"] = None
            self.begun[use["id"]] = time.perf_counter()
            ids.append(use["id"])
            self.emit(use)
        stop = {"type": "requires_action", "event_ids": ids}
        self.emit(self.event("session.status_idle", stop_reason=stop))

    def take(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take what a client sends; results of open calls move the turn."""
        now, taken = time.perf_counter(), []
        for event in events:
            sent = self.event(event["type"], **{k: v for k, v in event.items() if k != "type"})
            begun = self.begun.pop(event.get("custom_tool_use_id", ""), None)
            self.emit(sent)
            taken.append(sent)
            if begun is not None:
                self.world.latencies_ms.append((now - begun) * 1000)
                self.done += 1
                if not self.begun:
                    self.play()
        return taken

    @property
    def shown(self) -> dict[str, Any]:
        return {
            "type": "session", "id": self.id, "agent": AGENT, "environment_id": "env_bench",
            "status": "running", "title": None, "metadata": {}, "resources": [], "vault_ids": [],
            "outcome_evaluations": [], "archived_at": None, "stats": {}, "usage": {},
            "created_at": self.created_at, "updated_at": self.created_at,
        }  # fmt: skip

    def page(self, query: dict[str, list[str]]) -> bytes:
        since = query.get("created_at[gte]", [""])[0]
        first = int(query.get("page", ["0"])[0] or 0)
        limit = min(PAGE_MAX, int(query.get("limit", ["1000"])[0]))
        types = {type_.encode() for type_ in query.get("types[]", [])}
        found = [raw for at, raw in self.history if at >= since]
        if types:
            found = [raw for raw in found if raw.split(b'"', 5)[3] in types]
        following = str(first + limit).encode() if first + limit < len(found) else None
        end = b"null" if following is None else b'"' + following + b'"'
        return b'{"data":[' + b",".join(found[first : first + limit]) + b'],"next_page":' + end + b"}"


class World:
    """All sessions of a contest."""

    def __init__(self, calls: int, parallel: int, delay_ms: float) -> None:
        self.calls, self.parallel, self.delay_ms = calls, parallel, delay_ms
        self.sessions: dict[str, Session] = {}
        self.latencies_ms: list[float] = []
        self.webhooks = self.requests = 0
        self.began_at = 0.0

    def session(self, id_: str) -> Session:
        if id_ not in self.sessions:
            self.sessions[id_] = Session(self, id_)
        return self.sessions[id_]

    def go(self) -> None:
        self.began_at = time.perf_counter()
        for session in self.sessions.values():
            session.emit(session.event("session.status_running"))
            session.play()

    def report(self) -> dict[str, Any]:
        return {
            "streaming": sum(bool(session.streams) for session in self.sessions.values()),
            "done": len(self.latencies_ms),
            "took_s": time.perf_counter() - self.began_at,
            "webhooks": self.webhooks,
            "requests": self.requests,
        }


class Connection(asyncio.Protocol):
    """One connection, with as many requests as come."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.parser = httptools.HttpRequestParser(self)
        self.session: Session | None = None
        self.url, self.body = b"", bytearray()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        if self.session is not None and self in self.session.streams:
            self.session.streams.remove(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.body = b"", bytearray()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.world.requests += 1
        parts = urlsplit(self.url.decode())
        steps, method = parts.path.strip("/").split("/"), self.parser.get_method()
        if steps == ["tool"]:
            self.world.webhooks += 1
            if self.world.delay_ms:
                asyncio.get_running_loop().call_later(
                    self.world.delay_ms / 1000, self.reply, b'{"content":"done"}'
                )
            else:
                self.reply(b'{"content":"done"}')
        elif steps[0] == "_go":
            self.reply(b"{}")
            self.world.go()
        elif steps[0] == "_report":
            self.reply(json.dumps(self.world.report()).encode())
        elif steps[0] == "_latencies":
            self.reply(json.dumps(self.world.latencies_ms).encode())
        elif steps[:2] == ["v1", "environments"]:
            self.reply(b'{"type":"environment","id":"env_bench","name":"bench","config":{"type":"cloud"}}')
        elif steps[:2] == ["v1", "sessions"] and len(steps) > 2:
            self._of_session(self.world.session(unquote(steps[2])), method, steps[3:], parts.query)
        else:
            self.reply(b'{"data":[],"next_page":null}')

    def _of_session(self, session: Session, method: bytes, rest: list[str], query: str) -> None:
        if rest == ["events", "stream"]:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self.transport.write(head)
            self.session = session
            session.streams.append(self)
        elif rest == ["events"] and method == b"POST":
            sent = session.take(json.loads(bytes(self.body))["events"])
            self.reply(json.dumps({"data": sent}).encode())
        elif rest == ["events"]:
            self.reply(session.page(parse_qs(query)))
        else:
            self.reply(json.dumps(session.shown).encode())

    def reply(self, body: bytes) -> None:
        if not self.transport.is_closing():
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(head % len(body) + body)

    def chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve(world: World) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(world), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, required=True, help="of each session")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(World(options.calls, options.parallel, options.delay_ms)))


if __name__ == "__main__":
    main()
