"""`bascule serve` against PyPI's open-managed-agents, a server that we did not write.

It replays the history on each connect, leaves the permission out of gated calls, takes a verdict for the
answer to a call, and refuses whatever comes after one with 409.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import postgres
from tests.interop.environments import ROOT, python_of
from tests.runner.receiver import Receiver, receiving
from tests.runner.service import Service
from tests.store.rows import until

pytestmark = [pytest.mark.anyio, pytest.mark.interop, pytest.mark.timeout(180)]

LOCK = Path(__file__).with_name("requirements-oma.lock")
SERVER = Path(__file__).with_name("oma_server.py")
ADMIN_KEY = "an-admin-key-for-tests"
SECRET_KEY = base64.b64encode(bytes(range(32))).decode()
START_S = 30.0
STOP_S = 15.0
UPSTREAM_HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "managed-agents-2026-04-01"}
ANSWERS = ("user.custom_tool_result", "user.tool_result", "user.tool_confirmation")
WEATHER = {
    "type": "custom",
    "name": "get_weather",
    "description": "Weather for a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
GATED_BASH = {
    "type": "agent_toolset_20260401",
    "default_config": {"enabled": True, "permission_policy": {"type": "always_ask"}},
}


@dataclass(frozen=True)
class Upstream:
    """open-managed-agents over its own HTTP API."""

    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post(path, json=body)
        assert answer.is_success, answer.text
        value: dict[str, Any] = answer.json()
        return value

    async def create_session(self, tool: dict[str, Any], environment: str) -> str:
        """Create an agent with one tool, an environment of that type, and a session of both."""
        agent = await self.post("/v1/agents", {"name": "weather", "model": "gpt-5.5", "tools": [tool]})
        place = {"name": f"place-{agent['id']}", "config": {"type": environment}}
        environment_id = (await self.post("/v1/environments", place))["id"]
        session = await self.post("/v1/sessions", {"agent": agent["id"], "environment_id": environment_id})
        return str(session["id"])

    async def say(self, session_id: str) -> None:
        content = [{"type": "text", "text": "What is the weather in Paris?"}]
        await self.send(session_id, {"type": "user.message", "content": content})

    async def send(self, session_id: str, event: dict[str, Any]) -> None:
        await self.post(f"/v1/sessions/{session_id}/events", {"events": [event]})

    async def answers(self, session_id: str) -> list[dict[str, Any]]:
        """Every answer to a call that it holds, whoever gave it."""
        return await self._listed(session_id, *ANSWERS)

    async def event(self, session_id: str, event_type: str) -> dict[str, Any]:
        """Wait for an event of this type; return the first."""
        found: list[dict[str, Any]] = []

        async def is_there() -> bool:
            found[:] = await self._listed(session_id, event_type)
            return bool(found)

        await until(is_there, START_S)
        return found[0]

    async def _listed(self, session_id: str, *event_types: str) -> list[dict[str, Any]]:
        answer = await self.http.get(f"/v1/sessions/{session_id}/events", params={"limit": 1000})
        return [event for event in answer.json()["data"] if event["type"] in event_types]


@dataclass(frozen=True)
class World:
    """`service` asks `bascule serve` as the operator."""

    upstream: Upstream
    service: Service
    tool: Receiver

    async def held(self, session_id: str) -> str:
        """Wait until one call waits for a person; return its id."""
        path = f"/sessions/{session_id}/confirmations"
        shown = await self.service.until(path, lambda shown: len(shown["data"]) == 1)
        return str(shown["data"][0]["id"])

    async def decide(self, session_id: str, call_id: str, **decision: str) -> None:
        body = {"tool_use_id": call_id, **decision}
        answer = await self.service.http.post(f"/sessions/{session_id}/confirm", json=body)
        assert answer.status_code in (200, 202), answer.text

    async def state(self, session_id: str, call_id: str, *states: str) -> str:
        """Wait until a call is in one of these states; return it."""
        path = f"/sessions/{session_id}/calls/{call_id}"
        shown = await self.service.until(path, lambda call: call["state"] in states, limit_s=25)
        return str(shown["state"])

    async def text(self, session_id: str) -> str:
        """Wait for a message of the agent; return its text."""
        shown = await self.service.until(f"/sessions/{session_id}/text", lambda shown: shown["data"])
        assert [message["state"] for message in shown["data"]] == ["final"]
        return str(shown["data"][0]["text"])


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("oma", LOCK, pip_args=["--ignore-requires-python"])


@pytest.fixture(scope="module")
def database_server() -> Iterator[str]:
    with postgres.server() as url:
        yield url


@pytest.fixture
async def world(
    anyio_backend: str, python: Path, database_server: str, tmp_path: Path
) -> AsyncIterator[World]:
    with postgres.database(database_server) as ours, postgres.database(database_server) as theirs:
        async with (
            upstreaming(python, theirs, tmp_path) as upstream,
            receiving() as tool,
            serving(ours, upstream.url, tmp_path / "serve.log") as http,
        ):
            service = Service(http, None, tool, None)  # type: ignore[arg-type]
            await service.register("get_weather", "bash")
            yield World(upstream, service, tool)


@contextlib.asynccontextmanager
async def upstreaming(python: Path, database_url: str, folder: Path) -> AsyncIterator[Upstream]:
    """Run the foreign server outside the repository, on PostgreSQL: on SQLite its list filters fail."""
    variables = {
        "DATABASE_URL": database_url.replace("postgresql://", "postgresql+asyncpg://"),
        "OMA_RUNTIME_BACKEND": "local",
        "OMA_EVENT_POLL_INTERVAL_SECONDS": "0.05",
    }
    process = await asyncio.create_subprocess_exec(
        str(python),
        "-I",
        str(SERVER),
        cwd=folder,
        env={**_bare_environment(), **variables},
        stdout=asyncio.subprocess.PIPE,
    )
    async with stopped(process):
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            port = int(await process.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, headers=UPSTREAM_HEADERS, trust_env=False) as http:
            yield Upstream(http)


@contextlib.asynccontextmanager
async def serving(database_url: str, upstream_url: str, log: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run `bascule serve`; after it, its log must hold no error."""
    port = _free_port()
    variables = {
        "BASCULE_DATABASE_URL": database_url,
        "BASCULE_MIGRATE": "1",
        "BASCULE_UPSTREAM_URL": upstream_url,
        "BASCULE_WEBHOOK_ALLOW": "127.0.0.0/8",
        "BASCULE_ADMIN_KEY": ADMIN_KEY,
        "BASCULE_SECRET_KEY": SECRET_KEY,
        "BASCULE_PORT": str(port),
        "BASCULE_LOG_FORMAT": "json",
        "ANTHROPIC_API_KEY": "anything",
    }
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "app",
            "serve",
            cwd=ROOT,
            env={**_bare_environment(), **variables},
            stderr=errors,
        )
    async with stopped(process):
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as http:
            await until(lambda: _is_ready(http, process), START_S)
            yield http
    assert _defects(log) == []


