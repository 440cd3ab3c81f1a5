from __future__ import annotations

import base64
import json
import logging
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import SecretStr
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from app.main import build_bridge
from app.settings import Settings
from app.store import tables, tools
from app.store.secrets import Secrets
from app.store.tools import load_registry
from tests.api.service import Service, problem, served
from tests.store.rows import SECRETS, add_attachment, add_call, add_delivery
from tests.webhooks.cases import CASES

pytestmark = pytest.mark.anyio

URL = "https://tools.example/hook"


async def put(service: Service, name: str = "echo", **body: Any) -> Any:
    return await service.http.put(f"/tools/{quote(name)}", json={"url": URL, **body})


async def test_a_new_tool_has_every_default_and_shows_its_secret_once(service: Service) -> None:
    answer = await put(service)
    assert answer.status_code == 201
    shown = answer.json()
    secret = shown.pop("signing_secret")
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert shown.pop("created_at") == shown.pop("updated_at")
    assert shown == {
        "name": "echo",
        "url": URL,
        "description": None,
        "timeout_s": 120.0,
        "attempt_timeout_s": None,
        "retry": "connect_only",
        "on_unknown": "answer",
        "gate": "upstream",
        "approvers": None,
        "approvals_required": 1,
        "expires_in_s": None,
        "on_expiry": "deny",
        "callback_timeout_s": 3600,
        "callback_timeout_max_s": 86400,
        "when_unhealthy": "wait",
        "concurrency": 32,
        "header_names": [],
        "enabled": True,
        "reply_bytes_max": 1048576,
        "result_chars_max": 100000,
        "input_schema": None,
        "version": 1,
        "disabled_reason": None,
        "disabled_at": None,
        "health": {"state": "closed", "since": None, "last_error": None, "failures": 0},
    }
    assert "signing_secret" not in (await service.http.get("/tools/echo")).json()
    assert "signing_secret" not in (await put(service)).json()


async def test_replacing_a_tool_keeps_its_secret_and_raises_versions(service: Service) -> None:
    await put(service)
    async with service.engine.connect() as connection:
        before, registry = await load_registry(connection, SECRETS, "default")
    answer = await put(service, gate="ask", timeout_s=5)
    assert (answer.status_code, answer.json()["version"]) == (200, 2)
    async with service.engine.connect() as connection:
        after, changed = await load_registry(connection, SECRETS, "default")
    assert after == before + 1
    assert changed["echo"].secrets == registry["echo"].secrets
    assert (changed["echo"].gate, changed["echo"].timeout_s, changed["echo"].version) == ("ask", 5.0, 2)


async def test_the_same_registration_again_changes_nothing(service: Service) -> None:
    body = {"headers": {"authorization": "Bearer x"}, "timeout_s": 5}
    await put(service, **body)
    assert (await put(service, **body)).json()["version"] == 1
    async with service.engine.connect() as connection:
        assert (await load_registry(connection, SECRETS, "default"))[0] == 1


async def test_headers_are_encrypted_and_write_only(service: Service) -> None:
    answer = await put(service, headers={"authorization": "Bearer hidden-value"})
    assert "hidden-value" not in answer.text
    assert answer.json()["header_names"] == ["authorization"]
    async with service.engine.connect() as connection:
        row = (await connection.execute(select(tables.tools))).one()
        _, registry = await load_registry(connection, SECRETS, "default")
    assert b"hidden-value" not in row.headers + row.secrets
    assert registry["echo"].headers == (("authorization", "Bearer hidden-value"),)
    assert "hidden-value" not in repr(registry["echo"])


@pytest.mark.parametrize(
    "name", ["x" * 128, "a b", "Größe.v2", "%", "a?b#c", "..a", "工具", "'; drop table tools;--"]
)
async def test_a_name_is_exactly_what_the_agent_calls(service: Service, name: str) -> None:
    """R-107: any printable name without a slash, and no other spelling of it."""
    assert (await put(service, name)).json()["name"] == name
    assert (await service.http.get(f"/tools/{quote(name)}")).json()["name"] == name
    assert problem(await service.http.get(f"/tools/{quote(name + ' ')}"))[0] == 404


