"""The world on a loopback port: HTTP and SSE for whoever wants to talk to it, in this process or outside.

`async with running(world) as server:` is for tests; `main` is for the command line.
"""

import asyncio
import contextlib
import ipaddress
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from uvicorn import Config
from uvicorn.server import ServerState

from app.simulator.application import Backend, Protocol, application
from app.simulator.control import FIRST_MESSAGE
from app.simulator.script import Script, load, names
from app.simulator.session import Session
from app.simulator.streaming import Streams
from app.simulator.world import World

CLOSING_S = 5.0


class Server:
    """A world that listens. `url` is its base URL."""

    def __init__(self, world: World, clock: Callable[[], float]) -> None:
        self.world = world
        self.url = ""
        self.streams = Streams()
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def now(self) -> float:
        """The time that the world is told, in seconds since 1970."""
        return self._clock()

    def create(self, wanted: str | dict[str, Any] | Script, **settings: Any) -> Session:
        """Create a session now; see `World.create`."""
        self.world.timeline.advance(self.now)
        return self.world.create(wanted, **settings)

    def say(self, session_id: str, text: str = FIRST_MESSAGE) -> None:
        """Send a `user.message` to a session."""
        self.world.say(session_id, text, now=self.now)

    def emit(self, session_id: str, event: dict[str, Any], *, thread_id: str | None = None) -> str:
        """Emit an arbitrary event now; see `World.emit`."""
        self.world.timeline.advance(self.now)
        return self.world.emit(session_id, event, thread_id=thread_id)

    async def until(self, fact: Callable[[], Any], *, limit_s: float = 10.0) -> Any:
        """Wait until `fact()` is true of the world and return what it gave.

        Raises:
            TimeoutError: it did not come true within `limit_s` seconds.
        """
        async with asyncio.timeout(limit_s):
            while not (found := fact()):
                self._changed.clear()
                await self._changed.wait()
        return found

    def on_change(self) -> None:
        """Wake whoever waits, and see to it that the world goes on when something is due."""
        self._changed.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.world.next_due()
        if due is not None:
            delay_s = max(0.0, due - self.now)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def stop(self) -> None:
        """Let time stand still and end every stream."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.streams.end()

    def _tick(self) -> None:
        self._timer = None
        self.world.advance(self.now)


@contextlib.asynccontextmanager
async def running(
    world: World | None = None,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Server]:
    """Serve a world on this event loop for as long as the block lasts; `port` 0 takes a free one.

    Open streams end with the block, and other connections are closed.

    Raises:
        ValueError: `host` is not a loopback address; whoever reaches the control surface may do anything.
    """
    if host != "localhost" and not _is_loopback(host):
        raise ValueError(
            f"host {host} is not a loopback address; the simulator listens on 127.0.0.1 or ::1 only"
        )
    server = Server(world or World(), clock)
    config = Config(
        application(Backend(server.world, clock, server.streams)),
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        timeout_keep_alive=75,
        date_header=False,
    )
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(
        lambda: Protocol(config=config, server_state=state, app_state={}), host, port
    )
    address = listener.sockets[0].getsockname()
    server.url = (
        f"http://[{address[0]}]:{address[1]}" if ":" in address[0] else f"http://{address[0]}:{address[1]}"
    )
    unwatch = server.world.watch(server.on_change)
    server.world.advance(server.now)
    try:
        yield server
    finally:
        unwatch()
        listener.close()
        server.stop()
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=CLOSING_S)
        for task in list(state.tasks):
            task.cancel()
        for connection in list(state.connections):
            if connection.transport is not None:
                connection.transport.close()
        await asyncio.sleep(0)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _sessions_of(server: Server, scenario: str | None) -> Iterator[tuple[str, Session]]:
    for name in [scenario] if scenario else names():
        yield name, server.create(load(name))


async def _serve(scenario: str | None, port: int) -> None:
    # Ids that repeat from one start to the next would meet what a client remembers of the last one.
    async with running(World(seed=time.time_ns()), port=port) as server:
        lines = [f"The simulated Managed Agents API listens at {server.url}", "", "Sessions:"]
        lines += [f"  {session.id}  {name}" for name, session in _sessions_of(server, scenario)]
        some_id = next(iter(server.world.sessions))
        lines += [
            "",
            f"Begin a turn:   curl -X POST {server.url}/_sim/sessions/{some_id}/start",
            f'New session:    curl {server.url}/_sim/sessions -d \'{{"scenario": "demo"}}\'',
            f'Next request:   curl {server.url}/_sim/faults -d \'{{"kind": "refuse", "status": 503}}\'',
            f"What happened:  curl {server.url}/_sim/log",
            "",
            "Any x-api-key will do. Stop with Ctrl-C.",
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main(scenario: str | None = None, port: int = 0) -> None:
    """Serve one scenario, or every one that there is, until interrupted.

    Raises:
        BadScript: there is no such scenario.
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(scenario, port))
