"""Idempotency keys: a request that is sent again is answered again, and done once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api.access import SCHEME
from app.store import tables
from app.store.idempotency import Place, claim
from app.store.retention import prune
from app.store.secrets import Secrets
from tests.api.service import Service, problem, served
from tests.api.test_confirmations import CONFIRM, confirm, held, settle
from tests.store.rows import SECRETS, until

pytestmark = pytest.mark.anyio

TOOL = {"url": "https://tools.example/hook"}
KEY = {"name": "mine", "scopes": ["read"]}
REPLAYED = "idempotency-replayed"


def named(key: str, **headers: str) -> dict[str, Any]:
    return {"headers": {"idempotency-key": key} | headers}


async def decide(service: Service, result: str = "allow") -> httpx.Response:
    return await service.http.post(CONFIRM, json={"tool_use_id": "tu1", "result": result}, **named("a"))


async def count(engine: AsyncEngine, table: str) -> int:
    async with engine.connect() as connection:
        found = await connection.scalar(select(func.count()).select_from(tables.metadata.tables[table]))
        return int(found or 0)


def same(first: httpx.Response, again: httpx.Response) -> bool:
    """Whether the second answer is the first one again, and says so."""
    headers = [(one.status_code, one.content, one.headers.get("content-type")) for one in (first, again)]
    return headers[0] == headers[1] and REPLAYED not in first.headers and again.headers[REPLAYED] == "true"


async def test_a_repeat_gets_the_first_answer_and_does_nothing(service: Service) -> None:
    first = await service.http.post("/keys", json=KEY, **named("a"))
    again = await service.http.post("/keys", json=KEY, **named("a"))
    assert 201 == first.status_code
    assert same(first, again)
    assert first.headers["x-request-id"] != again.headers["x-request-id"]
    assert 1 == await count(service.engine, "keys") == await count(service.engine, "audit")


async def test_without_a_key_every_request_is_a_new_one(service: Service) -> None:
    answers = [await service.http.post("/keys", json=KEY) for _ in range(2)]
    assert 2 == len({answer.json()["id"] for answer in answers})
    assert 0 == await count(service.engine, "idempotency_keys")


async def test_an_answer_without_a_body_is_repeated_too(service: Service) -> None:
    await service.http.put("/credentials/mine", json={"type": "bearer", "secret": "s"})
    first = await service.http.delete("/credentials/mine", **named("a"))
    assert 204 == first.status_code
    assert same(first, await service.http.delete("/credentials/mine", **named("a")))


async def test_a_secret_that_is_shown_once_is_kept_encrypted(service: Service) -> None:
    made = await service.http.put("/tools/mine", json=TOOL, **named("a"))
    secret = made.json()["signing_secret"].encode()
    async with service.engine.connect() as connection:
        (sealed,) = await connection.scalars(select(tables.idempotency_keys.c.answer))
    assert b"signing_secret" not in sealed
    assert secret not in sealed
    again = await service.http.put("/tools/mine", json=TOOL, **named("a"))
    assert secret in again.content


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/tools/mine", TOOL | {"timeout_s": 2.0}),
        ("PUT", "/tools/mine?x=1", TOOL),
        ("PUT", "/tools/other", TOOL),
        ("DELETE", "/tools/mine", None),
    ],
)
async def test_a_key_that_stands_for_another_request_is_refused(
    service: Service, method: str, path: str, body: Any
) -> None:
    first = await service.http.put("/tools/mine", json=TOOL, **named("a"))
    other = await service.http.request(method, path, json=body, **named("a"))
    assert (422, "idempotency_key_reused") == problem(other)
    assert same(first, await service.http.put("/tools/mine", json=TOOL, **named("a")))


async def test_another_api_key_or_tenant_may_use_the_same_key(service: Service) -> None:
    callers = [await service.key("tools"), await service.key("tools"), await service.key("tools", tenant="b")]
    made = [await service.http.put("/tools/mine", json=TOOL, **named("a", **who)) for who in callers]
    assert [201, 200, 201] == [answer.status_code for answer in made]
    assert not any(REPLAYED in answer.headers for answer in made)


async def test_of_many_at_two_replicas_one_is_done(service: Service, migrated_url: str) -> None:
    async with served(service.engine, migrated_url) as other:
        sent = [one.http.post("/keys", json=KEY, **named("a")) for one in (service, other) for _ in range(8)]
        answers = await asyncio.gather(*sent)
    made = [answer for answer in answers if answer.status_code == 201]
    refused = [problem(answer) for answer in answers if answer.status_code != 201]
    assert 1 == len({answer.content for answer in made})
    assert {(409, "idempotency_in_flight")} >= set(refused)
    assert 1 == await count(service.engine, "keys")


async def test_one_that_is_under_way_is_told_so_and_ends_with_its_transaction(service: Service) -> None:
    async with service.engine.begin() as connection:
        assert await claim(connection, SECRETS, Place("default", "admin", "a")) is None
        answer = await service.http.post("/keys", json=KEY, **named("a"))
        assert (409, "idempotency_in_flight") == problem(answer)
        assert "1" == answer.headers["retry-after"]
    assert 201 == (await service.http.post("/keys", json=KEY, **named("a"))).status_code


async def test_an_effect_whose_answer_cannot_be_kept_is_undone(service: Service) -> None:
    async with service.engine.begin() as connection:
        refuse = "returns trigger language plpgsql as $$ begin raise sqlstate '57014'; end $$"
        await connection.execute(text(f"create function refuse() {refuse}"))
        before = "before insert on idempotency_keys execute function refuse()"
        await connection.execute(text(f"create trigger refuse {before}"))
    try:
        answer = await service.http.put("/tools/mine", json=TOOL, **named("a"))
        assert (503, "database_unavailable") == problem(answer)
        assert 0 == await count(service.engine, "tools")
    finally:
        async with service.engine.begin() as connection:
            await connection.execute(text("drop function refuse cascade"))
    assert 201 == (await service.http.put("/tools/mine", json=TOOL, **named("a"))).status_code


async def test_a_refusal_that_was_decided_is_an_answer(service: Service) -> None:
    """Whoever gave up on it must not find it done later, when a duplicate arrives."""
    first = await service.http.delete("/tools/mine", **named("a"))
    assert (404, "tool_not_found") == problem(first)
    await service.http.put("/tools/mine", json=TOOL)
    assert same(first, await service.http.delete("/tools/mine", **named("a")))
    assert 1 == await count(service.engine, "tools")


async def test_a_malformed_request_decides_nothing_and_leaves_its_key(service: Service) -> None:
    bad = await service.http.put("/tools/mine", json={"url": "ftp://a"}, **named("a"))
    worse = await service.http.put("/tools/mine", json={}, **named("a"))
    assert [(422, "invalid_request")] * 2 == [problem(bad), problem(worse)]
    assert 201 == (await service.http.put("/tools/mine", json=TOOL, **named("a"))).status_code


async def test_after_a_day_a_key_is_as_good_as_new(service: Service) -> None:
    first = await service.http.put("/tools/mine", json=TOOL, **named("a"))
    async with service.engine.begin() as connection:
        aged = "update idempotency_keys set created_at = now() - interval '24 hours 1 second'"
        await connection.execute(text(aged))
    later = await service.http.put("/tools/mine", json=TOOL, **named("a"))
    assert (201, 200) == (first.status_code, later.status_code)
    assert same(later, await service.http.put("/tools/mine", json=TOOL, **named("a")))


async def test_retention_removes_what_is_older_even_where_it_keeps_all_else(service: Service) -> None:
    for key in ("old", "young"):
        await service.http.put("/tools/mine", json=TOOL, **named(key))
    async with service.engine.begin() as connection:
        aged = "update idempotency_keys set created_at = now() - interval '25 hours' where key = 'old'"
        await connection.execute(text(aged))
    pruned = await prune(service.engine, sessions_days=0, deliveries_days=0)
    assert (1, True) == (pruned.idempotency_keys, pruned.is_complete)
    async with service.engine.connect() as connection:
        assert ["young"] == list(await connection.scalars(select(tables.idempotency_keys.c.key)))


async def test_an_answer_whose_encryption_key_is_gone_is_not_done_again(
    service: Service, migrated_url: str
) -> None:
    await service.http.post("/keys", json=KEY, **named("a"))
    async with served(service.engine, migrated_url, secrets=Secrets([bytes(32)])) as other:
        answer = await other.http.post("/keys", json=KEY, **named("a"))
    assert (409, "idempotency_unreadable") == problem(answer)
    assert 1 == await count(service.engine, "keys")


@pytest.mark.parametrize("key", ["", " ", "a b", 'a"b', '"', "a\\", "a" * 256, '"' + "a" * 256 + '"'])
async def test_a_key_has_a_plain_form(service: Service, key: str) -> None:
    answer = await service.http.post("/keys", json=KEY, **named(key))
    assert (422, "invalid_request") == problem(answer)
    assert ["idempotency-key"] == [error["field"] for error in answer.json()["errors"]]


async def test_a_key_is_the_same_in_quotes_and_without(service: Service) -> None:
    """The standard's draft has quotes, most clients have none."""
    first = await service.http.post("/keys", json=KEY, **named("a" * 255))
    assert same(first, await service.http.post("/keys", json=KEY, **named('"' + "a" * 255 + '"')))


