"""The health of endpoints, as the attempts of this process showed it; each belongs to a tool and a URL."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from app.logs import logger
from app.webhooks.breaker import Breaker, State

ENDPOINTS_MAX: Final = 10_000
"""So many are remembered; the one that was not called for longest counts as well again."""

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Health:
    """How an endpoint is seen. `since` is in seconds since 1970: the first failure after the last success."""

    url: str
    state: State
    since: float | None
    last_error: str | None
    failures: int


@dataclass(slots=True)
class Verdict:
    """What an attempt said of its endpoint: nothing yet, that it works, or how it failed."""

    is_well: bool = False
    error: str | None = None


class Endpoint:
    """One endpoint of one tool. `clock` is monotonic seconds, `wall` seconds since 1970."""

    def __init__(
        self, tenant: str, tool: str, url: str, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._names = {"tenant": tenant, "tool": tool}
        self._url = url
        self._clock = clock
        self._wall = wall
        self._breaker = Breaker()
        self._told: State = "closed"
        self._telling = asyncio.Lock()

    @property
    def health(self) -> Health:
        b = self._breaker
        since = None if b.since is None else self._wall() - (self._clock() - b.since)
        return Health(self._url, b.state, since, b.last_error, b.failures)

    def wait_s(self) -> float:
        """How long an attempt has to wait at least; 0 if it may begin."""
        return self._breaker.wait_s(self._clock())

    @contextlib.asynccontextmanager
    async def attempt(self, tell: Callable[[Health], Awaitable[bool]]) -> AsyncIterator[Verdict]:
        """Make an attempt inside the block, which fills in the verdict.

        `tell` is awaited when the state has changed, and returns whether that is stored; if not, the next
        attempt tells it.
        """
        breaker = self._breaker
        is_probe = breaker.begin()
        verdict = Verdict()
        try:
            await self._tell(tell)
            yield verdict
        finally:
            self._judge(verdict, is_probe=is_probe)
            await self._tell(tell)

    def _judge(self, verdict: Verdict, *, is_probe: bool) -> None:
        breaker, before = self._breaker, self._breaker.state
        failures = breaker.failures
        if verdict.is_well:
            breaker.succeeded()
        elif verdict.error is not None:
            breaker.failed(self._clock(), verdict.error, is_probe=is_probe)
        elif is_probe:
            breaker.released()
        if before == "closed" and breaker.state == "open":
            log.warning(
                "tool_unhealthy", **self._names, failures=breaker.failures, last_error=breaker.last_error
            )
        elif before != "closed" and breaker.state == "closed":
            log.info("tool_healthy", **self._names, failures=failures)

    async def _tell(self, tell: Callable[[Health], Awaitable[bool]]) -> None:
        if self._breaker.state == self._told:
            return
        async with self._telling:  # in order: the last one told is how it is
            health = self.health
            if health.state != self._told and await tell(health):
                self._told = health.state


class Endpoints:
    """The endpoints that were called, by tenant, tool and URL."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._known: dict[tuple[str, str, str], Endpoint] = {}

    def of(self, tenant: str, tool: str, url: str) -> Endpoint:
        key = (tenant, tool, url)
        endpoint = self._known.pop(key, None) or Endpoint(*key, self._clock, self._wall)
        self._known[key] = endpoint
        if len(self._known) > ENDPOINTS_MAX:
            del self._known[next(iter(self._known))]
        return endpoint
