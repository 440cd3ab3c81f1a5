"""The replica's runs: claims leases, starts runners, brings them wishes, stops them.

Wake-ups travel as hints with a poll every second behind them. Local time may only end trust earlier: a
replica whose renewal is late stops acting before its leases end by the database's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app import metrics
from app.core import protocol as p
from app.core.rules import Rule
from app.core.tools import Tool
from app.logs import logger
from app.runner.budget import UNLIMITED, Budget, Unlimited
from app.runner.callbacks import Callbacks
from app.runner.lookout import Lookout
from app.runner.runner import DefectError, SessionRunner
from app.runner.tasks import Parts
from app.runner.tool_tests import ToolTests
from app.store import credentials, decisions, leases, observers, reminders, rules, runs, sends
from app.store.attachments import settings_of
from app.store.batches import Batch
from app.store.credentials import Stored
from app.store.database import is_unavailable
from app.store.leases import Lease, LeaseLostError
from app.store.secrets import Secrets, UnreadableSecretError
from app.store.tools import load_registry, registry_version
from app.store.wakeups import Wakeups, is_for_runners, notify, wish_key
from app.store.writer import Writer
from app.upstream.client import UpstreamClient
from app.webhooks.delivery import Deliverer

if TYPE_CHECKING:
    from app.otel import Traces

POLL_S: Final = 1.0
"""How often the database is asked, whether or not a wake-up came."""
CLAIMS_MAX: Final = 200
"""How many attachments one statement takes over."""
EXPIRIES_MAX: Final = 200
"""How many held calls one poll lets expire."""
REMINDERS_AT_ONCE: Final = 200
"""Of how many held calls one poll reminds."""
STARTS_PER_S: Final = 100
"""How many runs begin in a second at most, so that a takeover opens its streams at a pace."""
DRAIN_S: Final = 30.0
"""How long deliveries under way may finish once the process is to end."""
CREDENTIAL_POLL_S: Final = 2.0
RESTARTS_MAX: Final = 5
"""More restarts after a defect within ten minutes end the attachment."""
RESTART_CAP_S: Final = 30.0
DEFECTS_MAX: Final = 2
"""An event whose handling failed this often is left out."""
CLOCK_STEP_S: Final = 0.01
"""Timers may come early by the resolution of the loop's clock."""
RULE_STEP_S: Final = 0.01
"""Rules are read again so much after one expires: the database says then that it has."""
DEAD_REPLICA_S: Final = 3_600.0

_NO_CREDENTIAL: Final = (
    "PUT /credentials/{} stores one, and the session goes on by itself; ANTHROPIC_API_KEY is `default` of the"
    " tenant `default`"
)

log = logger(__name__)


@dataclass(slots=True)
class _Registry:
    """What a tenant has registered, and its live rules. The first of them expires at `expires_at`, by the
    event loop's clock."""

    version: int
    tools: Mapping[str, Tool]
    rules: tuple[Rule, ...]
    expires_at: float
    credentials: Mapping[str, int]


@dataclass(slots=True)
class _Run:
    """`credential` is the name and version of the one that it goes upstream with, None for no stored one."""

    lease: Lease
    task: asyncio.Task[None]
    runner: SessionRunner | None = None
    credential: tuple[str, int] | None = None


@dataclass(slots=True)
class _Defects:
    """How often handling an event failed, by session and event."""

    counts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    suspects: dict[tuple[str, str], str] = field(default_factory=dict)

    def note(self, lease: Lease, event_id: str | None) -> None:
        """Count a failure. One while history is read is put down to the event that failed live before."""
        owner = (lease.tenant, lease.session_id)
        event_id = event_id or self.suspects.get(owner)
        if event_id:
            self.suspects[owner] = event_id
            key = (lease.tenant, lease.session_id, event_id)
            self.counts[key] = self.counts.get(key, 0) + 1

    def skipped(self, lease: Lease) -> frozenset[str]:
        return frozenset(
            event_id
            for (tenant, session_id, event_id), count in self.counts.items()
            if (tenant, session_id) == (lease.tenant, lease.session_id) and count >= DEFECTS_MAX
        )


