from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.doctor.examination import examine
from app.doctor.findings import Finding
from app.simulator.server import Server, running
from app.simulator.world import World
from tests.store.conftest import anyio_backend, engine, migrated_url

__all__ = ["anyio_backend", "engine", "migrated_url"]

KEY = "sk-ant-api-right"

Findings = dict[str, list[Finding]]
"""By check."""
Examine = Callable[..., Awaitable[Findings]]


@pytest.fixture
async def upstream() -> AsyncIterator[Server]:
    async with running(World(pace=0, keys=[KEY])) as server:
        yield server


@pytest.fixture
def examined(engine: AsyncEngine, migrated_url: str, upstream: Server, tmp_path: Path) -> Examine:
    """Examines a set-up that is right but for the variables given."""

    async def check(clock: Callable[[], float] = time.time, **changes: str) -> Findings:
        environ = {
            "BASCULE_DATABASE_URL": migrated_url,
            "BASCULE_SECRET_KEY": base64.b64encode(bytes(range(32))).decode(),
            "BASCULE_ADMIN_KEY": "0123456789abcdef",
            "BASCULE_UPSTREAM_URL": upstream.url,
            "BASCULE_DATA_DIR": str(tmp_path / "none"),
            "ANTHROPIC_API_KEY": KEY,
        }
        found: Findings = {}

        def report(finding: Finding) -> None:
            found.setdefault(finding.check, []).append(finding)

        # In a thread: the upstream that it asks is served by this one.
        await asyncio.to_thread(examine, environ | changes, report, clock)
        return found

    return check
