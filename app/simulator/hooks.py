"""The platform's webhooks, as the real ones come: signed, thin, unordered, some twice, some never.

They tell of a session that something happened to it, and neither what nor why.
"""

import asyncio
import base64
import contextlib
import hmac
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from app.simulator.timeline import stamp_text
from app.simulator.world import World

TYPES = {
    "session.status_running": "session.status_run_started",
    "session.status_idle": "session.status_idled",
    "session.status_rescheduled": "session.status_rescheduled",
    "session.status_terminated": "session.status_terminated",
    "session.updated": "session.updated",
    "session.deleted": "session.deleted",
}
"""What each event of a session is called in a webhook."""
ATTEMPT_S = 5.0


@dataclass(frozen=True)
class HookPlan:
    """Where webhooks go and how badly they fare.

    `key` signs them (`whsec_…`). Of all webhooks `lost` never leave, `twice` are sent once more with the same
    id, and each waits up to `shuffle_s`, so that they overtake each other. `seed` fixes which.
    """

    url: str
    key: str
    lost: float = 0.0
    twice: float = 0.0
    shuffle_s: float = 0.0
    seed: int = 0


@contextlib.asynccontextmanager
async def hooking(
    world: World, plan: HookPlan, clock: Callable[[], float] = time.time
) -> AsyncIterator["Hooks"]:
    """Send the webhooks of a world for as long as the block lasts."""
    hooks = Hooks(world, plan, clock)
    unwatch = world.watch(hooks.on_change)
    try:
        yield hooks
    finally:
        unwatch()
        await hooks.stop()


class Hooks:
    """Sends the webhooks of a world. `clock` is in seconds since 1970. `sent` are the bodies that arrived."""

    def __init__(self, world: World, plan: HookPlan, clock: Callable[[], float]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._world, self._plan, self._clock = world, plan, clock
        self._chance = random.Random(plan.seed)  # noqa: S311 - the seed fixes what happens
        self._told: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_change(self) -> None:
        """Send what the world's sessions have done since."""
        for session_id, event_type in self._news():
            body = {
                "type": "event",
                "id": f"whe_{self._chance.getrandbits(96):024x}",
                "created_at": stamp_text(round(self._clock() * 1e6)),
                "data": {
                    "type": TYPES[event_type],
                    "id": session_id,
                    "organization_id": "8a1f0c52-6f0e-4d0c-9c5b-1f5b7b3f2a10",
                    "workspace_id": "wrkspc_011CZkZaBF1tNoB5wlCeusgy",
                },
            }
            is_lost = self._chance.random() < self._plan.lost
            copies = 0 if is_lost else 2 if self._chance.random() < self._plan.twice else 1
            for _ in range(copies):
                delay_s = self._chance.random() * self._plan.shuffle_s
                task = asyncio.get_running_loop().create_task(self._send(body, delay_s))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Send nothing more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _news(self) -> Iterator[tuple[str, str]]:
        for session_id, session in self._world.sessions.items():
            told = min(self._told.get(session_id, 0), len(session.log))  # the log is cut now and then
            self._told[session_id] = len(session.log)
            for record in session.log[told:]:
                if record.who == "server" and record.event.get("type") in TYPES:
                    yield session_id, record.event["type"]

    async def _send(self, body: dict[str, Any], delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        raw = json.dumps(body, separators=(",", ":")).encode()
        stamp = str(int(self._clock()))
        key = base64.b64decode(self._plan.key.removeprefix("whsec_"))
        signed = f"{body['id']}.{stamp}.".encode() + raw
        headers = {
            "content-type": "application/json",
            "webhook-id": body["id"],
            "webhook-timestamp": stamp,
            "webhook-signature": "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode(),
        }
        timeout = aiohttp.ClientTimeout(total=ATTEMPT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.post(self._plan.url, data=raw, headers=headers, allow_redirects=False),
            ):
                self.sent.append(body)
        except (aiohttp.ClientError, TimeoutError):
            return  # as the real ones: after a few attempts they are dropped
