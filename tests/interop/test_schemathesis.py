"""schemathesis asks the running service whatever `openapi.yaml` allows, and much that it does not.

All its checks and phases are on, for every operation. Streams end after their first event, long polls after
some milliseconds; `schemathesis_hooks.py` says so, and what else the document cannot. The two operations that
take a callback's token or the platform's signature in the place of a key answer 401 to all of it.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.openapi import document
from app.simulator.server import running
from app.simulator.world import World
from tests.console.service import ADMIN_KEY, serving
from tests.interop.environments import ROOT, python_of
from tests.runner.receiver import receiving
from tests.runner.scripts import bash, custom, turn
from tests.store.conftest import engine, migrated_url

__all__ = ["engine", "migrated_url"]

pytestmark = [pytest.mark.anyio, pytest.mark.interop, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
LOCK = HERE / "requirements-contract.lock"
RUN_S = 360.0
SESSION, TOOL = "sesn_given", "lookup_order"
SCRIPT = turn({"do": "message", "text": "I shall look."}, custom(TOOL), bash())


async def test_what_the_document_allows_works_and_nothing_else_breaks_the_service(
    engine: AsyncEngine, migrated_url: str, tmp_path: Path
) -> None:
    python = python_of("contract", LOCK)
    async with (
        receiving() as tool,
        running(World(pace=0)) as upstream,
        serving(engine, migrated_url, upstream_url=upstream.url) as site,
    ):
        upstream.create(SCRIPT, session_id=SESSION)
        made = await site.http.put(f"/tools/{TOOL}", json={"url": tool.url})
        tool.secrets.append(made.json()["signing_secret"])
        await site.http.post(f"/sessions/{SESSION}/attach", json={"max_idle_s": None})
        upstream.say(SESSION)
        waiting = await site.http.get("/confirmations", params={"wait_s": 10})
        places = {"session_id": SESSION, "name": TOOL, "call_id": waiting.json()["data"][0]["id"]}
        told = await _run(
            python, tmp_path, site.base, places, BASCULE_KEY=ADMIN_KEY, BASCULE_TOOL_URL=tool.url
        )
    print(told[told.find("SUMMARY") :])
    operations = sum(len(methods) for methods in document()["paths"].values())
    assert f"Selected: {operations}/{operations}\n" in told, told
    assert re.search(rf"\bTested: {operations}\n", told), told


async def _run(python: Path, folder: Path, base: str, places: dict[str, str], **environ: str) -> str:
    """Return what schemathesis tells of a run in which it found nothing."""
    config = folder / "schemathesis.toml"
    written = (HERE / "schemathesis.toml").read_text(encoding="utf-8")
    config.write_text(written + _given(places), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        python.with_name("schemathesis"), "--config-file", config, "run", ROOT / "openapi.yaml",
        "--url", base, "--no-color",
        cwd=folder,
        env={
            **os.environ, **environ,
            "BASCULE_CALL_ID": places["call_id"],
            "SCHEMATHESIS_HOOKS": str(HERE / "schemathesis_hooks.py"),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(RUN_S):
            told = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, told
    return told


def _given(places: dict[str, str]) -> str:
    """The part of the configuration that names what there is, for one request in two."""
    lines = [f'[dictionaries.{name}]\nvalues = ["{value}"]' for name, value in places.items()]
    bound = [f'{name} = {{ dictionary = "{name}", probability = 0.5 }}' for name in places]
    return "\n".join(["", *lines, "[parameters]", *bound, ""])
