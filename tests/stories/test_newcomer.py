"""What the README tells a newcomer to do, done."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from standardwebhooks import Webhook

from app.webhooks.wire import sign
from tests.stories.receivers import EXAMPLES, Receiver, free_port, left_out

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEMO_LIMIT_S = 50.0
START_LIMIT_S = 40.0
STOP_LIMIT_S = 30.0
LINK = r"http://\S+/console/sign-in\?link=[\w-]+"


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


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the database's user may enter, so that all of it goes with the folder."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="bascule-newcomer-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


class Demo:
    """`make demo` in a terminal of its own."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        environ = {**os.environ, "BASCULE_DATA_DIR": str(data_dir), "BASCULE_PORT": str(free_port())}
        environ.pop("ANTHROPIC_API_KEY", None)
        # A shell gives what it starts in the background an ignored SIGINT, and so do we to what we start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", "demo", *options],
            cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.stream = self.process.stdout
        self.terminal = Terminal(self.stream)

    def stop(self, by: signal.Signals) -> int:
        self.process.send_signal(by)
        code = self.process.wait(timeout=STOP_LIMIT_S)
        self.stream.close()
        return code


@pytest.fixture
def demo(folder: Path) -> Iterator[Terminal]:
    running = Demo(folder / "d")
    try:
        yield running.terminal
    finally:
        running.stop(signal.SIGINT)


@pytest.mark.timeout(120)
def test_the_demo_prints_the_curl_that_allows_its_held_call_and_then_shows_the_text(demo: Terminal) -> None:
    command = demo.until(r"curl -s .*/confirm .*", DEMO_LIMIT_S).group(0)
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["decision"]["result"] == "allow"

    command = demo.until(r"curl -s .*/text\b", DEMO_LIMIT_S).group(0)
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    texts = [message["text"] for message in json.loads(answer.stdout)["data"]]
    assert "refunded 49.90 EUR." in texts[-1]
    assert texts[-1].split(".")[-2] in demo.text
    assert demo.text.count("Nothing gates it") == demo.text.count("Allowed. The verdict went upstream") == 1


@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    "languages", [("Python",), pytest.param((*EXAMPLES,), marks=pytest.mark.nightly)], ids=["one", "every"]
)
def test_an_example_answers_a_call_of_the_demo(folder: Path, languages: tuple[str, ...]) -> None:
    """One demo after another on the same data. All examples serve a call of the service in test_receivers."""
    for language in languages:
        assert left_out(language) is None
        port = free_port()
        demo = Demo(folder / "d", "--tool-url", f"http://127.0.0.1:{port}/")
        try:
            secret = demo.terminal.until(r"TOOL_SECRET=(whsec_\S+)", DEMO_LIMIT_S).group(1)
            receiver = Receiver(EXAMPLES[language], secret, port)
            try:
                demo.terminal.until("The tool answered: order A-1042 has shipped", DEMO_LIMIT_S)
            finally:
                receiver.stop()
        finally:
            demo.stop(signal.SIGINT)


@pytest.mark.timeout(120)
def test_a_demo_that_may_not_call_its_tool_says_why(folder: Path) -> None:
    demo = Demo(folder / "d", "--tool-url", "http://169.254.169.254/")
    try:
        demo.terminal.until("url: This address hands out a cloud.s credentials", DEMO_LIMIT_S)
        assert demo.process.wait(timeout=STOP_LIMIT_S) == 1
    finally:
        demo.stop(signal.SIGINT)
    assert "Traceback" not in demo.terminal.text


@pytest.mark.timeout(120)
def test_the_demo_prints_a_link_that_opens_the_console_where_its_call_waits(demo: Terminal) -> None:
    link = demo.until(LINK, DEMO_LIMIT_S).group(0)
    demo.until(r"curl -s .*/confirm .*", DEMO_LIMIT_S)
    assert "refund --order A-1042" in signed_in(link)


