from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import text

from tests.api.service import Service, problem
from tests.store.rows import add_attachment, add_call

pytestmark = pytest.mark.anyio


async def decided(service: Service) -> None:
    """Two sessions with a call each: the first is allowed, and denied too late."""
    async with service.engine.begin() as connection:
        for session in ("sesn_1", "sesn_2"):
            await add_attachment(connection, session_id=session)
            await add_call(connection, "tu1", session_id=session, gate_by="tool")
    for session, result in (("sesn_1", "allow"), ("sesn_1", "deny"), ("sesn_2", "deny")):
        body = {"tool_use_id": "tu1", "result": result, "shown_ms": 1200}
        await service.http.post(f"/sessions/{session}/confirm", json=body)


async def listed(service: Service, **params: Any) -> list[dict[str, Any]]:
    answer = await service.http.get("/audit", params=params)
    assert answer.status_code == 200, answer.text
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


async def test_decisions_are_listed_oldest_first_with_their_hashes(service: Service) -> None:
    await decided(service)
    first, second, third = await listed(service)
    assert [row["kind"] for row in (first, second, third)] == [
        "decision.recorded",
        "decision.contrary",
        "decision.recorded",
    ]
    assert (first["previous"], second["previous"]) == (64 * "0", first["hash"])
    assert (first["actor"], first["via"], first["result"], first["shown_ms"]) == (
        "admin",
        "api",
        "allow",
        1200,
    )
    assert (first["session_id"], first["call_id"], first["subject"]) == ("sesn_1", "tu1", "bash")
    assert first["input_digest"].startswith("sha256:")
    assert first["decision_id"] == second["decision_id"] != third["decision_id"]


async def test_the_list_goes_by_pages_in_both_orders_and_by_session_and_call(service: Service) -> None:
    await decided(service)
    for order, expected in (("false", [1, 2, 3]), ("true", [3, 2, 1])):
        page = (await service.http.get("/audit", params={"limit": 2, "newest_first": order})).json()
        rest = await listed(service, cursor=page["next_cursor"], newest_first=order)
        assert [row["sequence"] for row in page["data"] + rest] == expected
    assert [row["sequence"] for row in await listed(service, session="sesn_2")] == [3]
    assert [row["sequence"] for row in await listed(service, session="sesn_1", call="tu1")] == [1, 2]
    assert await listed(service, session="sesn_1", call="nope") == []
    assert problem(await service.http.get("/audit?call=tu1")) == (422, "invalid_request")


async def test_only_admins_of_the_tenant_read_it(service: Service) -> None:
    """C-007: another tenant's admin sees that tenant's chain."""
    await decided(service)
    reader = await service.key("read", "confirm", "sessions", "tools")
    assert problem(await service.http.get("/audit", headers=reader)) == (403, "forbidden")
    other = await service.key(tenant="other")
    (row,) = (await service.http.get("/audit", headers=other)).json()["data"]
    assert (row["kind"], row["sequence"]) == ("key.created", 1)


async def test_keys_and_tools_leave_rows_without_secrets(service: Service) -> None:
    made = (await service.http.post("/keys", json={"name": "ana", "scopes": ["read"]})).json()
    tool = {"url": "https://tools.example/hook", "headers": {"x-secret": "hidden"}}
    secret = (await service.http.put("/tools/lookup", json=tool)).json()["signing_secret"]
    await service.http.put("/tools/lookup", json=tool)
    await service.http.put("/tools/lookup", json=tool | {"timeout_s": 5})
    rotated = (await service.http.post("/tools/lookup/rotate-secret", json={})).json()["signing_secret"]
    await service.http.delete("/tools/lookup")
    await service.http.delete("/tools/lookup")
    await service.http.delete(f"/keys/{made['id']}")
    shown = await listed(service)
    assert [(row["kind"], row["subject"], row["detail"]) for row in shown] == [
        ("key.created", made["id"], None),
        ("tool.registered", "lookup", "version_1"),
        ("tool.changed", "lookup", "version_2"),
        ("tool.secret_rotated", "lookup", None),
        ("tool.deleted", "lookup", None),
        ("key.revoked", made["id"], None),
    ]
    assert not any(
        word in json.dumps(shown) for word in (made["key"], secret, rotated, "hidden", "tools.example")
    )


def verify(url: str, environ: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    env = {
        **environ,
        "BASCULE_DATABASE_URL": url,
        "BASCULE_SECRET_KEY": "A" * 43 + "=",
        "BASCULE_ADMIN_KEY": "x" * 32,
    }
    command = [sys.executable, "-m", "app", "audit", "verify"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


async def test_verify_prints_the_rows_and_the_head_and_finds_a_changed_row(
    service: Service, migrated_url: str
) -> None:
    await decided(service)
    head = (await listed(service))[-1]["hash"]
    sound = verify(migrated_url)
    assert (sound.returncode, sound.stdout) == (0, f"default\t3 rows\thead {head}\n")
    async with service.engine.begin() as connection:
        await connection.execute(text("set local session_replication_role = replica"))
        await connection.execute(text("update audit set result = 'deny' where sequence = 1"))
    broken = verify(migrated_url)
    assert (broken.returncode, broken.stderr) == (1, "default: row 1 was changed\n")