async def test_a_decision_is_answered_again_as_it_was_answered_first(service: Service) -> None:
    await held(service, gate_by="upstream")
    runner = asyncio.create_task(settle(service, "accepted", "queued"))
    first = await decide(service)
    await runner
    async with service.engine.begin() as connection:
        await connection.execute(text("update calls set state = 'dispatched'"))
    assert (200, "queued") == (first.status_code, first.json()["state"])
    assert same(first, await decide(service))


async def test_a_decision_whose_first_answer_was_lost_is_answered_with_202(service: Service) -> None:
    """What is certain is committed with it: that it is decided. Where it stands by now, the call tells."""
    await held(service, gate_by="upstream")
    lost = asyncio.create_task(decide(service))
    await until(lambda: _has(service.engine, "decisions"))
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    again = await decide(service)
    assert (202, "true") == (again.status_code, again.headers[REPLAYED])
    assert "sending" == again.json()["decision"]["status"]
    assert 1 == await count(service.engine, "decisions")


async def test_a_decision_that_upstream_refused_is_not_made_again_by_a_repeat(service: Service) -> None:
    await held(service, gate_by="upstream")
    runner = asyncio.create_task(settle(service, "refused", "held", "no such tool use"))
    first = await decide(service)
    await runner
    assert (409, "refused_by_upstream") == problem(first)
    assert same(first, await decide(service))
    assert 1 == await count(service.engine, "decisions")


