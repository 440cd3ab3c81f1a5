"""Notifications on the wire: each event, once; again under the same id; and nothing waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.notifications import EVENTS
from app.runner import notifications
from app.runner.notifications import Notifier
from app.simulator.server import running
from app.simulator.world import World
from app.store import subscriptions
from app.store.batches import Batch, write
from app.store.wakeups import Wakeups
from app.webhooks import breaker, notification
from app.webhooks.attempt import Door
from app.webhooks.egress import Egress, Lookup
from tests.runner.process import serving_child
from tests.runner.receiver import Delivery
from tests.runner.scripts import Gate, bash, custom, ended, in_state, live, turn
from tests.runner.service import Service, replicating
from tests.runner.subscriber import Notice, Subscriber, subscribing
from tests.store.batches import MINE, final, held_by_r1
from tests.store.rows import SECRETS, until

pytestmark = pytest.mark.anyio

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
MESSAGE = {"do": "message", "text": "the hidden text"}


@pytest.fixture
async def subscriber() -> AsyncIterator[Subscriber]:
    async with subscribing() as subscriber:
        yield subscriber


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is sent again soon."""
    monkeypatch.setattr(notifications, "RETRY_START_S", 0.05)
    monkeypatch.setattr(notifications, "PAUSE_START_S", 0.05)
    monkeypatch.setattr(notifications, "POLL_S", 0.05)


@contextlib.asynccontextmanager
async def notifying(
    engine: AsyncEngine, url: str, *, allow: Sequence[Any] = (), lookup: Lookup | None = None
) -> AsyncIterator[None]:
    """A notifier without a fleet."""
    wakeups = Wakeups(url, engine)
    door = Door(Egress(allow), lookup=lookup)
    notifier = Notifier("r1", engine, SECRETS, wakeups, door, base_url="https://bridge.example", version="0")
    async with notifier.running():
        yield


async def pending(service: Service, name: str = "all") -> int:
    count: int = (await service.get(f"/subscriptions/{name}"))["pending"]
    return count


async def fail(delivery: Delivery) -> web.StreamResponse:
    return web.Response(status=500, text="the hidden reply")


async def test_a_call_that_waits_for_a_person_is_told_with_the_page_to_open(
    service: Service, subscriber: Subscriber
) -> None:
    session = service.upstream.create(turn(bash()))
    await service.register("bash")
    await subscriber.subscribe(service.http, headers={"x-team": "payments"})
    await live(service, session.id)
    service.upstream.say(session.id)
    await subscriber.until(lambda: subscriber.notices)
    (call,) = await in_state(service, session.id, "held")
    (notice,) = subscriber.notices
    age_s = notice.data.pop("age_s")
    assert 0 <= age_s < 10
    assert {
        "session_id": session.id,
        "call_id": call["id"],
        "thread_id": None,
        "tool": "bash",
        "kind": "builtin",
        "state": "held",
        "gate": {"by": "upstream", "reason": "ask"},
        "outcome_unknown": False,
        "url": f"http://127.0.0.1:8080/console/sessions/{session.id}/calls/{call['id']}",
    } == notice.data
    told = json.loads(notice.body)
    assert ("confirmation.requested", {"type", "timestamp", "data"}) == (notice.type, told.keys())
    assert told["timestamp"].endswith("Z")
    assert ("payments", "application/json") == (notice.headers["x-team"], notice.headers["content-type"])
    assert notice.id.startswith("ntf_")
    body = {"tool_use_id": call["id"], "result": "allow"}
    await service.http.post(f"/sessions/{session.id}/confirm", json=body)
    await subscriber.until(lambda: len(subscriber.notices) == 2)
    decided = subscriber.notices[1]
    assert "confirmation.decided" == decided.type
    assert ("allow", "admin", "api") == tuple(
        decided.data["decision"][key] for key in ("result", "by", "via")
    )


