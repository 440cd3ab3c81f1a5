"""The check of inputs on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runner.scripts import custom, in_state, live, results, turn
from tests.runner.service import Service

pytestmark = pytest.mark.anyio

NUMBER = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 0}}}


@pytest.mark.parametrize("schema", [NUMBER, "agent"])
async def test_an_unfit_input_is_answered_upstream_and_never_reaches_the_tool(
    service: Service, schema: Any
) -> None:
    declared = {"type": "custom", "name": "echo", "description": "Echo.", "input_schema": NUMBER}
    script = turn(custom("echo", "echo")) | {"agent": {"name": "t", "tools": [declared]}}
    session = service.upstream.create(script)
    await service.register("echo", input_schema=schema)
    await live(service, session.id)
    service.upstream.say(session.id)
    fit, unfit = await in_state(service, session.id, "posted", "posted")
    assert [fit["id"]] == service.tool.called
    assert (0, True, True) == (unfit["attempts"], unfit["posted"], unfit["result"]["is_error"])
    [answer] = results(service.upstream, session.id)[unfit["id"]]
    assert "n must be at most 0" in answer["content"][0]["text"]
    shown = await service.get(f"/sessions/{session.id}/calls/{unfit['id']}")
    assert ([], True) == (shown["deliveries"], "input_schema" in shown["detail"])
