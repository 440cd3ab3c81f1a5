from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from sqlalchemy import insert, select, update

from app.api import confirmations
from app.core.calls import END_STATES, digest
from app.store import tables
from app.store.wakeups import notify, session_key
from tests.api.service import Service, problem
from tests.store.rows import add_attachment, add_call, until

pytestmark = pytest.mark.anyio

CONFIRM = "/sessions/sesn_1/confirm"


async def held(service: Service, call_id: str = "tu1", **values: Any) -> None:
    """Add a live session with one call; its own gate accepts a decision at once."""
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, call_id, **({"gate_by": "tool"} | values))


async def confirm(
    service: Service, result: str = "allow", call_id: str = "tu1", **body: Any
) -> httpx.Response:
    # Escapes, because httpx itself cannot send half a character.
    text = json.dumps({"tool_use_id": call_id, "result": result, **body})
    return await service.http.post(CONFIRM, content=text, headers={"content-type": "application/json"})


async def decisions(service: Service) -> list[Any]:
    async with service.engine.connect() as connection:
        return list((await connection.execute(select(tables.decisions))).all())


async def attachment(service: Service) -> Any:
    async with service.engine.connect() as connection:
        return (await connection.execute(select(tables.attachments))).one()


async def has_decisions(service: Service, count: int) -> bool:
    return len(await decisions(service)) >= count


async def wants(service: Service) -> bool:
    return bool((await attachment(service)).wanted)


async def settle(service: Service, status: str, state: str, refusal: str | None = None) -> None:
    """Do what a runner does once upstream has answered: wait for a decision, then mark it."""
    await until(lambda: has_decisions(service, 1))
    async with service.engine.begin() as connection:
        await connection.execute(update(tables.decisions).values(status=status, refusal=refusal))
        await connection.execute(update(tables.calls).values(state=state))
        await notify(connection, [session_key("default", "sesn_1")])


async def test_a_decision_on_a_gate_of_ours_is_accepted_at_once(service: Service) -> None:
    await held(service)
    before = (await attachment(service)).wish
    answer = await confirm(service)
    assert answer.status_code == 200
    shown = answer.json()["decision"]
    assert (shown["result"], shown["status"], shown["by"], shown["via"]) == (
        "allow",
        "accepted",
        "admin",
        "api",
    )
    assert shown["deny_message"] is None
    assert (await attachment(service)).wish == before + 1


async def test_a_decision_on_upstreams_gate_answers_when_upstream_accepted_it(service: Service) -> None:
    await held(service, gate_by="upstream")
    runner = asyncio.create_task(settle(service, "accepted", "queued"))
    answer = await confirm(service)
    await runner
    assert (answer.status_code, answer.json()["state"]) == (200, "queued")


