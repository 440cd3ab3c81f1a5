from __future__ import annotations

from typing import Any

import httpx
import pytest
from sqlalchemy import select

from app.api.access import SCHEME
from app.api.callbacks import TOKEN_SCHEME
from app.store import tables
from app.store.keys import SCOPES
from tests.api.service import Service, problem

pytestmark = pytest.mark.anyio

PUBLIC = {"/metrics", "/healthz", "/readyz", "/openapi.json", "/docs", "/docs/oauth2-redirect"}
CALLBACK = "/sessions/{session_id}/calls/{call_id}/result"
"""It takes the token of its call in place of a key."""
HOOK = "/hooks/anthropic"
"""It takes a signature in place of a key."""
NAMES = {
    "session_id": "sesn_a",
    "name": "tool_a",
    "call_id": "tu_a",
    "event_id": "m_a",
    "key_id": "key_" + "a" * 24,
    "subscription": "subscription_a",
    "attach_rule": "rule_a",
    "credential": "credential_a",
    "rule_id": "rul_" + "a" * 24,
    "test_id": "test_" + "a" * 24,
    "send_id": "send_" + "a" * 24,
}
BODIES: dict[tuple[str, str], Any] = {
    ("PUT", "/tools/{name}"): {"url": "https://a.example"},
    ("PUT", "/subscriptions/{subscription}"): {"url": "https://a.example", "events": ["call.failed"]},
    ("PATCH", "/sessions/{session_id}"): {"concurrency": 2},
    ("POST", "/sessions/{session_id}/confirm"): {"tool_use_id": "tu_a", "result": "allow"},
    ("POST", "/keys"): {"name": "x", "scopes": ["read"]},
}


def routes(service: Service) -> list[tuple[str, str, str]]:
    """Every guarded route, as method, path and scope, from the document that clients read."""
    found = []
    for path, methods in service.app.openapi()["paths"].items():
        for method, operation in methods.items():
            if path not in PUBLIC | {CALLBACK, HOOK}:
                found.append((method.upper(), path, operation["security"][0][SCHEME][0]))
    return found


async def send(
    service: Service, method: str, path: str, headers: dict[str, str], **names: str
) -> httpx.Response:
    body = BODIES.get((method, path))
    for name, value in names.items():
        path = path.replace(f"{{{name}}}", value)
    return await service.http.request(method, path, json=body, headers=headers)


async def test_every_route_but_the_public_ones_wants_a_key(service: Service) -> None:
    found = routes(service)
    assert len(found) >= 20
    for method, path, _ in found:
        for key in ("", "Bearer", "Bearer nonsense", "Basic YTpi", "Bearer bsk_" + "0" * 49):
            answer = await send(service, method, path, {"authorization": key}, **NAMES)
            assert problem(answer) == (401, "unauthenticated"), path
            assert answer.headers["www-authenticate"] == "Bearer"


async def test_the_callback_takes_no_key(service: Service) -> None:
    """Not even the operator's: only the token of the delivery shows who may answer a call."""
    (operation,) = service.app.openapi()["paths"][CALLBACK].values()
    assert [{TOKEN_SCHEME: []}] == operation["security"]
    for key in ("", "Bearer", "Bearer nonsense", (await service.key(*SCOPES))["authorization"]):
        answer = await send(service, "POST", CALLBACK, {"authorization": key}, **NAMES)
        assert problem(answer) == (401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ("", "The request names no key; "),
        ("bsk_secret", "The header authorization lacks the word Bearer before the key;"),
        ("Bearer", "The header authorization holds no key after the word Bearer; "),
        ("Bearer ", "The header authorization holds no key after the word Bearer; "),
        ("Bearer secret", "This key is unknown or revoked; "),
    ],
)
async def test_a_refused_key_is_told_why_and_never_repeated(
    service: Service, header: str, sentence: str
) -> None:
    answer = await service.http.get("/tools", headers={"authorization": header})
    assert problem(answer) == (401, "unauthenticated")
    assert answer.json()["detail"].startswith(sentence)
    assert "secret" not in answer.text


