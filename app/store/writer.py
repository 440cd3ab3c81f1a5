"""Group commit: what runners write goes through one writer per replica.

Whatever queued up while the last commit was on its way becomes one transaction, with one NOTIFY. A waiter
resumes after its COMMIT. A batch whose lease is gone fails alone, and so does one that the database refuses
or that waits for a lock: the group is then written one by one. While the database is away all wait
together. Every statement can be repeated: after a commit whose outcome is unknown the same batch is simply
run again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from app import metrics
from app.store.batches import Batch, write
from app.store.database import is_lock_timeout, is_unavailable
from app.store.leases import Lease, LeaseLostError

BATCHES_MAX: Final = 256
"""How many batches one transaction takes."""
QUEUE_MAX: Final = 10_000
"""How many batches may wait; more wait outside."""
RETRY_S: Final = 8.0
"""How long a batch is tried while the database is away: less than a lease is trusted."""
RETRY_EVERY_S: Final = 0.25


class Writer:
    """Commits batches of many runs together. Start it with `running`.

    `engine` is best one of its own, whose connections nobody else waits for and which gives up on locks soon.
    """

    def __init__(self, engine: AsyncEngine, replica_id: str) -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._queue: list[tuple[Batch, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._room = asyncio.Semaphore(QUEUE_MAX)
        self._is_ending = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Commit until the block ends; what is queued then is still committed."""
        task = asyncio.create_task(self._run(), name="writer")
        try:
            yield
        finally:
            self._is_ending = True
            self._wake.set()
            await asyncio.wait([task], timeout=2 * RETRY_S)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def submit(self, batch: Batch) -> None:
        """Commit the batch.

        Raises:
            LeaseLostError: the term is another's; nothing was written.
            ContradictionError: a call of the batch is over in the store; nothing was written.
            Exception: the database refused the batch, or was away for `RETRY_S`.
        """
        if batch.is_empty:
            return
        async with self._room:
            future = asyncio.get_running_loop().create_future()
            self._queue.append((batch, future))
            self._wake.set()
            await asyncio.shield(future)

    async def _run(self) -> None:
        while not (self._is_ending and not self._queue):
            await self._wake.wait()
            while self._queue:
                group, self._queue = self._queue[:BATCHES_MAX], self._queue[BATCHES_MAX:]
                await self._commit(group)
            if not self._is_ending:
                self._wake.clear()

    async def _commit(self, group: Sequence[tuple[Batch, asyncio.Future[None]]]) -> None:
        try:
            lost = await self._patiently([batch for batch, _ in group])
        except Exception as error:
            is_away = is_unavailable(error) and not is_lock_timeout(error)
            if len(group) == 1 or is_away:
                for _, future in group:
                    _fail(future, error)
            else:
                for item in group:
                    await self._commit([item])
            return
        for batch, future in group:
            if batch.lease in lost:
                _fail(future, LeaseLostError(f"term {batch.lease.term} of {batch.lease.session_id} is over"))
            elif not future.done():
                future.set_result(None)

    async def _patiently(self, batches: Sequence[Batch]) -> set[Lease]:
        """Write in one transaction, again while the database is away; return the leases that are lost."""
        deadline = asyncio.get_running_loop().time() + RETRY_S
        while True:
            try:
                with metrics.COMMITS.time():
                    async with self._engine.begin() as connection:
                        return await write(connection, self._replica_id, batches)
            except Exception as error:
                is_shared = is_lock_timeout(error) and len(batches) > 1
                if is_shared or not is_unavailable(error) or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RETRY_EVERY_S)


def _fail(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # the waiter may be gone; then nobody need hear of it