async def test_every_event_is_told_once_and_says_nothing_that_is_not_its_business(
    service: Service, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FAILURES_MIN", 2)
    monkeypatch.setattr(breaker, "SUSTAINED_S", 0.0)
    for name, timeout_s in (("bash", 5), ("down", 5), ("slow", 1)):
        await service.register(name, timeout_s=timeout_s, retry="never", when_unhealthy="answer")
    await subscriber.subscribe(service.http)
    slow = Gate()

    async def reply(delivery: Delivery) -> web.StreamResponse:
        return await (slow if delivery.data["tool"] == "slow" else fail)(delivery)

    service.tool.reply = reply
    session = service.upstream.create(turn(bash(), custom("slow"), MESSAGE))
    await live(service, session.id)
    service.upstream.say(session.id)
    (held,) = await in_state(service, session.id, "held")
    body = {"tool_use_id": held["id"], "result": "deny", "deny_message": "the hidden reason"}
    await service.http.post(f"/sessions/{session.id}/confirm", json=body)
    await subscriber.until(lambda: subscriber.types["message.final"])
    service.upstream.emit(session.id, {"type": "session.status_terminated"})
    await ended(service, session.id)
    other = service.upstream.create(turn(custom("nobodys", "down"), custom("down")))
    await live(service, other.id)
    service.upstream.say(other.id)
    await subscriber.until(lambda: subscriber.types["call.unowned"])
    await service.register("nobodys")
    # The unowned call is delivered at last and fails, and so do both of the tool that goes down.
    others = {"session.stuck", "confirmation.expired", "confirmation.reminded"}
    told = dict.fromkeys(EVENTS - others, 1) | {"call.failed": 4}
    await subscriber.until(lambda: subscriber.types == told)
    await until(lambda: _is_quiet(service))
    assert told == subscriber.types
    assert len(subscriber.notices) == len({notice.id for notice in subscriber.notices})
    for secret in (b"hidden", b"command", b'"n"', subscriber.secret.encode()):
        assert not [notice.type for notice in subscriber.notices if secret in notice.body]


async def _is_quiet(service: Service) -> bool:
    return not await pending(service)


async def test_a_session_that_is_stuck_is_told(
    engine: AsyncEngine, migrated_url: str, subscriber: Subscriber
) -> None:
    async with (
        running(World(pace=0)) as upstream,
        replicating(engine, migrated_url, upstream.url, api_key=None) as http,
    ):
        await subscriber.subscribe(http, events=["session.stuck"])
        service = Service(http, upstream, None, engine)  # type: ignore[arg-type]
        session = upstream.create("custom")
        await service.attach(session.id)
        await subscriber.until(lambda: subscriber.notices)
        (notice,) = subscriber.notices
        url = f"http://127.0.0.1:8080/console/sessions/{session.id}"
        assert {"session_id": session.id, "flag": "no_credential", "url": url} == notice.data


# ---- at least once


async def told_in(engine: AsyncEngine, count: int = 1, first: int = 0) -> None:
    """A run commits messages, which is told, and nobody is there to send it."""
    messages = [final(f"m{number}") for number in range(first, first + count)]
    async with engine.begin() as connection:
        assert not await write(connection, "r1", [Batch(MINE, messages=messages)])


async def subscribed(engine: AsyncEngine, subscriber: Subscriber, name: str = "all", **more: Any) -> None:
    """Subscribe without the api."""
    row = {"url": subscriber.url, "events": EVENTS, "headers": {}, "enabled": True} | more
    async with engine.begin() as connection:
        done = await subscriptions.put(connection, SECRETS, "default", name, **row)
    subscriber.secret = done.signing_secret or subscriber.secret


async def test_what_was_committed_before_a_crash_is_sent_by_whoever_comes(
    engine: AsyncEngine, migrated_url: str, subscriber: Subscriber
) -> None:
    await held_by_r1(engine, MINE)
    await subscribed(engine, subscriber)
    await told_in(engine)
    async with notifying(engine, migrated_url, allow=LOOPBACK):
        await subscriber.until(lambda: subscriber.notices)
    assert "https://bridge.example/console/sessions/sesn_1" == subscriber.notices[0].data["url"]


async def test_a_replica_killed_while_it_sends_is_followed_by_another_with_the_same_notification(
    engine: AsyncEngine, migrated_url: str, subscriber: Subscriber
) -> None:
    """The receiver sees it twice, knows it by its id, and gets the same bytes."""
    hanging = asyncio.Event()

    async def hang(notice: Notice) -> web.StreamResponse:
        await hanging.wait()
        return web.Response(status=204)

    subscriber.reply = hang
    async with running(World(pace=0)) as upstream:
        await held_by_r1(engine, MINE)
        await subscribed(engine, subscriber)
        # Nobody serves the session here: its attachment must not be claimed.
        async with engine.begin() as connection:
            await connection.execute(
                text("insert into replicas (id, expires_at) values ('r1', now() + interval '1 h')")
            )
        await told_in(engine)
        public = {"BASCULE_PUBLIC_URL": "https://bridge.example"}
        async with serving_child(migrated_url, upstream.url, public) as child:
            await subscriber.until(lambda: subscriber.notices)
            await child.kill()
    hanging.set()
    async with engine.begin() as connection:
        await connection.execute(text("update notifications set due_at = now()"))
    async with notifying(engine, migrated_url, allow=LOOPBACK):
        await subscriber.until(lambda: len(subscriber.notices) == 2)
        await until(lambda: _is_empty(engine))
    first, second = subscriber.notices
    assert (1, 2) == (first.attempt, second.attempt)
    assert (first.id, first.body) == (second.id, second.body)


async def test_a_refused_notification_comes_again_under_its_id_until_it_is_taken(
    engine: AsyncEngine, migrated_url: str, subscriber: Subscriber
) -> None:
    statuses = iter([500, 302, 404, 429])

    async def refuse(notice: Notice) -> web.StreamResponse:
        return web.Response(status=next(statuses, 200), headers={"location": "/elsewhere"})

    subscriber.reply = refuse
    await held_by_r1(engine, MINE)
    await subscribed(engine, subscriber)
    await told_in(engine)
    async with notifying(engine, migrated_url, allow=LOOPBACK):
        await until(lambda: _is_empty(engine), limit_s=15)
    assert [1, 2, 3, 4, 5] == [notice.attempt for notice in subscriber.notices]
    assert 1 == len({(notice.id, notice.body) for notice in subscriber.notices})
    found = await shown(engine)
    assert (0, "http_status 429") == (found.failures, found.last_error)
    assert found.last_success_at is not None


async def test_two_replicas_send_each_notification_once(
    engine: AsyncEngine, migrated_url: str, subscriber: Subscriber
) -> None:
    await held_by_r1(engine, MINE)
    await subscribed(engine, subscriber)
    async with (
        notifying(engine, migrated_url, allow=LOOPBACK),
        notifying(engine, migrated_url, allow=LOOPBACK),
    ):
        for first in range(0, 50, 10):
            await told_in(engine, 10, first)
        await subscriber.until(lambda: len(subscriber.notices) >= 50)
        await until(lambda: _is_empty(engine))
    assert [1] * 50 == [notice.attempt for notice in subscriber.notices]
    assert 50 == len({notice.data["message_id"] for notice in subscriber.notices})


# ---- endpoints that do not work


async def test_an_endpoint_that_hangs_delays_neither_calls_nor_other_subscriptions(
    service: Service, subscriber: Subscriber
) -> None:
    hanging = asyncio.Event()

    async def hang(notice: Notice) -> web.StreamResponse:
        await hanging.wait()
        return web.Response(status=204)

    session = service.upstream.create(turn(custom(*["lookup"] * 20), MESSAGE))
    await service.register("lookup")
    async with subscribing() as other:
        subscriber.reply = hang
        await subscriber.subscribe(service.http, name="hangs")
        await other.subscribe(service.http, name="works", events=["message.final"])
        await live(service, session.id)
        for turns in (1, 2):
            service.upstream.say(session.id)
            await in_state(service, session.id, *["posted"] * 20 * turns)
            await other.until(lambda count=turns: len(other.notices) == count)  # type: ignore[misc]
    assert await pending(service, "hangs")
    assert 1 <= len(subscriber.notices) <= 4
    hanging.set()


async def test_an_endpoint_that_does_not_answer_in_time_is_asked_again(
    engine: AsyncEngine, migrated_url: str, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notification, "SEND_LIMIT_S", 0.2)

    async def hang(notice: Notice) -> web.StreamResponse:
        if notice.attempt == 1:
            await asyncio.Event().wait()
        return web.Response(status=204)

    subscriber.reply = hang
    await held_by_r1(engine, MINE)
    await subscribed(engine, subscriber)
    await told_in(engine)
    async with notifying(engine, migrated_url, allow=LOOPBACK):
        await until(lambda: _is_empty(engine))
    assert "timeout" == (await shown(engine)).last_error


@pytest.mark.parametrize(
    ("host", "code"), [("hooks.example", "blocked_address"), ("127.0.0.1", "blocked_address")]
)
async def test_a_forbidden_address_is_never_connected_to(
    engine: AsyncEngine, migrated_url: str, host: str, code: str
) -> None:
    """C-009: by its text, or by what its name leads to."""
    connected: list[object] = []
    server = await asyncio.start_server(lambda *streams: connected.append(streams), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await held_by_r1(engine, MINE)
    await subscribed(engine, Subscriber(), url=f"https://{host}:{port}/hook")
    await told_in(engine)

    def lookup(name: str, port: int) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async with server, notifying(engine, migrated_url, lookup=lookup):

        async def has_failed() -> bool:
            return (await shown(engine)).failures >= 2

        await until(has_failed)
    assert code == (await shown(engine)).last_error
    assert [] == connected


async def test_a_410_disables_the_subscription(service: Service, subscriber: Subscriber) -> None:
    async def gone(notice: Notice) -> web.StreamResponse:
        return web.Response(status=410)

    subscriber.reply = gone
    await subscriber.subscribe(service.http)
    session = service.upstream.create(turn(custom("nobodys")))
    await live(service, session.id)
    service.upstream.say(session.id)
    found = await service.until("/subscriptions/all", lambda found: not found["enabled"])
    assert ("gone", 0, 1) == (found["disabled_reason"], found["pending"], found["dropped"])
    assert 1 == len(subscriber.notices)


async def test_what_is_under_way_at_the_end_is_finished(
    engine: AsyncEngine, migrated_url: str, subscriber: Subscriber
) -> None:
    taken = asyncio.Event()

    async def slowly(notice: Notice) -> web.StreamResponse:
        await taken.wait()
        return web.Response(status=204)

    subscriber.reply = slowly
    await held_by_r1(engine, MINE)
    await subscribed(engine, subscriber)
    await told_in(engine)
    async with notifying(engine, migrated_url, allow=LOOPBACK):
        await subscriber.until(lambda: subscriber.notices)
        asyncio.get_running_loop().call_later(0.1, taken.set)
    assert await _is_empty(engine)


async def _is_empty(engine: AsyncEngine) -> bool:
    async with engine.connect() as connection:
        return not await connection.scalar(text("select count(*) from notifications"))


async def shown(engine: AsyncEngine, name: str = "all") -> subscriptions.Subscription:
    async with engine.connect() as connection:
        found = await subscriptions.get(connection, SECRETS, "default", name)
    assert found is not None
    return found
