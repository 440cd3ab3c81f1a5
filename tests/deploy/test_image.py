"""The Dockerfile, as far as it can be tried without an engine: linted, and its steps done in a folder."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests import postgres
from tests.stories.receivers import free_port

ROOT = Path(__file__).parents[2]
LIMIT_S = 40.0


class Instruction(NamedTuple):
    name: str
    arguments: str


def stages() -> list[list[Instruction]]:
    """The instructions of each stage, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = filter(None, re.sub(r"\\\n\s*", "", text).splitlines())
    found: list[list[Instruction]] = []
    for name, _, arguments in (line.partition(" ") for line in lines):
        if name == "FROM":
            found.append([])
        found[-1].append(Instruction(name, arguments))
    return found


def only(stage: list[Instruction], name: str) -> str:
    (instruction,) = (one for one in stage if one.name == name)
    return instruction.arguments


BUILD, FINAL = stages()
COPIED = [shlex.split(one.arguments) for one in BUILD if one.name == "COPY"]


def test_a_linter_finds_nothing() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    ended = subprocess.run([linter, ROOT / "Dockerfile"], stdout=subprocess.PIPE, text=True, check=False)
    assert (0, "") == (ended.returncode, ended.stdout)


def test_what_is_copied_exists_and_is_let_through() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" == ignored[0]
    sources = {source for *these, _ in COPIED for source in these}
    assert {f"!{source}" for source in sources} == {line for line in ignored if line.startswith("!")}
    assert [] == [source for source in sources if not (ROOT / source).exists()]


def test_it_runs_as_nobody_special_and_gets_signals_itself() -> None:
    assert int(only(FINAL, "USER")) > 0
    assert ["tini", "--"] == json.loads(only(FINAL, "ENTRYPOINT"))
    shell, flag, script = json.loads(only(FINAL, "CMD"))
    assert ("sh", "-c") == (shell, flag)
    assert script.rpartition("&& ")[2].startswith("exec ")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the image has, and nothing else."""
    folder = tmp_path_factory.mktemp("image")
    for *sources, target in COPIED:
        for source in sources:
            if (ROOT / source).is_dir():
                leave = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, folder / target, ignore=leave)
            else:
                shutil.copy(ROOT / source, folder / target)
    return folder


def test_its_packages_are_those_of_the_lock_by_their_hashes(image: Path) -> None:
    """Nothing is fetched: the environment of the tests holds the same packages."""
    command = re.search(r"/bin/pip (install .*)", only(BUILD, "RUN"))
    assert command is not None
    assert "--require-hashes -r requirements.lock" in command[1]
    pip = [sys.executable, "-m", "pip", *shlex.split(command[1]), "--dry-run", "--quiet", "--no-index"]
    subprocess.run(pip, cwd=image, check=True, timeout=LIMIT_S)


def test_it_has_the_command_that_the_pages_name(image: Path, tmp_path: Path) -> None:
    written = re.search(r"(printf .*) > /opt/bascule/bin/bascule && chmod 755", only(BUILD, "RUN"))
    assert written is not None
    command = tmp_path / "bascule"
    command.write_bytes(subprocess.run(["sh", "-c", written[1]], stdout=subprocess.PIPE, check=True).stdout)
    command.chmod(0o755)
    environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shown = subprocess.run(
        [command, "--help"], cwd=image, env=environ, capture_output=True, text=True, check=True
    )
    assert "doctor" in shown.stdout


@pytest.fixture(scope="module")
def database_url() -> Iterator[str]:
    with postgres.server() as server_url, postgres.database(server_url) as url:
        yield url


def test_its_command_migrates_serves_is_healthy_and_ends_when_told_to(image: Path, database_url: str) -> None:
    port = str(free_port())
    before = {path for path in image.rglob("*") if "__pycache__" not in path.parts}
    environ = dict(pair.split("=", 1) for pair in shlex.split(only(FINAL, "ENV")))
    environ |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BASCULE_DATA_DIR": str(image / "data"),
        "BASCULE_PORT": port,
        "BASCULE_DATABASE_URL": database_url,
        "BASCULE_SECRET_KEY": base64.b64encode(bytes(32)).decode(),
        "BASCULE_ADMIN_KEY": "an-admin-key-for-tests",
        "PYTHONWARNINGS": "error",
    }
    service = subprocess.Popen(json.loads(only(FINAL, "CMD")), cwd=image, env=environ)
    try:
        until_it_listens(port, service)
        check = json.loads(only(FINAL, "HEALTHCHECK").partition("CMD ")[2])
        check = [word.replace(":8080/", f":{port}/") for word in check]
        subprocess.run(check, env=environ, check=True, timeout=LIMIT_S)
        assert 200 == httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code
        service.terminate()
        assert 0 == service.wait(LIMIT_S)
    finally:
        service.kill()
        service.wait(LIMIT_S)
    after = {path for path in image.rglob("*") if "__pycache__" not in path.parts}
    assert before == after, "it writes files, although its file system may be read-only"


def until_it_listens(port: str, service: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        assert service.poll() is None, "the service ended"
        try:
            httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False)
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"nothing listens at port {port}")
