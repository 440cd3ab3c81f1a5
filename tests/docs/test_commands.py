"""Every command of the documentation is run, here or by the test that its page names."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from tests.docs.desk import Desk
from tests.docs.pages import PAGES, ROOT, blocks, files, fits, typed
from tests.installed import program

TUTORIAL = ROOT / "docs" / "tutorial.md"
LIMIT_S = 20.0
BENEATH = [block for block in blocks(TUTORIAL) if "make run" in block.text or "app simulate" in block.text]
"""What starts the service and the simulator."""
NOT_RUN = {
    "it is what runs this",
    "it gets the repository that the test is in",
    "it needs a Docker engine",
    "it needs a cluster",
}
"""Why a block may stay unrun. A page with a new reason adds it here, where somebody reads it."""

pytestmark = pytest.mark.timeout(120)


def test_each_block_is_typed_here_or_says_who_runs_it_or_why_nobody_does() -> None:
    marks = {block.mark for page in PAGES for block in blocks(page)} - {"", "stays in the foreground"}
    assert {mark.removeprefix("not run: ") for mark in marks if mark.startswith("not run: ")} == NOT_RUN
    runners = [mark.removeprefix("run by ") for mark in marks if mark.startswith("run by ")]
    assert [] == [runner for runner in runners if not (ROOT / runner).is_file()]
    assert len(marks) == len(NOT_RUN) + len(runners)


def test_an_answer_fits_what_a_page_shows_of_it() -> None:
    actual = {"id": "sevt_1", "data": [{"n": 1, "more": 2}]}
    assert fits({"id": "sevt_…", "data": [{"n": 1}]}, actual)
    for other in ({"id": "sesn_…"}, {"data": []}, {"data": [{"n": 2}]}, {"none": None}, []):
        assert not fits(other, actual)


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    """They outlive the service: a delivery to a tool that is gone would hold up its stop."""
    with Tools(("127.0.0.1", 0), Webhooks) as tools:
        threading.Thread(target=tools.serve_forever, daemon=True).start()
        yield tools
        tools.shutdown()


@pytest.fixture(scope="module")
def desk(tools: Tools) -> Iterator[Desk]:
    """Where the service and the simulator run, started as the tutorial says."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="bascule-reader-") as name:
        Path(name).chmod(0o711)  # the database's user must be able to enter it
        desk = Desk(Path(name))
        try:
            for block in BENEATH:
                desk.stay(block)
            yield desk
        finally:
            desk.stop()


@pytest.mark.parametrize("page", [page for page, _ in typed()], ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(desk: Desk, tools: Tools, page: Path) -> None:
    if any("go run" in block.text for block in blocks(page)):
        program("go", "golang-go")
    for name, text in files(page).items():
        (desk.folder / name).write_text(text, encoding="utf-8")
    desk.values = {}
    with Scene(desk, tools) as scene:
        for block in blocks(page):
            if block.mark == "stays in the foreground":
                desk.stay(block)
            elif block.is_typed:
                if page != TUTORIAL:  # which takes nothing for granted
                    desk.values = scene.values(block.text)
                desk.type_(block)
    desk.stop(keep=[block.text for block in BENEATH])


class Tools(ThreadingHTTPServer):
    """Tools of the pages' agents. `jobs` are the callbacks of calls to be answered later."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.jobs: list[dict[str, str]] = []


class Webhooks(BaseHTTPRequestHandler):
    """`/report` answers 202 and keeps the callback; any other tool answers at once."""

    server: Tools

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/report":
            self.send_response(202)
            self.server.jobs.append(body["data"]["callback"])
        else:
            self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


class Scene:
    """What pages take for granted: keys, a session, calls that wait, a tool that answers later."""

    def __init__(self, desk: Desk, tools: Tools) -> None:
        self._admin = (desk.folder / ".bascule" / "admin.key").read_text(encoding="utf-8").strip()
        headers = {"authorization": f"Bearer {self._admin}"}
        self._http = httpx.Client(base_url=desk.url("8080"), headers=headers, trust_env=False)
        self._upstream = httpx.Client(base_url=desk.url("8301"), trust_env=False)
        self._tools = tools

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._upstream.close()

    def values(self, text: str) -> dict[str, str]:
        """The variables that a block reads, each with something that it can be used for."""
        values = {"KEY": self._admin, "ADMIN": self._admin, "ADMIN_KEY": self._admin}
        if "$CALLBACK_URL" in text:
            job = self._job()
            values |= {"CALLBACK_URL": job["url"], "CALLBACK_TOKEN": job["token"]}
        elif "$CALL" in text:
            values["SESSION"], values["CALL"] = self._held()
        elif "$SESSION" in text:
            values["SESSION"] = self._session({"do": "message", "text": "Hello."})
        return {name: value for name, value in values.items() if f"${name}" in text}

    def _session(self, *steps: dict[str, Any]) -> str:
        script = {"name": "s", "environment": "self_hosted", "turns": [{"steps": [*steps, {"do": "end"}]}]}
        session_id: str = self._upstream.post("/_sim/sessions", json={"scenario": script}).json()["id"]
        assert self._http.post(f"/sessions/{session_id}/attach", json={"max_idle_s": None}).is_success
        self._until(f"/sessions/{session_id}", lambda shown: shown["status"] == "live")
        return session_id

    def _called(self, tool: str, **policy: Any) -> str:
        """A session whose agent has called the tool."""
        url = f"http://127.0.0.1:{self._tools.server_port}/{tool}"
        assert self._http.put(f"/tools/{tool}", json={"url": url, **policy}).is_success
        call = {"tool": "custom", "name": tool, "input": {"order_id": "A-1042", "amount": 120}}
        session_id = self._session({"do": "call", "calls": [call]})
        assert self._upstream.post(f"/_sim/sessions/{session_id}/start").is_success
        return session_id

    def _held(self) -> tuple[str, str]:
        session_id = self._called("refund", gate="ask")
        shown = self._until(f"/sessions/{session_id}/confirmations", lambda shown: shown["data"])
        return session_id, shown["data"][0]["id"]

    def _job(self) -> dict[str, str]:
        """The callback of a call that its tool answered with 202."""
        session_id = self._called("report")
        self._until(f"/sessions/{session_id}/calls", lambda _: self._tools.jobs)
        return self._tools.jobs.pop()

    def _until(self, path: str, fact: Any) -> Any:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            shown = self._http.get(path).json()
            if fact(shown):
                return shown
            time.sleep(0.05)
        raise AssertionError(f"{path} still shows {shown}")
