"""A reader's desk: a folder like the clone, terminals in it, and what they would put for each `…`."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT, Block, fits
from tests.stories.receivers import free_port
from tests.stories.test_newcomer import Terminal

COMMAND_LIMIT_S = 30.0
LISTENING_LIMIT_S = 60.0  # Go compiles first
SHOWN_LIMIT_S = 20.0
STREAM_LIMIT_S = 2
STOP_LIMIT_S = 45.0  # the service itself takes up to 40
_ASSIGNMENT = re.compile(r"^([A-Z_]+)=(\$\(.*\)|\S+)$", re.MULTILINE)
_LISTENERS = {"make run": "8080", "simulate": "8301", "TOOL_SECRET": "9000", "SUBSCRIPTION_SECRET": "9001"}
_PORTS = ("8080", "8301", "9000", "9001")


class Desk:
    """Types blocks of pages. `words` are what stands for `whsec_…` and the like, by the newest answer.

    `values` are variables of the reader's shell.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("app", "migrations", "examples"):
            (folder / name).symlink_to(ROOT / name)
        # What a reader would see as a failure is one: a status of 400 and above, and a stream ends some time.
        curl = f"fail-with-body\nshow-error\nmax-time = {COMMAND_LIMIT_S:g}\n"
        (folder / ".curlrc").write_text(curl, encoding="utf-8")
        self.ports = {port: str(free_port()) for port in _PORTS}
        self.words = {"sk-ant-…": "sk-ant-api-test", "services/…": "services/T0/B0/x"}
        self.words["whsec_…"] = "whsec_" + base64.b64encode(bytes(32)).decode()
        self.values: dict[str, str] = {}
        self._running: dict[str, tuple[subprocess.Popen[str], Terminal]] = {}

    def url(self, port: str) -> str:
        return f"http://127.0.0.1:{self.ports[port]}"

    def environ(self) -> dict[str, str]:
        own = {"PYTHONUNBUFFERED": "1", "BASCULE_URL": self.url("8080"), "CURL_HOME": str(self.folder)}
        given = {name: value for name, value in os.environ.items() if not name.startswith("BASCULE_")}
        own |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BASCULE_PORT": self.ports["8080"],
        }
        return {**given, **own, "GOPROXY": "off", "GOTOOLCHAIN": "local"}

    def filled(self, text: str) -> str:
        """What a reader would type here and now."""
        python = shlex.quote(sys.executable)
        changes = {"make run": f"{python} -m app serve", ".venv/bin/python": python, "python3": python}
        text = re.sub("|".join(map(re.escape, changes)), lambda found: changes[found[0]], text)
        text = self._with_ports(text)
        for word, value in self.words.items():
            text = text.replace(word, value)
        assert "…" not in text, f"nothing says what to put for … in {text}"
        return text

    def _with_ports(self, text: str) -> str:
        return re.sub(rf"\b({'|'.join(_PORTS)})\b", lambda found: self.ports[found[0]], text)

    def stay(self, block: Block) -> None:
        """Start what stays in the foreground, in a terminal of its own, and wait until it listens."""
        if block.text in self._running:
            return
        environ = self.environ()
        (port,) = (port for word, port in _LISTENERS.items() if word in block.text)
        if port in ("9000", "9001"):
            environ["PORT"] = self.ports[port]
        process = subprocess.Popen(
            ["bash", "-c", self.filled(block.text)],
            cwd=self.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        terminal = Terminal(process.stdout)
        self._running[block.text] = (process, terminal)
        check = ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{self.ports[port]}"]
        end = time.monotonic() + LISTENING_LIMIT_S
        while subprocess.run(check, capture_output=True, check=False).returncode != 0:
            assert process.poll() is None, f"{block}\n{terminal.text}"
            assert time.monotonic() < end, f"{block}: nothing listens\n{terminal.text}"
            time.sleep(0.05)

    def type_(self, block: Block) -> None:
        """Run a block; one that only reads again until it answers what the page shows, as a reader would."""
        output = None if block.output is None else json.loads(self._with_ports(json.dumps(block.output)))
        limit_s = 0.0 if re.search(r" -[Xd] ", block.text) else SHOWN_LIMIT_S
        end = time.monotonic() + limit_s
        while True:
            shown = self._run(block)
            for prefix, rest in re.findall(r"\"(whsec_|sesn_|sevt_)([^\"…]+)\"", shown):
                self.words[f"{prefix}…"] = prefix + rest
            if output is None or fits(output, last_json(shown)):
                return
            assert time.monotonic() < end, f"{block}\nanswers {shown}"
            time.sleep(0.1)

    def _run(self, block: Block) -> str:
        text = self.filled(block.text)
        values = "".join(f"{name}={value}\n" for name, value in self.values.items())
        is_stream = "curl -sN" in text
        is_endless = is_stream or (block.output is None and "wait_s=" in text)
        limit = ["timeout", str(STREAM_LIMIT_S)] if is_endless else []
        ended = subprocess.run(
            [*limit, "bash", "-euo", "pipefail", "-c", values + text],
            cwd=self.folder, env=self.environ(), capture_output=True, text=True, check=False,
            timeout=COMMAND_LIMIT_S,
        )  # fmt: skip
        said = f"{block}\n{ended.stdout}\n{ended.stderr}"
        assert ended.returncode in ((0, 124) if is_endless else (0,)), said
        assert ended.stdout or not is_stream, said
        self.values.update(_ASSIGNMENT.findall(text))
        return ended.stdout

    def stop(self, keep: Collection[str] = ()) -> None:
        """End what stays in the foreground, but for these blocks; the service before what it talks to."""
        for text in [text for text in self._running if text not in keep]:
            process, _ = self._running.pop(text)
            os.killpg(process.pid, signal.SIGTERM)
            assert process.stdout is not None
            try:
                process.wait(timeout=STOP_LIMIT_S)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()


def last_json(text: str) -> Any:
    """The answer of the last command, if it is JSON."""
    try:
        return json.loads(text[text.index("{") :])
    except ValueError:
        return None
