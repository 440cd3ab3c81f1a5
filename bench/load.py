"""The load of the chaos runs: agents that call tools, the tools behind webhooks, and people who decide.

Each keeps its own record, which `bench.verdict` compares with the others' at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
from aiohttp import web

from app.simulator.refusal import Refused
from app.simulator.server import Server
from app.simulator.session import Session
from bench.stage import Stage, free_port, until_async

Mode = Literal["well", "slow", "busy", "failing"]

RETRY: Final = {
    "charge": "never",
    "lookup": "connect_only",
    "report": "safe",
    "bash": "connect_only",
    "write": "safe",
    "refund": "never",
}
"""The tools, by how their webhooks may be repeated."""
BUILTIN: Final = frozenset({"bash", "write"})
"""Gated by upstream."""
OURS: Final = "refund"
"""Gated by us."""
GATED: Final = BUILTIN | {OURS}
DENIED_OF_16: Final = 3
"""Of so many calls in sixteen the people deny the wish."""

TIMEOUT_S: Final = 30.0
ATTEMPT_TIMEOUT_S: Final = 5.0
SLOW_S: Final = (4.0, 8.0)
BUSY_RETRY_AFTER_S: Final = 1
DECIDERS: Final = 16
DECIDE_EVERY_S: Final = 0.2
SAY_EVERY_S: Final = 0.1
TURNS: Final = 8
"""How many different turns an agent has."""
CALLS_PER_TURN: Final = 4.0
CONCURRENCY: Final = 64


@dataclass(frozen=True, slots=True)
class Delivery:
    """One request that arrived whole. `was_run` is False where the tool refused to begin."""

    at: float
    id: str
    attempt: int
    digest: bytes
    tool: str
    call_id: str
    was_run: bool


class Tools:
    """All webhooks, on one port that can be closed. `replies` are the texts that each call was given."""

    def __init__(self, seed: int) -> None:
        self.deliveries: list[Delivery] = []
        self.replies: dict[str, set[str]] = defaultdict(set)
        self.mode: Mode = "well"
        self.is_brief = False
        """Leave out the replies that take seconds."""
        self.inside = 0
        self.port = free_port()
        self._random = random.Random(seed)  # noqa: S311
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        """Answer, until `close`."""
        app = web.Application()
        app.router.add_post("/{tool}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def close(self) -> None:
        """Refuse connections, and drop those that wait for an answer."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        data = json.loads(body)["data"]
        tool, mode, attempt = data["tool"], self.mode, int(request.headers["bascule-attempt"])
        delivery = Delivery(
            time.time(), request.headers["webhook-id"], attempt, hashlib.sha256(body).digest(), tool,
            data["call_id"], was_run=mode != "busy",
        )  # fmt: skip
        self.deliveries.append(delivery)
        self.inside += 1
        try:
            return await self._answer(delivery, mode)
        finally:
            self.inside -= 1

    async def _answer(self, delivery: Delivery, mode: Mode) -> web.Response:
        if mode == "busy":
            return web.Response(status=503, headers={"retry-after": str(BUSY_RETRY_AFTER_S)})
        if mode == "failing":
            return web.Response(status=500, text="chaos")
        await asyncio.sleep(self._random.uniform(*SLOW_S) if mode == "slow" else self._takes_s())
        # Each run of a tool says something of its own, so that it shows which one the agent was told.
        text = f"{delivery.call_id} run {delivery.attempt} {self._random.getrandbits(32):08x}"
        self.replies[delivery.call_id].add(text)
        return web.json_response({"content": text})

    def _takes_s(self) -> float:
        luck = self._random.random()
        if luck < 0.75:
            return self._random.uniform(0.005, 0.05)
        if luck < 0.95 or self.is_brief:
            return self._random.uniform(0.1, 0.5)
        return self._random.uniform(1.0, 3.0)