async def test_a_decision_that_was_not_recorded_is_refused_again(service: Service) -> None:
    await held(service)
    await confirm(service)
    first = await decide(service, "deny")
    assert (409, "already_decided") == problem(first)
    assert same(first, await decide(service, "deny"))


@pytest.mark.parametrize(
    ("path", "body", "table"),
    [
        ("/tools/mine/test", {}, "tool_tests"),
        ("/sessions/sesn_1/events", {"events": [{"type": "user.interrupt"}]}, "sends"),
    ],
)
async def test_what_waits_for_its_outcome_is_asked_for_once(
    service: Service, path: str, body: Any, table: str
) -> None:
    """A repeat of one whose answer was lost is told where the outcome will be."""
    await service.http.put("/tools/mine", json=TOOL)
    await held(service)
    lost = asyncio.create_task(service.http.post(path, json=body, **named("a")))
    await until(lambda: _has(service.engine, table))
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    again = await service.http.post(path, json=body, **named("a"))
    assert (202, "true") == (again.status_code, again.headers[REPLAYED])
    assert "waiting" == (await service.http.get(again.headers["location"])).json()["status"]
    assert 1 == await count(service.engine, table)


async def test_every_mutation_takes_a_key(service: Service) -> None:
    walked = 0
    for path, operations in service.app.openapi()["paths"].items():
        for method, operation in operations.items():
            if method != "get" and SCHEME in operation.get("security", [{}])[0]:
                names = [one["name"] for one in operation["parameters"]]
                assert "idempotency-key" in names, f"{method} {path}"
                assert "`idempotency_in_flight`" in operation["responses"]["409"]["description"]
                assert "`idempotency_key_reused`" in operation["responses"]["422"]["description"]
                walked += 1
    assert walked >= 16, walked


async def _has(engine: AsyncEngine, table: str) -> bool:
    return await count(engine, table) > 0
