"""GET, HEAD, OPTIONS change nothing, on any address: so no preview, prefetch or scanner decides anything."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from app.main import create_app
from app.store import tables
from tests.api.routes import every_route
from tests.console.service import ADMIN_KEY, Site
from tests.store.rows import add_attachment, add_call, add_delivery, add_message

pytestmark = pytest.mark.anyio


async def everything(engine: AsyncEngine) -> dict[str, Any]:
    """Every row of every table, by its digest."""
    found = {}
    async with engine.connect() as connection:
        for table in tables.metadata.sorted_tables:
            rows = (await connection.execute(select(table))).all()
            found[table.name] = sorted(hashlib.sha256(repr(row).encode()).hexdigest() for row in rows)
    return found


async def test_looking_at_any_address_changes_nothing(site: Site) -> None:
    await site.http.put("/tools/bash", json={"url": "https://tools.example/hook"})
    rule_id = (await site.http.post("/rules", json={"effect": "deny"})).json()["id"]
    await site.http.put("/credentials/team", json={"type": "api_key", "secret": "sk-team"})
    hook = {"url": "https://hooks.example", "events": ["session.ended"]}
    await site.http.put("/subscriptions/all", json=hook)
    async with site.engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu_1")
        await add_delivery(connection, "tu_1")
        await add_message(connection, "m_1", ["hello"], seq=1)
    link = (await site.link()).partition("link=")[2]
    visitor = await site.visitor(ADMIN_KEY)
    visitor.headers["authorization"] = f"Bearer {ADMIN_KEY}"
    names = {
        "session_id": "sesn_1", "call_id": "tu_1", "event_id": "m_1", "name": "bash",
        "credential": "team", "subscription": "all", "rule_id": rule_id,
        "key_id": "key_" + "a" * 24, "test_id": "test_" + "a" * 24,
        "send_id": "send_" + "a" * 24, "attach_rule": "all",
    }  # fmt: skip
    before = await everything(site.engine)
    walked = [route.path for route in every_route(create_app(site.bridge))]
    assert {"/tools/{name}", "/rules", "/console", "/console/sign-in", "/docs"} <= set(walked)
    assert len(walked) > 50
    for path in walked:
        for name, value in names.items():
            path = path.replace(f"{{{name}}}", value)  # noqa: PLW2901 - the address of the same route
        assert "{" not in path, f"{path}: name a value of this parameter here"
        for method in ("GET", "HEAD", "OPTIONS"):
            query = {
                "link": link,
                "next": "/console",
                "result": "allow",
                "tool_use_id": "tu_1",
                "call_id": "tu_1",
            }
            for purpose in ({}, {"sec-purpose": "prefetch"}, {"accept": "text/event-stream"}):
                # A stream has no end, and begins with what it finds.
                async with visitor.stream(method, path, params=query, headers=purpose) as answer:
                    assert answer.status_code < 500, path
                    await anext(answer.aiter_raw(), None)
    assert before == await everything(site.engine)
    # All of them together did not use up the link.
    assert 303 == (await visitor.post("/console/sign-in", data={"link": link})).status_code
