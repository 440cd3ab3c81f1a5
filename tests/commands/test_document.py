"""Every command that docs/command-line.md shows is typed here, in its order, against a service."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.main import get_command

from app.__main__ import app
from app.commands.client import Exit
from app.simulator.server import Server
from tests.api.test_serve import ENVIRON, ROOT
from tests.commands.conftest import Terminal
from tests.console.service import Site
from tests.runner.receiver import Delivery, Receiver, echo
from tests.runner.scripts import custom, turn

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
LIMIT_S = 15.0
WHICH: dict[str, Callable[[dict[str, Any]], bool]] = {
    "allow": lambda one: bool(one["state"] == "held" and one["decision"] is None),
    "deny": lambda one: bool(one["state"] == "held" and one["decision"] is None),
    "redeliver": lambda one: bool(one["awaits_callback"]),
}
"""The call that a command is about."""


def lines() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


class Newcomer:
    """Types the page's lines; knows what stands for each variable when a line wants it."""

    def __init__(self, terminal: Terminal, site: Site, session_id: str, webhook: str) -> None:
        self.terminal, self.site, self.session_id = terminal, site, session_id
        self.known = {"SESSION": session_id, "WEBHOOK": webhook}
        self.typed: list[str] = []

    async def type(self, line: str) -> str:
        """Type a line and return what it prints."""
        words = shlex.split(re.sub(r"\$([A-Z_]+)", lambda found: self.known.get(found[1], found[0]), line))
        assert words.pop(0) == "bascule"
        self.typed.append(" ".join(words[:2]))
        if "$CALL" in words:
            call = await self.call(WHICH.get(words[1], lambda one: one["state"] == "posted"))
            words[words.index("$CALL")] = call
        done = await self.terminal.run(*words)
        assert done.exit_code == 0, f"{line}: {done.output}"
        if words[:2] == ["keys", "create"]:
            self.known["KEY_ID"] = re.search(r"key_[0-9a-f]{24}", done.stdout)[0]  # type: ignore[index]
        return str(done.stdout)

    async def call(self, fact: Callable[[dict[str, Any]], bool]) -> str:
        """Wait for a call of the session that is so."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                answer = await self.site.http.get(f"/sessions/{self.session_id}/calls")
                if found := [one["id"] for one in answer.json()["data"] if fact(one)]:
                    return str(found[0])
                await asyncio.sleep(0.05)


async def heard_of(process: asyncio.subprocess.Process, words: str, heard: bytearray) -> None:
    """Read what a process prints until it has printed these words."""
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        while words.encode() not in heard:
            heard += await process.stdout.readline()


async def test_every_command_of_the_page_does_what_it_says(
    terminal: Terminal, site: Site, upstream: Server, tool: Receiver, migrated_url: str
) -> None:
    async def reply(delivery: Delivery) -> web.StreamResponse:
        return web.Response(status=202) if delivery.data["tool"] == "refund" else await echo(delivery)

    tool.reply = reply
    steps = ({"do": "message", "text": "I look."}, custom("lookup_order", "lookup_order", "refund"))
    session_id = upstream.create(turn(*steps)).id
    terminal.environ.update(
        BASCULE_DATABASE_URL=migrated_url,
        BASCULE_SECRET_KEY=base64.b64encode(bytes(range(32))).decode(),
        BASCULE_ADMIN_KEY="0123456789abcdef",
        BASCULE_UPSTREAM_URL=upstream.url,
        ANTHROPIC_API_KEY="any",
    )
    newcomer = Newcomer(terminal, site, session_id, tool.url)
    said: dict[str, str] = {}
    following, followed = None, bytearray()
    for line in lines():
        if line.startswith("bascule sessions follow"):
            words = shlex.split(line.replace("$SESSION", session_id))[1:]
            following = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "app", *words,
                cwd=ROOT, env=ENVIRON | terminal.environ, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            newcomer.typed.append("sessions follow")
            continue
        if line.startswith("bascule confirmations list") and following is not None:
            # Whoever follows from later on is shown how the call stands by then.
            await heard_of(following, "waits for a person", followed)
        if line.startswith("bascule tools test"):
            # As its owner does, the tool has the secret by now.
            tool.secrets.append(re.search(r"whsec_\S+", said["tools put lookup_order"])[0])  # type: ignore[index]
            tool.secrets.append(re.search(r"whsec_\S+", said["tools put refund"])[0])  # type: ignore[index]
        if line.startswith("bascule sessions text"):
            await newcomer.call(lambda one: one["state"] == "held")
        said[" ".join(line.split()[1:4])] = await newcomer.type(line)
    assert following is not None
    async with asyncio.timeout(LIMIT_S):
        followed += (await following.communicate())[0]
    assert following.returncode == 0
    assert "I look.\n" in followed.decode()
    assert "lookup_order: held, waits for a person] {" in followed.decode()
    assert f"[{session_id} is detached" in followed.decode().splitlines()[-1]
    assert "I look." in said[f"sessions text {session_id}".replace(session_id, "$SESSION")]
    assert 'got {\\"order_id\\": \\"A-1042\\"}' in said["tools test lookup_order"]
    assert {"data": [], "next_cursor": None} == json.loads(said["confirmations list --json"])
    group = get_command(app)
    shown = {
        f"{name} {command}"
        for name in ("tools", "sessions", "calls", "confirmations", "keys")
        for command in group.commands[name].commands  # type: ignore[attr-defined]
    }
    assert shown == {one for one in newcomer.typed if not one.startswith("doctor")}


def test_the_page_lists_every_command_and_exit_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert re.search(rf"^\|.*`{name}\b.*\|.*\|$", page, re.MULTILINE), name
    for code in Exit:
        assert f"\n| {code.value} | " in page
