"""Standing rules on their whole way: nobody is asked, and a rule that has ended lets nothing run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.runner.scripts import Gate, bash, custom, in_state, live, results, turn
from tests.runner.service import Service
from tests.runner.subscriber import Subscriber, subscribing

pytestmark = pytest.mark.anyio


@pytest.fixture
async def subscriber() -> AsyncIterator[Subscriber]:
    async with subscribing() as subscriber:
        yield subscriber


async def rule(service: Service, effect: str = "allow", **body: Any) -> str:
    answer = await service.http.post("/rules", json={"effect": effect, "tool": "refund"} | body)
    assert 201 == answer.status_code, answer.text
    return str(answer.json()["id"])


async def test_a_call_that_a_rule_allows_asks_nobody(service: Service, subscriber: Subscriber) -> None:
    session = service.upstream.create(turn(custom("refund")))
    await service.register("refund", gate="ask")
    await subscriber.subscribe(service.http)
    rule_id = await rule(service)
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "posted")
    assert (rule_id, "rule", "allow") == tuple(call["decision"][name] for name in ("by", "via", "result"))
    assert ("tool", rule_id) == (call["gate"]["by"], call["gate"]["rule"])
    await subscriber.until(lambda: subscriber.types["confirmation.decided"])
    assert 0 == subscriber.types["confirmation.requested"]
    assert 1 == (await service.get(f"/rules/{rule_id}"))["uses"]


async def test_a_rule_answers_what_upstream_asks(service: Service) -> None:
    session = service.upstream.create(turn(bash()))
    await service.register("bash")
    await rule(service, tool="bash", kind="builtin")
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "posted")
    assert ("upstream", "rule") == (call["gate"]["by"], call["decision"]["via"])
    assert 1 == len(service.tool.deliveries)


async def test_a_rule_denies_what_nobody_would_have_asked_about(service: Service) -> None:
    session = service.upstream.create(turn(custom("refund")))
    await service.register("refund")
    await rule(service, "deny", tool=None, deny_message="Refunds are frozen")
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "denied")
    assert [] == service.tool.deliveries
    [answer] = results(service.upstream, session.id)[call["id"]]
    words = "Denied by a standing rule: Refunds are frozen. Do not retry without new instructions."
    assert (True, words) == (answer["is_error"], answer["content"][0]["text"])


async def test_allow_like_this_answers_for_what_waits_already_and_asks_about_the_rest(
    service: Service,
) -> None:
    inputs = [{"n": 1}, {"n": 1.0}, {"n": 2}]
    calls = [{"tool": "custom", "name": "refund", "input": one} for one in inputs]
    session = service.upstream.create(turn({"do": "call", "calls": calls}))
    await service.register("refund", gate="ask")
    await live(service, session.id)
    service.upstream.say(session.id)
    first, _, _ = await in_state(service, session.id, "held", "held", "held")
    body = {"tool_use_id": first["id"], "result": "allow", "rule": {}}
    answer = await service.http.post(f"/sessions/{session.id}/confirm", json=body)
    assert 200 == answer.status_code, answer.text
    first, second, third = await in_state(service, session.id, "posted", "posted", "held")
    assert ["api", "rule"] == [call["decision"]["via"] for call in (first, second)]
    assert third["decision"] is None


async def test_what_a_rule_allowed_waits_for_a_person_once_the_rule_is_revoked(service: Service) -> None:
    """C-041: between the decision and the dispatch."""
    session = service.upstream.create(turn(custom("refund", "refund", "other")))
    await service.register("refund", gate="ask")
    service.tool.reply = gate = Gate()
    rule_id = await rule(service)
    await live(service, session.id, concurrency=1)
    service.upstream.say(session.id)
    await service.tool.until(lambda: gate.inside)
    path = f"/sessions/{session.id}/calls"
    await service.until(path, lambda shown: "queued" in [call["state"] for call in shown["data"]])
    await service.http.delete(f"/rules/{rule_id}")
    await service.register("other")
    # Its call is taken up once the runner has read what is registered, and the rules with it.
    await service.until(path, lambda shown: "unowned" not in [call["state"] for call in shown["data"]])
    gate.open()
    shown = await service.until(path, lambda shown: "held" in [call["state"] for call in shown["data"]])
    (second,) = [call for call in shown["data"] if call["state"] == "held"]
    assert ("rule", "rule_over", None) == (
        second["gate"]["by"], second["gate"]["reason"], second["decision"]
    )  # fmt: skip
    body = {"tool_use_id": second["id"], "result": "allow"}
    assert 200 == (await service.http.post(f"/sessions/{session.id}/confirm", json=body)).status_code
    await in_state(service, session.id, "posted", "posted", "posted")


async def test_an_expired_rule_asks_again_without_a_change_of_the_registry(service: Service) -> None:
    session = service.upstream.create(turn(custom("refund", "refund")))
    await service.register("refund", gate="ask")
    rule_id = await rule(service, expires_in_s=0.5)
    await live(service, session.id)
    await service.until(f"/rules/{rule_id}", lambda shown: not shown["is_live"])
    service.upstream.say(session.id)
    await in_state(service, session.id, "held", "held")