def signed_in(link: str) -> str:
    """Press the button behind a sign-in link; return the page that follows."""
    base, _, token = link.partition("/console/sign-in?link=")
    with httpx.Client(base_url=base, headers={"origin": base}, trust_env=False) as browser:
        assert "This link signs you in once" in browser.get(link).text
        answer = browser.post("/console/sign-in", data={"link": token}, follow_redirects=True)
        assert "Waiting for a person" in answer.text
        return answer.text


@pytest.mark.timeout(120)
def test_a_demo_that_is_told_to_end_leaves_no_database_and_the_next_one_lists_no_old_session(
    folder: Path,
) -> None:
    data = folder / "d"
    first = Demo(data)
    old = first.terminal.until(r"Session (\w+) is attached", DEMO_LIMIT_S).group(1)
    first.terminal.until(r"curl -s .*/confirm .*", DEMO_LIMIT_S)
    assert first.stop(signal.SIGTERM) == 0
    assert not (data / "demo" / "postgres" / "pgdata" / "postmaster.pid").exists()
    second = Demo(data)
    try:
        url = second.terminal.until(r"listens at (\S+)", DEMO_LIMIT_S).group(1)
        second.terminal.until(r"curl -s .*/confirm .*", DEMO_LIMIT_S)
        headers = {"authorization": f"Bearer {(data / 'demo' / 'admin.key').read_text().strip()}"}
        shown = httpx.get(f"{url}/confirmations", headers=headers, trust_env=False).json()
        assert old not in {call["session_id"] for call in shown["data"]}
        assert len(shown["data"]) == 1
    finally:
        assert second.stop(signal.SIGTERM) == 0


def test_the_guides_signature_is_that_of_its_example() -> None:
    guide = (ROOT / "docs" / "receiving-webhooks.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `?([\w-]+)`? \| `([^`]+)` \|$", guide, re.MULTILINE))
    body, at = rows["body"].encode(), int(rows["webhook-timestamp"])
    key = Webhook(rows["secret"])._whsecret
    assert rows["webhook-signature"] == sign([key], rows["webhook-id"], at, body)
    assert json.loads(body)["data"]["input"] == {"order_id": "A-1042"}