class Fleet:
    """All runs of one replica.

    `client_for` makes the upstream client of an attachment from its tenant, credential name, extra headers,
    and that credential if it is stored; it returns None when there is none. Tools reach the service at
    `base_url`. `budget_for` gives the budget of a tenant's credential that goes to a URL. The lists of
    sessions are swept every `sweep_s` seconds, 0 for never. `traces` is None where nothing is traced.
    """

    def __init__(
        self,
        replica_id: str,
        engine: AsyncEngine,
        secrets: Secrets,
        wakeups: Wakeups,
        deliverer: Deliverer,
        client_for: Callable[[str, str, Mapping[str, str], Stored | None], UpstreamClient | None],
        *,
        base_url: str = "http://127.0.0.1:8080",
        budget_for: Callable[[str, str, str], Budget | Unlimited] = lambda *_: UNLIMITED,
        sweep_s: float = 0.0,
        draw: Callable[[], float] = random.random,
        traces: Traces | None = None,
    ) -> None:
        self.replica_id = replica_id
        self._engine = engine
        self._secrets = secrets
        self._wakeups = wakeups
        self._client_for = client_for
        self._budget_for = budget_for
        self._writer = Writer(engine, replica_id)
        callbacks = Callbacks(base_url, secrets)
        self._parts = Parts(
            replica_id, engine, self._writer, deliverer, callbacks, self.trusted_for_s, draw, traces=traces
        )
        self._tests = ToolTests(replica_id, engine, secrets, deliverer)
        self._lookout = Lookout(engine, secrets, client_for, budget_for, sweep_s=sweep_s)
        self._runs: dict[tuple[str, str], _Run] = {}
        self._registries: dict[str, _Registry] = {}
        self._defects = _Defects()
        self._draining: dict[asyncio.Task[None], SessionRunner] = {}
        self._trusted_until = 0.0
        self._losing: asyncio.TimerHandle | None = None
        self._left_at: float | None = None
        self._is_stopping = False
        self._stopped = asyncio.Event()
        self._pace = asyncio.Semaphore(1)

    def trusted_for_s(self) -> float:
        """For how many seconds the replica may still act on its leases."""
        return self._trusted_until - asyncio.get_running_loop().time()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve attachments until the block ends; then give the leases back and let deliveries finish."""
        async with self._writer.running():
            await self._renew()
            tasks = [
                asyncio.create_task(self._renewing(), name="renewing"),
                asyncio.create_task(self._polling(), name="polling"),
            ]
            try:
                yield
            finally:
                self._is_stopping = True
                self._stopped.set()
                tasks[1].cancel()
                await asyncio.gather(tasks[1], return_exceptions=True)
                await self._tests.stop()
                await self._lookout.stop()
                await self._stop_runs()
                tasks[0].cancel()
                await asyncio.gather(tasks[0], return_exceptions=True)
                if self._losing is not None:
                    self._losing.cancel()
                with contextlib.suppress(Exception):
                    async with self._engine.begin() as connection:
                        await leases.leave(connection, self.replica_id)

    # ---- leases

    async def _renewing(self) -> None:
        while True:
            await asyncio.sleep(leases.RENEW_S)
            try:
                await self._renew()
            except Exception as error:
                log.warning("renewal_failed", replica_id=self.replica_id, error=repr(error))
            self._lose_if_late()

    def _lose_if_late(self) -> None:
        """End all runs when the leases are not sure any more: a pause of the process ends trust too."""
        if self.trusted_for_s() <= 0 and self._runs:
            metrics.LOST.inc()
            log.error("leases_lost", replica_id=self.replica_id, runs=len(self._runs))
            for run in list(self._runs.values()):
                self._lose(run)

    async def _renew(self) -> None:
        self._lose_if_late()
        began = asyncio.get_running_loop().time()
        async with self._engine.begin() as connection:
            await leases.renew(connection, self.replica_id)
        self._trusted_until = began + leases.TTL_S - leases.MARGIN_S
        # A clock of its own: the next renewal may hang for longer than the trust lasts.
        if self._losing is not None:
            self._losing.cancel()
        self._losing = asyncio.get_running_loop().call_at(
            self._trusted_until + CLOCK_STEP_S, self._lose_if_late
        )

    # ---- polling

    async def _polling(self) -> None:
        with self._wakeups.listen(None) as signal:
            while True:
                try:
                    await self._poll()
                except Exception as error:
                    log.warning("poll_failed", replica_id=self.replica_id, error=repr(error))
                due = asyncio.get_running_loop().time() + POLL_S
                while (left_s := due - asyncio.get_running_loop().time()) > 0:
                    if await signal.wait(left_s) and is_for_runners(signal.take()):
                        break

    async def _poll(self) -> None:
        """One look at the database: who is free, what is wished, which registries changed."""
        if self.trusted_for_s() <= leases.SEND_S:
            return
        while await self._claim() == CLAIMS_MAX:
            pass
        metrics.RUNS.set(len(self._runs))
        await self._expire()
        await self._remind()
        async with self._engine.begin() as connection:
            wishes = await runs.wishes(connection, self.replica_id)
            watched = await observers.watched(connection, self.replica_id)
            held = await leases.held(connection, self.replica_id)
            await leases.forget_dead(connection, older_than_s=DEAD_REPLICA_S)
        await self._compare(held)
        for key, left_s in watched.items():
            run = self._runs.get(key)
            if run is not None and run.runner is not None:
                run.runner.watch(left_s)
        for wish in wishes:
            run = self._runs.get((wish.tenant, wish.session_id))
            if run is not None and run.runner is not None:
                try:
                    await self._bring(run.runner, wish)
                except Exception:
                    log.exception("wish_not_brought", session_id=wish.session_id)
        await self._refresh_registries()
        await self._tests.take()
        await self._lookout.take()

    async def _claim(self) -> int:
        """Take over what nobody runs: a fair share at once, and a poll later what nobody else has taken.

        The first to notice a death would run everything otherwise, and nothing moves a run again.
        """
        now = asyncio.get_running_loop().time()
        async with self._engine.begin() as connection:
            free = await leases.free(connection, self.replica_id)
            is_left = self._left_at is not None and now >= self._left_at + POLL_S
            limit = min(CLAIMS_MAX, free.count if is_left else free.room)
            claimed = await leases.claim(connection, self.replica_id, limit) if limit else []
        if free.count <= len(claimed):
            self._left_at = None
        elif self._left_at is None:
            self._left_at = now
        metrics.CLAIMED.inc(len(claimed))
        for lease in claimed:
            self._begin(lease)
        return len(claimed)

    async def _expire(self) -> None:
        """Decide for people whose time is over; the decisions are wishes like theirs."""
        async with self._engine.connect() as connection:
            due = await decisions.due(connection, self.replica_id, EXPIRIES_MAX)
        for tenant, session_id, call_id in due:
            try:
                async with self._engine.begin() as connection:
                    await decisions.expire(connection, tenant, session_id, call_id)
            except Exception as error:
                log.warning("expiry_failed", session_id=session_id, call_id=call_id, error=repr(error))

    async def _remind(self) -> None:
        """Tell people of calls that are still held."""
        try:
            async with self._engine.begin() as connection:
                await reminders.remind(connection, self.replica_id, REMINDERS_AT_ONCE)
        except Exception as error:
            log.warning("reminders_failed", replica_id=self.replica_id, error=repr(error))

    async def _compare(self, held: set[Lease]) -> None:
        """Give back leases that nobody runs here, and end runs whose lease is another's."""
        mine = {run.lease for run in self._runs.values()}
        for lease in held - mine:
            await self._release(lease)
        for run in self._runs.values():
            if run.runner is not None and run.lease not in held:
                run.runner.lose()

    async def _bring(self, runner: SessionRunner, wish: runs.Wish) -> None:
        async with self._engine.connect() as connection:
            decided = await runs.decided(connection, runner.lease)
            is_steered = await sends.are_open(connection, runner.lease)
        settings = settings_of(wish.settings)
        notices: list[p.Notice] = [p.SettingsChanged(settings.for_core())]
        notices += [p.Decided(call_id, decision) for call_id, decision in decided]
        if wish.wanted:
            notices.append(p.Wanted(wish.wanted))
        if wish.again:
            notices.append(p.Redeliver(wish.again))
        if is_steered:
            notices.append(p.Steered(True))
        if wish.is_detach_requested:
            notices.append(p.DetachRequested())
        runner.wish(notices, wish.wish)

    async def _refresh_registries(self) -> None:
        tenants = {tenant for tenant, _ in self._runs} | {r.lease.tenant for r in self._draining.values()}
        for tenant in list(self._registries):
            if tenant not in tenants:
                del self._registries[tenant]
        for tenant in tenants & self._registries.keys():
            known = self._registries[tenant]
            async with self._engine.connect() as connection:
                is_current = asyncio.get_running_loop().time() < known.expires_at
                if is_current and await registry_version(connection, tenant) == known.version:
                    continue
                known = self._registries[tenant] = await self._load_registry(connection, tenant)
            serving = [run.runner for run in self._runs.values() if run.runner is not None]
            for runner in [*serving, *self._draining.values()]:
                if runner.lease.tenant == tenant:
                    runner.change_tools(known.tools, known.rules)
            for run in self._runs.values():
                used = run.credential
                is_current = used is None or known.credentials.get(used[0]) == used[1]
                if run.lease.tenant == tenant and run.runner is not None and not is_current:
                    run.runner.stop()  # whoever takes the session up next begins with what it is now

    async def _registry(self, tenant: str) -> _Registry:
        known = self._registries.get(tenant)
        if known is None:
            async with self._engine.connect() as connection:
                known = self._registries[tenant] = await self._load_registry(connection, tenant)
        return known

    async def _load_registry(self, connection: AsyncConnection, tenant: str) -> _Registry:
        version, tools = await load_registry(connection, self._secrets, tenant)
        live, left_s = await rules.live(connection, tenant)
        left_s = math.inf if left_s is None else left_s + RULE_STEP_S
        expires_at = asyncio.get_running_loop().time() + left_s
        return _Registry(version, tools, live, expires_at, await credentials.versions(connection, tenant))

    # ---- runs

    def _begin(self, lease: Lease) -> None:
        key = (lease.tenant, lease.session_id)
        before = self._runs.get(key)
        if before is not None:
            # A claim over a run of our own: its lease had expired. It may write nothing any more.
            self._lose(before)
        task = asyncio.create_task(self._supervise(lease), name=f"run {lease.session_id}")
        self._runs[key] = _Run(lease, task)
        task.add_done_callback(lambda done: self._forget(key, done))

    @staticmethod
    def _lose(run: _Run) -> None:
        """End a run whose lease is another's, or may be; one that has not begun would act on old news."""
        if run.runner is not None:
            run.runner.lose()
        else:
            run.task.cancel()

    def _forget(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        run = self._runs.get(key)
        if run is not None and run.task is task:
            del self._runs[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("run_failed", session_id=key[1], error=repr(error))

    async def _supervise(self, lease: Lease) -> None:
        """Run a lease; after a defect run it again, a few times, each time later."""
        delay_s = 1.0
        while True:
            try:
                await self._run(lease)
                return
            except LeaseLostError:
                log.info("lease_lost", session_id=lease.session_id, term=lease.term)
                return
            except Exception as error:
                if is_unavailable(error):
                    # The store was away for longer than a lease is trusted: whoever is well takes over.
                    log.warning("run_without_store", session_id=lease.session_id, error=repr(error))
                    await self._release(lease)
                    return
                log.exception("run_defect", session_id=lease.session_id)
                self._defects.note(lease, error.event_id if isinstance(error, DefectError) else None)
            async with self._engine.begin() as connection:
                restarts = await leases.count_restart(connection, lease)
            if restarts > RESTARTS_MAX:
                detail = "handling this session failed again and again; the log has the reasons"
                await self._writer.submit(Batch(lease, end=p.End("internal_error", detail)))
                return
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RESTART_CAP_S)

    async def _run(self, lease: Lease) -> None:
        async with self._pace:
            await asyncio.sleep(1 / STARTS_PER_S)
        start, client, stored = await self._start_of(lease)
        if start is None or client is None:
            return
        registry = await self._registry(lease.tenant)
        skipped = self._defects.skipped(lease)
        name = start.settings.credential
        parts = replace(self._parts, budget=self._budget_for(lease.tenant, name, client.base_url))
        runner = SessionRunner(
            lease, start, registry.tools, client, parts, rules=registry.rules, skipped=skipped
        )
        run = self._runs.get((lease.tenant, lease.session_id))
        if run is not None and run.lease == lease:
            run.runner = runner
            run.credential = None if stored is None else (name, stored.version)
        if self._is_stopping:
            runner.stop()
        try:
            await runner.run()
        finally:
            if run is not None:
                run.runner = None
            draining = asyncio.create_task(self._drain(runner), name=f"drain {lease.session_id}")
            self._draining[draining] = runner
            draining.add_done_callback(self._draining.pop)
        await self._release(lease)

    async def _start_of(self, lease: Lease) -> tuple[runs.Start | None, UpstreamClient | None, Stored | None]:
        """What a run starts from, and its way upstream; waits while what it sends there is not known."""
        told = False
        while True:
            async with self._engine.connect() as connection:
                start = await runs.load(connection, self._secrets, lease)
                if start is None:
                    return None, None, None
                name, stored, unreadable = start.settings.credential, None, None
                try:
                    stored = await credentials.load(connection, self._secrets, lease.tenant, name)
                except UnreadableSecretError as error:
                    unreadable = f"{error}. PUT /credentials/{name} stores it anew."
            client = self._client_for(lease.tenant, name, start.extra_headers, stored)
            if client is not None and start.fault is None:
                return start, client, stored
            if start.is_detach_requested:
                await self._writer.submit(Batch(lease, end=p.End("detached")))
                return None, None, None
            if not told:
                told = True
                flag = "no_credential" if start.fault is None else "unreadable_headers"
                remedy = start.fault or unreadable or _NO_CREDENTIAL.format(name)
                log.error(flag, session_id=lease.session_id, credential=name, remedy=remedy)
                flags = start.progress.flags | {flag}
                await self._writer.submit(Batch(lease, progress=replace(start.progress, flags=flags)))
            await asyncio.sleep(CREDENTIAL_POLL_S)

    async def _drain(self, runner: SessionRunner) -> None:
        """Deliveries may take as long as their tools may, unless the process is to end."""
        draining = asyncio.create_task(runner.drain(None))
        try:
            stopping = asyncio.create_task(self._stopped.wait())
            await asyncio.wait([draining, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not draining.done():
                await asyncio.wait([draining], timeout=DRAIN_S)
            if not draining.done():
                draining.cancel()
                await asyncio.gather(draining, return_exceptions=True)
                await runner.drain(0.0)
            else:
                draining.result()
        except Exception as error:
            log.warning("drain_failed", session_id=runner.lease.session_id, error=repr(error))

    async def _release(self, lease: Lease) -> None:
        with contextlib.suppress(Exception):
            async with self._engine.begin() as connection:
                await leases.release(connection, self.replica_id, lease)
                await notify(connection, [wish_key(lease.tenant, lease.session_id)])

    async def _stop_runs(self) -> None:
        for run in self._runs.values():
            if run.runner is not None:
                run.runner.stop()
            else:
                run.task.cancel()
        tasks = [run.task for run in self._runs.values()]
        if tasks:
            await asyncio.wait(tasks)
        if self._draining:
            await asyncio.wait(self._draining)
