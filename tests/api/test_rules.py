"""Rules through the api: made, listed, revoked, and made of an allow."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.service import Service, problem
from tests.api.test_approvals import person
from tests.store.rows import add_attachment, add_call

pytestmark = pytest.mark.anyio

INPUT = '{"amount": 90.10, "to": "A-1"}'


async def post(service: Service, **body: Any) -> httpx.Response:
    return await service.http.post("/rules", json={"effect": "allow", "tool": "refund"} | body)


async def held(service: Service, *, input: str = INPUT, **values: Any) -> None:
    row = {"kind": "custom", "tool": "refund", "permission": None, "gate_by": "tool"}
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu1", input=input, **(row | {"gate_reason": "tool_asks"} | values))


async def confirm(service: Service, who: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    headers = {} if who is None else {"authorization": who["authorization"]}
    body = {"tool_use_id": "tu1", "result": "allow"} | body
    return await service.http.post("/sessions/sesn_1/confirm", json=body, headers=headers)


async def audited(service: Service) -> list[tuple[str, str | None, str | None, str | None]]:
    rows = (await service.http.get("/audit")).json()["data"]
    return [(row["kind"], row["subject"], row["result"], row["detail"]) for row in rows]


async def test_a_rule_has_every_default_and_is_shown_as_it_was_made(service: Service) -> None:
    answer = await post(service)
    assert 201 == answer.status_code
    made = answer.json()
    assert made == (await service.http.get(f"/rules/{made['id']}")).json()
    assert [made] == (await service.http.get("/rules")).json()["data"]
    assert made.pop("id").startswith("rul_")
    assert made.pop("created_at").endswith("Z")
    assert made == {
        "effect": "allow",
        "tool": "refund",
        "kind": None,
        "session_id": None,
        "tests": [],
        "only": None,
        "deny_message": None,
        "note": None,
        "is_live": True,
        "created_by": "admin",
        "expires_at": None,
        "revoked_at": None,
        "revoked_by": None,
        "uses": 0,
        "last_used_at": None,
    }


async def test_the_values_of_tests_keep_their_digits(service: Service) -> None:
    tests = (
        '[{"argument": "/amount", "at_most": 100.10},'
        ' {"argument": "/x", "equals": null},'
        ' {"argument": "/id", "one_of": [12345678901234567890123, "a"]}]'
    )
    body = f'{{"effect": "ask", "tests": {tests}, "only": ["x", "amount"], "expires_in_s": 60}}'
    answer = await service.http.post("/rules", content=body, headers={"content-type": "application/json"})
    assert 201 == answer.status_code, answer.text
    assert '"at_most":100.10}' in answer.text
    assert '"equals":null}' in answer.text
    assert "[12345678901234567890123, " in answer.text
    assert (["amount", "x"], True) == (answer.json()["only"], answer.json()["expires_at"] is not None)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"tool": None}, "body"),
        ({"effect": "maybe"}, "effect"),
        ({"deny_message": "no"}, "body"),
        ({"tests": [{"argument": "amount", "equals": 1}]}, "tests.0"),
        ({"tests": [{"argument": "/a"}]}, "tests.0"),
        ({"tests": [{"argument": "/a", "equals": 1, "at_most": 2}]}, "tests.0"),
        ({"tests": [{"argument": "/a", "at_most": None}]}, "tests.0"),
        ({"tests": [{"argument": "/a", "at_most": "7"}]}, "tests.0.at_most"),
        ({"tests": [{"argument": "/a", "like": "7"}]}, "tests.0.like"),
        ({"tests": [{"argument": "/a", "equals": 1}] * 21}, "tests"),
        ({"tests": [{"argument": "/a", "equals": "x" * 20_000}]}, "tests.0.equals"),
        ({"only": ["a\0"]}, "only"),
        ({"note": "\0"}, "note"),
        ({"expires_in_s": 0}, "expires_in_s"),
        ({"session_id": "no/id"}, "session_id"),
    ],
)
async def test_a_rule_that_says_nothing_clear_is_refused_by_its_member(
    service: Service, body: dict[str, Any], place: str
) -> None:
    answer = await post(service, **body)
    assert (422, "invalid_request") == problem(answer)
    assert place in [error["field"] for error in answer.json()["errors"]], answer.text


async def test_a_test_that_readers_take_differently_is_refused(service: Service) -> None:
    for value in ('{"a": 1, "a": 2}', "NaN", "1e999999999999999999999"):
        body = f'{{"effect": "ask", "tests": [{{"argument": "/a", "equals": {value}}}]}}'
        answer = await service.http.post("/rules", content=body, headers={"content-type": "application/json"})
        assert (422, "invalid_request") == problem(answer), value


async def test_a_revoked_rule_is_listed_on_demand_and_stays_revoked(service: Service) -> None:
    first, second = [(await post(service, note=note)).json() for note in ("first", "second")]
    gone = (await service.http.delete(f"/rules/{first['id']}")).json()
    assert (False, "admin") == (gone["is_live"], gone["revoked_by"])
    assert gone == (await service.http.delete(f"/rules/{first['id']}")).json()
    assert [second] == (await service.http.get("/rules")).json()["data"]
    every = {"with_ended": "true", "limit": "1"}
    page = (await service.http.get("/rules", params=every)).json()
    rest = (await service.http.get("/rules", params=every | {"cursor": page["next_cursor"]})).json()
    assert ([second, gone], None) == (page["data"] + rest["data"], rest["next_cursor"])
    assert [
        ("rule.created", "refund", "allow", first["id"]),
        ("rule.created", "refund", "allow", second["id"]),
        ("rule.revoked", "refund", "allow", first["id"]),
    ] == await audited(service)


@pytest.mark.parametrize("rule_id", ["rul_" + "0" * 24, "nonsense"])
async def test_an_unknown_rule_is_a_404(service: Service, rule_id: str) -> None:
    for method in ("GET", "DELETE"):
        answer = await service.http.request(method, f"/rules/{rule_id}")
        assert (404, "rule_not_found") == problem(answer)


async def test_rules_are_the_admins_and_each_tenants_own(service: Service) -> None:
    rule_id = (await post(service)).json()["id"]
    reviewer, foreign = await service.key("confirm", "tools"), await service.key("admin", tenant="other")
    for method, path in (("GET", "/rules"), ("POST", "/rules"), ("DELETE", f"/rules/{rule_id}")):
        answer = await service.http.request(method, path, headers=reviewer)
        assert (403, "forbidden") == problem(answer)
    assert [] == (await service.http.get("/rules", headers=foreign)).json()["data"]
    answer = await service.http.delete(f"/rules/{rule_id}", headers=foreign)
    assert (404, "rule_not_found") == problem(answer)


# ---- of an allow


async def test_allow_like_this_makes_a_rule_for_the_session_that_expires(service: Service) -> None:
    await held(service)
    ana = await person(service, "ana")
    answer = await confirm(service, ana, rule={"same": ["to"]})
    assert 200 == answer.status_code, answer.text
    made = answer.json()["rule"]
    assert ("allow", "refund", "custom", "sesn_1", ana["id"]) == tuple(
        made[name] for name in ("effect", "tool", "kind", "session_id", "created_by")
    )
    assert ([{"argument": "/to", "equals": "A-1"}], ["amount", "to"]) == (made["tests"], made["only"])
    assert made["expires_at"] is not None
    assert [made] == (await service.http.get("/rules")).json()["data"]
    kinds = [kind for kind, *_ in await audited(service)]
    assert ["decision.recorded", "rule.created"] == kinds[-2:]
    again = await confirm(service, ana, rule={"same": ["to"]})
    assert (200, False) == (again.status_code, "rule" in again.json())


async def test_without_names_every_argument_must_be_the_same(service: Service) -> None:
    await held(service)
    answer = await confirm(service, rule={})
    assert '{"argument":"/amount","equals":90.10}' in answer.text


@pytest.mark.parametrize(
    ("held_as", "rule", "why"),
    [
        ({}, {"same": ["cc"]}, "no argument 'cc'"),
        ({"input": "[]"}, {}, "cannot be compared"),
        ({"input": '{"a":1,"a":2}'}, {}, "twice"),
        ({"gate_reason": "outcome_unknown"}, {}, "outcome is unknown"),
    ],
)
async def test_where_no_rule_can_be_made_nothing_is_decided_and_the_answer_says_why(
    service: Service, held_as: dict[str, Any], rule: dict[str, Any], why: str
) -> None:
    await held(service, **held_as)
    answer = await confirm(service, rule=rule)
    assert (422, "rule_unfit") == problem(answer)
    ((place, sentence),) = [(one["field"], one["message"]) for one in answer.json()["errors"]]
    assert ("rule", True) == (place, why in sentence), sentence
    assert 200 == (await confirm(service)).status_code


async def test_a_rule_is_not_made_for_two_people(service: Service) -> None:
    await held(service)
    await service.http.put("/tools/refund", json={"url": "https://t.example", "approvals_required": 2})
    answer = await confirm(service, rule={})
    assert (422, "rule_unfit") == problem(answer)
    assert "two people" in answer.text


@pytest.mark.parametrize("body", [{"result": "deny"}, {"input": json.loads(INPUT) | {"to": "B"}}])
async def test_a_rule_goes_with_an_allow_of_the_agents_own_input(
    service: Service, body: dict[str, Any]
) -> None:
    await held(service)
    answer = await confirm(service, rule={}, **body)
    assert (422, "invalid_request") == problem(answer)


async def test_with_as_many_rules_as_there_may_be_nothing_is_decided(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.rules.RULES_MAX", 1)
    assert 201 == (await post(service)).status_code
    await held(service)
    for answer in (await post(service), await confirm(service, rule={})):
        assert (409, "too_many_rules") == problem(answer)
    shown = (await service.http.get("/sessions/sesn_1/calls/tu1")).json()
    assert None is shown["decision"]
