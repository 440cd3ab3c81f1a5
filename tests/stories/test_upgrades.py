"""The version before and this one serve side by side on this one's schema, and hand each other their work.

The version before is the code as it was before the newest migration came, out of the repository's history.
"""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import running
from app.simulator.world import World
from tests.runner.process import ROOT, Child, serving_child
from tests.runner.receiver import receiving
from tests.runner.scripts import bash, custom, in_state
from tests.runner.service import Service

pytestmark = [pytest.mark.anyio, pytest.mark.nightly, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the version before."""
    newest = max((ROOT / "migrations" / "versions").glob("[0-9]*.py"))
    added = _git("log", "-1", "--format=%H", "--diff-filter=A", "--", str(newest)).decode().strip()
    assert added, f"the history does not tell when {newest.name} came; run this in a full clone"
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(_git("archive", f"{added}^", "app", "migrations"))) as archive:
        archive.extractall(folder, filter="data")
    assert not (folder / "migrations" / "versions" / newest.name).exists()
    return folder


def _git(*arguments: str) -> bytes:
    told = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    assert told.returncode == 0, (
        f"git does not show the history, where the version before is: {told.stderr!r}"
    )
    return told.stdout


async def _stop(child: Child) -> None:
    child.process.send_signal(signal.SIGTERM)
    await child.process.wait()


async def test_versions_side_by_side_hand_calls_to_each_other(
    before: Path, migrated_url: str, engine: AsyncEngine
) -> None:
    """D-088: an upgrade and the way back, replica by replica, while a call waits for a person each time."""
    async with receiving() as tool, running(World(pace=0)) as upstream:

        @contextlib.asynccontextmanager
        async def serving(root: Path) -> AsyncIterator[tuple[Child, Service]]:
            async with serving_child(migrated_url, upstream.url, root=root) as child:
                yield child, Service(child.http, upstream, tool, engine)

        async def decide(service: Service, call: dict[str, Any]) -> None:
            decision = {"tool_use_id": call["id"], "result": "allow"}
            answer = await service.http.post(f"/sessions/{session.id}/confirm", json=decision)
            assert answer.status_code in (200, 202), answer.text

        turns = [{"steps": [custom("echo"), bash(), {"do": "end"}]} for _ in range(2)]
        session = upstream.create({"name": "t", "environment": "self_hosted", "turns": turns})
        async with serving(before) as (old, of_old):
            await of_old.register("echo", "bash")
            await of_old.attach(session.id)
            upstream.say(session.id)
            _, held = await in_state(of_old, session.id, "posted", "held")
            async with serving(ROOT) as (new, of_new):
                await _stop(old)
                await decide(of_new, held)
                await in_state(of_new, session.id, "posted", "posted")
                upstream.say(session.id)
                *_, held = await in_state(of_new, session.id, "posted", "posted", "posted", "held")
                async with serving(before) as (_, of_old_again):
                    await _stop(new)
                    await decide(of_old_again, held)
                    await in_state(of_old_again, session.id, *["posted"] * 4)
        answers = upstream.world.answers(session.id)
    assert [1] * 4 == [len(each) for each in answers.values()]
    assert sorted(answers) == sorted(tool.called)
