"""Deliveries to an endpoint that is down, by a clock that only moves when asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from app.core.tools import Tool
from app.webhooks.breaker import FAILURES_MIN, PAUSE_START_S, SUSTAINED_S
from app.webhooks.delivery import Deliverer, DeliveryOutcome
from app.webhooks.egress import Egress
from tests.webhooks.conftest import (
    LOOPBACK,
    Log,
    Receiver,
    Step,
    Time,
    a_call,
    a_request,
    a_tool,
    delivering,
    hang_up,
    receiving,
    reply,
)
from tests.webhooks.test_delivery import OK, text_of

pytestmark = pytest.mark.anyio

DOWN = reply(503)
STEP_S = SUSTAINED_S / (FAILURES_MIN - 1)


@dataclass
class Line:
    """A receiver, and a deliverer that calls it."""

    receiver: Receiver
    deliverer: Deliverer
    time: Time

    def tool(self, **values: Any) -> Tool:
        return a_tool(**({"url": self.receiver.url, "retry": "never", "timeout_s": 120.0} | values))

    async def call(self, log: Log | None = None, **tool: Any) -> DeliveryOutcome:
        return await self.deliverer.deliver(a_request(self.tool(**tool)), log or Log())

    async def fail(self, times: int = FAILURES_MIN, log: Log | None = None, **tool: Any) -> None:
        """Call so often, over as long as it takes to open."""
        for number in range(times):
            self.time.now += STEP_S if number else 0
            assert (await self.call(log, **tool)).result.is_error


@contextlib.asynccontextmanager
async def line(*steps: Step, egress: Egress = LOOPBACK, time: Time | None = None) -> AsyncIterator[Line]:
    time = time or Time()
    fakes = {"clock": time.clock, "wall": time.wall, "sleep": time.sleep}
    async with receiving(*steps) as receiver, delivering(egress, **fakes) as deliverer:
        yield Line(receiver, deliverer, time)


async def test_an_endpoint_that_is_down_is_not_called_and_the_agent_is_told() -> None:
    """C-061: a clear error at once, which names the tool, since when, and that nothing was sent."""
    async with line(DOWN) as one:
        await one.fail()
        log = Log()
        outcome = await one.call(log, when_unhealthy="answer")
        assert FAILURES_MIN == len(one.receiver.requests)
    assert text_of(outcome) == (
        'The tool "echo" was not called: its endpoint is down since 2026-10-29T14:00:04Z (http_status 503).'
        " Nothing was sent to the tool; it has not run."
    )
    assert (outcome.code, outcome.outcome_unknown, log.begun) == ("unhealthy", False, [])
    assert [("unhealthy", False)] == [(report.code, report.was_written) for report in log.reports]
    assert [] == one.time.waits


async def test_a_call_waits_for_the_endpoint_and_is_its_probe() -> None:
    async with line(*[DOWN] * FAILURES_MIN, OK) as one:
        await one.fail()
        log = Log()
        assert "done" == text_of(await one.call(log))
        assert PAUSE_START_S == sum(one.time.waits)
        assert "done" == text_of(await one.call())
    assert ["half_open", "closed"] == [health.state for health in log.healths]


async def test_a_wait_is_bounded_by_the_time_of_the_call() -> None:
    """Pauses grow to a minute: a call of ten seconds does not wait for a probe that comes later."""
    async with line(DOWN) as one:
        await one.fail()
        for _ in range(2):  # the probes after 5 s and after 10 s
            assert "http_status" == (await one.call()).code
        one.time.waits.clear()
        assert "unhealthy" == (await one.call(timeout_s=10.0)).code
        assert [] == one.time.waits


async def test_who_waits_while_a_probe_is_under_way_learns_what_came_of_it() -> None:
    opened = asyncio.Event()

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await opened.wait()
        writer.write(OK)

    async with line(*[DOWN] * FAILURES_MIN, work) as one:
        await one.fail()
        tasks = [asyncio.create_task(one.call(timeout_s=1e6)) for _ in range(3)]
        await one.receiver.wait_for(FAILURES_MIN + 1)
        assert FAILURES_MIN + 1 == len(one.receiver.requests)
        opened.set()
        assert ["done"] * 3 == [text_of(outcome) for outcome in await asyncio.gather(*tasks)]


@pytest.mark.parametrize(
    "step", [reply(404), reply(301), reply(410), reply(body=b'{"content":"no","is_error":true}'), reply(202)]
)
async def test_what_speaks_of_the_call_says_nothing_against_the_endpoint(step: bytes) -> None:
    async with line(step) as one:
        await one.fail(2 * FAILURES_MIN, when_unhealthy="answer")
        assert 2 * FAILURES_MIN == len(one.receiver.requests)


@pytest.mark.parametrize("step", [reply(408), reply(425), reply(429), reply(500), hang_up])
async def test_what_speaks_of_the_endpoint_counts(step: Step) -> None:
    async with line(step) as one:
        log = Log()
        await one.fail(log=log)
        assert "unhealthy" == (await one.call(when_unhealthy="answer")).code
    assert ["open"] == [health.state for health in log.healths]
    assert (FAILURES_MIN, one.time.wall() - SUSTAINED_S) == (log.healths[0].failures, log.healths[0].since)


async def test_timeouts_count() -> None:
    """By a clock that goes on between any two looks, as real ones do."""

    class Running(Time):
        def clock(self) -> float:
            self.now += 1e-6
            return self.now

    async with line(hang, time=Running()) as one:
        await one.fail(timeout_s=0.02)
        assert "unhealthy" == (await one.call(when_unhealthy="answer")).code


async def test_a_timeout_of_the_rest_of_the_time_does_not_count() -> None:
    """The second attempt of each call has a tenth of a second left: that says nothing of the endpoint."""
    async with line(DOWN, hang) as one:
        for _ in range(FAILURES_MIN - 1):
            one.receiver.requests.clear()
            one.time.now += SUSTAINED_S
            assert "timeout" == (await one.call(timeout_s=0.6, retry="safe")).code
        one.receiver.requests.clear()
        assert "http_status" == (await one.call(when_unhealthy="answer")).code


async def test_an_endpoint_that_we_may_not_call_is_not_down() -> None:
    async with line(OK, egress=Egress([])) as one:
        await one.fail(2 * FAILURES_MIN)
        assert "blocked_address" == (await one.call(when_unhealthy="answer")).code


async def test_another_tool_and_another_place_are_not_down() -> None:
    async with line(*[DOWN] * FAILURES_MIN, OK) as one:
        await one.fail()
        assert "unhealthy" == (await one.call(when_unhealthy="answer")).code
        assert "done" == text_of(await one.call(name="other", when_unhealthy="answer"))
        moved = one.receiver.url + "/moved"
        assert "done" == text_of(await one.call(url=moved, when_unhealthy="answer"))


async def test_a_call_that_waits_follows_the_tool_to_its_new_place() -> None:
    """The operator mends the tool by its URL: nobody waits for the old one."""
    async with line(*[DOWN] * FAILURES_MIN, OK) as one:
        await one.fail()

        class Moving(Log):
            def current(self) -> Tool | None:  # type: ignore[override]
                return a_tool(one.receiver.url + "/moved") if one.time.waits else None

        assert "done" == text_of(await one.call(Moving()))
        assert [1.0] == one.time.waits


async def test_a_cancelled_probe_leaves_room_for_the_next() -> None:
    async with line(*[DOWN] * FAILURES_MIN, hang, OK) as one:
        await one.fail()
        one.time.now += PAUSE_START_S
        task = asyncio.create_task(one.call())
        await one.receiver.wait_for(FAILURES_MIN + 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert "done" == text_of(await one.call(when_unhealthy="answer"))


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def test_a_repeated_delivery_that_finds_the_endpoint_down_says_that_it_may_have_run() -> None:
    async with line(DOWN) as one:
        await one.fail()
        request = a_request(one.tool(retry="safe", when_unhealthy="answer"), a_call(), attempt=2)
        outcome = await one.deliverer.deliver(request, Log())
    assert ("unhealthy", 2) == (outcome.code, outcome.attempts)
    assert "the tool may have run" in text_of(outcome)


async def test_a_state_that_could_not_be_stored_is_told_again() -> None:
    class Forgetful(Log):
        async def health_changed(self, health: Any) -> bool:
            await super().health_changed(health)
            return len(self.healths) > 1

    log = Forgetful()
    async with line(*[DOWN] * FAILURES_MIN, OK) as one:
        await one.fail(log=log)
        assert ["open"] == [health.state for health in log.healths]
        await one.call(log)
        await one.call(log)
    assert ["open", "half_open", "closed"] == [health.state for health in log.healths]
