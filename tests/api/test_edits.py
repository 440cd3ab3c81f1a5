"""An allow with an edited input: what is recorded, refused, repeated, and shown to whom."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from app.core.calls import digest
from app.store import tables
from tests.api.service import Service, problem
from tests.api.test_approvals import person
from tests.store.rows import add_attachment, add_call

pytestmark = pytest.mark.anyio

ORIGINAL = '{"amount": 900, "to": "A-1"}'
EDITED = '{"amount":90.10,"to":"A-1"}'
DIGEST = digest(EDITED.encode())
OTHER = '{"amount":80,"to":"A-1"}'


async def held(service: Service, *, policy: dict[str, Any] | None = None, **values: Any) -> None:
    """Add a held custom call, of a tool that is registered so."""
    row = {"kind": "custom", "tool": "refund", "input": ORIGINAL, "permission": None, "gate_by": "tool"}
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu1", **(row | {"gate_reason": "tool_asks"} | values))
    if policy is not None:
        answer = await service.http.put("/tools/refund", json={"url": "https://tools.example/hook"} | policy)
        assert answer.status_code in (200, 201), answer.text


async def allow(
    service: Service, edited: str | None = EDITED, *, who: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    """Allow as a client that writes its JSON itself; `who` is a person's header."""
    text = json.dumps({"tool_use_id": "tu1", "result": "allow"} | body)
    if edited is not None:
        text = text[:-1] + f', "input": {edited}}}'
    headers = {"content-type": "application/json"}
    if who is not None:
        headers["authorization"] = who["authorization"]
    return await service.http.post("/sessions/sesn_1/confirm", content=text, headers=headers)


async def standing(service: Service) -> list[tuple[str, str, str | None]]:
    d = tables.decisions
    async with service.engine.connect() as connection:
        rows = await connection.execute(
            select(d.c.result, d.c.status, d.c.edited_input).order_by(d.c.decided_at)
        )
        return [(row.result, row.status, row.edited_input) for row in rows]


async def audited(service: Service) -> list[tuple[str, str | None]]:
    rows = (await service.http.get("/audit", params={"session": "sesn_1"})).json()["data"]
    assert {digest(ORIGINAL.encode())} == {row["input_digest"] for row in rows}
    return [(row["kind"], row["detail"]) for row in rows]


async def test_an_edited_input_is_kept_digit_for_digit_beside_the_agents(service: Service) -> None:
    await held(service)
    answer = await allow(service, '{ "amount": 90.10, "to": "A-1" }')
    assert answer.status_code == 200
    assert f'"input":{ORIGINAL},' in answer.text
    assert f'"edited_input":{EDITED},' in answer.text
    shown = answer.json()
    assert (digest(ORIGINAL.encode()), DIGEST) == (
        shown["input_digest"],
        shown["decision"]["edited_input_digest"],
    )
    assert [("allow", "accepted", EDITED)] == await standing(service)
    assert [("decision.recorded", f"edited {DIGEST}")] == await audited(service)
    again = await service.http.get("/sessions/sesn_1/calls/tu1")
    assert f'"edited_input":{EDITED},' in again.text


async def test_the_same_edit_again_succeeds_without_effect(service: Service) -> None:
    await held(service)
    first, second = await allow(service), await allow(service, EDITED.replace(",", " ,\n"))
    assert (200, first.content) == (second.status_code, second.content)
    assert 1 == len(await standing(service))
    assert ["decision.recorded", "decision.repeated"] == [kind for kind, _ in await audited(service)]


@pytest.mark.parametrize(
    ("first", "second", "shown", "attempted"),
    [
        (EDITED, OTHER, DIGEST, f"edited {digest(OTHER.encode())}"),
        (EDITED, None, DIGEST, None),
        (None, EDITED, None, f"edited {DIGEST}"),
    ],
)
async def test_an_allow_of_another_input_is_a_contrary_decision(
    service: Service, first: str | None, second: str | None, shown: str | None, attempted: str | None
) -> None:
    await held(service)
    assert (await allow(service, first)).status_code == 200
    answer = await allow(service, second)
    assert problem(answer) == (409, "already_decided")
    decision = answer.json()["decision"]
    assert ("allow", "admin", shown) == (decision["result"], decision["by"], decision["edited_input_digest"])
    assert ("decision.contrary", attempted) == (await audited(service))[1]


@pytest.mark.parametrize("edited", [ORIGINAL, '{"to":"A-1","amount":900}'])
async def test_an_edit_that_changes_nothing_is_an_ordinary_allow(service: Service, edited: str) -> None:
    await held(service)
    assert (await allow(service, edited)).json()["edited_input"] is None
    assert (await allow(service, None)).status_code == 200
    assert [("allow", "accepted", None)] == await standing(service)


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "builtin", "tool": "bash", "permission": "ask", "gate_by": "upstream"},
        {"kind": "builtin", "tool": "bash"},
        {"kind": "mcp", "permission": "ask", "gate_by": "upstream"},
        {"permission": "review", "gate_by": "upstream", "gate_reason": "unknown_permission"},
        {"gate_reason": "outcome_unknown", "attempts": 1},
    ],
)
async def test_what_the_platform_cannot_run_edited_is_refused_with_the_remedy(
    service: Service, values: dict[str, Any]
) -> None:
    await held(service, **values)
    answer = await allow(service)
    assert problem(answer) == (422, "not_editable")
    assert "deny it with a message that says what to change" in answer.json()["detail"]
    assert await standing(service) == []


