"""An official SDK's runner and the service on one session, each with tools of its own, as one moves."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server
from tests.interop.test_sdk import driven, python, server
from tests.runner.conftest import engine, migrated_url
from tests.runner.receiver import receiving
from tests.runner.scripts import custom, in_state, live, turn
from tests.runner.service import Service, replicating

__all__ = ["engine", "migrated_url", "python", "server"]

pytestmark = [pytest.mark.anyio, pytest.mark.interop, pytest.mark.timeout(120)]


async def test_each_answers_the_calls_of_its_own_tools_once(
    python: Path, server: Server, engine: AsyncEngine, migrated_url: str
) -> None:
    session = server.create(turn(custom("lookup_order", "report", input={"order_id": "A-1042"})))
    async with receiving() as tool, replicating(engine, migrated_url, server.url) as http:
        service = Service(http, server, tool, engine)
        await service.register("report")
        await live(service, session.id, tools=["report"])
        server.say(session.id)
        theirs = await driven(python, server, "runner", session.id)
        ours = await in_state(service, session.id, "answered_elsewhere", "posted")
    assert [("lookup_order", True)] == [(call["name"], call["posted"]) for call in theirs]
    assert ["report"] == [delivery.data["tool"] for delivery in tool.deliveries]
    answers = server.world.answers(session.id)
    assert {call["id"]: 1 for call in ours} == {call: len(given) for call, given in answers.items()}
