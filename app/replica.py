"""One replica's working side: the connections it calls out with, and the fleet that uses them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets as chance
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from app import __version__
from app.logs import logger
from app.runner.budget import Budget, Budgets, Unlimited
from app.runner.fleet import Fleet
from app.runner.notifications import Notifier
from app.settings import Settings
from app.store import retention
from app.store.credentials import DEFAULT, Stored
from app.store.keys import DEFAULT_TENANT
from app.store.secrets import Secrets
from app.store.wakeups import Wakeups
from app.traces import tracing
from app.upstream.client import UpstreamClient
from app.upstream.headers import Credential
from app.upstream.transport import open_session
from app.webhooks.attempt import Door
from app.webhooks.delivery import Deliverer
from app.webhooks.egress import Egress

STREAMS_MAX: Final = 10_000
"""How many sessions one replica streams at a time."""
REQUESTS_MAX: Final = 100
"""How many reads of upstream are under way at a time."""
SENDS_MAX: Final = 100
"""How many sends are; they never wait behind reads."""

log = logger(__name__)


@contextlib.asynccontextmanager
async def replica(
    settings: Settings,
    engine: AsyncEngine,
    secrets: Secrets,
    wakeups: Wakeups,
    egress: Egress,
    *,
    budget_sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[Fleet]:
    """Serve attachments until the block ends. `budget_sleep` passes the time until the budget refills."""
    key = settings.anthropic_api_key
    environments = Credential("api_key", key.get_secret_value()) if key is not None else None
    async with (
        open_session(STREAMS_MAX, for_streams=True) as streams,
        open_session(REQUESTS_MAX) as requests,
        open_session(SENDS_MAX) as sends,
        tracing(settings.traces_url) as traces,
    ):

        def client_for(
            tenant: str, name: str, extra_headers: Mapping[str, str], stored: Stored | None
        ) -> UpstreamClient | None:
            url = settings.upstream_url
            if environments is not None and (tenant, name) == (DEFAULT_TENANT, DEFAULT):
                credential = environments
            elif stored is not None:
                credential, url = Credential(stored.type, stored.secret), stored.upstream_url or url
            else:
                return None
            return UpstreamClient(
                url,
                credential,
                streams=streams,
                requests=requests,
                sends=sends,
                extra_headers=extra_headers,
            )

        deliverer = Deliverer(
            egress, version=__version__, tenant_deliveries_max=settings.tenant_deliveries_max
        )
        replica_id = f"{socket.gethostname()}-{chance.token_hex(4)}"
        budgets = Budgets(engine, sleep=budget_sleep)

        def budget_for(tenant: str, name: str, url: str) -> Budget | Unlimited:
            return budgets.of(tenant, name, settings.limit_per_min(url))

        fleet = Fleet(
            replica_id, engine, secrets, wakeups, deliverer, client_for,
            base_url=settings.base_url, budget_for=budget_for, sweep_s=settings.sessions_sweep_s,
            traces=traces,
        )  # fmt: skip
        notifier = Notifier(
            replica_id, engine, secrets, wakeups, Door(egress),
            base_url=settings.base_url, version=__version__,
        )  # fmt: skip
        pruning = asyncio.create_task(_pruning(engine, settings), name="pruning")
        try:
            # The last to stop: what the runs still commit is told too.
            async with notifier.running(), fleet.running():
                yield fleet
        finally:
            pruning.cancel()
            await asyncio.gather(pruning, return_exceptions=True)
            await budgets.close()
            await deliverer.close()


async def _pruning(engine: AsyncEngine, settings: Settings) -> None:
    """Remove what retention allows to, about once an hour; replicas take turns by a lock."""
    while True:
        await asyncio.sleep(retention.EVERY_S * random.uniform(0.5, 1.0))  # noqa: S311 - only to spread load
        try:
            pruned = await retention.prune(
                engine,
                sessions_days=settings.retention_sessions_days,
                deliveries_days=settings.retention_deliveries_days,
            )
        except Exception as error:
            log.warning("pruning_failed", error=repr(error))
        else:
            log.info("pruned", **pruned.counts, is_complete=pruned.is_complete)