async def test_a_wrong_key_is_told_where_the_first_one_lies(service: Service) -> None:
    answer = await service.http.get("/tools", headers={"authorization": "Bearer wrong"})
    assert "wrote one to .bascule/admin.key (the demo's is .bascule/demo/admin.key" in answer.json()["detail"]


async def test_a_key_does_only_what_its_scopes_say(service: Service) -> None:
    keys = {scope: await service.key(scope) for scope in SCOPES}
    for method, path, scope in routes(service):
        for held, key in keys.items():
            if held != scope:
                answer = await send(service, method, path, key, **NAMES)
                assert problem(answer) == (403, "forbidden"), path


async def test_the_key_is_looked_at_before_the_body(service: Service) -> None:
    headers = {"authorization": "Bearer no", "content-type": "application/json"}
    answer = await service.http.post("/keys", content=b"{", headers=headers)
    assert problem(answer) == (401, "unauthenticated")


async def test_two_tenants_attach_the_same_session_apart(service: Service) -> None:
    """D-079: two attachments, each with its own settings."""
    key_a, key_b = await service.key(tenant="a"), await service.key(tenant="b")
    for key, concurrency in ((key_a, 1), (key_b, 2)):
        answer = await service.http.post("/sessions/s/attach", json={"concurrency": concurrency}, headers=key)
        assert answer.status_code == 202
    assert (await service.http.get("/sessions/s", headers=key_a)).json()["settings"]["concurrency"] == 1


async def test_only_a_hash_of_a_key_is_stored(service: Service) -> None:
    key = (await service.key("read"))["authorization"].removeprefix("Bearer ")
    assert key.startswith("bsk_")
    async with service.engine.connect() as connection:
        row = (await connection.execute(select(tables.keys))).one()
    assert key not in str(row)
    assert len(row.hash) == 32
    assert key not in (await service.http.get("/keys")).text


async def test_a_revoked_key_is_refused_at_once(service: Service) -> None:
    key = await service.key("read")
    key_id = (await service.http.get("/keys")).json()["data"][0]["id"]
    assert (await service.http.get("/sessions", headers=key)).status_code == 200
    revoked = (await service.http.delete(f"/keys/{key_id}")).json()["revoked_at"]
    assert revoked is not None
    assert problem(await service.http.get("/sessions", headers=key)) == (401, "unauthenticated")
    assert (await service.http.delete(f"/keys/{key_id}")).json()["revoked_at"] == revoked


async def test_only_the_operator_names_another_tenant(service: Service) -> None:
    admin_b = await service.key("admin", tenant="b")
    body = {"name": "x", "scopes": ["read"]}
    created = await service.http.post("/keys", json=body, headers=admin_b)
    assert created.json()["tenant"] == "b"
    refused = await service.http.post("/keys", json=body | {"tenant": "a"}, headers=admin_b)
    assert problem(refused) == (403, "forbidden")
    for method, path in (("GET", "/keys?tenant=a"), ("DELETE", f"/keys/key_{'0' * 24}?tenant=a")):
        assert problem(await service.http.request(method, path, headers=admin_b)) == (403, "forbidden")
    listed = (await service.http.get("/keys?tenant=b")).json()["data"]
    assert len(listed) == 2
    assert (await service.http.delete(f"/keys/{listed[0]['id']}?tenant=b")).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"name": "", "scopes": ["read"]},
        {"name": "a\0", "scopes": ["read"]},
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": ["root"]},
        {"name": "x", "scopes": ["read"], "tenant": "A/b"},
        {"name": "x", "scopes": ["read"], "tenant": "!x"},
    ],
)
async def test_an_invalid_key_is_not_created(service: Service, body: dict[str, Any]) -> None:
    assert problem(await service.http.post("/keys", json=body)) == (422, "invalid_request")
    assert (await service.http.get("/keys")).json()["data"] == []


async def test_keys_are_listed_by_pages(service: Service) -> None:
    for _ in range(3):
        await service.key("read")
    first = (await service.http.get("/keys?limit=2")).json()
    rest = (await service.http.get("/keys", params={"cursor": first["next_cursor"]})).json()
    assert len({key["id"] for key in first["data"] + rest["data"]}) == 3
