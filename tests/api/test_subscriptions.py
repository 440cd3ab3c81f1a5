from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.notifications import EVENTS
from app.main import build_bridge
from app.settings import Settings
from app.store import subscriptions, tables
from tests.api.service import Service, problem, served
from tests.store.rows import SECRETS

pytestmark = pytest.mark.anyio

URL = "https://hooks.example/bascule"


async def put(service: Service, name: str = "slack", **body: Any) -> Any:
    body = {"url": URL, "events": ["call.failed"], **body}
    return await service.http.put(f"/subscriptions/{name}", json=body)


async def test_a_new_subscription_has_every_default_and_shows_its_secret_once(service: Service) -> None:
    answer = await put(service, events=sorted(EVENTS))
    assert answer.status_code == 201
    shown = answer.json()
    secret = shown.pop("signing_secret")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert (await service.http.get("/subscriptions/slack")).json() == shown
    assert shown.pop("created_at") == shown.pop("updated_at")
    assert shown == {
        "name": "slack",
        "url": URL,
        "events": sorted(EVENTS),
        "header_names": [],
        "enabled": True,
        "disabled_reason": None,
        "disabled_at": None,
        "pending": 0,
        "dropped": 0,
        "failures": 0,
        "retry_at": None,
        "last_success_at": None,
        "last_error": None,
        "last_error_at": None,
    }
    again = await put(service, headers={"x": "y"}, enabled=False)
    assert again.status_code == 200
    assert "signing_secret" not in again.json()
    assert (["x"], False) == (again.json()["header_names"], again.json()["enabled"])


async def test_replacing_a_subscription_keeps_its_secret(service: Service) -> None:
    secret = (await put(service)).json()["signing_secret"]
    await put(service, url="https://hooks.example/elsewhere")
    async with service.engine.connect() as connection:
        row = (await connection.execute(select(tables.subscriptions))).one()
    key = SECRETS.decrypt(row.secret, column=subscriptions.SECRET, row=("default", "slack"))
    assert "whsec_" + base64.b64encode(key).decode() == secret


async def test_secret_and_headers_are_encrypted_and_write_only(service: Service) -> None:
    answer = await put(service, headers={"authorization": "Bearer hidden-value"})
    key = base64.b64decode(answer.json()["signing_secret"].removeprefix("whsec_"))
    assert "hidden-value" not in answer.text
    async with service.engine.connect() as connection:
        row = (await connection.execute(select(tables.subscriptions))).one()
    assert b"hidden-value" not in row.headers
    assert key not in row.secret


@pytest.mark.parametrize(
    "body",
    [
        {"events": []},
        {"events": ["call.posted"]},
        {"events": ["call.failed", "call.failed"]},
        {"events": "call.failed"},
        {"enabled": "yes"},
        {"url": "http://hooks.example"},
        {"url": "https://hooks.example/\0"},
        {"headers": {"webhook-id": "x"}},
        {"headers": {"Host": "x"}},
        {"unknown": 1},
    ],
)
async def test_an_invalid_subscription_is_refused(service: Service, body: dict[str, Any]) -> None:
    assert problem(await put(service, **body)) == (422, "invalid_request")
    assert (await service.http.get("/subscriptions")).json()["data"] == []


@pytest.mark.parametrize(
    "url",
    ["http://hooks.example", "https://127.0.0.1/", "https://169.254.169.254/", "https://u:p@hooks.example/"],
)
async def test_a_url_is_judged_by_its_text_as_a_tools_is(
    engine: AsyncEngine, migrated_url: str, url: str
) -> None:
    """C-009."""
    bridge = build_bridge(Settings(secret_key=SecretStr(base64.b64encode(bytes(32)).decode())), migrated_url)
    async with served(engine, migrated_url, bridge.check_url) as service:
        answer = await put(service, url=url)
        assert problem(answer) == (422, "invalid_request")
        assert ["url"] == [each["field"] for each in answer.json()["errors"]]
        assert "u:p" not in answer.text


@pytest.mark.parametrize("name", ["a b", "x" * 65, "ä", "a%2Fb"])
async def test_a_name_that_none_can_have_is_not_found(service: Service, name: str) -> None:
    assert (await put(service, name)).status_code == 404


async def test_subscriptions_are_listed_by_name_and_by_pages_and_end(service: Service) -> None:
    for name in ("b", "a", "c"):
        await put(service, name)
    first = (await service.http.get("/subscriptions?limit=2")).json()
    rest = (await service.http.get("/subscriptions", params={"cursor": first["next_cursor"]})).json()
    assert ["a", "b", "c"] == [one["name"] for one in first["data"] + rest["data"]]
    assert (await service.http.delete("/subscriptions/a")).status_code == 204
    assert problem(await service.http.delete("/subscriptions/a")) == (404, "subscription_not_found")
    assert problem(await service.http.get("/subscriptions/a")) == (404, "subscription_not_found")


async def test_a_tenant_has_a_limited_number_of_subscriptions(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "SUBSCRIPTIONS_MAX", 1)
    await put(service, "a")
    assert problem(await put(service, "b")) == (409, "too_many_subscriptions")
    assert (await put(service, "a", enabled=False)).status_code == 200


async def test_two_that_subscribe_at_once_make_one_subscription(service: Service) -> None:
    statuses = [answer.status_code for answer in await asyncio.gather(*(put(service) for _ in range(5)))]
    assert [200] * 4 + [201] == sorted(statuses)
