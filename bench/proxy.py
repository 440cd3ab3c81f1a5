"""A TCP proxy of ours that can be slow, cut connections, or go quiet while they stay open."""

from __future__ import annotations

import asyncio
from typing import Final

CHUNK_BYTES: Final = 65_536
CONNECT_LIMIT_S: Final = 5.0

Target = tuple[str, int] | str
"""A host and port, or the path of a Unix socket."""


class Link:
    """One listener on loopback and its connections to `target`.

    `latency_s` delays every chunk each way; `is_quiet` swallows nothing and forwards nothing, as when a
    machine in between went away: connections stay open, new ones are accepted; `is_refusing` closes new ones.
    `bytes_out` went to the target and `bytes_back` came from it.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loud = asyncio.Event()
        self._loud.set()
        self.address = ("127.0.0.1", 0)
        self.latency_s = 0.0
        self.is_refusing = False
        self.bytes_out = 0
        self.bytes_back = 0

    @classmethod
    async def open(cls, target: Target) -> Link:
        """Listen on a free port."""
        link = cls(target)
        link._server = await asyncio.start_server(link._accept, *link.address)
        link.address = link._server.sockets[0].getsockname()[:2]
        return link

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    @property
    def is_quiet(self) -> bool:
        return not self._loud.is_set()

    @is_quiet.setter
    def is_quiet(self, is_quiet: bool) -> None:
        if is_quiet:
            self._loud.clear()
        else:
            self._loud.set()

    def cut(self) -> int:
        """Reset every connection, in the middle of whatever it carries; return how many there were."""
        writers = list(self._open)
        for writer in writers:
            writer.transport.abort()
        return len(writers)

    def heal(self) -> None:
        """Carry everything again, at once. What waited while it was quiet arrives now."""
        self.latency_s, self.is_refusing, self.is_quiet = 0.0, False, False

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            if not self.is_refusing:
                await self._carry(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._open.discard(writer)
            writer.close()  # what is on its way out still leaves, unless it was cut

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._loud.wait()
        async with asyncio.timeout(CONNECT_LIMIT_S):
            if isinstance(self._target, str):
                far_reader, far_writer = await asyncio.open_unix_connection(self._target)
            else:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._open.add(far_writer)
        try:
            ways = [
                asyncio.create_task(self._pump(reader, far_writer, is_back=False)),
                asyncio.create_task(self._pump(far_reader, writer, is_back=True)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            self._open.discard(far_writer)
            far_writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_back: bool
    ) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            self.bytes_back += len(chunk) * is_back
            self.bytes_out += len(chunk) * (not is_back)
            if self.latency_s:
                await asyncio.sleep(self.latency_s)
            await self._loud.wait()
            writer.write(chunk)
            await writer.drain()
