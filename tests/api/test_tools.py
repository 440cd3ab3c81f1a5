from __future__ import annotations

import asyncio
import base64
import json
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import SecretStr
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from app.core.tools import Tool
from app.main import build_bridge
from app.settings import Settings
from app.store import tables, tools
from app.store.secrets import Secrets
from app.store.tools import load_registry
from tests.api.service import Service, problem, served
from tests.store.rows import SECRETS, add_attachment, add_call, add_delivery, pass_time
from tests.webhooks.cases import CASES

pytestmark = pytest.mark.anyio

URL = "https://tools.example/hook"
LOST = Secrets([b"k" * 32])
"""Keys that the service does not have."""


async def put(service: Service, name: str = "echo", **body: Any) -> Any:
    return await service.http.put(f"/tools/{quote(name)}", json={"url": URL, **body})


async def test_a_new_tool_has_every_default_and_shows_its_secret_once(service: Service) -> None:
    answer = await put(service)
    assert answer.status_code == 201
    shown = answer.json()
    secret = shown.pop("signing_secret")
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    created_at = shown.pop("created_at")
    assert [{"created_at": created_at, "expires_at": None}] == shown.pop("signing_secrets")
    assert created_at == shown.pop("updated_at")
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
        "remind_after_s": None,
        "on_expiry": "deny",
        "callback_timeout_s": 3600,
        "callback_timeout_max_s": 86400,
        "when_unhealthy": "wait",
        "concurrency": 32,
        "header_names": [],
        "fault": None,
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
        before, known = await load_registry(connection, SECRETS, "default")
    answer = await put(service, gate="ask", timeout_s=5)
    assert (answer.status_code, answer.json()["version"]) == (200, 2)
    async with service.engine.connect() as connection:
        after, changed = await load_registry(connection, SECRETS, "default")
    assert after == before + 1
    assert changed["echo"].secrets == known["echo"].secrets
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
    tool = (await registry(service))["echo"]
    assert b"hidden-value" not in row.headers + row.secrets
    assert tool.headers == (("authorization", "Bearer hidden-value"),)
    assert "hidden-value" not in repr(tool)


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
        {"approvers": []},
        {"approvers": ["ana"], "approvals_required": 2},
        {"approvers": ["a\nb"]},
        {"approvals_required": 3},
        {"expires_in_s": 0},
        {"remind_after_s": 0},
        {"remind_after_s": 30 * 86_400 + 1},
        {"remind_after_s": 1.5},
        {"remind_after_s": 60, "expires_in_s": 60},
        {"on_expiry": "allow"},
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


async def put_under(service: Service, keys: Secrets, name: str = "echo") -> None:
    """Register a tool as a replica with other keys would."""
    async with service.engine.begin() as connection:
        await tools.put(
            connection, keys, "default", name, url=URL, description=None, policy={}, headers={"x": "y"}
        )


async def registry(service: Service, keys: Secrets = SECRETS) -> dict[str, Tool]:
    async with service.engine.connect() as connection:
        return (await load_registry(connection, keys, "default"))[1]


async def test_a_tool_whose_secrets_cannot_be_read_stops_no_other_and_says_why(service: Service) -> None:
    await put(service, "a")
    await put_under(service, LOST, "b")
    loaded = await registry(service)
    assert (None, ()) == (loaded["a"].fault, loaded["b"].secrets)
    readable, faulty = (await service.http.get("/tools")).json()["data"]
    assert (None, loaded["b"].fault) == (readable["fault"], faulty["fault"])
    assert ([], []) == (faulty["signing_secrets"], faulty["header_names"])
    for told in (LOST.key_ids[0], "BASCULE_SECRET_KEY", "append that key", "/rotate-secret", "PUT /tools/"):
        assert told in faulty["fault"]


async def test_what_cannot_be_read_is_said_in_the_log(service: Service) -> None:
    await put_under(service, LOST)
    with capture_logs() as logs:
        await registry(service)
    ((name, reason),) = [(x["tool"], x["reason"]) for x in logs if x["event"] == "tool_unreadable"]
    assert "echo" == name
    assert f"was encrypted with key {LOST.key_ids[0]}" in reason


async def test_a_tool_whose_key_is_lost_for_good_is_made_anew(service: Service) -> None:
    """The two remedies of the sentence, and nothing else, are enough."""
    await put_under(service, LOST)
    refused = await rotate(service)
    assert (409, "secrets_unreadable") == problem(refused)
    assert LOST.key_ids[0] in refused.json()["detail"]
    assert 200 == (await rotate(service, overlap_s=0)).status_code
    assert "tools.headers" in (await service.http.get("/tools/echo")).json()["fault"]
    assert None is (await put(service, headers={"x": "z"})).json()["fault"]
    loaded = (await registry(service))["echo"]
    assert (None, (("x", "z"),), 1) == (loaded.fault, loaded.headers, len(loaded.secrets))


# ---- rotating


async def rotate(service: Service, name: str = "echo", **body: Any) -> Any:
    return await service.http.post(f"/tools/{name}/rotate-secret", json=body)


def key_of(answer: Any) -> bytes:
    return base64.b64decode(answer.json()["signing_secret"].removeprefix("whsec_"))


