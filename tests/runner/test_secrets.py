"""What signs a request: the secrets that are live when it leaves. What cannot be read calls nothing."""

from __future__ import annotations

import pytest

from app.store import attachments, tools
from app.store.reencryption import reencrypt
from app.store.secrets import Secrets
from tests.runner.receiver import Delivery
from tests.runner.scripts import Gate, asked, custom, in_state, live, turn
from tests.runner.service import Service
from tests.runner.test_tool_changes import is_signed_by

pytestmark = pytest.mark.anyio

FOREIGN = Secrets([b"f" * 32])
"""A key that the service does not have."""
BOTH = Secrets([bytes(range(32)), b"f" * 32])


async def rotate(service: Service, overlap_s: float) -> None:
    answer = await service.http.post("/tools/echo/rotate-secret", json={"overlap_s": overlap_s})
    assert 200 == answer.status_code, answer.text
    service.tool.secrets.append(answer.json()["signing_secret"])


async def has_read_its_tools(service: Service) -> None:
    """The run delivers a call of a tool registered just now, so it knows all that was written before."""
    await service.register("late")
    await service.tool.until(lambda: "late" in [one.data["tool"] for one in service.tool.deliveries])


def signers(service: Service, number: int) -> list[bool]:
    """Which of the secrets of `echo`, the first one first, verify the delivery of this number alone."""
    delivery: Delivery = [one for one in service.tool.deliveries if one.data["tool"] == "echo"][number]
    signed = [is_signed_by([secret], delivery) for secret in service.tool.secrets[:3]]
    assert sum(signed) == len(delivery.headers["webhook-signature"].split())
    return signed


async def test_a_held_call_is_signed_with_what_is_live_once_it_is_allowed(service: Service) -> None:
    """C-060: held, rotated twice, allowed; the first secret has ended by then."""
    session = service.upstream.create(turn(custom("echo", "late")))
    await service.register("echo", gate="ask")
    await live(service, session.id)
    service.upstream.say(session.id)
    call, _ = await in_state(service, session.id, "held", "unowned")
    await rotate(service, 0)
    await rotate(service, 3600)
    await has_read_its_tools(service)
    body = {"tool_use_id": call["id"], "result": "allow"}
    await service.http.post(f"/sessions/{session.id}/confirm", json=body)
    await in_state(service, session.id, "posted", "posted")
    assert [False, True, True] == signers(service, 0)


async def test_a_call_that_waits_for_its_slot_is_signed_when_it_leaves(service: Service) -> None:
    """C-060: it was given to the deliverer before the rotation."""
    session = service.upstream.create(turn(custom("echo", "echo", "late")))
    await service.register("echo", concurrency=1)
    service.tool.reply = gate = Gate()
    await live(service, session.id)
    service.upstream.say(session.id)
    await in_state(service, session.id, "dispatched", "dispatched", "unowned")
    await service.tool.until(lambda: gate.inside)
    await rotate(service, 0)
    await rotate(service, 3600)
    await has_read_its_tools(service)
    gate.open()
    await in_state(service, session.id, "posted", "posted", "posted")
    assert [[True, False, False], [False, True, True]] == [signers(service, number) for number in (0, 1)]


async def test_the_end_of_an_overlap_needs_no_write(service: Service) -> None:
    """The run reads its tools within the overlap, and never again."""
    session = service.upstream.create(turn(custom("echo"), custom("echo")))
    await service.register("echo")
    await live(service, session.id)
    await rotate(service, 0)
    await rotate(service, 2)
    service.tool.reply = gate = Gate()
    service.upstream.say(session.id)
    await service.tool.until(lambda: gate.inside)
    await service.until("/tools/echo", lambda shown: 1 == len(shown["signing_secrets"]))
    gate.open()
    await in_state(service, session.id, "posted", "posted")
    assert [False, False, True] == signers(service, 1)


async def test_a_tool_that_cannot_be_read_is_called_once_its_key_is_back(service: Service) -> None:
    """Until then its calls wait and say which key is missing; nothing leaves unsigned."""
    session = service.upstream.create(turn(custom("echo", "other")))
    await service.register("other")
    async with service.engine.begin() as connection:
        put = await tools.put(
            connection, FOREIGN, "default", "echo", url=service.tool.url, description=None, policy={},
            headers={},
        )  # fmt: skip
    await live(service, session.id)
    service.upstream.say(session.id)
    call, _ = await in_state(service, session.id, "unowned", "posted")
    detail = (await service.get(f"/sessions/{session.id}/calls/{call['id']}"))["detail"]
    assert f"was encrypted with key {FOREIGN.key_ids[0]}" in detail
    assert (await service.get("/tools/echo"))["fault"] in detail
    assert "unowned_calls" in (await service.get(f"/sessions/{session.id}"))["flags"]
    assert put.signing_secret is not None
    service.tool.secrets.append(put.signing_secret)
    await reencrypt(service.engine, BOTH)
    await in_state(service, session.id, "posted", "posted")


async def test_a_session_whose_headers_cannot_be_read_waits_for_their_key(service: Service) -> None:
    """It does not end, and asks nothing of upstream without them."""
    session = service.upstream.create("custom")
    async with service.engine.begin() as connection:
        await attachments.attach(
            connection, FOREIGN, "default", session.id, attachments.Settings(max_idle_s=None), {"x-a": "1"}
        )
    path = f"/sessions/{session.id}"
    await service.until(path, lambda shown: ["unreadable_headers"] == shown["flags"])
    assert [] == asked(service.upstream, session.id, "stream", "list", "retrieve")
    await reencrypt(service.engine, BOTH)
    shown = await service.until(path, lambda shown: "live" == shown["status"])
    assert [] == shown["flags"]
