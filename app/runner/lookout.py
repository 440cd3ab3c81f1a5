"""Looks for sessions that are to be served and are not: those that were heard of, and those that are listed.

Upstream is asked about each, and only what it says counts. One replica at a time looks at a sighting or a
list; whoever dies meanwhile leaves it for later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.core.sightings import Sighted, has_woken, rule_for
from app.logs import logger
from app.runner.budget import Budget, Unlimited
from app.store import attach_rules, attachments, credentials, sightings
from app.store.attach_rules import StoredRule
from app.store.attachments import Accepted
from app.store.budgets import Priority
from app.store.credentials import Stored
from app.store.secrets import Secrets, UnreadableSecretError
from app.store.sightings import Sighting
from app.upstream.client import UpstreamClient
from app.upstream.failures import UpstreamError

AT_ONCE_MAX: Final = 10
"""How many sightings one replica looks at together; more wait."""
SWEEPS_AT_ONCE: Final = 2
PLAN_EVERY_S: Final = 60.0
"""How often a replica sees to it that every list of interest is swept, and whether one is due."""
ABSENT: Final = frozenset({403, 404, 410})
"""Answers after which asking again is of no use."""

ClientFor = Callable[[str, str, Mapping[str, str], Stored | None], UpstreamClient | None]
BudgetFor = Callable[[str, str, str], Budget | Unlimited]

log = logger(__name__)


class Lookout:
    """The looks of one replica. `take` as often as it polls; `stop` at the end.

    Lists are swept every `sweep_s` seconds; 0 leaves it at webhooks.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        secrets: Secrets,
        client_for: ClientFor,
        budget_for: BudgetFor,
        *,
        sweep_s: float,
    ) -> None:
        self._engine, self._secrets = engine, secrets
        self._client_for, self._budget_for = client_for, budget_for
        self._sweep_s = sweep_s
        self._looks: set[asyncio.Task[None]] = set()
        self._sweeps: set[asyncio.Task[None]] = set()
        self._plan_at = 0.0

    async def take(self) -> None:
        """Take up what is due."""
        room = AT_ONCE_MAX - len(self._looks)
        if room > 0:
            async with self._engine.begin() as connection:
                due = await sightings.claim(connection, room)
            for sighting in due:
                self._start(self._looks, self._look(sighting), f"look {sighting.session_id}")
        now = asyncio.get_running_loop().time()
        if self._sweep_s and now >= self._plan_at:
            self._plan_at = now + min(PLAN_EVERY_S, self._sweep_s)
            async with self._engine.begin() as connection:
                await sightings.plan_sweeps(connection, self._sweep_s)
                room = SWEEPS_AT_ONCE - len(self._sweeps)
                lists = await sightings.claim_sweeps(connection, self._sweep_s, room) if room > 0 else []
            for tenant, credential in lists:
                self._start(self._sweeps, self._sweep(tenant, credential), f"sweep {tenant}/{credential}")

    async def stop(self) -> None:
        """End the looks under way; they are taken up again later."""
        running = [*self._looks, *self._sweeps]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    @staticmethod
    def _start(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _look(self, sighting: Sighting) -> None:
        tenant, credential, session_id = sighting.tenant, sighting.credential, sighting.session_id
        try:
            client = await self._client(tenant, credential)
            if client is None:
                return
            seen: Sighted | None = None
            try:
                async with self._budget_for(tenant, credential, client.base_url).turn(Priority.SWEEP):
                    seen = await client.sighted(session_id)
            except UpstreamError as error:
                if error.failure.status not in ABSENT:
                    log.info("look_failed", session_id=session_id, status=error.failure.status)
                    return
            async with self._engine.begin() as connection:
                rules = await attach_rules.live(connection, tenant, credential)
                if seen is not None and seen.session_id == session_id:
                    await self._attach(connection, tenant, rules, [seen], was_told=True)
                await sightings.settle(connection, sighting)
        except Exception as error:
            log.warning("look_failed", session_id=session_id, error=repr(error))

    async def _sweep(self, tenant: str, credential: str) -> None:
        """Walk the list of a credential's workspace."""
        try:
            async with self._engine.begin() as connection:
                rules = await attach_rules.live(connection, tenant, credential)
                if not rules and not await sightings.sleeping(connection, tenant, credential):
                    await sightings.end_sweep(connection, tenant, credential)
                    return
            client = await self._client(tenant, credential)
            if client is None:
                return
            budget = self._budget_for(tenant, credential, client.base_url)
            async with contextlib.aclosing(client.sessions()) as pages:
                while True:
                    async with budget.turn(Priority.SWEEP):
                        page = await anext(pages, None)
                    if page is None:
                        return
                    async with self._engine.begin() as connection:
                        await self._attach(connection, tenant, rules, page, was_told=False)
        except UpstreamError as error:
            log.info("sweep_failed", credential=credential, status=error.failure.status)
        except Exception as error:
            log.warning("sweep_failed", credential=credential, error=repr(error))

    async def _attach(
        self,
        connection: AsyncConnection,
        tenant: str,
        rules: Mapping[str, StoredRule],
        seen: Sequence[Sighted],
        *,
        was_told: bool,
    ) -> None:
        """Attach what is to be served of these sessions, and is not."""
        known = await sightings.known_of(connection, tenant, [one.session_id for one in seen])
        for one in seen:
            before = known.get(one.session_id)
            if before is None:
                rule = rule_for([rule.for_core() for rule in rules.values()], one, was_told=was_told)
                if rule is not None:
                    settings = rules[rule.name].settings
                    done = await attachments.attach(
                        connection, self._secrets, tenant, one.session_id, settings, {}
                    )
                    is_new = isinstance(done, Accepted)
                    log.info("attached_by_rule", session_id=one.session_id, rule=rule.name, is_new=is_new)
            elif before.ended_at is not None and has_woken(
                one, ended_s=before.ended_at.timestamp(), seen_updated_at=before.seen_updated_at
            ):
                await sightings.wake(connection, tenant, one.session_id, one.updated_at)
                log.info("woken", session_id=one.session_id)

    async def _client(self, tenant: str, name: str) -> UpstreamClient | None:
        async with self._engine.connect() as connection:
            try:
                stored = await credentials.load(connection, self._secrets, tenant, name)
            except UnreadableSecretError:
                stored = None
        return self._client_for(tenant, name, {}, stored)
