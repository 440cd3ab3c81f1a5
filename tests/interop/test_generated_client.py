"""A client that openapi-python-client generates from `openapi.yaml`: whole, type-checked, put to work."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from sqlalchemy.ext.asyncio import AsyncEngine

from app.openapi import document
from app.simulator.server import running
from app.simulator.world import World
from tests.console.service import ADMIN_KEY, serving
from tests.interop.environments import python_of
from tests.runner.receiver import receiving
from tests.store.conftest import engine, migrated_url

__all__ = ["engine", "migrated_url"]

pytestmark = [pytest.mark.anyio, pytest.mark.interop, pytest.mark.timeout(180)]

LOCK = Path(__file__).with_name("requirements-contract.lock")
DRIVER = Path(__file__).with_name("client_driver.py")
PACKAGE = "bascule_client"
TURN_S = 60.0
MYPY = f"""
[mypy]
strict = true
warn_redundant_casts = false
[mypy-{PACKAGE}.client]
ignore_errors = true
"""
"""`client.py` is the generator's own, whatever the document says, and hands `object`s to httpx. So is the
habit of a cast too many."""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("contract", LOCK)


@pytest.fixture(scope="module")
def folder(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the generated package and the driver lie."""
    folder = tmp_path_factory.mktemp("client")
    whole = document()
    # The generator knows JSON, forms and files. A result in plain text can be sent as a string in JSON.
    result = whole["paths"]["/sessions/{session_id}/calls/{call_id}/result"]["post"]
    del result["requestBody"]["content"]["text/plain"]
    (folder / "openapi.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    shutil.copy(DRIVER, folder)
    generator = python.with_name("openapi-python-client")
    _run(
        folder, generator, "generate", "--path", "openapi.yaml", "--output-path", PACKAGE, "--meta", "none",
        "--fail-on-warning",
    )  # fmt: skip
    return folder


def test_every_operation_is_generated_and_the_client_type_checks(python: Path, folder: Path) -> None:
    """`follow_session` is among them, but waits for the end of the stream: that takes a reader of events."""
    made = {path.stem for path in folder.glob(f"{PACKAGE}/api/*/*.py")} - {"__init__"}
    assert {one["operationId"] for path in document()["paths"].values() for one in path.values()} == made
    (folder / "mypy.ini").write_text(MYPY, encoding="utf-8")
    _run(folder, python, "-m", "compileall", "-q", PACKAGE)
    _run(folder, python, "-m", "mypy", "--config-file", "mypy.ini", PACKAGE, DRIVER.name)


async def test_the_generated_client_completes_a_turn(
    python: Path, folder: Path, engine: AsyncEngine, migrated_url: str
) -> None:
    async with (
        receiving() as tool,
        running(World(pace=0)) as upstream,
        serving(engine, migrated_url, upstream_url=upstream.url) as site,
    ):
        session = upstream.create("gated")
        process = await asyncio.create_subprocess_exec(
            python, DRIVER.name, site.base, ADMIN_KEY, session.id, tool.url,
            cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(TURN_S):
                assert process.stdout is not None
                tool.secrets.append(json.loads(await process.stdout.readline() or '""'))
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, err.decode()
    assert len(tool.deliveries) == 1
    assert {
        "missing": "session_not_found",
        "held": ["held", {"command": "ls -l /srv/reports"}],
        "posted": True,
        "text": [
            ["final", "I will list the reports."],
            ["final", 'It came to this: got {"command": "ls -l /srv/reports"}'],
        ],
        "detached": "detaching",
    } == json.loads(out)


def _run(folder: Path, *command: str | Path) -> None:
    # Those that the generator calls in its turn, ruff among them, are in its own environment.
    path = f"{Path(command[0]).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
