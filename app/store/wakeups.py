"""Wake-ups: a hint, carried by LISTEN/NOTIFY, that something of a session or a registry changed.

A hint can be lost, so everybody who waits for one also looks by the clock. A key is `tenant/session_id` for
a session and `tenant/` for a tenant's registry; an empty payload means that everything may have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final

import asyncpg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.logs import logger

CHANNEL: Final = "bascule"
PAYLOAD_BYTES_MAX: Final = 7900
"""PostgreSQL refuses payloads of 8000 bytes; a longer list of keys becomes "everything"."""
KEYS_MAX: Final = 10_000
"""A signal that nobody takes remembers so many keys, then "everything"."""

CONNECT_LIMIT_S: Final = 5.0
CLOSE_LIMIT_S: Final = 2.0
ECHO_LIMIT_S: Final = 3.0
ECHO_EVERY_S: Final = 20.0
"""How often the path is proven from a pooled connection to the listening one and back."""
BACKOFF_S_MIN: Final = 0.2
BACKOFF_S_MAX: Final = 5.0
# No key begins with it: tenant ids do not.
_ECHO: Final = "!"

log = logger(__name__)


def session_key(tenant: str, session_id: str) -> str:
    return f"{tenant}/{session_id}"


def wish_key(tenant: str, session_id: str) -> str:
    """What wakes whoever runs the session; its own writes do not."""
    return f"?{tenant}/{session_id}"


def is_for_runners(keys: frozenset[str] | None) -> bool:
    """Whether a fleet must look at the database: something was wished, or a registry changed."""
    return keys is None or any(key[0] == "?" or key[-1] == "/" for key in keys)


def registry_key(tenant: str) -> str:
    return f"{tenant}/"


async def notify(connection: AsyncConnection, keys: Iterable[str]) -> None:
    """Wake whoever listens for these keys, on every replica, once the transaction commits."""
    unique = sorted(set(keys))
    if not unique:
        return
    payload = "\n".join(unique)
    if len(payload.encode()) > PAYLOAD_BYTES_MAX:
        payload = ""
    await connection.execute(
        text("select pg_notify(:channel, :payload)"), {"channel": CHANNEL, "payload": payload}
    )


class Signal:
    """What one listener has not looked at yet. For one waiter at a time."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._keys: set[str] | None = set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a wake-up; return False if none came in time. `take` makes it wait for the next one."""
        if self._event.is_set():
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    def take(self) -> frozenset[str] | None:
        """Return the keys seen since the last take, None for everything, and forget them."""
        keys, self._keys = self._keys, set()
        self._event.clear()
        return None if keys is None else frozenset(keys)

    def wake(self, keys: Iterable[str] | None) -> None:
        if keys is None or self._keys is None:
            self._keys = None
        else:
            self._keys.update(keys)
            if len(self._keys) > KEYS_MAX:
                self._keys = None
        self._event.set()


class Wakeups:
    """Hands wake-ups to listeners of this process, over one connection of its own.

    `url` leads to PostgreSQL itself, not through a pooler; `engine` is the pool that the service writes with,
    from which the path is proven. `works` is False until then and whenever the proof fails: then only the
    clock wakes anybody.
    """

    def __init__(self, url: str, engine: AsyncEngine) -> None:
        self._url = url
        self._engine = engine
        self._by_key: dict[str, set[Signal]] = {}
        self._for_all: set[Signal] = set()
        self._echoes: dict[str, asyncio.Event] = {}
        self.works = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen until the block ends; a lost connection is opened again."""
        task = asyncio.create_task(self._run(), name="wakeups")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self.works = False

    async def proven(self) -> bool:
        """Listen once, and tell whether what the pool sends comes back; for who checks the set-up.

        Raises:
            OSError, asyncpg.PostgresError, asyncpg.InterfaceError: `url` does not lead to PostgreSQL.
        """
        async with self._listening():
            return await self._echo_returns()

    @property
    def is_heard(self) -> bool:
        """Whether somebody listens for a key of its own."""
        return bool(self._by_key)

    @contextlib.contextmanager
    def listen(self, key: str | None) -> Iterator[Signal]:
        """Lend a signal that wakes for `key`, or for every key when it is None."""
        signal = Signal()
        signals = self._for_all if key is None else self._by_key.setdefault(key, set())
        signals.add(signal)
        try:
            yield signal
        finally:
            signals.discard(signal)
            if key is not None and not signals and self._by_key.get(key) is signals:
                del self._by_key[key]

    def wake(self, keys: Iterable[str] | None) -> None:
        """Wake this process's listeners of `keys`, or all of them for None."""
        if keys is None:
            for signal in (*self._for_all, *(one for signals in self._by_key.values() for one in signals)):
                signal.wake(None)
            return
        keys = tuple(keys)
        for signal in self._for_all:
            signal.wake(keys)
        for key in keys:
            for signal in self._by_key.get(key, ()):
                signal.wake((key,))

    async def _run(self) -> None:
        backoff_s = BACKOFF_S_MIN
        while True:
            try:
                async with self._listening() as lost:
                    # What was sent while nobody listened is gone.
                    self.wake(None)
                    while await self._echo_returns():
                        if not self.works:
                            log.info("wakeups_work")
                        self.works = True
                        backoff_s = BACKOFF_S_MIN
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(ECHO_EVERY_S):
                                await lost.wait()
                        if lost.is_set():
                            break
            except Exception as error:
                # Whatever it was, the clock goes on waking everybody meanwhile.
                log.warning("wakeups_lost", error=type(error).__name__)
            if self.works:
                log.warning("wakeups_stopped", remedy="polling meanwhile; see BASCULE_DATABASE_DIRECT_URL")
            self.works = False
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_S_MAX)

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[asyncio.Event]:
        lost = asyncio.Event()
        connection = await asyncpg.connect(
            self._url, timeout=CONNECT_LIMIT_S, command_timeout=CONNECT_LIMIT_S, statement_cache_size=0
        )
        try:
            connection.add_termination_listener(lambda _: lost.set())
            await connection.add_listener(CHANNEL, self._received)
            yield lost
        finally:
            try:
                await connection.close(timeout=CLOSE_LIMIT_S)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection.terminate()

    def _received(self, _connection: Any, _pid: int, _channel: str, payload: object) -> None:
        text_ = str(payload)
        if text_.startswith(_ECHO):
            if (echo := self._echoes.get(text_)) is not None:
                echo.set()
            return
        self.wake(text_.split("\n") if text_ else None)

    async def _echo_returns(self) -> bool:
        token = _ECHO + secrets.token_hex(8)
        heard = self._echoes[token] = asyncio.Event()
        try:
            async with asyncio.timeout(ECHO_LIMIT_S):
                async with self._engine.begin() as connection:
                    await notify(connection, [token])
                await heard.wait()
        except TimeoutError:
            return False
        finally:
            del self._echoes[token]
        return True
