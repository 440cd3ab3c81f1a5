"""The floor: parse the event, commit, post to the webhook, commit, post the result.

`python floor.py URL DATABASE SESSION…`. No framework, no retries, no gates, no leases: what is left when all
that makes it a product is taken away. All sessions share one writer that commits what waits, and one
kept-alive connection for each request under way.
"""

import asyncio
import json
import sys
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import uvloop


class Wire(asyncio.Protocol):
    """One HTTP/1.1 connection for requests whose answers have a content-length."""

    def __init__(self) -> None:
        self.buffer, self.waiting = b"", None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, mark, body = self.buffer.partition(b"\r\n\r\n")
        if mark and len(body) >= int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
            self.buffer = b""
            self.waiting.set_result(body)


class Floor:
    def __init__(self, url: str) -> None:
        self.parts = urlsplit(url)
        self.free: list[Wire] = []
        self.rows: list[tuple[tuple[Any, ...], asyncio.Future[None]]] = []
        self.has_rows = asyncio.Event()

    async def post(self, path: str, body: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        if self.free:
            wire = self.free.pop()
        else:
            _, wire = await loop.create_connection(Wire, self.parts.hostname, self.parts.port)
        wire.waiting = loop.create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: {self.parts.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
        wire.transport.write(head.encode() + body)
        answer = await wire.waiting
        self.free.append(wire)
        return answer

    async def commit(self, *row: Any) -> None:
        done = asyncio.get_running_loop().create_future()
        self.rows.append((row, done))
        self.has_rows.set()
        await done

    async def write(self, database: str) -> None:
        connection = await asyncpg.connect(database)
        await connection.execute(
            "create table if not exists floor_calls (id text primary key, state text, result text)"
        )
        statement = await connection.prepare(
            "insert into floor_calls select * from unnest($1::text[], $2::text[], $3::text[])"
            " on conflict (id) do update set state = excluded.state, result = excluded.result"
        )
        while True:
            await self.has_rows.wait()
            self.has_rows.clear()
            batch, self.rows = self.rows, []
            rows = {row[0]: row for row, _ in batch}
            await statement.fetch(*map(list, zip(*rows.values(), strict=True)))
            for _, done in batch:
                done.set_result(None)

    async def call(self, session_id: str, event: dict[str, Any]) -> None:
        await self.commit(event["id"], "dispatched", None)
        result = json.loads(await self.post("/tool", json.dumps(event["input"]).encode()))["content"]
        await self.commit(event["id"], "posting", result)
        content = [{"type": "text", "text": result}]
        sent = {"type": "user.custom_tool_result", "custom_tool_use_id": event["id"], "content": content}
        await self.post(f"/v1/sessions/{session_id}/events", json.dumps({"events": [sent]}).encode())

    async def serve(self, session_id: str, calls: asyncio.TaskGroup) -> None:
        reader, writer = await asyncio.open_connection(self.parts.hostname, self.parts.port)
        path = f"/v1/sessions/{session_id}/events/stream"
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {self.parts.netloc}\r\n\r\n".encode())
        while line := await reader.readline():
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if event["type"] == "agent.custom_tool_use":
                    calls.create_task(self.call(session_id, event))


async def main(url: str, database: str, session_ids: list[str]) -> None:
    floor = Floor(url)
    async with asyncio.TaskGroup() as group:
        group.create_task(floor.write(database))
        for session_id in session_ids:
            group.create_task(floor.serve(session_id, group))


with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
