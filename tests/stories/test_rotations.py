"""A tool's secret rotates again and again while calls flow, and its receiver learns of each rotation late."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from aiohttp import web

from app.simulator.script import burst
from tests.runner.receiver import Delivery, echo
from tests.runner.scripts import live, results
from tests.runner.service import Service
from tests.runner.test_tool_changes import is_signed_by
from tests.store.rows import pass_time

pytestmark = pytest.mark.anyio

TOOL = "lookup_order"
ROTATIONS = 100
OVERLAP_S = 3600
BETWEEN_S = 450
"""The time between two rotations, by the database's clock, which is moved."""
BEHIND_MAX = 6
"""So many rotations the receiver may be behind: what it knows has not ended then."""
PACE_S = 0.5
"""How long a reply waits for its rotation, which may wait for a receiver that is behind."""
BROKEN_EVERY = 20
"""Each of so many calls is answered 503 the first time, and delivered again."""


class LateReceiver:
    """Verifies with one secret, and takes up the next one some deliveries after the first that carries it.

    `every` deliveries wait for one rotation each, and a secret is taken up after two of these.
    """

    def __init__(self, secret: str, every: int) -> None:
        self.count = self.learnt = self.rotations = 0
        self.rejected: list[str] = []
        self.bodies: dict[str, set[bytes]] = {}
        self.attempts: Counter[str] = Counter()
        self.changed = asyncio.Condition()
        self._secret = secret
        self._every = every
        self._told: list[str] = []
        self._since: dict[str, int] = {}

    async def tell(self, secret: str) -> None:
        """The tool's secret was rotated."""
        async with self.changed:
            self._told.append(secret)
            self.rotations += 1
            self.changed.notify_all()

    async def is_due(self) -> None:
        """Wait until the next rotation may be."""
        async with self.changed:
            await self.changed.wait_for(
                lambda: (
                    self.count >= self.rotations * self._every and self.rotations - self.learnt < BEHIND_MAX
                )
            )

    async def __call__(self, delivery: Delivery) -> web.StreamResponse:
        self._learn(delivery)
        if not is_signed_by([self._secret], delivery):
            self.rejected.append(delivery.id)
            return web.Response(status=401)
        is_new = delivery.id not in self.bodies
        self.bodies.setdefault(delivery.id, set()).add(delivery.body)
        self.attempts[delivery.id] += 1
        is_broken = is_new and len(self.bodies) % BROKEN_EVERY == 0
        async with self.changed:
            self.count += 1
            due = min(self.count // self._every, ROTATIONS)
            self.changed.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PACE_S):
                    await self.changed.wait_for(lambda: self.rotations >= due)
        return web.Response(status=503) if is_broken else await echo(delivery)

    def _learn(self, delivery: Delivery) -> None:
        for secret in list(self._told):
            if secret not in self._since and is_signed_by([secret], delivery):
                self._since[secret] = self.count
            if self._since.get(secret, self.count) + 2 * self._every <= self.count:
                self._secret = secret
                self._told.remove(secret)
                self.learnt += 1


async def rotate(service: Service, receiver: LateReceiver) -> None:
    while receiver.rotations < ROTATIONS:
        await receiver.is_due()
        await pass_time(service.engine, BETWEEN_S)
        answer = await service.http.post(f"/tools/{TOOL}/rotate-secret", json={"overlap_s": OVERLAP_S})
        assert 200 == answer.status_code, answer.text
        service.tool.secrets.append(answer.json()["signing_secret"])
        await receiver.tell(answer.json()["signing_secret"])


async def soak(service: Service, calls: int, *, limit_s: float) -> None:
    """Make so many calls, rotate for each hundredth of them, and compare what was sent."""
    session = service.upstream.create(burst(calls, 0, parallel=50))
    await service.register(TOOL, retry="safe")
    receiver = LateReceiver(service.tool.secrets[0], calls // ROTATIONS)
    service.tool.reply = receiver
    await live(service, session.id)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        rotating = group.create_task(rotate(service, receiver))
        service.upstream.say(session.id)
        await service.until(
            f"/sessions/{session.id}/text",
            lambda shown: shown["data"] and f"All {calls} calls are done." in shown["data"][-1]["text"],
            limit_s=limit_s,
        )
        rotating.cancel()
    took_s = loop.time() - began
    print(f"{calls} calls, {receiver.rotations} rotations, {receiver.learnt} learnt: {took_s:.1f} s")
    assert [] == receiver.rejected
    assert receiver.learnt >= ROTATIONS * 3 / 4
    assert calls == len(receiver.bodies)
    assert {1} == {len(bodies) for bodies in receiver.bodies.values()}
    assert {1: calls - calls // BROKEN_EVERY, 2: calls // BROKEN_EVERY} == Counter(receiver.attempts.values())
    answers = [one for each in results(service.upstream, session.id).values() for one in each]
    assert calls == len(answers)
    assert not [one for one in answers if one.get("is_error")]


async def test_no_delivery_is_rejected_while_secrets_rotate(service: Service) -> None:
    """C-060: 500 calls, a rotation for every 5; bodies stay the same when an attempt is repeated."""
    await soak(service, 500, limit_s=45.0)


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_no_delivery_of_ten_thousand_is_rejected_while_secrets_rotate(service: Service) -> None:
    await soak(service, 10_000, limit_s=500.0)
