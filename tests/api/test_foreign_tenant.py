"""Promise 6: to one tenant another's things do not exist, on every route and in every list."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import confirmations
from app.store import tables
from tests.api.routes import every_route
from tests.api.service import Service
from tests.store.rows import add_attachment, add_call, add_delivery, add_message

pytestmark = pytest.mark.anyio

HOOK = "https://tools.example/hook"
SECRET_WORDS = "the words of another tenant"
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("PUT", "/tools/{name}"): {"url": HOOK},
    ("PUT", "/subscriptions/{subscription}"): {"url": HOOK, "events": ["session.ended"]},
    ("PUT", "/attach-rules/{attach_rule}"): {"agent_id": "agent_mine"},
    ("PUT", "/credentials/{credential}"): {"type": "api_key", "secret": "sk-mine"},
    ("POST", "/sessions/{session_id}/confirm"): {"tool_use_id": "{call_id}", "result": "allow"},
    ("POST", "/sessions/{session_id}/calls/{call_id}/result"): {"content": "mine"},
    ("PATCH", "/sessions/{session_id}"): {"concurrency": 2},
    ("POST", "/sessions/{session_id}/events"): {"events": [{"type": "user.interrupt"}]},
}
QUERIES = ("", "?session=sesn_theirs", "?session=sesn_theirs&call=call_theirs", "?with_ended=true")
PER_REQUEST = re.compile(r'"(request_id|created_at|updated_at|signing_secret|id)":"[^"]*"')
"""What differs between any two answers."""


@dataclass(frozen=True)
class Names:
    """Ids of one of each thing, to put in the places of a path."""

    session_id: str
    call_id: str
    event_id: str
    name: str
    subscription: str
    credential: str
    rule_id: str
    key_id: str
    test_id: str
    send_id: str
    attach_rule: str

    def fill(self, text: str) -> str:
        for name in re.findall("{(.*?)}", text):
            text = text.replace(f"{{{name}}}", getattr(self, name))
        return text

    def hide(self, text: str) -> str:
        for name, value in sorted(vars(self).items(), key=lambda one: -len(one[1])):
            text = text.replace(value, f"<{name}>")
        return text


UNKNOWN = Names(
    "sesn_none", "call_none", "msg_none", "tool_none", "sub_none", "cred_none",
    "rul_" + "0" * 24, "key_" + "0" * 24, "test_" + "0" * 24,
    "send_" + "0" * 24, "auto_none",
)  # fmt: skip


async def theirs(service: Service) -> Names:
    """One of each thing, of the tenant `default`."""
    http = service.http
    for path, body in (
        ("/tools/their_tool", {"url": HOOK, "description": SECRET_WORDS}),
        ("/subscriptions/their_sub", {"url": HOOK, "events": ["session.ended"]}),
        ("/attach-rules/their_auto", {"agent_id": "agent_theirs"}),
        ("/credentials/their_cred", {"type": "api_key", "secret": "sk-theirs"}),
    ):
        assert 201 == (await http.put(path, json=body)).status_code
    rule = (await http.post("/rules", json={"effect": "deny", "note": SECRET_WORDS})).json()
    key = (await http.post("/keys", json={"name": SECRET_WORDS, "scopes": ["read"]})).json()
    test_id, send_id = "test_" + "a" * 24, "send_" + "a" * 24
    async with service.engine.begin() as connection:
        await add_attachment(connection, session_id="sesn_theirs")
        said = json.dumps({"a": SECRET_WORDS})
        await add_call(connection, "call_theirs", session_id="sesn_theirs", input=said)
        await add_delivery(connection, "call_theirs", session_id="sesn_theirs", tool="their_tool")
        await add_message(connection, "msg_theirs", [SECRET_WORDS], session_id="sesn_theirs", seq=1)
        test = {"id": test_id, "tool": "their_tool", "input": "{}", "lost_at": datetime.now(UTC)}
        await connection.execute(tables.tool_tests.insert().values(tenant="default", **test))
        send = {"session_id": "sesn_theirs", "id": send_id, "events": json.dumps(SECRET_WORDS)}
        await connection.execute(tables.sends.insert().values(tenant="default", **send))
    return Names(
        "sesn_theirs", "call_theirs", "msg_theirs", "their_tool", "their_sub", "their_cred",
        rule["id"], key["id"], test_id, send_id, "their_auto",
    )  # fmt: skip


async def rows_of(engine: AsyncEngine, tenant: str) -> dict[str, list[str]]:
    found = {}
    async with engine.connect() as connection:
        for table in tables.metadata.sorted_tables:
            if "tenant" in table.c:
                rows = await connection.execute(select(table).where(table.c.tenant == tenant))
                found[table.name] = sorted(repr(row) for row in rows)
    return found


async def ask(service: Service, who: dict[str, str], method: str, path: str, names: Names) -> httpx.Response:
    body = BODIES.get((method, path))
    if body is not None:
        body = {name: names.fill(value) if isinstance(value, str) else value for name, value in body.items()}
    return await service.http.request(method, names.fill(path), json=body, headers=who)


def shape(answer: httpx.Response, names: Names) -> tuple[int, str, str | None]:
    text = names.hide(PER_REQUEST.sub(r'"\1":"…"', answer.text))
    return answer.status_code, text, answer.headers.get("content-type")


async def test_on_every_route_another_tenants_things_are_unknown_ones(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-007, A-058, D-056: with another's ids a tenant gets what it gets with ids that nobody has."""
    monkeypatch.setattr(confirmations, "LOOK_LIMIT_S", 0.01)
    foreign = await theirs(service)
    mine = await service.key("tools", "sessions", "read", "confirm", "admin", tenant="mine")
    before = await rows_of(service.engine, "default")
    walked = 0
    for route in every_route(service.app):
        if "{" not in route.path or route.path.startswith("/console"):
            continue
        for method in sorted((route.methods or set()) - {"HEAD"}):
            unknown = shape(await ask(service, mine, method, route.path, UNKNOWN), UNKNOWN)
            known = shape(await ask(service, mine, method, route.path, foreign), foreign)
            assert unknown == known, f"{method} {route.path}"
            assert SECRET_WORDS not in known[1]
            walked += 1
    assert walked >= 30, walked
    assert before == await rows_of(service.engine, "default")


async def test_no_list_holds_another_tenants_things(service: Service) -> None:
    await theirs(service)
    mine = await service.key("tools", "sessions", "read", "confirm", "admin", tenant="mine")
    walked = 0
    for route in every_route(service.app):
        is_list = "GET" in (route.methods or ()) and "{" not in route.path
        if not is_list or route.path.startswith(("/console", "/docs", "/openapi", "/readyz", "/healthz")):
            continue
        for query in (
            "",
            "?session=sesn_theirs",
            "?session=sesn_theirs&call=call_theirs",
            "?with_ended=true",
        ):
            answer = await service.http.get(route.path + query, headers=mine)
            assert "theirs" not in answer.text, route.path
            assert "their_" not in answer.text, route.path
            assert SECRET_WORDS not in answer.text, route.path
        walked += 1
    assert walked >= 8, walked
