"""A TCP proxy that fails as networks do: refuses, keeps quiet, or cuts a connection at a chosen moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, urlsplit

CHUNK_BYTES = 65_536


@dataclass
class Cut:
    """Cuts the connection whose transaction wrote `marker`, when its COMMIT passes; once.

    With `is_forwarded` the server still gets it, and only the answer is lost.
    """

    marker: bytes
    is_forwarded: bool
    is_done: bool = False


class Proxy:
    """Listens on a port of its own.

    With `mode` `hold` it takes what comes and passes nothing on, nor ever again on that connection; with
    `reset` it cuts whoever connects.
    """

    def __init__(self, url: str) -> None:
        self.mode: Literal["pass", "hold", "reset"] = "pass"
        self.cut: Cut | None = None
        self.port = 0
        self.waiting = 0
        """How many connections are being held with something to say."""
        self.turned_away = 0
        """How many connections were cut as they came."""
        self._url = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The URL of what is behind the proxy, by way of it."""
        user, at, _ = self._url.netloc.rpartition("@")
        return self._url._replace(netloc=f"{user}{at}127.0.0.1:{self.port}", query="").geturl()

    async def open(self) -> None:
        """Listen, on the port of the last time if there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        """Refuse new connections and reset those that there are."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Cut every connection that there is."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if self.mode == "reset":
                self.turned_away += 1
                writer.transport.abort()
                return
            if self.mode == "hold":
                await self._hold(reader)
                return
            with contextlib.suppress(OSError):
                far_reader, far_writer = await self._connect()
                self._writers.add(far_writer)
                back = asyncio.create_task(self._pump(far_reader, writer))
                try:
                    await self._pump(reader, far_writer, near=writer)
                finally:
                    far_writer.close()
                    await asyncio.gather(back, return_exceptions=True)
                    self._writers.discard(far_writer)
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        query = parse_qs(self._url.query)
        if "host" in query:  # as libpq writes the folder of a Unix socket
            path = f"{query['host'][0]}/.s.PGSQL.{query.get('port', ['5432'])[0]}"
            return await asyncio.open_unix_connection(path)
        return await asyncio.open_connection(self._url.hostname, self._url.port)

    async def _hold(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            is_counted = False
            while await reader.read(CHUNK_BYTES):
                self.waiting += not is_counted
                is_counted = True
            self.waiting -= is_counted

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        near: asyncio.StreamWriter | None = None,
    ) -> None:
        is_marked = False
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self.mode == "hold":
                    await self._hold(reader)
                    return
                cut = self.cut
                if near is not None and cut is not None and not cut.is_done:
                    is_marked = (is_marked or cut.marker in data) and b"ROLLBACK;" not in data
                    if is_marked and b"COMMIT;" in data:
                        cut.is_done = True
                        near.transport.abort()
                        if cut.is_forwarded:
                            writer.write(data)
                        break
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def proxying(url: str) -> AsyncIterator[Proxy]:
    """Run a proxy in front of what the URL names."""
    proxy = Proxy(url)
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.shut()
