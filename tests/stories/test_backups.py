"""A database that is dumped and restored as docs/operating.md says, while agents go on."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server
from app.store.database import create_engine
from app.store.programs import Programs, child_environ
from tests import postgres
from tests.runner.receiver import Receiver
from tests.runner.scripts import bash, custom, in_state, live, results, turn
from tests.runner.service import Service, replicating
from tests.runner.test_restarts import tool, upstream

__all__ = ["tool", "upstream"]

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[2] / "docs" / "operating.md"
DUMP, RESTORE = re.findall(
    r"<!-- run by tests/stories/test_backups.py -->\n```sh\n(.*?)```",
    PAGE.read_text(encoding="utf-8"),
    re.DOTALL,
)


async def type_(command: str, folder: Path, database_url: str) -> None:
    programs = Programs(child_environ(os.environ)).find(folder)
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "BASCULE_DATABASE_URL": database_url}
    process = await asyncio.create_subprocess_exec("bash", "-euc", command, cwd=folder, env=environ)
    assert 0 == await process.wait()


async def test_a_dump_of_a_service_at_work_is_restored_and_goes_on(
    engine: AsyncEngine, migrated_url: str, upstream: Server, tool: Receiver, tmp_path: Path
) -> None:
    """D-089: what was held is still held, what was answered since is not delivered again."""
    first = upstream.create(turn(custom("lookup"), bash()))
    later = upstream.create(turn(custom("lookup")))
    async with replicating(engine, migrated_url, upstream.url) as http:
        service = Service(http, upstream, tool, engine)
        await service.register("lookup", "bash")
        for session in (first, later):
            await live(service, session.id)
        upstream.say(first.id)
        held = (await in_state(service, first.id, "posted", "held"))[1]
        await type_(DUMP, tmp_path, migrated_url)
        upstream.say(later.id)
        await in_state(service, later.id, "posted")

    with postgres.database(migrated_url) as url:
        await type_(RESTORE, tmp_path, url)
        restored = create_engine(url, connections_max=6)
        async with restored.begin() as connection:  # up to 12 s pass otherwise, as for any replica that died
            await connection.execute(text("update replicas set expires_at = now()"))
        async with replicating(restored, url, upstream.url) as http:
            service = Service(http, upstream, tool, restored)
            body = {"tool_use_id": held["id"], "result": "allow"}
            assert (await http.post(f"/sessions/{first.id}/confirm", json=body)).status_code in (200, 202)
            await in_state(service, first.id, "posted", "posted")
            await service.until(f"/sessions/{later.id}", lambda s: s["status"] == "live" and s["term"] == 2)
    assert ["lookup", "lookup", "bash"] == [delivery.data["tool"] for delivery in tool.deliveries]
    assert [1] * 3 == [len(each) for one in (first, later) for each in results(upstream, one.id).values()]