async def test_a_decision_that_upstream_has_not_accepted_in_time_answers_202(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-142: 202 while the verdict is not delivered yet."""
    monkeypatch.setattr(confirmations, "OUTCOME_LIMIT_S", 0.05)
    await held(service, gate_by="upstream")
    answer = await confirm(service)
    assert answer.status_code == 202
    assert (answer.json()["state"], answer.json()["decision"]["status"]) == ("held", "sending")


async def test_a_decision_that_upstream_refuses_answers_409_and_makes_room(service: Service) -> None:
    """R-143: the caller gets 409 with upstream's message, and the call is held again."""
    await held(service, gate_by="upstream")
    runner = asyncio.create_task(settle(service, "refused", "held", "no such tool use"))
    answer = await confirm(service)
    await runner
    assert problem(answer) == (409, "refused_by_upstream")
    assert "no such tool use" in answer.json()["detail"]
    assert answer.json()["call"]["state"] == "held"
    listed = await service.http.get("/confirmations")
    assert [call["id"] for call in listed.json()["data"]] == ["tu1"]


async def test_a_decision_that_someone_elses_overtook_answers_409(service: Service) -> None:
    """D-052: upstream held a deny already; the allow is refused and the caller told."""
    await held(service, gate_by="upstream")

    async def overtake() -> None:
        await until(lambda: has_decisions(service, 1))
        row = {"tenant": "default", "id": "seen", "session_id": "sesn_1", "call_id": "tu1"}
        verdict = {"result": "deny", "status": "accepted", "decided_by": "upstream", "via": "stream"}
        async with service.engine.begin() as connection:
            words = {"status": "refused", "refusal": "Somebody else decided first."}
            await connection.execute(update(tables.decisions).values(**words))
            await connection.execute(insert(tables.decisions).values(**row, **verdict))
            await connection.execute(update(tables.calls).values(state="denied"))
            await notify(connection, [session_key("default", "sesn_1")])

    runner = asyncio.create_task(overtake())
    answer = await confirm(service)
    await runner
    assert problem(answer) in {(409, "already_decided"), (409, "call_over")}
    assert answer.json()["state"] == "denied"


async def test_the_same_decision_twice_succeeds_twice_and_is_recorded_once(service: Service) -> None:
    """D-050: both answers succeed with the same content; one decision, one wish."""
    await held(service)
    first, second = await asyncio.gather(confirm(service), confirm(service))
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.content == second.content
    assert len(await decisions(service)) == 1
    assert (await attachment(service)).wish == 2


async def test_a_repeated_decision_succeeds_after_the_call_moved_on(service: Service) -> None:
    """D-050: a client's retry gets success, not the state that its first request led to."""
    await held(service)
    assert (await confirm(service)).status_code == 200
    async with service.engine.begin() as connection:
        await connection.execute(update(tables.calls).values(state="posted"))
    assert (await confirm(service)).json()["state"] == "posted"


async def test_of_fifty_opposite_decisions_at_once_the_first_counts(service: Service) -> None:
    """D-051, C-020: one decision stands; its like succeed, and its opposites get it in a 409."""
    await held(service)
    sent = ["allow", "deny"] * 25
    answers = await asyncio.gather(*(confirm(service, result) for result in sent))
    (decision,) = await decisions(service)
    for result, answer in zip(sent, answers, strict=True):
        if result == decision.result:
            assert answer.status_code == 200
        else:
            assert problem(answer) == (409, "already_decided")
            assert answer.json()["decision"]["result"] == decision.result
            assert answer.json()["decision"]["by"] == "admin"
    assert (await attachment(service)).wish == 2


@pytest.mark.parametrize("state", sorted(END_STATES))
async def test_a_call_that_is_over_cannot_be_decided(service: Service, state: str) -> None:
    """D-053: 409 with its outcome; nothing recorded."""
    await held(service, state=state)
    answer = await confirm(service)
    assert problem(answer) == (409, "call_over")
    assert answer.json()["state"] == state
    assert await decisions(service) == []


@pytest.mark.parametrize("reason", ["terminated", "deleted"])
async def test_a_call_of_a_session_that_is_over_cannot_be_decided(service: Service, reason: str) -> None:
    """D-054: 409 `session_ended`; nothing recorded."""
    await held(service)
    async with service.engine.begin() as connection:
        await connection.execute(update(tables.attachments).values(status="ended", end_reason=reason))
    answer = await confirm(service)
    assert problem(answer) == (409, "session_ended")
    assert (reason, None) == (answer.json()["end_reason"], answer.json()["end_detail"])
    assert "attach it" not in answer.json()["detail"]
    assert await decisions(service) == []


@pytest.mark.parametrize(
    ("status", "reason", "remedy"),
    [
        ("detached", "detached", "attach it first"),
        ("ended", "idle", "attach it first"),
        ("ended", "session_gone", "check the id"),
    ],
)
async def test_a_call_of_a_detached_session_cannot_be_decided(
    service: Service, status: str, reason: str, remedy: str
) -> None:
    """D-061, D-070: 409 `not_attached`; nothing recorded, and the call is not listed."""
    await held(service)
    ending = {"end_reason": reason, "end_detail": "as it was"}
    async with service.engine.begin() as connection:
        await connection.execute(update(tables.attachments).values(status=status, **ending))
    answer = await confirm(service)
    assert problem(answer) == (409, "not_attached")
    assert answer.json().items() >= ending.items()
    assert ("attach it first" in answer.json()["detail"]) is (remedy == "attach it first")
    assert remedy in answer.json()["detail"]
    assert await decisions(service) == []
    assert (await service.http.get("/confirmations")).json()["data"] == []


async def test_an_unknown_call_is_looked_for_and_then_not_found(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-055: the runner is asked to look in history; 404 when it does not appear."""
    monkeypatch.setattr(confirmations, "LOOK_LIMIT_S", 0.05)
    await held(service)
    assert problem(await confirm(service, call_id="nowhere")) == (404, "call_not_found")
    row = await attachment(service)
    assert (row.wanted, row.wish) == (["nowhere"], 2)


async def test_an_unknown_call_that_history_shows_is_decided(service: Service) -> None:
    """D-055: when the lease holder finds it gated and unanswered, the decision is accepted."""
    await held(service)

    async def find() -> None:
        await until(lambda: wants(service))
        async with service.engine.begin() as connection:
            await add_call(connection, "tu9", gate_by="tool")
            await notify(connection, [session_key("default", "sesn_1")])

    runner = asyncio.create_task(find())
    answer = await confirm(service, call_id="tu9")
    await runner
    assert (answer.status_code, answer.json()["id"]) == (200, "tu9")


async def test_another_tenants_call_is_an_unknown_one(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-056, C-007: not to be told from D-055, with that tenant's session or with one's own."""
    monkeypatch.setattr(confirmations, "LOOK_LIMIT_S", 0.05)
    await held(service)
    other = await service.key(tenant="other")
    async with service.engine.begin() as connection:
        await add_attachment(connection, "other", "sesn_2")
    for session, call, code in (
        ("sesn_1", "tu1", "session_not_found"),
        ("nope", "tu1", "session_not_found"),
        ("sesn_2", "tu1", "call_not_found"),
        ("sesn_2", "nope", "call_not_found"),
    ):
        body = {"tool_use_id": call, "result": "allow"}
        answer = await service.http.post(f"/sessions/{session}/confirm", json=body, headers=other)
        assert problem(answer) == (404, code)
    assert await decisions(service) == []


@pytest.mark.parametrize("state", ["queued", "dispatched", "unowned"])
async def test_a_call_that_was_never_gated_needs_no_decision(service: Service, state: str) -> None:
    """D-057: 409 `not_awaiting_confirmation`; nothing recorded."""
    await held(service, kind="custom", gate_by=None, gate_reason=None, state=state)
    assert problem(await confirm(service)) == (409, "not_awaiting_confirmation")
    assert await decisions(service) == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_use_id": "tu1", "result": "maybe"}, "result"),
        ({"tool_use_id": "tu1"}, "result"),
        ({"tool_use_id": "tu1", "verdict": "allow"}, "result"),
        ({"result": "allow"}, "tool_use_id"),
        ({"tool_use_id": "a\0b", "result": "allow"}, "tool_use_id"),
        ({"tool_use_id": "x" * 257, "result": "allow"}, "tool_use_id"),
        ({"tool_use_id": "tu1", "result": "allow", "deny_message": "no"}, "body"),
        ({"tool_use_id": "tu1", "result": "deny", "deny_message": "x" * 10_001}, "deny_message"),
        ({"tool_use_id": "tu1", "result": "deny", "input_digest": "md5:0"}, "input_digest"),
    ],
)
async def test_an_invalid_decision_is_refused_and_not_recorded(
    service: Service, body: dict[str, Any], field: str
) -> None:
    """D-058, R-145: 422, nothing recorded."""
    await held(service)
    answer = await service.http.post(CONFIRM, json=body)
    assert problem(answer) == (422, "invalid_request")
    assert field in [error["field"] for error in answer.json()["errors"]]
    assert await decisions(service) == []


