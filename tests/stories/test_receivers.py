"""The tool of examples/ in every language: it serves the real service and refuses everybody else."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from app.simulator.server import Server, running
from app.simulator.world import World
from app.webhooks.wire import sign
from tests import postgres
from tests.runner.process import serving_child
from tests.stories.receivers import (
    EXAMPLES,
    FOLDER,
    ROOT,
    SECRET,
    START_LIMIT_S,
    Example,
    Receiver,
    free_port,
    left_out,
)

STARTED = [language for language in EXAMPLES if left_out(language) is None]
POSTED_LIMIT_S = 20.0
KEY, OTHER_KEY = bytes(range(0, 256, 8)), b"o" * 32
SIGNING_SECRET = "whsec_" + base64.b64encode(KEY).decode()
BODY = b'{"type":"tool.call","data":{"tool":"lookup_order","input":{"order_id":"A-1042"}}}'
BAD_SIGNATURE = "bad signature: is TOOL_SECRET the signing_secret of this tool?"


@dataclass(frozen=True)
class Bridge:
    """The service as a process of its own, and its upstream."""

    http: httpx.AsyncClient
    upstream: Server

    async def secret_for(self, url: str) -> str:
        """Register the tool anew, since its secret is told only once."""
        await self.http.delete("/tools/lookup_order")
        registered = await self.http.put("/tools/lookup_order", json={"url": url})
        assert registered.status_code == 201, registered.text
        return str(registered.json()["signing_secret"])


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def bridge(migrated_url: str) -> AsyncIterator[Bridge]:
    with postgres.database(migrated_url) as url:
        async with (
            running(World(pace=0)) as upstream,
            serving_child(url, upstream.url, {"BASCULE_MIGRATE": "1"}) as child,
        ):
            yield Bridge(child.http, upstream)


@pytest.mark.parametrize("language", EXAMPLES)
def test_every_example_can_be_started_or_is_left_out_loudly(language: str) -> None:
    """C-050: CI leaves nothing out."""
    if sentence := left_out(language):
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            pytest.fail(f"{sentence}, and CI=true forbids that")
        pytest.skip(sentence)


@pytest.mark.anyio
@pytest.mark.timeout(120)
@pytest.mark.parametrize("language", STARTED)
async def test_an_example_answers_a_call_of_the_service(bridge: Bridge, language: str) -> None:
    port = free_port()
    secret = await bridge.secret_for(f"http://127.0.0.1:{port}/")
    receiver = await asyncio.to_thread(Receiver, EXAMPLES[language], secret, port)
    try:
        session = bridge.upstream.create("custom")
        await bridge.http.post(f"/sessions/{session.id}/attach", json={"max_idle_s": None})
        bridge.upstream.say(session.id)
        calls: list[dict[str, object]] = []
        async with asyncio.timeout(POSTED_LIMIT_S):
            while [call["state"] for call in calls] != ["posted"]:
                await asyncio.sleep(0.05)
                calls = (await bridge.http.get(f"/sessions/{session.id}/calls")).json()["data"]
    finally:
        receiver.stop()
    shipped = [{"type": "text", "text": "order A-1042 has shipped"}]
    assert calls[0]["result"] == {"content": shipped, "is_error": False}
    assert calls[0]["attempts"] == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("language", STARTED)
def test_an_example_refuses_what_is_not_signed_for_it(language: str) -> None:
    receiver = Receiver(EXAMPLES[language], SIGNING_SECRET, free_port())
    now = int(time.time())
    good, old, early = (sign([KEY], "call_x", now + shift, BODY) for shift in (0, -360, 360))

    def answer(
        signature: str | bytes, at: str = str(now), id_: str = "call_x", body: bytes = BODY
    ) -> httpx.Response:
        headers = {"webhook-id": id_, "webhook-timestamp": at, "webhook-signature": signature}
        return httpx.post(receiver.url, content=body, headers=headers, trust_env=False)

    try:
        accepted = [
            answer(good),
            answer(sign([OTHER_KEY, KEY], "call_x", now, BODY)),  # after a rotation: the second entry is ours
            answer(f"v1a,x v2,y {good}"),
        ]
        refused = [
            httpx.post(receiver.url, content=BODY, trust_env=False),
            httpx.post(receiver.url, trust_env=False),
            answer(sign([OTHER_KEY], "call_x", now, BODY)),
            answer(good, body=BODY.replace(b"A-1042", b"A-1043")),
            answer(good, id_="call_y"),
            answer(old, at=str(now - 360)),
            answer(early, at=str(now + 360)),
            answer(old),
            answer(good, at="soon"),
            answer(good, at="9" * 5000),
            answer(""),
            answer("v1"),
            answer("v1,"),
            answer("v1,*"),
            answer(b"v1,\xff\xb2"),
        ]
    finally:
        log = receiver.stop()
    for each in accepted:
        assert (each.status_code, each.json()) == (200, {"content": "order A-1042 has shipped"})
    for each in refused:
        assert each.status_code == 401
        assert each.headers["content-type"].partition(";")[0] == "text/plain"
        assert each.text.strip() == BAD_SIGNATURE
    assert "Traceback" not in log
    assert "Error" not in log


@pytest.mark.timeout(120)
@pytest.mark.parametrize("language", STARTED)
def test_an_example_tells_the_agent_what_is_wrong_with_an_input(language: str) -> None:
    receiver = Receiver(EXAMPLES[language], SIGNING_SECRET, free_port())
    now = int(time.time())
    inputs = ("{}", '{"order_id":7}', '{"order_id":null}', '{"other":"A-1042"}', "[1]", '"A-1042"', "null")
    answers = []
    try:
        for input_ in inputs:
            body = b'{"type":"tool.call","data":{"tool":"lookup_order","input":%s}}' % input_.encode()
            headers = {"webhook-id": "call_x", "webhook-timestamp": str(now)}
            headers["webhook-signature"] = sign([KEY], "call_x", now, body)
            answers.append(httpx.post(receiver.url, content=body, headers=headers, trust_env=False))
    finally:
        receiver.stop()
    for each in answers:
        assert (each.status_code, each.headers["content-type"]) == (200, "application/json")
        assert each.json() == {"content": "order_id must be a text such as A-1042", "is_error": True}


@pytest.mark.parametrize("language", STARTED)
@pytest.mark.parametrize("secret", ["", SECRET])
def test_an_example_without_its_secret_says_how_to_start_it(language: str, secret: str) -> None:
    example = EXAMPLES[language]
    ended = subprocess.run(
        ["bash", "-c", example.filled(secret)],
        cwd=ROOT, env={**os.environ, "LC_ALL": "C.UTF-8"}, capture_output=True, text=True,
        timeout=START_LIMIT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"usage: {example.command} ")
    assert "Traceback" not in ended.stderr


def test_the_ten_lines_of_the_guide_are_a_tool(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "receiving-webhooks.md").read_text(encoding="utf-8")
    program, command = re.findall(r"```(?:python|sh)\n(.*?)\n```", guide, re.DOTALL)[:2]
    assert len([line for line in program.splitlines() if line]) <= 10
    (tmp_path / "tool.py").write_text(program)
    port = free_port()
    command = command.replace("9000", str(port))
    command = command.replace("uvicorn", f"{shlex.quote(sys.executable)} -m uvicorn")
    receiver = Receiver(Example("guide", "tool.py", command), SIGNING_SECRET, port, tmp_path)
    now = int(time.time())
    headers = {"webhook-id": "call_x", "webhook-timestamp": str(now)}
    try:
        answers = [
            httpx.post(
                receiver.url, content=BODY, trust_env=False,
                headers=headers | {"webhook-signature": sign([key], "call_x", now, BODY)},
            )
            for key in (KEY, OTHER_KEY)
        ]  # fmt: skip
    finally:
        receiver.stop()
    assert [each.status_code for each in answers] == [200, 500]
    assert answers[0].json() == {"content": "order A-1042 has shipped"}


def test_the_table_names_every_example() -> None:
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.glob("tool*")}
    assert {example.file for example in EXAMPLES.values()} == {*files, "shell/cgi-bin/index.cgi"}


def test_the_lock_of_the_node_example_names_no_index() -> None:
    lock = (FOLDER / "package-lock.json").read_text(encoding="utf-8")
    assert '"resolved"' not in lock
    assert lock.count('"integrity"') == lock.count('"node_modules/')
