"""An edited input on its whole way: to the tool, past crashes, and into what the agent is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.calls import digest
from app.simulator.server import Server, running
from app.simulator.world import World
from app.store.database import create_engine
from tests.runner.process import serving_child
from tests.runner.receiver import Delivery, Receiver, receiving
from tests.runner.scripts import Gate, custom, in_state, live, results, turn
from tests.runner.service import Service, replicating

pytestmark = pytest.mark.anyio

EDITED = '{"n":-1.50,"why":"less"}'


@pytest.fixture
async def tool() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def upstream() -> AsyncIterator[Server]:
    async with running(World(pace=0)) as server:
        yield server


async def held(service: Service, *, script: dict[str, Any] | None = None, **policy: Any) -> tuple[str, Any]:
    """A session whose one call waits for a person; return its id, and the call."""
    session = service.upstream.create(script or turn(custom("refund")))
    await service.register("refund", gate="ask", **policy)
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "held")
    return session.id, call


async def edit(service: Service, session_id: str, call_id: str, edited: str = EDITED) -> Any:
    body = f'{{"tool_use_id": "{call_id}", "result": "allow", "input": {edited}}}'
    headers = {"content-type": "application/json"}
    answer = await service.http.post(f"/sessions/{session_id}/confirm", content=body, headers=headers)
    assert 200 == answer.status_code, answer.text
    return answer.json()


@pytest.mark.parametrize("is_error", [False, True])
async def test_the_tool_gets_the_edit_and_the_agent_is_told_and_the_original_stays(
    service: Service, is_error: bool
) -> None:
    async def reply(_: Delivery) -> web.StreamResponse:
        return web.json_response({"content": "the tool's words", "is_error": is_error})

    service.tool.reply = reply
    session_id, call = await held(service)
    await edit(service, session_id, call["id"])
    (shown,) = await in_state(service, session_id, "posted")
    (delivery,) = service.tool.deliveries
    assert f'"input":{EDITED}' in delivery.body.decode()
    assert (True, digest(EDITED.encode())) == (delivery.data["input_edited"], delivery.data["input_digest"])
    [answer] = results(service.upstream, session_id)[call["id"]]
    notice, words = (block["text"] for block in answer["content"])
    assert (is_error, "the tool's words") == (answer["is_error"], words)
    assert notice.startswith("A person edited the input of this call before it ran.")
    assert notice.endswith(EDITED)
    assert (call["input"], json.loads(EDITED)) == (shown["input"], shown["edited_input"])
    assert ["the tool's words"] == [block["text"] for block in shown["result"]["content"]]


async def test_a_call_that_is_allowed_as_it_is_says_nothing_of_edits(service: Service) -> None:
    session_id, call = await held(service)
    body = {"tool_use_id": call["id"], "result": "allow", "input": call["input"]}
    assert 200 == (await service.http.post(f"/sessions/{session_id}/confirm", json=body)).status_code
    await in_state(service, session_id, "posted")
    assert "input_edited" not in service.tool.deliveries[0].data
    [answer] = results(service.upstream, session_id)[call["id"]]
    assert 1 == len(answer["content"])


async def test_an_edit_that_the_agents_own_schema_forbids_goes_back_to_a_person(service: Service) -> None:
    """Only the runner knows that schema; nothing runs and the agent hears nothing."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}}
    declared = {"type": "custom", "name": "refund", "description": "Pay.", "input_schema": schema}
    script = turn(custom("refund")) | {"agent": {"name": "t", "tools": [declared]}}
    session_id, call = await held(service, script=script, input_schema="agent")
    await edit(service, session_id, call["id"])

    def is_refused(shown: Any) -> bool:
        return [one["decision"]["status"] for one in shown["data"] if one["decision"]] == ["refused"]

    await service.until("/confirmations", is_refused)
    assert ([], {}) == (service.tool.deliveries, results(service.upstream, session_id))
    await edit(service, session_id, call["id"], '{"n": 7}')
    await in_state(service, session_id, "posted")
    assert [{"n": 7}] == [delivery.data["input"] for delivery in service.tool.deliveries]


async def test_after_a_kill_the_same_edit_is_delivered_again_and_told_once(
    engine: AsyncEngine, migrated_url: str, upstream: Server, tool: Receiver
) -> None:
    """What runs is in the database: the replica that takes over sends the same bytes."""
    echo, tool.reply = tool.reply, Gate()
    async with serving_child(migrated_url, upstream.url) as child:
        first = Service(child.http, upstream, tool, engine)
        session_id, call = await held(first, retry="safe")
        await edit(first, session_id, call["id"])
        await tool.until(lambda: len(tool.deliveries) == 1)
        await child.kill()
    tool.reply = echo
    async with engine.begin() as connection:
        await connection.execute(text("update replicas set expires_at = now() - interval '1 s'"))
        # Not even what was sent is needed: the edit itself is kept.
        await connection.execute(text("delete from bodies"))
    own = create_engine(migrated_url, connections_max=6)
    async with replicating(own, migrated_url, upstream.url) as http:
        await in_state(Service(http, upstream, tool, engine), session_id, "posted", limit_s=30)
    before, after = tool.deliveries
    assert (before.id, before.data["input"]) == (after.id, json.loads(EDITED))
    assert json.loads(EDITED) == before.data["input"]
    assert (True, before.data["input_digest"]) == (after.data["input_edited"], after.data["input_digest"])
    [answer] = results(upstream, session_id)[call["id"]]
    notice, words = (block["text"] for block in answer["content"])
    assert (True, True) == (notice.startswith("A person edited"), words.startswith("got "))
