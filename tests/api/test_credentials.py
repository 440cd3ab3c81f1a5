"""Credentials through the api: stored, replaced, listed without their secrets, and whose they are."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from app.settings import Settings
from app.store import credentials, tables
from tests.api.service import ADMIN_KEY, Service, problem
from tests.store.rows import SECRETS

pytestmark = pytest.mark.anyio

HIDDEN = "sk-ant-very-secret-value"


async def put(
    service: Service, name: str = "team", who: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    body = {"type": "api_key", "secret": HIDDEN} | body
    return await service.http.put(f"/credentials/{name}", json=body, headers=who or {})


async def test_a_credential_is_shown_without_its_secret_and_replaced_under_its_name(service: Service) -> None:
    answer = await put(service)
    assert answer.status_code == 201
    shown = answer.json()
    assert {"name": "team", "type": "api_key", "upstream_url": None, "source": "stored"} == {
        name: shown[name] for name in ("name", "type", "upstream_url", "source")
    }
    assert (await put(service, type="bearer", secret="another")).status_code == 200
    listed = (await service.http.get("/credentials")).json()["data"]
    one = (await service.http.get("/credentials/team")).json()
    assert [one] == listed
    assert one["type"] == "bearer"
    async with service.engine.connect() as connection:
        stored = await credentials.load(connection, SECRETS, "default", "team")
        sealed = (await connection.execute(tables.credentials.select())).one().secret
    assert stored is not None
    assert ("bearer", "another", 2) == (stored.type, stored.secret, stored.version)
    assert b"another" not in sealed
    assert "another" not in repr(stored)


@pytest.mark.parametrize(
    "body",
    [
        {"secret": ""},
        {"secret": HIDDEN + " and more"},
        {"secret": HIDDEN + "\n"},
        {"secret": "é"},
        {"secret": "x" * 5_000},
        {"type": "cookie"},
        {"upstream_url": "ftp://x"},
        {"upstream_url": "https://user:pw@x.example"},
        {"more": 1},
    ],
)
async def test_what_is_wrong_is_named_and_the_secret_is_not_said(
    service: Service, body: dict[str, Any]
) -> None:
    answer = await put(service, **body)
    assert problem(answer) == (422, "invalid_request")
    assert HIDDEN not in answer.text


async def test_only_the_operator_names_where_upstream_is(service: Service) -> None:
    """Else a tenant could let the service call what only the service reaches."""
    admin = await service.key("admin")
    url = "http://169.254.169.254"
    assert problem(await put(service, who=admin, upstream_url=url)) == (403, "forbidden")
    assert (await put(service, who=admin)).status_code == 201
    assert (await put(service, upstream_url="https://gateway.example/")).json()["upstream_url"] == (
        "https://gateway.example"
    )


async def test_a_tenants_credentials_are_its_own(service: Service) -> None:
    other = await service.key("admin", tenant="other")
    await put(service)
    for method in ("GET", "DELETE"):
        answer = await service.http.request(method, "/credentials/team", headers=other)
        assert problem(answer) == (404, "credential_not_found")
    assert [] == (await service.http.get("/credentials", headers=other)).json()["data"]
    answer = await service.http.put(
        "/credentials/team", json={"type": "api_key", "secret": "theirs"}, params={"tenant": "other"}
    )
    assert answer.status_code == 201
    assert 1 == len((await service.http.get("/credentials", headers=other)).json()["data"])
    answer = await service.http.get("/credentials", headers=other, params={"tenant": "default"})
    assert problem(answer) == (403, "forbidden")


async def test_credentials_are_the_admins(service: Service) -> None:
    key = await service.key("tools", "sessions", "read", "confirm")
    assert problem(await put(service, who=key)) == (403, "forbidden")


async def test_a_deleted_credential_is_gone_and_all_of_it_is_audited(service: Service) -> None:
    await put(service)
    assert (await service.http.delete("/credentials/team")).status_code == 204
    assert problem(await service.http.delete("/credentials/team")) == (404, "credential_not_found")
    rows = (await service.http.get("/audit")).json()["data"]
    assert [("credential.stored", "team"), ("credential.deleted", "team")] == [
        (row["kind"], row["subject"]) for row in rows
    ]
    assert HIDDEN not in str(rows)


async def test_the_environments_credential_is_listed_and_is_changed_there(service: Service) -> None:
    settings = Settings(admin_key=SecretStr(ADMIN_KEY), anthropic_api_key=SecretStr("sk-ant-env"))
    object.__setattr__(service.app.state.bridge, "settings", settings)
    (shown,) = (await service.http.get("/credentials")).json()["data"]
    assert ("default", "environment") == (shown["name"], shown["source"])
    assert shown == (await service.http.get("/credentials/default")).json()
    assert problem(await put(service, "default")) == (409, "credential_from_environment")
    assert problem(await service.http.delete("/credentials/default")) == (409, "credential_from_environment")
    other = await service.key("admin", tenant="other")
    assert (await put(service, "default", other)).status_code == 201


async def test_a_session_is_attached_with_a_credential_that_is_there(service: Service) -> None:
    answer = await service.http.post("/sessions/sesn_1/attach", json={"credential": "team"})
    assert problem(answer) == (422, "invalid_request")
    assert "credential" == answer.json()["errors"][0]["field"]
    await put(service)
    answer = await service.http.post("/sessions/sesn_1/attach", json={"credential": "team"})
    assert (202, "team") == (answer.status_code, answer.json()["settings"]["credential"])


async def test_a_tenant_has_only_so_many(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "CREDENTIALS_MAX", 1)
    await put(service)
    assert problem(await put(service, "more")) == (409, "too_many_credentials")
    assert (await put(service)).status_code == 200
