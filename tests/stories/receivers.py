"""The tools of examples/, started as their README says."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
START_LIMIT_S = 60.0  # Go compiles first
STOP_LIMIT_S = 30.0
CHECK_LIMIT_S = 10.0
SECRET = "whsec_…"
"""What stands for the secret in the commands."""
_ROW = re.compile(r"^\| ([^|]+) \| \[[^]]+\]\(([^)]+)\) \| `([^`]+)` \|", re.MULTILINE)

# Nothing may come from the network while an example starts.
_OFFLINE = {"GOPROXY": "off", "GOTOOLCHAIN": "local", "NO_UPDATE_NOTIFIER": "1"}


@dataclass(frozen=True)
class Example:
    """A row of the table: `command` is what starts it in the folder of the clone."""

    language: str
    file: str
    command: str

    def filled(self, secret: str) -> str:
        command = self.command.replace(SECRET, shlex.quote(secret))
        return command.replace("python3", shlex.quote(sys.executable))


EXAMPLES = {
    language: Example(language, file, command)
    for language, file, command in _ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
}

_PROGRAMS: Mapping[str, Sequence[str]] = {
    "TypeScript": ("npm",),
    "Node": ("node",),
    "Go": ("go",),
    "Ruby": ("ruby",),
    "shell": ("busybox", "jq", "openssl"),
}
_REMEDIES = {
    "TypeScript": "Debian: apt install npm; then npm --prefix examples ci",
    "Node": "Debian: apt install nodejs",
    "Go": "Debian: apt install golang-go",
    "Ruby": "Debian: apt install ruby ruby-webrick",
    "shell": "Debian: apt install busybox jq openssl",
}


@functools.cache
def left_out(language: str) -> str | None:
    """Return a sentence that says what an example lacks on this machine; None if it can be started."""
    lacks = [name for name in _PROGRAMS.get(language, ()) if shutil.which(name) is None]
    if language == "TypeScript" and not (FOLDER / "node_modules" / ".package-lock.json").exists():
        lacks.append("what its lock file names")
    if language == "Ruby" and not lacks and not _has_webrick():
        lacks.append("the gem webrick")
    if not lacks:
        return None
    what, remedy = " and ".join(lacks), _REMEDIES[language]
    return f"left out: the {language} example, as {what} is not installed ({remedy})"


def _has_webrick() -> bool:
    command = ["ruby", "-e", 'require "webrick"']
    return subprocess.run(command, capture_output=True, timeout=CHECK_LIMIT_S, check=False).returncode == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Receiver:
    """An example that listens at `url`."""

    def __init__(self, example: Example, secret: str, port: int, folder: Path = ROOT) -> None:
        self.url = f"http://127.0.0.1:{port}/"
        # Several start the server as a child of theirs, so what is stopped is the group.
        self._process = subprocess.Popen(
            ["bash", "-c", example.filled(secret)],
            cwd=folder, env={**os.environ, **_OFFLINE, "PORT": str(port)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            self._until_it_listens(port)
        except AssertionError as error:
            raise AssertionError(f"{error}; it said:\n{self.stop()}") from None

    def stop(self) -> str:
        """End it and return what it wrote."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.communicate(timeout=STOP_LIMIT_S)[0]

    def _until_it_listens(self, port: int) -> None:
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end:
            assert self._process.poll() is None, "the example ended"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"nothing listens at port {port}")