async def test_a_decision_about_another_input_is_refused(service: Service) -> None:
    await held(service, input='{"command":   "ls"}')
    seen = digest(b'{"command": "ls"}')
    assert problem(await confirm(service, input_digest=seen)) == (409, "input_changed")
    assert (await confirm(service, input_digest=digest(b'{"command":   "ls"}'))).status_code == 200


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("no\0pe \ud83d", "no\ufffdpe \ufffd"),
        ("  ", "Declined by a reviewer. Do not retry without new instructions."),
        (None, "Declined by a reviewer. Do not retry without new instructions."),
        ("x" * 10_000, "x" * 10_000),
    ],
)
async def test_a_deny_message_is_stored_clean(service: Service, given: str | None, stored: str) -> None:
    """R-145, C-012: what the database cannot hold is replaced, and a blank message by a sentence."""
    await held(service)
    answer = await confirm(service, "deny", deny_message=given)
    assert answer.json()["decision"]["deny_message"] == stored


async def test_what_waits_is_listed_oldest_first_and_by_pages(service: Service) -> None:
    async with service.engine.begin() as connection:
        for session in ("sesn_1", "sesn_2"):
            await add_attachment(connection, session_id=session)
        for number in range(5):
            await add_call(connection, f"tu{number}", session_id=f"sesn_{1 + number % 2}")
        await add_call(connection, "moved", state="queued")
    first = (await service.http.get("/confirmations?limit=3")).json()
    rest = (await service.http.get("/confirmations", params={"cursor": first["next_cursor"]})).json()
    assert [call["id"] for call in first["data"] + rest["data"]] == [f"tu{number}" for number in range(5)]
    assert rest["next_cursor"] is None
    one = (await service.http.get("/sessions/sesn_2/confirmations")).json()
    assert [call["id"] for call in one["data"]] == ["tu1", "tu3"]


async def test_a_decided_call_no_longer_waits_for_a_person(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmations, "OUTCOME_LIMIT_S", 0.01)
    await held(service, gate_by="upstream")
    assert (await confirm(service)).status_code == 202
    assert (await service.http.get("/confirmations")).json()["data"] == []


async def test_waiting_confirmations_hold_no_database_connection(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-030: more waiting requests than connections leave room for others."""
    monkeypatch.setattr(confirmations, "OUTCOME_LIMIT_S", 1.0)
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        for number in range(40):
            await add_call(connection, f"tu{number}")
    waiting = [asyncio.create_task(confirm(service, call_id=f"tu{number}")) for number in range(40)]
    await until(lambda: has_decisions(service, 40))
    assert (await service.http.get("/sessions/sesn_1")).status_code == 200
    assert {(await task).status_code for task in waiting} == {202}
