"""Who may decide, and how many it takes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import select, text

from app.core.calls import Call, Decision, Gate
from app.store import tables
from app.store.batches import Batch, write
from app.store.leases import Lease
from tests.api.service import Service, problem
from tests.store.rows import add_attachment, add_call

pytestmark = pytest.mark.anyio


async def held(service: Service, **policy: Any) -> None:
    """Add a held call of a tool that is registered so."""
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu1", gate_by="tool")
    await register(service, **policy)


async def register(service: Service, **policy: Any) -> None:
    answer = await service.http.put("/tools/bash", json={"url": "https://tools.example/hook", **policy})
    assert answer.status_code in (200, 201), answer.text


async def person(service: Service, name: str) -> dict[str, str]:
    """Create a key for a person; return its header, and its id under `id`."""
    made = (await service.http.post("/keys", json={"name": name, "scopes": ["confirm"]})).json()
    return {"authorization": f"Bearer {made['key']}", "id": made["id"]}


async def confirm(service: Service, who: dict[str, str], result: str = "allow") -> httpx.Response:
    headers = {"authorization": who["authorization"]}
    body = {"tool_use_id": "tu1", "result": result}
    return await service.http.post("/sessions/sesn_1/confirm", json=body, headers=headers)


async def standing(service: Service) -> list[tuple[str, str, str]]:
    d = tables.decisions
    async with service.engine.connect() as connection:
        rows = await connection.execute(
            select(d.c.decided_by, d.c.result, d.c.status).order_by(d.c.decided_at)
        )
        return [(row.decided_by, row.result, row.status) for row in rows]


async def audited(service: Service) -> list[tuple[str, str, str | None]]:
    rows = (await service.http.get("/audit", params={"session": "sesn_1"})).json()["data"]
    return [(row["kind"], row["actor"], row["detail"]) for row in rows]


async def waiting(service: Service) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = (await service.http.get("/confirmations")).json()["data"]
    return data


async def test_an_allow_of_a_tool_that_was_registered_anew_is_refused(service: Service) -> None:
    ana = await person(service, "ana")
    await held(service)
    (shown,) = await waiting(service)
    seen = shown["gate"]["tool_version"]
    await register(service, description="Another one now.")
    headers = {"authorization": ana["authorization"]}
    body = {"tool_use_id": "tu1", "result": "allow", "tool_version": seen}
    answer = await service.http.post("/sessions/sesn_1/confirm", json=body, headers=headers)
    assert problem(answer) == (409, "tool_changed")
    assert answer.json()["gate"]["tool_version"] == seen + 1
    body["tool_version"] = seen + 1
    answer = await service.http.post("/sessions/sesn_1/confirm", json=body, headers=headers)
    assert (answer.status_code, answer.json()["decision"]["by"]) == (200, ana["id"])


async def test_a_deny_counts_whatever_became_of_the_tool(service: Service) -> None:
    await held(service)
    await register(service, description="Another one now.")
    body = {"tool_use_id": "tu1", "result": "deny", "tool_version": 1}
    assert (await service.http.post("/sessions/sesn_1/confirm", json=body)).status_code == 200


async def test_an_approval_of_the_tool_before_is_none_of_the_tool_now(service: Service) -> None:
    ana, ben = await person(service, "ana"), await person(service, "ben")
    await held(service, approvals_required=2)
    assert (await confirm(service, ana)).status_code == 202
    await register(service, approvals_required=2, description="Another one now.")
    assert (await confirm(service, ben)).status_code == 202
    assert await decided_now(service) is None
    assert (await confirm(service, ana)).status_code == 200
    assert await decided_now(service) == "allow"


async def decided_now(service: Service) -> str | None:
    decision = (await service.http.get("/sessions/sesn_1/calls/tu1")).json()["decision"]
    return None if decision is None else str(decision["result"])


async def test_a_key_that_is_not_named_decides_nothing(service: Service) -> None:
    """Neither way; and the card says who may."""
    ana, ben = await person(service, "ana"), await person(service, "ben")
    await held(service, approvers=["ana"])
    (shown,) = await waiting(service)
    assert shown["gate"]["approvers"] == ["ana"]
    for result in ("allow", "deny"):
        assert problem(await confirm(service, ben, result)) == (403, "not_an_approver")
    assert await standing(service) == []
    assert (await confirm(service, ana)).json()["decision"]["by"] == ana["id"]
    assert await audited(service) == [
        ("decision.rejected", ben["id"], "not_an_approver"),
        ("decision.rejected", ben["id"], "not_an_approver"),
        ("decision.recorded", ana["id"], None),
    ]


async def test_approvers_are_named_by_id_too_and_the_operator_like_any_other(service: Service) -> None:
    ana = await person(service, "x")
    await held(service, approvers=[ana["id"]])
    operator = {"authorization": service.http.headers["authorization"]}
    assert problem(await confirm(service, operator)) == (403, "not_an_approver")
    assert (await confirm(service, ana)).status_code == 200


async def test_the_registration_counts_as_it_is_when_somebody_decides(service: Service) -> None:
    ana = await person(service, "ana")
    await held(service)
    await register(service, approvers=["ben"])
    assert problem(await confirm(service, ana)) == (403, "not_an_approver")
    await service.http.delete("/tools/bash")
    assert (await confirm(service, ana)).status_code == 200


@pytest.mark.parametrize(
    ("kind", "rules"),
    [("custom", "*"), ("builtin", None), ("mcp", None), ("builtin", "bash"), ("mcp", "bash")],
)
async def test_the_registration_that_rules_is_of_the_name_or_for_custom_calls_the_catch_all(
    service: Service, kind: str, rules: str | None
) -> None:
    """An MCP call by one of its name too: that can only make it harder to allow."""
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu1", kind=kind, gate_by="tool")
    tool = {"url": "https://tools.example/hook", "approvers": ["nobody"]}
    await service.http.put(f"/tools/{rules or '*'}", json=tool)
    (shown,) = await waiting(service)
    assert shown["gate"]["approvers"] == (None if rules is None else ["nobody"])
    answer = await confirm(service, await person(service, "ana"))
    assert answer.status_code == (200 if rules is None else 403)


async def test_four_eyes_take_two_keys_to_allow(service: Service) -> None:
    """The first approval is recorded and shown, and the call waits on."""
    ana, ben = await person(service, "ana"), await person(service, "ben")
    await held(service, approvals_required=2)
    for _ in range(2):
        answer = await confirm(service, ana)
        body = answer.json()
        assert (answer.status_code, body["code"]) == (202, "second_approval_needed")
        assert (body["state"], body["decision"]) == ("held", None)
    (shown,) = await waiting(service)
    assert shown["gate"]["approvals_required"] == 2
    assert [one["by"] for one in shown["gate"]["approvals"]] == [ana["id"]]
    done = (await confirm(service, ben)).json()
    assert (done["decision"]["by"], done["decision"]["result"]) == (ben["id"], "allow")
    assert [one["by"] for one in done["gate"]["approvals"]] == [ana["id"]]
    assert await waiting(service) == []
    assert await standing(service) == [(ana["id"], "allow", "approved"), (ben["id"], "allow", "accepted")]
    assert [kind for kind, _, _ in await audited(service)] == [
        "decision.approved",
        "decision.repeated",
        "decision.recorded",
    ]


@pytest.mark.parametrize("who", ["first", "another"])
async def test_one_deny_ends_what_was_half_approved(service: Service, who: str) -> None:
    """Also by the one who had approved it."""
    people = {"first": await person(service, "ana"), "another": await person(service, "ben")}
    await held(service, approvals_required=2)
    await confirm(service, people["first"])
    answer = await confirm(service, people[who], "deny")
    assert (answer.status_code, answer.json()["decision"]["result"]) == (200, "deny")
    assert problem(await confirm(service, people["another"])) == (409, "already_decided")


async def test_an_approval_of_a_revoked_key_does_not_count(service: Service) -> None:
    ana, ben, cleo = [await person(service, name) for name in ("ana", "ben", "cleo")]
    await held(service, approvals_required=2)
    await confirm(service, ana)
    await service.http.delete(f"/keys/{ana['id']}")
    assert (await confirm(service, ben)).status_code == 202
    assert (await confirm(service, cleo)).status_code == 200


async def test_of_many_approvals_at_once_two_suffice_and_no_key_counts_twice(service: Service) -> None:
    ana, ben = await person(service, "ana"), await person(service, "ben")
    await held(service, approvals_required=2)
    answers = await asyncio.gather(*(confirm(service, ana) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {202}
    answers = await asyncio.gather(*(confirm(service, who) for who in [ana, ben] * 5))
    assert {answer.status_code for answer in answers} <= {200, 202}
    found = await standing(service)
    assert [(by, status) for by, _, status in found] == [(ana["id"], "approved"), (ben["id"], "accepted")]


async def test_an_approval_answers_no_later_question(service: Service) -> None:
    """An interrupt closed the call; when upstream asks again, two must allow again."""
    ana, ben = await person(service, "ana"), await person(service, "ben")
    await held(service, approvals_required=2)
    await confirm(service, ana)
    call = Call("tu1", "builtin", "bash", b"{}", "interrupted", gate=Gate("tool", None, "tool_asks"))
    async with service.engine.begin() as connection:
        await write(connection, "r1", [Batch(Lease("default", "sesn_1", 1), calls=[call], moved=[call])])
        await connection.execute(text("update calls set state = 'held'"))
    assert (await confirm(service, ben)).status_code == 202
    assert (await standing(service))[0] == (ana["id"], "allow", "refused")


async def test_the_approvals_of_a_lost_delivery_are_spent(service: Service) -> None:
    """To deliver once more takes two again."""
    ana, ben = await person(service, "ana"), await person(service, "ben")
    await held(service, approvals_required=2)
    await confirm(service, ana)
    done = (await confirm(service, ben)).json()
    assert done["decision"]["status"] == "accepted"
    held_again = Call("tu1", "builtin", "bash", b"{}", "held", gate=Gate("tool", None, "outcome_unknown"))
    async with service.engine.begin() as connection:
        batch = Batch(Lease("default", "sesn_1", 1), calls=[held_again], reopened=["tu1"])
        await write(connection, "r1", [batch])
    assert {status for _, _, status in await standing(service)} == {"spent"}
    assert (await confirm(service, ben)).status_code == 202


async def test_an_allow_that_upstream_refused_needs_one_more_key_only(service: Service) -> None:
    """The question is the same, and the other approval was about it."""
    ana, ben = await person(service, "ana"), await person(service, "ben")
    await held(service, approvals_required=2)
    await confirm(service, ana)
    await confirm(service, ben)
    d = tables.decisions
    async with service.engine.begin() as connection:
        mine = await connection.scalar(select(d.c.id).where(d.c.status == "accepted"))
        refused = Decision("allow", "refused", ben["id"], "api", id=mine, refusal="no")
        gate = Gate("tool", None, "tool_asks")
        call = Call("tu1", "builtin", "bash", b"{}", "held", gate=gate, decision=refused)
        await write(connection, "r1", [Batch(Lease("default", "sesn_1", 1), calls=[call], decided=[call])])
    assert (await confirm(service, ben)).status_code == 200
