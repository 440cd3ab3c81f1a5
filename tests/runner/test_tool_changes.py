"""Tools that change while their calls are under way."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from standardwebhooks import Webhook, WebhookVerificationError

from app.simulator.server import Server
from tests.runner.process import serving_child
from tests.runner.proxy import Proxy, proxying
from tests.runner.receiver import Delivery, Receiver, receiving
from tests.runner.scripts import Gate, custom, in_state, live, results, turn
from tests.runner.service import Service
from tests.runner.test_restarts import Start, replica, tool, upstream

__all__ = ["replica", "tool", "upstream"]

pytestmark = pytest.mark.anyio


@pytest.fixture
async def moved() -> AsyncIterator[Receiver]:
    """Where the tool is found later."""
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def wire(service: Service) -> AsyncIterator[Proxy]:
    """A proxy in front of the tool's first place."""
    async with proxying(service.tool.url) as proxy:
        yield proxy


async def put(service: Service, name: str, **body: Any) -> None:
    answer = await service.http.put(f"/tools/{name}", json=body)
    assert 200 == answer.status_code, answer.text


async def test_a_call_that_was_allowed_asks_again_when_its_tool_has_moved(
    service: Service, moved: Receiver
) -> None:
    session = service.upstream.create(turn(custom("echo", "echo", "other")))
    await service.register("echo", gate="ask")
    moved.secrets = service.tool.secrets
    service.tool.reply = gate = Gate()
    await live(service, session.id, concurrency=1)
    service.upstream.say(session.id)
    held = await in_state(service, session.id, "held", "held", "unowned")
    for call in held[:2]:
        body = {"tool_use_id": call["id"], "result": "allow"}
        answer = await service.http.post(f"/sessions/{session.id}/confirm", json=body)
        assert 200 == answer.status_code, answer.text
    await service.tool.until(lambda: gate.inside)
    await put(service, "echo", url=moved.url, gate="ask")
    await service.register("other")
    path = f"/sessions/{session.id}/calls"
    await service.until(path, lambda shown: "unowned" not in [call["state"] for call in shown["data"]])
    gate.open()
    _, second, _ = await in_state(service, session.id, "posted", "held", "posted")
    assert ("tool_changed", None) == (second["gate"]["reason"], second["decision"])
    body = {"tool_use_id": second["id"], "result": "allow"}
    assert 200 == (await service.http.post(f"/sessions/{session.id}/confirm", json=body)).status_code
    await in_state(service, session.id, "posted", "posted", "posted")
    assert [second["id"]] == moved.called


async def test_a_call_that_waits_goes_to_the_new_url(service: Service, moved: Receiver) -> None:
    """D-040: the one at work stays where it is."""
    session = service.upstream.create(turn(custom("echo", "echo", "other")))
    await service.register("echo")
    moved.secrets = service.tool.secrets
    service.tool.reply = gate = Gate()
    await live(service, session.id, concurrency=1)
    service.upstream.say(session.id)
    first, second, other = await in_state(service, session.id, "dispatched", "queued", "unowned")
    await service.tool.until(lambda: gate.inside)
    await put(service, "echo", url=moved.url)
    await service.register("other")
    # Its call is taken up once the runner has read the registrations, the new one of `echo` among them.
    await in_state(service, session.id, "dispatched", "queued", "queued")
    gate.open()
    await in_state(service, session.id, "posted", "posted", "posted")
    assert ([first["id"], other["id"]], [second["id"]]) == (service.tool.called, moved.called)


async def test_repeats_stay_where_a_delivery_may_have_arrived(
    service: Service, wire: Proxy, moved: Receiver
) -> None:
    """D-041: the connection breaks while the tool is at work; only that endpoint knows the call's id."""
    session = service.upstream.create(turn(custom("echo")))
    await service.register("echo", url=wire.url, retry="safe")
    moved.secrets = service.tool.secrets
    echo, gate = service.tool.reply, Gate()
    service.tool.reply = gate
    await live(service, session.id)
    service.upstream.say(session.id)
    await service.tool.until(lambda: gate.inside)
    await put(service, "echo", url=moved.url, retry="safe")
    service.tool.reply = echo
    wire.reset()
    await in_state(service, session.id, "posted")
    assert ([1, 2], []) == ([one.attempt for one in service.tool.deliveries], moved.called)