@pytest.mark.parametrize("name", ["x" * 129, "a\0b", "a\nb", "\x7f"])
async def test_a_name_that_no_tool_can_have_is_not_found(service: Service, name: str) -> None:
    assert problem(await put(service, name)) == (404, "tool_not_found")


@pytest.mark.parametrize(
    "body",
    [
        {"timeout_s": 0.5},
        {"timeout_s": 601},
        {"timeout_s": "5"},
        {"attempt_timeout_s": 121},
        {"retry": "always"},
        {"gate": "none"},
        {"when_unhealthy": "retry"},
        {"concurrency": 0},
        {"enabled": "yes"},
        {"enabled": 1},
        {"reply_bytes_max": 10},
        {"result_chars_max": 10**30},
        {"callback_timeout_s": -1},
        {"callback_timeout_s": 100, "callback_timeout_max_s": 10},
        {"description": "a\0b"},
        {"url": "http://tools.example"},
        {"url": "https://tools.example/\0"},
        {"url": 7},
        {"headers": {"webhook-id": "x"}},
        {"headers": {"Bascule_Attempt": "x"}},
        {"headers": {"Host": "x"}},
        {"headers": {"x": "a\nb"}},
        {"unknown": 1},
    ],
)
async def test_an_invalid_tool_is_refused(service: Service, body: dict[str, Any]) -> None:
    assert problem(await put(service, **body)) == (422, "invalid_request")
    assert (await service.http.get("/tools")).json()["data"] == []


async def test_a_url_is_refused_just_where_its_text_alone_would_stop_a_delivery(
    engine: AsyncEngine, migrated_url: str
) -> None:
    """C-009: the cases are those of the deliveries, and the judgement is that of the whole service."""
    bridge = build_bridge(Settings(secret_key=SecretStr(base64.b64encode(bytes(32)).decode())), migrated_url)
    async with served(engine, migrated_url, bridge.check_url) as service:
        for case in CASES:
            if case.allow:
                continue
            # Escaped: some of the URLs hold what cannot be written in UTF-8.
            answer = await service.http.put(
                "/tools/echo",
                content=json.dumps({"url": case.url}),
                headers={"content-type": "application/json"},
            )
            if case.refused is None:
                assert answer.status_code in (200, 201), case
            else:
                assert problem(answer) == (422, "invalid_request"), case
                assert [each["field"] for each in answer.json()["errors"]] == ["url"], case


@pytest.mark.parametrize("body", [{"approvers": ["a"]}, {"approvals_required": 2}, {"expires_in_s": 60}])
async def test_a_gate_that_nothing_enforces_is_refused(service: Service, body: dict[str, Any]) -> None:
    assert problem(await put(service, **body)) == (422, "not_supported")


async def test_tools_are_listed_by_name_and_by_pages(service: Service) -> None:
    for name in ("b", "a", "ä", "c"):
        await put(service, name)
    first = (await service.http.get("/tools?limit=2")).json()
    rest = (await service.http.get("/tools", params={"cursor": first["next_cursor"]})).json()
    assert sorted(tool["name"] for tool in first["data"] + rest["data"]) == ["a", "b", "c", "ä"]
    assert rest["next_cursor"] is None


async def test_deleting_a_tool_names_the_calls_that_it_leaves(service: Service) -> None:
    await put(service)
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        for number, state in enumerate(["held", "queued", "posted", "dispatched"]):
            await add_call(connection, f"tu{number}", tool="echo", state=state)
        await add_call(connection, "other", tool="other")
    answer = await service.http.delete("/tools/echo")
    assert [call["id"] for call in answer.json()["calls"]] == ["tu0", "tu1", "tu3"]
    assert answer.json()["calls_total"] == 3
    assert problem(await service.http.delete("/tools/echo")) == (404, "tool_not_found")
    async with service.engine.connect() as connection:
        assert await load_registry(connection, SECRETS, "default") == (2, {})


async def test_a_tenant_has_a_limited_number_of_tools(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "TOOLS_MAX", 1)
    await put(service, "a")
    assert problem(await put(service, "b")) == (409, "too_many_tools")
    assert (await put(service, "a", gate="ask")).status_code == 200