async def test_a_rotated_secret_signs_beside_the_one_before_it(service: Service) -> None:
    """C-060, D-046."""
    old = key_of(await put(service))
    async with service.engine.connect() as connection:
        before = await tools.registry_version(connection, "default")
    answer = await rotate(service, overlap_s=3600)
    shown = answer.json()
    ends = datetime.fromisoformat(shown["old_signs_until"])
    assert (200, 32) == (answer.status_code, len(key_of(answer)))
    newest, older = shown["signing_secrets"]
    assert (None, shown["old_signs_until"]) == (newest["expires_at"], older["expires_at"])
    assert timedelta(seconds=3600) == ends - datetime.fromisoformat(newest["created_at"])
    tool = (await registry(service))["echo"]
    assert (key_of(answer), old) == tool.keys_at(ends.timestamp() - 1)
    assert (key_of(answer),) == tool.keys_at(ends.timestamp() + 1)
    async with service.engine.connect() as connection:
        assert before + 1 == await tools.registry_version(connection, "default")


async def test_a_rotation_without_a_body_overlaps_by_a_day(service: Service) -> None:
    await put(service)
    shown = (await service.http.post("/tools/echo/rotate-secret")).json()
    ends, begins = shown["old_signs_until"], shown["signing_secrets"][0]["created_at"]
    assert timedelta(days=1) == datetime.fromisoformat(ends) - datetime.fromisoformat(begins)


async def test_reads_show_the_times_of_secrets_and_never_a_secret(service: Service) -> None:
    first = await put(service)
    second = await rotate(service)
    for path in ("/tools", "/tools/echo"):
        answer = await service.http.get(path)
        assert 2 == answer.text.count("expires_at")
        for made in (first, second):
            assert made.json()["signing_secret"].removeprefix("whsec_") not in answer.text


async def test_an_overlap_of_nothing_ends_every_earlier_secret(service: Service) -> None:
    await put(service)
    await rotate(service)
    answer = await rotate(service, overlap_s=0)
    assert 1 == len(answer.json()["signing_secrets"])
    assert [key_of(answer)] == [one.key for one in (await registry(service))["echo"].secrets]


async def test_a_shorter_overlap_shortens_those_before_it(service: Service) -> None:
    """After the overlap that was asked for, only the new secret signs."""
    await put(service)
    await rotate(service, overlap_s=3600)
    shown = (await rotate(service, overlap_s=60)).json()
    assert [None, *[shown["old_signs_until"]] * 2] == [one["expires_at"] for one in shown["signing_secrets"]]
    longer = (await rotate(service, overlap_s=3600)).json()
    assert [shown["old_signs_until"]] * 2 == [one["expires_at"] for one in longer["signing_secrets"][2:]]


async def test_an_ended_secret_signs_nothing_is_not_shown_and_goes_with_the_next_write(
    service: Service,
) -> None:
    await put(service)
    second = await rotate(service, overlap_s=60)
    await pass_time(service.engine, 61)
    assert [key_of(second)] == [one.key for one in (await registry(service))["echo"].secrets]
    assert 1 == len((await service.http.get("/tools/echo")).json()["signing_secrets"])
    third = await rotate(service, overlap_s=60)
    async with service.engine.connect() as connection:
        row = (await connection.execute(select(tables.tools))).one()
    stored = json.loads(SECRETS.decrypt(row.secrets, column="tools.secrets", row=("default", "echo")))
    assert [key_of(third), key_of(second)] == [base64.b64decode(key["key"]) for key in stored]


async def test_so_many_secrets_sign_and_one_more_is_refused(service: Service) -> None:
    """Whoever rotates again because an answer was lost does not cut off the receiver that works."""
    used = key_of(await put(service))
    for _ in range(tools.SECRETS_MAX - 1):
        assert 200 == (await rotate(service)).status_code
    refused = await rotate(service)
    assert (409, "too_many_secrets") == problem(refused)
    assert "overlap_s" in refused.json()["detail"]
    kept = [one.key for one in (await registry(service))["echo"].secrets]
    assert (tools.SECRETS_MAX, used) == (len(kept), kept[-1])
    assert 200 == (await rotate(service, overlap_s=0)).status_code


async def test_rotations_at_once_are_one_after_the_other(service: Service) -> None:
    await put(service)
    answers = await asyncio.gather(*(rotate(service) for _ in range(4)))
    made = {key_of(answer) for answer in answers}
    assert made < {one.key for one in (await registry(service))["echo"].secrets}


@pytest.mark.parametrize(
    "body", [{"overlap_s": -1}, {"overlap_s": 604_801}, {"overlap_s": "60"}, {"overlap_s": None}, {"x": 1}]
)
async def test_an_invalid_rotation_changes_nothing(service: Service, body: dict[str, Any]) -> None:
    await put(service)
    assert (422, "invalid_request") == problem(await rotate(service, **body))
    assert 1 == len((await registry(service))["echo"].secrets)


async def test_only_a_tool_of_ones_own_is_rotated(service: Service) -> None:
    await put(service)
    assert (404, "tool_not_found") == problem(await rotate(service, "other"))
    stranger = await service.key("tools", tenant="other")
    answer = await service.http.post("/tools/echo/rotate-secret", headers=stranger)
    assert (404, "tool_not_found") == problem(answer)
    reader = await service.key("read")
    answer = await service.http.post("/tools/echo/rotate-secret", headers=reader)
    assert (403, "forbidden") == problem(answer)


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
