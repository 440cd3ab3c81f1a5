"""The official Python SDK, in an environment of its own, against the simulator."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.simulator.server import Server, running
from app.simulator.switches import Fault
from app.simulator.world import World
from tests.interop.environments import python_of

pytestmark = [pytest.mark.anyio, pytest.mark.interop, pytest.mark.timeout(120)]

DRIVER = Path(__file__).with_name("sdk_driver.py")
LOCK = Path(__file__).with_name("requirements-sdk.lock")
FIXTURES = Path(__file__).parents[1] / "fixtures"
DRIVER_S = 60.0
STREAM_ONLY = {"event_start", "event_delta", "session.deleted"}
UNUSUAL_CLASSES = {"event_start": "StartEvent", "event_delta": "DeltaEvent"}


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("sdk", LOCK)


@pytest.fixture
async def server(anyio_backend: str) -> AsyncIterator[Server]:
    async with running(World(pace=0)) as server:
        yield server


async def driven(python: Path, server: Server, command: str, session_id: str, **given: Any) -> Any:
    """Run the driver and return what it printed."""
    process = await asyncio.create_subprocess_exec(
        str(python),
        str(DRIVER),
        command,
        server.url,
        session_id,
        json.dumps(given),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DRIVER_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def test_the_runner_completes_a_custom_turn(python: Path, server: Server) -> None:
    session = server.create("custom")
    server.say(session.id)
    [call] = await driven(python, server, "runner", session.id)
    assert (
        call["name"],
        call["posted"],
        call["is_error"],
        call["confirmation"],
    ) == ("lookup_order", True, False, None)
    [answer] = server.world.answers(session.id)[call["id"]]
    assert answer["content"] == [{"type": "text", "text": "A-1042 is shipped"}]
    assert session.status == "idle"


async def test_the_runner_works_through_parallel_calls(python: Path, server: Server) -> None:
    steps = [
        {
            "do": "call",
            "calls": [{"tool": "custom", "name": "lookup_order", "input": {"order_id": f"A-{n}"}}] * 4,
        }
        for n in range(3)
    ]
    session = server.create({"turns": [{"steps": steps}]})
    server.say(session.id)
    calls = await driven(python, server, "runner", session.id)
    assert (12, {True}) == (len(calls), {call["posted"] for call in calls})
    assert all(len(each) == 1 for each in server.world.answers(session.id).values())


@pytest.mark.parametrize(("verdict", "answers"), [("allow", 1), ("deny", 0)])
async def test_the_runner_obeys_verdicts(python: Path, server: Server, verdict: str, answers: int) -> None:
    session = server.create("gated")
    server.say(session.id)
    [call_id] = session.waiting_ids()
    async with asyncio.TaskGroup() as tasks:
        running_driver = tasks.create_task(driven(python, server, "runner", session.id))
        await server.until(lambda: any(each.endpoint == "list" for each in server.world.requests), limit_s=30)
        confirmation = {"type": "user.tool_confirmation", "tool_use_id": call_id, "result": verdict}
        server.world.send(session.id, {"events": [confirmation]}, now=server.now)
    [call] = running_driver.result()
    assert (verdict, bool(answers)) == (call["confirmation"], call["posted"])
    assert answers == len(server.world.answers(session.id).get(call_id, []))
    assert session.status == "idle"


@pytest.mark.parametrize("fault", ["eof", "cut"])
async def test_the_runner_reconnects_and_answers_once(python: Path, server: Server, fault: Any) -> None:
    session = server.create("custom")
    server.world.strike(Fault(fault, after_events=2))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(driven(python, server, "runner", session.id))
        await server.until(lambda: server.streams.count, limit_s=30)
        server.say(session.id)
    [answers] = server.world.answers(session.id).values()
    assert len(answers) == 1
    assert sum(each.endpoint == "stream" for each in server.world.requests) >= 2


async def test_previews_parse(python: Path, server: Server) -> None:
    session = server.create(
        {"turns": [{"steps": [{"do": "message", "text": "Order A-1042 shipped.", "deltas": 4}]}]}
    )
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(driven(python, server, "watch", session.id, until="agent.message"))
        await server.until(lambda: server.streams.count, limit_s=30)
        server.say(session.id)
    events = [
        each for each in watching.result() if each["type"] in ("event_start", "event_delta", "agent.message")
    ]
    assert [
        "BetaManagedAgentsStartEvent",
        *["BetaManagedAgentsDeltaEvent"] * 4,
        "BetaManagedAgentsAgentMessageEvent",
    ] == [each["class"] for each in events]
    text = "".join(each["event"]["delta"]["content"]["text"] for each in events[1:-1])
    assert text == events[-1]["event"]["content"][0]["text"]


@pytest.mark.parametrize("switches", [{}, {"empty_pages": True}, {"nulls": "absent"}])
async def test_lists_page_through_small_pages(python: Path, server: Server, switches: dict[str, Any]) -> None:
    server.world.switch(**switches)
    session = server.create("custom")
    server.say(session.id)
    ids = [entry.id for entry in session.primary.log.entries]
    seen = await driven(python, server, "pages", session.id, limit=3)
    assert ids == seen["ids"]
    if not switches:
        assert seen["sizes"] == [3, 3, 3, 1]


async def test_a_whole_conversation_over_list_stream_and_send(python: Path, server: Server) -> None:
    session = server.create("custom")
    saw = await driven(python, server, "talk", session.id)
    assert saw["seen"] == saw["listed"]
    assert [event_type for event_type, _id in saw["sent"]] == ["user.message", "user.custom_tool_result"]
    assert (
        saw["status"],
        saw["environment"],
        saw["threads"],
        saw["missing"],
    ) == ("idle", "cloud", ["idle"], [])


async def test_a_refusal_is_the_class_that_the_sdk_has_for_it(python: Path, server: Server) -> None:
    session = server.create("custom")
    saw = await driven(python, server, "failing", session.id)
    assert (saw["class"], saw["status"]) == ("BadRequestError", 400)
    assert saw["request_id"] == server.world.requests[-1].request_id


@pytest.mark.parametrize("nulls", ["null", "absent", "mixed"])
async def test_what_scenarios_emit_has_every_field_that_the_sdk_needs(
    python: Path, server: Server, nulls: str
) -> None:
    server.world.switch(nulls=nulls)
    sessions = [server.create(name) for name in ("demo", "threads", "mcp", "trouble", "cloud")]
    for session in sessions:
        server.say(session.id)
        for _ in range(20):
            for call_id in session.waiting_ids()[:1]:
                server.world.send(session.id, {"events": [_answer(session.calls[call_id])]}, now=server.now)
    first, *more = [session.id for session in sessions]
    events = await driven(python, server, "listing", first, more=more)
    assert len(events) == sum(len(session.primary.log.entries) for session in sessions)
    assert [(each["type"], each["missing"]) for each in events if each["missing"]] == []
    assert [each["type"] for each in events if each["class"] != _class_of(each["type"])] == []


@pytest.mark.parametrize("folder", ["events", "variants"])
async def test_every_sample_passes_through_stream_and_list(python: Path, server: Server, folder: str) -> None:
    samples = [json.loads(path.read_text()) for path in sorted((FIXTURES / folder).glob("*.json"))]
    if folder == "variants":
        samples.append(json.loads((FIXTURES / "events" / "event_start.json").read_text()))
    samples.sort(key=lambda each: each["type"] != "event_start")
    session = server.create("custom")
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(driven(python, server, "watch", session.id, count=len(samples)))
        await server.until(lambda: server.streams.count, limit_s=30)
        for sample in samples:
            server.emit(session.id, sample)
    _check(samples, watching.result())
    listed = await driven(python, server, "listing", session.id)
    kept = [each for each in samples if each["type"] not in STREAM_ONLY]
    _check(sorted(kept, key=_id), sorted(listed, key=lambda each: _id(each["event"])))


def _check(samples: list[dict[str, Any]], seen: list[dict[str, Any]]) -> None:
    assert [each["type"] for each in samples] == [each["type"] for each in seen]
    assert [(each["type"], each["missing"]) for each in seen if each["missing"]] == []
    assert [each["type"] for each in seen if each["class"] != _class_of(each["type"])] == []
    for sample, each in zip(samples, seen, strict=True):
        assert _plain(sample) == _plain(each["event"])


def _class_of(event_type: str) -> str:
    words = [word if word != "mcp" else "MCP" for word in re.split(r"[._]", event_type)]
    name = "".join(word if word.isupper() else word.capitalize() for word in words) + "Event"
    return "BetaManagedAgents" + UNUSUAL_CLASSES.get(event_type, name)


def _plain(value: Any) -> Any:
    """Return JSON with timestamps in one form, for the SDK shortens their fractions."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", value):
        return re.sub(r"\.?0*Z$", "Z", value) if "." in value else value
    return value


def _id(event: dict[str, Any]) -> str:
    return str(event["id"])


def _answer(call: Any) -> dict[str, Any]:
    if call.awaits == "verdict":
        return {
            "type": "user.tool_confirmation",
            "tool_use_id": call.id,
            "result": "deny",
            "deny_message": "No.",
        }
    text = [{"type": "text", "text": "ok"}]
    if call.spec.kind == "custom":
        return {"type": "user.custom_tool_result", "custom_tool_use_id": call.id, "content": text}
    return {"type": "user.tool_result", "tool_use_id": call.id, "content": text}