@contextlib.asynccontextmanager
async def stopped(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Stop a process at the end of the block, by a signal first."""
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def _defects(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line["level"] in ("error", "critical")]


async def _is_ready(http: httpx.AsyncClient, process: asyncio.subprocess.Process) -> bool:
    assert process.returncode is None, "bascule serve has ended; its log says why"
    try:
        return (await http.get("/readyz")).is_success
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _bare_environment() -> dict[str, str]:
    """What a process needs of ours: neither settings nor anything of Python's."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}


async def test_a_custom_turn_is_served(world: World) -> None:
    session_id = await world.upstream.create_session(WEATHER, "cloud")
    assert re.fullmatch("[A-Za-z0-9_-]{1,128}", session_id)
    await world.service.attach(session_id)
    await world.upstream.say(session_id)
    text = await world.text(session_id)
    [call] = (await world.service.calls(session_id)).values()
    await world.state(session_id, call["id"], "posted")
    assert world.tool.called == [call["id"]]
    [answer] = await world.upstream.answers(session_id)
    assert (answer["type"], answer["custom_tool_use_id"]) == ("user.custom_tool_result", call["id"])
    assert text.endswith('received custom tool result: got {"prompt": "What is the weather in Paris?"}')


async def test_a_session_with_a_past_is_taken_up_where_it_stands(world: World) -> None:
    """The first turn was another client's; its history comes with the list and again with the stream."""
    session_id = await world.upstream.create_session(WEATHER, "cloud")
    await world.upstream.say(session_id)
    first = await world.upstream.event(session_id, "agent.custom_tool_use")
    content = [{"type": "text", "text": "sunny"}]
    result = {"type": "user.custom_tool_result", "custom_tool_use_id": first["id"], "content": content}
    await world.upstream.send(session_id, result)
    await world.upstream.event(session_id, "agent.message")
    await world.service.attach(session_id)
    assert (await world.text(session_id)).endswith("received custom tool result: sunny")
    await world.upstream.say(session_id)
    shown = await world.service.until(f"/sessions/{session_id}/text", lambda shown: len(shown["data"]) == 2)
    assert shown["data"][1]["text"].endswith('got {"prompt": "What is the weather in Paris?"}')
    targets = [answer["custom_tool_use_id"] for answer in await world.upstream.answers(session_id)]
    assert targets[0] == first["id"]
    assert world.tool.called == targets[1:]
    assert len(targets) == len(set(targets)) == 2


async def test_an_allowed_call_runs_once_and_only_after_the_verdict(world: World) -> None:
    """Its environment is of a type that nobody documents: the call is ours to run, once it is allowed."""
    session_id = await world.upstream.create_session(GATED_BASH, "local")
    await world.service.attach(session_id)
    await world.upstream.say(session_id)
    call_id = await world.held(session_id)
    assert world.tool.called == []
    await world.decide(session_id, call_id, result="allow")
    await world.tool.until(lambda: world.tool.called)
    [verdict] = await world.upstream.answers(session_id)
    assert (verdict["type"], verdict["tool_use_id"], verdict["result"]) == (
        "user.tool_confirmation",
        call_id,
        "allow",
    )
    assert (await world.text(session_id)).endswith("received tool confirmation: allow")
    # To this server the verdict was the answer, so it takes no result.
    assert await world.state(session_id, call_id, "posted", "rejected") == "rejected"
    assert world.tool.called == [call_id]
    assert await world.upstream.answers(session_id) == [verdict]


async def test_an_allowed_call_of_a_cloud_environment_is_left_to_the_platform(world: World) -> None:
    """R-104."""
    session_id = await world.upstream.create_session(GATED_BASH, "cloud")
    await world.service.attach(session_id)
    await world.upstream.say(session_id)
    call_id = await world.held(session_id)
    await world.decide(session_id, call_id, result="allow")
    assert (await world.text(session_id)).endswith("received tool confirmation: allow")
    await world.state(session_id, call_id, "unowned")
    [verdict] = await world.upstream.answers(session_id)
    assert (verdict["type"], verdict["tool_use_id"]) == ("user.tool_confirmation", call_id)
    assert world.tool.called == []


@pytest.mark.parametrize("environment", ["cloud", "local"])
async def test_a_denied_call_never_reaches_its_webhook(world: World, environment: str) -> None:
    session_id = await world.upstream.create_session(GATED_BASH, environment)
    await world.service.attach(session_id)
    await world.upstream.say(session_id)
    call_id = await world.held(session_id)
    await world.decide(session_id, call_id, result="deny", deny_message="not today")
    await world.state(session_id, call_id, "denied")
    assert (await world.text(session_id)).endswith("received tool denial: not today")
    [verdict] = await world.upstream.answers(session_id)
    assert (verdict["type"], verdict["tool_use_id"], verdict["result"]) == (
        "user.tool_confirmation",
        call_id,
        "deny",
    )
    assert world.tool.called == []