@pytest.mark.parametrize("retry", ["connect_only", "safe"])
async def test_repeats_go_to_the_new_url_while_none_has_arrived(
    service: Service, wire: Proxy, moved: Receiver, retry: str
) -> None:
    """D-041: every delivery so far was refused at connect, so the new place answers in time."""
    session = service.upstream.create(turn(custom("echo")))
    await service.register("echo", url=wire.url, retry=retry)
    moved.secrets = service.tool.secrets
    await wire.shut()
    await live(service, session.id)
    service.upstream.say(session.id)
    (call,) = await in_state(service, session.id, "dispatched")
    path = f"/sessions/{session.id}/calls/{call['id']}"
    await service.until(path, lambda shown: len(shown["deliveries"]) >= 2)
    await put(service, "echo", url=moved.url, retry=retry)
    (call,) = await in_state(service, session.id, "posted")
    assert ([], [call["id"]], False) == (service.tool.called, moved.called, call["result"]["is_error"])


async def test_a_killed_process_leaves_behind_where_its_deliveries_went(
    migrated_url: str,
    engine: AsyncEngine,
    replica: Start,
    upstream: Server,
    tool: Receiver,
    moved: Receiver,
) -> None:
    """D-041, D-046: after `kill -9` one that was at work is repeated there, one that was refused is not.

    Both tools have a new URL and a new secret by then: the secret counts at once, and ids do not change.
    """
    session = upstream.create(turn(custom("reached", "refused")))
    tool.reply = gate = Gate()
    async with proxying(tool.url) as closed, serving_child(migrated_url, upstream.url) as child:
        await closed.shut()
        service = Service(child.http, upstream, tool, engine)
        await service.register("reached", retry="safe")
        await service.register("refused", retry="safe", url=closed.url)
        await live(service, session.id)
        upstream.say(session.id)
        _, refused = await in_state(service, session.id, "dispatched", "dispatched")
        await tool.until(lambda: gate.inside)
        path = f"/sessions/{session.id}/calls/{refused['id']}"
        # The child is killed before it can repeat the one that is refused at its new place.
        await service.until(path, lambda s: len(s["deliveries"]) >= 3 and s["deliveries"][-1]["finished_at"])
        await child.kill()
    old, new = list(tool.secrets), []
    async with engine.begin() as connection:
        await connection.execute(text("delete from tools"))
        await connection.execute(text("update attachments set status = 'detached', replica_id = null"))
        await connection.execute(text("update replicas set expires_at = now() - interval '1 s'"))
    gate.open()
    async with replica() as service:
        for name in ("reached", "refused"):
            body = {"url": moved.url, "retry": "safe"}
            new.append((await service.http.put(f"/tools/{name}", json=body)).json()["signing_secret"])
        tool.secrets = moved.secrets = [*old, *new]
        await service.attach(session.id)
        await in_state(service, session.id, "posted", "posted")
    first, second = tool.deliveries
    (other,) = moved.deliveries
    assert ("refused", True) == (other.data["tool"], other.attempt >= 4)
    assert (first.id, first.body, [1, 2]) == (second.id, second.body, [first.attempt, second.attempt])
    assert [(True, False), (False, True)] == [
        (is_signed_by(old, one), is_signed_by(new, one)) for one in (first, second)
    ]
    assert [1, 1] == [len(each) for each in results(upstream, session.id).values()]


def is_signed_by(secrets: list[str], delivery: Delivery) -> bool:
    for secret in secrets:
        try:
            Webhook(secret).verify(delivery.body, delivery.headers)
        except WebhookVerificationError:
            continue
        return True
    return False


async def test_a_new_timeout_holds_from_the_next_dispatch_on(service: Service) -> None:
    """D-045: a delivery at work keeps the deadline that it was told."""
    session = service.upstream.create(turn(custom("echo", "echo")))
    await service.register("echo", timeout_s=2)
    gate, echo = Gate(), service.tool.reply

    async def reply(delivery: Delivery) -> Any:
        return await (gate if delivery is service.tool.deliveries[0] else echo)(delivery)

    service.tool.reply = reply
    await live(service, session.id, concurrency=1)
    service.upstream.say(session.id)
    await service.tool.until(lambda: gate.inside)
    await put(service, "echo", url=service.tool.url, timeout_s=300)
    first, second = await in_state(service, session.id, "posted", "posted")
    assert "within 2 s" in first["result"]["content"][0]["text"]
    assert not second["result"]["is_error"]
    left_s = [int(one.headers["bascule-deadline"]) - time.time() for one in service.tool.deliveries]
    assert left_s[0] < 2
    assert 280 < left_s[1] <= 300