@pytest.mark.parametrize(
    ("body", "edited", "field", "words"),
    [
        ({"result": "deny"}, EDITED, "body", "input goes with allow only"),
        ({}, '"text"', "input", ""),
        ({}, "[1]", "input", ""),
        ({}, '{"a": NaN}', "input", "without NaN"),
    ],
)
async def test_a_deny_with_an_input_and_an_input_that_is_no_object_are_malformed(
    service: Service, body: dict[str, Any], edited: str, field: str, words: str
) -> None:
    await held(service)
    answer = await allow(service, edited, **body)
    assert problem(answer) == (422, "invalid_request")
    (error,) = answer.json()["errors"]
    assert (True, True) == (error["field"].startswith(field), words in error["message"])
    assert await standing(service) == []


@pytest.mark.parametrize(
    ("edited", "words"),
    [
        ('{"amount": 5000}', "amount must be at most 1000"),
        ('{"to": "A-1"}', 'lacks the member "amount"'),
        ('{"amount": 1, "amount": 2}', "names a member of an object twice"),
    ],
)
async def test_an_edit_that_the_tool_would_not_take_says_where(
    service: Service, edited: str, words: str
) -> None:
    schema = {"type": "object", "required": ["amount"], "properties": {"amount": {"maximum": 1000}}}
    await held(service, policy={"input_schema": schema})
    answer = await allow(service, edited)
    assert problem(answer) == (422, "input_unfit")
    (error,) = answer.json()["errors"]
    assert "input" == error["field"]
    assert words in error["message"]
    assert [] == await standing(service)
    assert [("decision.rejected", "input_unfit")] == await audited(service)
    assert 200 == (await allow(service)).status_code


async def test_two_people_must_approve_the_same_edit(service: Service) -> None:
    """Else what runs would have one approval: neither the original nor another edit counts."""
    ana, ben = await person(service, "ana"), await person(service, "ben")
    await held(service, policy={"approvals_required": 2})
    first = await allow(service, who=ana)
    assert (202, "second_approval_needed") == (first.status_code, first.json()["code"])
    for other in (None, OTHER):
        answer = await allow(service, other, who=ben)
        assert problem(answer) == (409, "approved_otherwise")
        assert [DIGEST] == [one["edited_input_digest"] for one in answer.json()["gate"]["approvals"]]
    (shown,) = (await service.http.get("/confirmations")).json()["data"]
    assert json.loads(EDITED) == shown["edited_input"]
    assert 200 == (await allow(service, who=ben)).status_code
    assert [("allow", "approved", EDITED), ("allow", "accepted", EDITED)] == await standing(service)
    assert "decision.rejected" == (await audited(service))[1][0]


async def test_a_second_person_approves_an_edit_by_the_digest_of_what_was_shown(service: Service) -> None:
    ana, ben = await person(service, "ana"), await person(service, "ben")
    await held(service, policy={"approvals_required": 2})
    await allow(service, who=ana)
    answer = await allow(service, None, who=ben, input_digest=DIGEST)
    assert (200, DIGEST) == (answer.status_code, answer.json()["decision"]["edited_input_digest"])


async def test_who_approved_alone_may_approve_another_input(service: Service) -> None:
    ana, ben = await person(service, "ana"), await person(service, "ben")
    await held(service, policy={"approvals_required": 2})
    await allow(service, OTHER, who=ana)
    assert 202 == (await allow(service, who=ana)).status_code
    assert 202 == (await allow(service, who=ana)).status_code
    assert ["spent", "approved"] == [status for _, status, _ in await standing(service)]
    assert problem(await allow(service, OTHER, who=ben)) == (409, "approved_otherwise")
    assert 200 == (await allow(service, who=ben)).status_code


async def test_a_deny_ends_an_edited_call_that_waits_for_a_second_person(service: Service) -> None:
    ana = await person(service, "ana")
    await held(service, policy={"approvals_required": 2})
    await allow(service, who=ana)
    body = {"tool_use_id": "tu1", "result": "deny", "input_digest": DIGEST}
    answer = await service.http.post("/sessions/sesn_1/confirm", json=body)
    assert (200, None) == (answer.status_code, answer.json()["edited_input"])


async def test_a_refused_edit_makes_room_for_the_next(service: Service) -> None:
    """The runner refuses one that does not fit the schema of the session's own agent."""
    await held(service)
    await allow(service)
    async with service.engine.begin() as connection:
        refused = {"status": "refused", "refusal": "It does not fit."}
        await connection.execute(update(tables.decisions).values(**refused))
    (shown,) = (await service.http.get("/confirmations")).json()["data"]
    assert (None, "refused") == (shown["edited_input"], shown["decision"]["status"])
    assert 200 == (await allow(service, OTHER)).status_code