async def test_a_tool_whose_secrets_cannot_be_read_stops_no_other(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    await put(service, "a")
    other_keys = Secrets([b"k" * 32])
    caplog.set_level(logging.CRITICAL)
    async with service.engine.begin() as connection:
        await tools.put(
            connection, other_keys, "default", "b", url=URL, description=None, policy={}, headers={}
        )
        _, registry = await load_registry(connection, SECRETS, "default")
    assert [name for name, tool in registry.items() if tool.is_readable] == ["a"]
    assert [tool["name"] for tool in (await service.http.get("/tools")).json()["data"]] == ["a", "b"]


async def test_the_catch_all_is_registered_by_its_name_however_it_is_written(service: Service) -> None:
    plain = await service.http.put("/tools/*", json={"url": URL})
    encoded = await service.http.put("/tools/%2A", json={"url": URL, "gate": "ask"})
    assert (plain.status_code, encoded.status_code, encoded.json()["version"]) == (201, 200, 2)
    assert (await service.http.get("/tools/%2A")).json()["name"] == "*"
    async with service.engine.connect() as connection:
        assert ["*"] == list((await load_registry(connection, SECRETS, "default"))[1])


async def test_deleting_the_catch_all_names_the_calls_that_it_leaves(service: Service) -> None:
    """What it got, and what waits for it; not what a registration of its own, or nobody, serves."""
    await put(service, "*")
    await put(service, "own", enabled=False)
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        for call_id, values in {
            "waits": {"tool": "foo", "state": "queued"},
            "got": {"tool": "own", "state": "dispatched"},
            "theirs": {"tool": "gone", "state": "dispatched"},
            "builtin": {"tool": "bash", "state": "queued", "kind": "builtin"},
            "own": {"tool": "own", "state": "queued"},
            "parked": {"tool": "bar", "state": "unowned"},
            "over": {"tool": "foo", "state": "posted"},
        }.items():
            await add_call(connection, call_id, **({"kind": "custom"} | values))
        await add_delivery(connection, "got", tool="*")
        await add_delivery(connection, "theirs", tool="gone")
    removed = (await service.http.delete("/tools/*")).json()
    assert (["waits", "got"], 2) == ([call["id"] for call in removed["calls"]], removed["calls_total"])
    removed = (await service.http.delete("/tools/own")).json()
    assert ["own"] == [call["id"] for call in removed["calls"]]


SCHEMA = {"properties": {"n": {"const": 12345678901234567890123}, "ключ": {"pattern": "^a$"}}}


@pytest.mark.parametrize("schema", [SCHEMA, "agent", None])
async def test_an_input_schema_is_kept_as_it_was_given(service: Service, schema: Any) -> None:
    assert (await put(service, input_schema=schema)).json()["input_schema"] == schema
    assert (await service.http.get("/tools/echo")).json()["input_schema"] == schema
    assert (await put(service, input_schema=schema)).json()["version"] == 1
    async with service.engine.connect() as connection:
        text = (await load_registry(connection, SECRETS, "default"))[1]["echo"].input_schema
    assert schema == (json.loads(text) if text and text.startswith("{") else text)


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ('{"properties": {"a": {"type": "strin"}}}', "input_schema.properties.a.type"),
        ('{"allOf": [{"$ref": "https://example.com/a"}]}', "input_schema.allOf[0].$ref"),
        ('{"maximum": 1e999}', "input_schema.maximum"),
        (r'{"const": "\ud800"}', "input_schema"),
        ('{"not":' * 300 + "{}" + "}" * 300, "input_schema"),
        ('"upstream"', "input_schema"),
        ("7", "input_schema"),
    ],
)
async def test_a_schema_that_cannot_be_used_is_refused_and_said_where(
    service: Service, schema: str, field: str
) -> None:
    body = f'{{"url": "{URL}", "input_schema": {schema}}}'
    answer = await service.http.put("/tools/echo", content=body, headers={"content-type": "application/json"})
    assert problem(answer) == (422, "invalid_request")
    assert all(error["field"].startswith(field) for error in answer.json()["errors"])
    assert len(answer.text) < 2000
