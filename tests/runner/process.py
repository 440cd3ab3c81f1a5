"""The service as a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from tests.runner.service import ADMIN_KEY

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 40.0


@dataclass(frozen=True)
class Child:
    """A process and a client of its api."""

    http: httpx.AsyncClient
    process: asyncio.subprocess.Process

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@contextlib.asynccontextmanager
async def serving_child(
    database_url: str,
    upstream_url: str,
    more: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    root: Path = ROOT,
) -> AsyncIterator[Child]:
    """Run `serve` on a database that is migrated; it shares keys with the replicas of this process.

    `more` is added to its environment. All that it prints goes to `output`, a file, if given.
    `root` is the folder of the code that runs.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "ANTHROPIC_API_KEY": "sk-ant-api-test",
        "BASCULE_DATABASE_URL": database_url,
        "BASCULE_UPSTREAM_URL": upstream_url,
        "BASCULE_SECRET_KEY": base64.b64encode(bytes(range(32))).decode(),
        "BASCULE_ADMIN_KEY": ADMIN_KEY,
        "BASCULE_WEBHOOK_ALLOW": "127.0.0.0/8",
        "BASCULE_PORT": str(port),
        "BASCULE_LOG_LEVEL": "error",
        **(more or {}),
    }
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app", "serve", cwd=root, env=environ, stdout=output, stderr=output
    )
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as http:
            async with asyncio.timeout(START_LIMIT_S):
                while not await _is_ready(http):
                    assert process.returncode is None, "the service ended"
                    await asyncio.sleep(0.05)
            yield Child(http, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _is_ready(http: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await http.get("/readyz")).status_code == 200
    return False