class Walk:
    """What the README says, typed into terminals in a folder that looks like the clone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("app", "migrations", "examples"):
            (folder / name).symlink_to(ROOT / name)
        section = README.partition("## Your own tool")[2].partition("\n## ")[0]
        self.blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
        self.ports = {port: str(free_port()) for port in ("8080", "8301", "9000")}
        self.words: dict[str, str] = {}
        self.typed: set[str] = set()
        self.running: list[tuple[subprocess.Popen[str], Terminal]] = []

    def command(self, part: str) -> str:
        """Return the first block that holds `part`, with what a reader would put in."""
        block = next(block for block in self.blocks if part in block)
        self.typed.add(block)
        return self.filled(block)

    def filled(self, text: str) -> str:
        python = shlex.quote(sys.executable)
        changes = {"make run": f"{python} -m app serve", ".venv/bin/python": python, "python3": python}
        text = re.sub("|".join(map(re.escape, changes)), lambda found: changes[found[0]], text)
        text = re.sub(r"\b(8080|8301|9000)\b", lambda found: self.ports[found[0]], text)
        for word, value in self.words.items():
            text = text.replace(word, value)
        return text

    def start(self, command: str) -> Terminal:
        environ = {**os.environ, "BASCULE_PORT": self.ports["8080"], "PYTHONUNBUFFERED": "1"}
        environ |= {"PORT": self.ports["9000"]} if "TOOL_SECRET" in command else {}
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        self.running.append((process, Terminal(process.stdout)))
        return self.running[-1][1]

    def run(self, command: str) -> str:
        session = self.words.get("sesn_…", "")
        return subprocess.run(
            ["bash", "-c", f"KEY=$(cat .bascule/admin.key); SESSION={session}; {command}"],
            cwd=self.folder, capture_output=True, text=True, timeout=STOP_LIMIT_S, check=True,
        ).stdout  # fmt: skip

    def until(self, command: str, pattern: str) -> str:
        end, shown = time.monotonic() + START_LIMIT_S, ""
        while time.monotonic() < end:
            shown = self.run(command)
            if re.search(pattern, shown):
                return shown
            time.sleep(0.1)
        raise AssertionError(f"no {pattern!r} in {shown}")

    def stop(self) -> None:
        for process, _ in reversed(self.running):
            process.terminate()
        for process, _ in reversed(self.running):
            process.wait(timeout=STOP_LIMIT_S)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def walk(folder: Path) -> Iterator[Walk]:
    walk = Walk(folder)
    try:
        yield walk
    finally:
        walk.stop()


@pytest.mark.timeout(150)
def test_every_command_of_the_readmes_walk_runs_as_written(walk: Walk) -> None:
    simulator = walk.start(walk.command("app simulate"))
    walk.words["sesn_…"] = simulator.until(r"(sesn_\w+)  custom", START_LIMIT_S).group(1)
    service = walk.start(walk.command("BASCULE_UPSTREAM_URL"))
    signed_in(service.until(LINK, START_LIMIT_S).group(0))
    walk.command("sk-ant-")  # the platform's own; there is none here
    register = walk.command("-X PUT")
    registered: dict[str, Any] = json.loads(walk.run(register))
    walk.words["whsec_…"] = registered["signing_secret"]
    walk.start(walk.command("TOOL_SECRET"))

    attach = walk.command("/attach")
    assert walk.words["sesn_…"] in walk.run(attach)
    walk.run(simulator.until(r"Begin a turn: +(curl .*)", START_LIMIT_S).group(1))
    calls = walk.command("/calls")
    assert "has shipped" in walk.until(calls, '"state": "posted"')
    assert '"next_after"' in walk.until(walk.command("/text"), "has shipped")

    assert '"gate":"ask"' in walk.run(walk.command('"gate"'))
    walk.words["sesn_…"] = json.loads(walk.run(walk.command("_sim/sessions -d")))["id"]
    walk.run(walk.command("/attach"))
    walk.run(walk.command("/start"))
    confirm = walk.command("/confirm ")
    waiting = walk.until(confirm.splitlines()[0], '"held"')
    walk.words["sevt_…"] = json.loads(waiting)["data"][0]["id"]
    assert '"result":"allow"' in walk.run(walk.command("/confirm "))
    assert "has shipped" in walk.until(calls, '"state": "posted"')
    assert set(walk.blocks) == walk.typed


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("requirements.lock", "pyproject.toml"):
        (folder / name).touch()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=STOP_LIMIT_S, check=False,
    )  # fmt: skip


def test_an_old_or_missing_python_is_told_before_anything_else(folder: Path) -> None:
    old = folder / "old"
    old.write_text('#!/bin/sh\ncase "$2" in *print*) echo is 3.10.13;; *) exit 1;; esac\n')
    old.chmod(0o755)
    for python, fault in (("./old", "is 3.10.13"), ("./none", "is missing")):
        ended = make(folder, "run", f"PYTHON={python}")
        assert (ended.returncode, ended.stdout) == (2, "")
        sentence = f"Python 3.11 or newer is needed, {python} {fault}; make run PYTHON=python3.12"
        assert sentence == ended.stderr.splitlines()[0]


def test_cleaning_follows_no_link_to_what_is_not_ours(folder: Path) -> None:
    for target in ("kept", str(folder / "kept"), "/var/lib/bascule/../bascule/x"):
        (folder / "kept").mkdir(exist_ok=True)
        (folder / ".bascule" / "demo").mkdir(parents=True)
        (folder / ".bascule" / "postgres").symlink_to(target)
        (folder / ".bascule" / "demo" / "postgres").symlink_to(target)
        assert make(folder, "clean").returncode == 0
        assert not (folder / ".bascule").exists()
        assert (folder / "kept").exists()


def test_every_file_and_target_that_the_readme_names_exists() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)) <= targets


def test_the_readme_says_what_the_command_line_accepts() -> None:
    commands = re.findall(r"python -m app (\w+)", README)
    for command in {*commands, "serve", "demo", "migrate", "openapi"}:
        subprocess.run(
            [sys.executable, "-m", "app", *shlex.split(command), "--help"],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
