"""Makes the test calls that were asked for: one signed delivery each, as an agent's call would be made."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from datetime import UTC
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.calls import Call, Result
from app.core.outgoing import error_result
from app.core.tools import Tool
from app.logs import logger
from app.runner.health import store_health
from app.store import tool_tests
from app.store.secrets import Secrets
from app.store.tool_tests import Outcome, Wish
from app.store.tools import load
from app.webhooks.delivery import AttemptReport, Deliverer, DeliveryRequest
from app.webhooks.health import Health
from app.webhooks.wire import TEST_IDENTITY, build_body

AT_ONCE_MAX: Final = 20
"""How many tests one replica makes at once; more wait."""
PROMISED: Final = Result(
    b'[{"type":"text","text":"(202: the result would come later, by a callback, which no test offers)"}]',
    is_error=False,
)
"""Shown of a tool that promises a result."""

log = logger(__name__)


class ToolTests:
    """The tests of one replica. `take` as often as it polls; `stop` at the end."""

    def __init__(self, replica_id: str, engine: AsyncEngine, secrets: Secrets, deliverer: Deliverer) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._secrets = secrets
        self._deliverer = deliverer
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self) -> None:
        """Take up the tests that nobody made yet."""
        room = AT_ONCE_MAX - len(self._tasks)
        if room <= 0:
            return
        async with self._engine.begin() as connection:
            wishes = await tool_tests.claim(connection, self._replica_id, room)
        for wish in wishes:
            task = asyncio.create_task(self._make(wish), name=f"test {wish.id}")
            self._tasks.add(task)
            task.add_done_callback(self._done)

    async def stop(self) -> None:
        """End the tests under way: they are lost, and their callers may ask again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("tool_test_failed", error=repr(error))

    async def _make(self, wish: Wish) -> None:
        async with self._engine.connect() as connection:
            tool = await load(connection, self._secrets, wish.tenant, wish.tool)
        if tool is None or tool.fault is not None:
            why = "is not registered" if tool is None else f"cannot be called: {tool.fault}"
            gone = error_result(f"The tool {wish.tool!r} {why}.")
            outcome = Outcome(gone.content.decode(), True, None, None, None, None, None)
        else:
            outcome = await self._deliver(wish, tool)
        async with self._engine.begin() as connection:
            await tool_tests.finish(connection, self._replica_id, wish, outcome)

    async def _deliver(self, wish: Wish, tool: Tool) -> Outcome:
        asked_at = wish.requested_at.astimezone(UTC).isoformat(timespec="milliseconds")
        call = Call(wish.id, "custom", wish.tool, wish.input.encode(), "dispatched", attempts=1)
        body = build_body(call, "test", asked_at.replace("+00:00", "Z"), is_test=True)
        # One attempt: whoever tests wants to see what comes back, not what comes of patience.
        once = replace(tool, retry="never")
        request = DeliveryRequest(wish.tenant, TEST_IDENTITY, call, once, body, is_test=True)
        told = _Told(self, wish.tenant, tool)
        done = await self._deliverer.deliver(request, told)
        report, result = told.reports[-1], done.result or PROMISED
        return Outcome(
            result.content.decode(), result.is_error, done.code, report.http_status,
            report.finished_ms - report.started_ms, tool.url, report.reply_excerpt,
        )  # fmt: skip

    async def store_health(self, tenant: str, tool: str, health: Health) -> bool:
        return await store_health(self._engine, self._replica_id, tenant, tool, health)


@dataclass
class _Told:
    """Keeps what the delivery tells."""

    tests: ToolTests
    tenant: str
    tool: Tool
    reports: list[AttemptReport] = field(default_factory=list)

    def current(self) -> None:
        return None

    async def started(self, attempt: int) -> None:
        pass

    async def finished(self, report: AttemptReport) -> None:
        self.reports.append(report)

    async def health_changed(self, health: Health) -> bool:
        return await self.tests.store_health(self.tenant, self.tool.name, health)
