"""What the README tells a newcomer to do, done."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.runner.service import Service

ROOT = Path(__file__).parents[2]
DEMO_LIMIT_S = 50.0


class Terminal:
    """A program's output, line by line, as somebody would read it."""

    def __init__(self, stream: IO[str]) -> None:
        self.text = ""
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._changed:
                self.text += line
                self._changed.notify_all()

    def until(self, pattern: str, limit_s: float) -> re.Match[str]:
        """Wait until the output holds the pattern."""
        with self._changed:
            found = self._changed.wait_for(lambda: re.search(pattern, self.text), timeout=limit_s)
        assert found, f"no {pattern!r} in:\n{self.text}"
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Terminal]:
    environ = {**os.environ, "BASCULE_DATA_DIR": str(tmp_path / "d"), "BASCULE_PORT": str(free_port())}
    environ.pop("ANTHROPIC_API_KEY", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "demo"],
        cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield Terminal(process.stdout)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        process.stdout.close()


@pytest.mark.timeout(120)
def test_the_demo_prints_the_curl_that_allows_its_held_call_and_then_shows_the_text(demo: Terminal) -> None:
    command = demo.until(r"curl -s .*/confirm .*", DEMO_LIMIT_S).group(0)
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["decision"]["result"] == "allow"

    command = demo.until(r"curl -s .*/text\b", DEMO_LIMIT_S).group(0)
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    texts = [message["text"] for message in json.loads(answer.stdout)["data"]]
    assert "refunded 49.90 EUR." in texts[-1]
    assert texts[-1] in demo.text


@pytest.mark.anyio
async def test_the_examples_tool_answers_a_call(service: Service) -> None:
    session = service.upstream.create("custom")
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    registered = await service.http.put("/tools/lookup_order", json={"url": url})
    environ = {**os.environ, "TOOL_SECRET": registered.json()["signing_secret"], "PORT": str(port)}
    tool = subprocess.Popen(  # noqa: ASYNC220 - starting takes milliseconds, and nothing else runs yet
        [sys.executable, str(ROOT / "examples" / "tool.py")],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert tool.stdout is not None
    try:
        await service.attach(session.id)
        service.upstream.say(session.id)
        path = f"/sessions/{session.id}/calls"
        shown = await service.until(path, lambda page: [c for c in page["data"] if c["state"] == "posted"])
        result = shown["data"][0]["result"]
        assert not result["is_error"], result
        assert "has shipped" in result["content"][0]["text"]
    finally:
        tool.kill()
        tool.wait(timeout=10)
        tool.stdout.close()


def test_every_file_and_target_that_the_readme_names_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", readme) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", readme, re.MULTILINE)) <= targets


def test_the_readme_says_what_the_command_line_accepts() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"python -m app (\w+)", readme)
    for command in {*commands, "serve", "demo", "migrate", "openapi"}:
        subprocess.run(
            [sys.executable, "-m", "app", *shlex.split(command), "--help"],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