class People:
    """They decide on every call that waits, through whichever replica answers. `asked_at` and `wishes` are by
    call: when an answer was first on its way, and which."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.wishes: dict[str, str] = {}
        self.asked_at: dict[str, float] = {}
        self.statuses: Counter[str] = Counter()
        self._stage = stage
        self._random = random.Random(seed)  # noqa: S311
        self._busy: set[str] = set()
        self._room = asyncio.Semaphore(DECIDERS)

    @contextlib.asynccontextmanager
    async def deciding(self) -> AsyncIterator[None]:
        """Decide until the block ends."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._decide(group))
            try:
                yield
            finally:
                task.cancel()

    async def _decide(self, group: asyncio.TaskGroup) -> None:
        while True:
            if self._stage.replicas:
                replica = self._random.choice(self._stage.replicas)
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
                    status, shown = await self._stage.request(
                        "GET", "/confirmations?limit=200", replica=replica
                    )
                    for call in shown["data"] if status == 200 else []:
                        # A decision that upstream has not taken yet is on its way without us.
                        if call["id"] not in self._busy and call["decision"] is None:
                            self._busy.add(call["id"])
                            group.create_task(self._confirm(call))
            await asyncio.sleep(DECIDE_EVERY_S)

    async def _confirm(self, call: dict[str, Any]) -> None:
        call_id = call["id"]
        wish = "deny" if hashlib.sha256(call_id.encode()).digest()[0] % 16 < DENIED_OF_16 else "allow"
        try:
            async with self._room:
                if not self._stage.replicas:
                    return
                self.wishes[call_id] = wish
                self.asked_at.setdefault(call_id, time.time())
                replica = self._random.choice(self._stage.replicas)
                body = {"tool_use_id": call_id, "result": wish, "input_digest": call["input_digest"]}
                path = f"/sessions/{call['session_id']}/confirm"
                status, _ = await self._stage.request("POST", path, body, replica=replica)
                self.statuses[str(status)] += 1
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            self.statuses["none"] += 1
        finally:
            self._busy.discard(call_id)


class Agents:
    """Sessions whose agents begin a next turn a while after the last one ended, until `is_over`."""

    def __init__(self, server: Server, count: int, calls_per_s: float, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311
        self._server = server
        self._think_s = count * CALLS_PER_TURN / calls_per_s
        self.is_over = False
        self.sessions: list[Session] = [server.create(self._script()) for _ in range(count)]
        self._due = {session.id: 0.0 for session in self.sessions}

    @property
    def are_quiet(self) -> bool:
        """Whether every turn has ended."""
        return not any(session.primary.in_turn or session.queued for session in self.sessions)

    @contextlib.asynccontextmanager
    async def talking(self) -> AsyncIterator[None]:
        """Begin turns until the block ends."""
        task = asyncio.create_task(self._talk())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _talk(self) -> None:
        now = time.monotonic()
        for session in self.sessions:
            self._due[session.id] = now + self._random.uniform(0, self._think_s)
        while True:
            now = time.monotonic()
            for session in self.sessions:
                if session.primary.in_turn or session.queued or session.blocking_ids():
                    self._due[session.id] = max(self._due[session.id], now + self._random.uniform(0, 0.5))
                elif now >= self._due[session.id] and not self.is_over:
                    self._due[session.id] = now + self._random.uniform(0.5, 1.5) * self._think_s
                    with contextlib.suppress(Refused):
                        self._server.say(session.id)
            await asyncio.sleep(SAY_EVERY_S)

    def _script(self) -> dict[str, Any]:
        turns = [{"steps": [*self._steps(), {"do": "end"}]} for _ in range(TURNS - 1)]
        return {"name": "chaos", "environment": "self_hosted", "turns": [*turns, turns[0]]}

    def _steps(self) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = []
        for _ in range(self._random.choice((1, 2, 2))):
            names = self._random.choices(
                list(RETRY), weights=(4, 4, 4, 2, 1, 1), k=self._random.choice((1, 2, 4))
            )
            steps.append({"do": "call", "calls": [self._call(name) for name in names]})
        text = " ".join(["chaos"] * 20)
        return [*steps, {"do": "message", "text": text, "deltas": 4, "pause_s": 0.05}]

    def _call(self, name: str) -> dict[str, Any]:
        input_ = {"n": self._random.getrandbits(32)}
        if name in BUILTIN:
            return {"tool": "builtin", "name": name, "input": input_, "permission": "ask"}
        return {"tool": "custom", "name": name, "input": input_}


async def register(stage: Stage, url: str) -> None:
    """Register every tool at this address."""
    for name, retry in RETRY.items():
        body = {
            "url": f"{url}/{name}",
            "retry": retry,
            "timeout_s": TIMEOUT_S,
            "attempt_timeout_s": ATTEMPT_TIMEOUT_S if retry == "safe" else None,
            "gate": "ask" if name == OURS else "upstream",
            "concurrency": CONCURRENCY,
        }
        status, shown = await stage.request("PUT", f"/tools/{name}", body)
        assert status == 201, shown


async def attach(stage: Stage, server: Server, sessions: Sequence[Session], *, limit_s: float) -> None:
    """Attach the sessions through all replicas and wait until each has its stream."""
    for number, session in enumerate(sessions):
        replica = stage.replicas[number % len(stage.replicas)]
        path = f"/sessions/{session.id}/attach"
        status, shown = await stage.request("POST", path, {"max_idle_s": None}, replica=replica)
        assert status == 202, shown

    async def are_live() -> bool:
        rows = await stage.database.ask("select 1 from attachments where status = 'live'")
        return len(rows) == len(sessions) and server.streams.count >= len(sessions)

    await until_async(are_live, limit_s=limit_s)


def open_streams(session: Session) -> int:
    """How many streams are open on the session."""
    return sum(not each.is_closed for each in session.subscriptions)
