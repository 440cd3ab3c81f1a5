"""HAProxy with the configuration of deploy/compose, in front of replicas on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx

from tests.stories.receivers import free_port

START_LIMIT_S = 20.0


@contextlib.asynccontextmanager
async def proxying(
    program: str, configuration: str, replicas: Sequence[str]
) -> AsyncIterator[httpx.AsyncClient]:
    """Run the proxy until the block ends; Docker's resolver is replaced by the replicas' addresses."""
    port = free_port()
    servers = "\n".join(
        f"    server replica{number} {base.removeprefix('http://')}" for number, base in enumerate(replicas)
    )
    text = configuration.replace("bind :8080", f"bind 127.0.0.1:{port}")
    text = text.replace(" resolvers docker init-addr none", "")
    text = re.sub(r"resolvers docker\n(    .*\n)+", "", text)
    text = re.sub(r"    server-template .*", servers, text)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "haproxy.cfg"
        file.write_text(text, encoding="utf-8")
        process = await asyncio.create_subprocess_exec(program, "-db", "-f", file)
        try:
            base_url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=base_url, trust_env=False) as http:
                async with asyncio.timeout(START_LIMIT_S):
                    while not await _serves(http):
                        assert process.returncode is None, "the proxy ended"
                        await asyncio.sleep(0.05)
                yield http
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _serves(http: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await http.get("/readyz")).status_code == 200
    return False
