from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import insert

from app.api.calls import CallDetail, CallObject
from app.store import tables
from tests.api.service import Service, problem
from tests.store.rows import add_attachment, add_call, add_delivery

pytestmark = pytest.mark.anyio

CALLS = "/sessions/sesn_1/calls"


async def add(service: Service, call_id: str = "tu1", **values: Any) -> None:
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, call_id, **values)


async def decide(service: Service, decision_id: str, status: str, result: str, at: datetime) -> None:
    row = {"tenant": "default", "id": decision_id, "session_id": "sesn_1", "call_id": "tu1"}
    verdict = {"result": result, "status": status, "decided_by": "key_1", "via": "api", "decided_at": at}
    async with service.engine.begin() as connection:
        await connection.execute(insert(tables.decisions).values(**row, **verdict))


async def test_a_call_is_shown_whole(service: Service) -> None:
    await add(service, thread_id="th1", result='[{"type":"text","text":"ok"}]', is_error=False, attempts=2)
    shown = (await service.http.get(CALLS)).json()["data"][0]
    assert CallObject.model_fields.keys() == shown.keys()
    assert shown.pop("created_at") <= shown.pop("updated_at")
    digest = hashlib.sha256(b'{"command": "ls"}').hexdigest()
    assert shown == {
        "id": "tu1",
        "session_id": "sesn_1",
        "thread_id": "th1",
        "kind": "builtin",
        "tool": "bash",
        "input": {"command": "ls"},
        "input_digest": f"sha256:{digest}",
        "edited_input": None,
        "state": "held",
        "outcome_unknown": False,
        "awaits_callback": False,
        "gate": {
            "by": "upstream",
            "permission": "ask",
            "reason": "ask",
            "rule": None,
            "expires_at": None,
            "on_expiry": None,
            "is_overdue": False,
            "approvers": None,
            "approvals_required": 1,
            "tool_version": 0,
            "approvals": [],
        },
        "decision": None,
        "attempts": 2,
        "result": {"content": [{"type": "text", "text": "ok"}], "is_error": False},
        "posted": False,
    }


@pytest.mark.parametrize(
    "raw",
    [
        '{"b": 1.10, "a":  12345678901234567890123456789, "a": 1e400}',
        '{"q":"a\\u0000b"}',
        '"\\ud83d"',
        '{"\\ude00\\ud83d": "\\\\u0000"}',
        '{"text": "é\\u00e9"}',
    ],
)
async def test_an_input_is_shown_byte_for_byte(service: Service, raw: str) -> None:
    """C-012: digits, order, escapes and half characters as the agent wrote them, with the digest of that."""
    await add(service, input=raw)
    digest = hashlib.sha256(raw.encode()).hexdigest()
    for path in (CALLS, f"{CALLS}/tu1", "/confirmations"):
        answer = await service.http.get(path)
        assert f'"input":{raw},"input_digest":"sha256:{digest}"'.encode() in answer.content


async def test_the_decision_shown_is_the_one_that_stands(service: Service) -> None:
    await add(service)
    await decide(service, "d1", "refused", "allow", datetime(2026, 1, 1, tzinfo=UTC))
    await decide(service, "d2", "refused", "deny", datetime(2026, 1, 2, tzinfo=UTC))
    shown = (await service.http.get(f"{CALLS}/tu1")).json()["decision"]
    assert (shown["result"], shown["status"]) == ("deny", "refused")
    await decide(service, "d3", "sending", "allow", datetime(2025, 1, 1, tzinfo=UTC))
    shown = (await service.http.get(f"{CALLS}/tu1")).json()["decision"]
    assert shown == {
        "result": "allow",
        "status": "sending",
        "by": "key_1",
        "via": "api",
        "at": "2025-01-01T00:00:00Z",
        "deny_message": None,
        "edited_input_digest": None,
    }


async def test_one_call_shows_every_delivery(service: Service) -> None:
    await add(service, detail="the tool may have run")
    async with service.engine.begin() as connection:
        for attempt in (2, 1):
            await add_delivery(connection, "tu1", attempt=attempt)
    shown = (await service.http.get(f"{CALLS}/tu1")).json()
    assert CallDetail.model_fields.keys() == shown.keys()
    assert shown["detail"] == "the tool may have run"
    assert [delivery["attempt"] for delivery in shown["deliveries"]] == [1, 2]


async def test_calls_are_listed_in_the_order_of_their_record_and_by_state(service: Service) -> None:
    await add(service)
    async with service.engine.begin() as connection:
        for number in range(2, 6):
            await add_call(connection, f"tu{number}", state="posted")
    seen: list[str] = []
    params: dict[str, str] = {"limit": "2"}
    while True:
        page = (await service.http.get(CALLS, params=params)).json()
        seen += [call["id"] for call in page["data"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert seen == [f"tu{number}" for number in range(1, 6)]
    held = (await service.http.get(CALLS, params={"state": "held"})).json()
    assert [call["id"] for call in held["data"]] == ["tu1"]


async def test_an_unknown_call_is_not_found(service: Service) -> None:
    await add(service)
    for call_id in ("tu2", "a%00b", "x" * 300, "%0A"):
        assert problem(await service.http.get(f"{CALLS}/{call_id}")) == (404, "call_not_found")
