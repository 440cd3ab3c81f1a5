"""Keys: how they look, when they were used, and when they end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.main import Bridge
from app.store.keys import is_plausible
from tests.api.service import Service, problem

pytestmark = pytest.mark.anyio

GUIDE = (Path(__file__).parents[2] / "docs/keys.md").read_text(encoding="utf-8")


async def passed(engine: AsyncEngine, column: str, seconds: float) -> None:
    """Let time pass: what a column of the keys says lies back by this."""
    async with engine.begin() as connection:
        await connection.execute(text(f"update keys set {column} = {column} - interval '{seconds} seconds'"))


async def only_key(service: Service) -> dict[str, Any]:
    (key,) = (await service.http.get("/keys")).json()["data"]
    return dict(key)


async def test_the_guides_pattern_finds_keys_in_text_and_their_checksum_tells_them_from_noise(
    service: Service,
) -> None:
    pattern = re.search(r"`(bsk_\[.*?)`", GUIDE)
    assert pattern is not None
    key = (await service.key("read"))["authorization"].removeprefix("Bearer ")
    assert [key] == re.findall(pattern[1], f'KEY="{key}" # {key[:-1]} {key.lower()[:20]}')
    swapped = key[:10] + ("0" if key[10] != "0" else "1") + key[11:]
    assert (True, False) == (is_plausible(key), is_plausible(swapped))
    assert re.fullmatch(pattern[1], swapped)


async def test_a_key_made_before_the_checksum_was_documented_is_still_good() -> None:
    """The form is frozen: this one was made by the first version."""
    assert is_plausible("bsk_00000000000000000000000000000000000000000002CZclj")


async def test_a_key_that_expired_is_refused_and_told_so(service: Service) -> None:
    made = await service.http.post("/keys", json={"name": "x", "scopes": ["read"], "expires_in_s": 3600})
    as_key = {"authorization": f"Bearer {made.json()['key']}"}
    assert made.json()["expires_at"] > made.json()["created_at"]
    assert 200 == (await service.http.get("/sessions", headers=as_key)).status_code
    await passed(service.engine, "expires_at", 3601)
    refused = await service.http.get("/sessions", headers=as_key)
    assert (401, "key_expired") == problem(refused)
    assert "Bearer" == refused.headers["www-authenticate"]
    assert 200 == (await service.http.delete(f"/keys/{made.json()['id']}")).status_code
    assert (401, "unauthenticated") == problem(await service.http.get("/sessions", headers=as_key))


async def test_a_key_lasts_for_ever_unless_it_says_otherwise(service: Service) -> None:
    await service.key("read")
    assert (await only_key(service))["expires_at"] is None


@pytest.mark.parametrize("seconds", [0, -1, 1.5, 10**12, "60"])
async def test_an_expiry_is_a_number_of_seconds_within_ten_years(service: Service, seconds: Any) -> None:
    body = {"name": "x", "scopes": ["read"], "expires_in_s": seconds}
    assert (422, "invalid_request") == problem(await service.http.post("/keys", json=body))


async def test_a_keys_last_use_is_listed_and_written_at_most_once_a_minute(service: Service) -> None:
    bridge: Bridge = service.app.state.bridge
    key = await service.key("read")
    assert (await only_key(service))["last_used_at"] is None
    seen = []
    for aged_s in (0, 30, 30):
        if seen:
            await passed(service.engine, "last_used_at", aged_s)
        before = (await only_key(service))["last_used_at"]
        await service.http.get("/sessions", headers=key)
        await bridge.uses.write(service.engine)
        seen.append((await only_key(service))["last_used_at"] == before)
    assert [False, True, False] == seen


async def test_a_refused_key_counts_as_no_use(service: Service) -> None:
    bridge: Bridge = service.app.state.bridge
    key = await service.key("read")
    await service.http.delete(f"/keys/{(await only_key(service))['id']}")
    await service.http.get("/sessions", headers=key)
    await bridge.uses.write(service.engine)
    assert (await only_key(service))["last_used_at"] is None
