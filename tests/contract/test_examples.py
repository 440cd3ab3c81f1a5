"""The examples of the OpenAPI document: they fit their schemas, and those of requests do what they show."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.contract.documented import Operation, check, errors, examples_of, operations
from tests.runner.scripts import custom, turn
from tests.runner.service import serving

pytestmark = pytest.mark.anyio

ALL = operations()
SAYS = {"do": "message", "text": "Paid."}
SESSION = "sesn_011CZkZAtmR3yMPDzynEDxu7"
PLACES = {
    "name": "refund",
    "session_id": SESSION,
    "subscription": "pager",
    "credential": "orders",
    "attach_rule": "order-desk",
}
ORDER = (
    "put_tool", "rotate_secret", "test_tool", "put_credential", "put_subscription", "put_attach_rule",
    "create_key", "attach_session", "send_events", "confirm", "change_session", "create_rule",
    "report_result", "take_hook",
)  # fmt: skip
UNSIGNED = ("report_result", "take_hook")
"""Their tokens and signatures cannot stand in a document."""


@pytest.mark.parametrize("operation", ALL, ids=lambda one: one.id)
def test_all_that_an_operation_takes_and_answers_has_an_example_that_fits(operation: Operation) -> None:
    answers = operation.declared["responses"].values()
    for content in (operation.declared.get("requestBody", {}), *answers):
        for media_type, one in content.get("content", {}).items():
            examples = examples_of(one)
            assert examples, media_type
            for example in examples:
                assert [] == errors(one.get("schema", {}), example), media_type


async def test_the_examples_of_requests_are_taken_and_every_answer_is_as_documented(
    engine: AsyncEngine, migrated_url: str
) -> None:
    by_id = {operation.id: operation for operation in ALL}
    assert {one.id for one in ALL if "requestBody" in one.declared} == set(ORDER)
    async with serving(engine, migrated_url) as service:
        service.upstream.world.create(turn(custom("refund"), SAYS), session_id=SESSION)
        places = dict(PLACES)
        for id_ in ORDER:
            operation = by_id[id_]
            if id_ == "confirm":
                held = await service.until("/confirmations", lambda shown: shown["data"])
                places["call_id"] = held["data"][0]["id"]
            for media_type, example in operation.body_examples():
                more = {"tool_use_id": places["call_id"]} if id_ == "confirm" else {}
                content = example if isinstance(example, str) else json.dumps(example | more)
                answer = await service.http.request(
                    operation.method,
                    operation.path.format(**{"call_id": "sevt_none", **places}),
                    content=content,
                    headers={"content-type": media_type},
                )
                check(answer)
                assert answer.is_success or (id_ in UNSIGNED and answer.status_code == 401), answer.text
                _learn(places, id_, answer.json() if answer.content else {})
        text = await service.until(f"/sessions/{SESSION}/text", lambda shown: shown["data"])
        places["event_id"] = text["data"][0]["id"]
        for operation in ALL:
            # Streams have no end; tests/api reads them.
            if operation.method == "GET" and operation.id != "follow_session":
                answer = await service.http.get(operation.path.format(**places))
                check(answer)
                assert answer.status_code == 200, answer.text


def _learn(places: dict[str, str], operation_id: str, answer: dict[str, Any]) -> None:
    names = {"test_tool": "test_id", "send_events": "send_id", "create_rule": "rule_id"}
    if operation_id in names:
        places[names[operation_id]] = answer["id"]
