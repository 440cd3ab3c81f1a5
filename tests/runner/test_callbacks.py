"""Tools that answer 202 and report later, against the whole service."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server
from tests.runner.receiver import Delivery, Receiver
from tests.runner.scripts import custom, in_state, live, results, turn
from tests.runner.service import Service
from tests.runner.test_restarts import Start, replica, tool, upstream

__all__ = ["replica", "tool", "upstream"]

pytestmark = pytest.mark.anyio

RESULT = {"content": "shipped"}


async def later(delivery: Delivery) -> web.StreamResponse:
    return web.Response(status=202)


class Job:
    """A call that its tool has taken: reports go where the delivery said, with the token that it brought."""

    def __init__(self, service: Service, delivery: Delivery) -> None:
        callback = delivery.data["callback"]
        self._service, self._token = service, callback["token"]
        self.path = urlsplit(callback["url"]).path

    async def report(
        self, value: Any, *, token: str | None = None, path: str | None = None
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {token or self._token}"}
        return await self._service.http.post(path or self.path, json=value, headers=headers)


async def taken(service: Service, upstream: Server, tool: Receiver, *steps: Any) -> tuple[str, list[Job]]:
    """A session whose calls the tool has all answered with 202."""
    session = upstream.create(turn(*(steps or (custom("lookup"),))))
    await live(service, session.id)
    count = len(tool.deliveries)
    upstream.say(session.id)
    path = f"/sessions/{session.id}/calls"
    await service.until(path, lambda s: s["data"] and all(c["awaits_callback"] for c in s["data"]))
    return session.id, [Job(service, delivery) for delivery in tool.deliveries[count:]]


async def ending(engine: AsyncEngine, *, left_s: float) -> None:
    async with engine.begin() as connection:
        await connection.execute(
            text("update deliveries set deadline_at = now() + make_interval(secs => :left)"), {"left": left_s}
        )


def told(upstream: Server, session_id: str) -> list[tuple[str, bool]]:
    """What upstream has of us, as (text, is_error)."""
    events = [one for answers in results(upstream, session_id).values() for one in answers]
    return [(one["content"][0]["text"], one["is_error"]) for one in events]


async def test_what_is_reported_after_a_202_is_posted_once(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """The same again is a success without effect, another one a 409 that says so."""
    tool.reply = later
    async with replica() as service:
        await service.register("lookup")
        session_id, (job,) = await taken(service, upstream, tool)
        assert [] == told(upstream, session_id)
        answers = [(await job.report(value)).status_code for value in (RESULT, RESULT)]
        await in_state(service, session_id, "posted")
        answers += [(await job.report(value)).status_code for value in (RESULT, {"content": "lost"})]
    assert ([200, 200, 200, 409], [("shipped", False)]) == (answers, told(upstream, session_id))
    assert 1 == len(tool.deliveries)


async def test_a_result_that_comes_before_the_202_was_read_is_posted(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """The tool's job was quicker than its own answer."""

    async def quick(delivery: Delivery) -> web.StreamResponse:
        assert (await Job(service, delivery).report(RESULT)).status_code == 200
        return web.Response(status=202)

    tool.reply = quick
    async with replica() as service:
        await service.register("lookup")
        session = upstream.create(turn(custom("lookup")))
        await live(service, session.id)
        upstream.say(session.id)
        await in_state(service, session.id, "posted")
    assert [("shipped", False)] == told(upstream, session.id)


async def test_a_report_stands_although_the_webhook_fails(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """The delivery came to nothing, but what the tool reported is known."""

    async def rude(delivery: Delivery) -> web.StreamResponse:
        assert (await Job(service, delivery).report(RESULT)).status_code == 200
        return web.Response(status=500)

    tool.reply = rude
    async with replica() as service:
        await service.register("lookup", retry="never")
        session = upstream.create(turn(custom("lookup")))
        await live(service, session.id)
        upstream.say(session.id)
        (call,) = await in_state(service, session.id, "posted")
    assert ([("shipped", False)], False) == (told(upstream, session.id), call["outcome_unknown"])


async def test_a_report_reaches_the_run_that_follows(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """The replica that heard the 202 is gone; one report comes while nobody serves, one afterwards."""
    tool.reply = later
    async with replica() as service:
        await service.register("lookup")
        session_id, jobs = await taken(service, upstream, tool, custom("lookup", "lookup"))
        service_before = service
    async with replica() as service:
        for job, content in zip(jobs, ("one", "two"), strict=True):
            job._service = service
            assert (await job.report({"content": content})).status_code == 200
        await in_state(service, session_id, "posted", "posted")
    assert service is not service_before
    assert (["one", "two"], 2) == (sorted(t for t, _ in told(upstream, session_id)), len(tool.deliveries))


async def test_a_token_is_good_for_its_own_call_alone(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """Whatever is wrong with it, the answer is the same."""
    tool.reply = later
    async with replica() as service:
        await service.register("lookup")
        session_id, (job, other) = await taken(service, upstream, tool, custom("lookup", "lookup"))
        token = job._token
        wrong = [
            await other.report(RESULT, token=token),
            await job.report(RESULT, path=f"/sessions/{session_id}/calls/sevt_none/result"),
            await job.report(RESULT, path=job.path.replace(session_id, "sesn_other")),
            await job.report(RESULT, token=token[:-1]),
            await job.report(RESULT, token=token.replace("cbt.", "cbt.0", 1)),
            await job.report(RESULT, token="an-admin-key-for-tests"),
        ]
        assert {401} == {answer.status_code for answer in wrong}
        assert 1 == len({answer.json()["detail"] for answer in wrong})
        assert [] == told(upstream, session_id)


async def test_progress_keeps_a_call_open_up_to_the_tools_maximum(
    replica: Start, upstream: Server, tool: Receiver, engine: AsyncEngine
) -> None:
    tool.reply = later
    left = text("select extract(epoch from deadline_at - now()) from deliveries")
    async with replica() as service:
        await service.register("lookup", callback_timeout_s=100, callback_timeout_max_s=150)
        session_id, (job,) = await taken(service, upstream, tool)
        await ending(engine, left_s=1)
        answer = await job.report({"progress": "2 of 5"})
        assert (200, True) == (answer.status_code, answer.json()["is_progress"])
        async with engine.begin() as connection:
            assert 95 < await connection.scalar(left) <= 100
            await connection.execute(text("update deliveries set deadline_max_at = now() + interval '50 s'"))
        await job.report({"progress": "3 of 5"})
        async with engine.connect() as connection:
            assert 45 < await connection.scalar(left) <= 50
        assert (await job.report(RESULT)).status_code == 200
        await in_state(service, session_id, "posted")


async def test_a_promise_that_is_not_kept_is_told_to_the_agent_and_a_late_report_is_gone(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    tool.reply = later
    async with replica() as service:
        await service.register("lookup", callback_timeout_s=1, retry="safe")
        session_id, (job,) = await taken(service, upstream, tool)
        await in_state(service, session_id, "posted")
        late = [await job.report(value) for value in (RESULT, {"progress": 1})]
    assert [(410, "callback_late")] * 2 == [(answer.status_code, answer.json()["code"]) for answer in late]
    ((sentence, is_error),) = told(upstream, session_id)
    assert ("reported none in time" in sentence, is_error, 1) == (True, True, len(tool.deliveries))


async def test_a_report_for_a_call_that_is_over_is_refused(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """The agent was interrupted meanwhile: nobody waits for the result any more."""
    tool.reply = later
    async with replica() as service:
        await service.register("lookup")
        session_id, (job,) = await taken(service, upstream, tool)
        upstream.emit(session_id, {"type": "user.interrupt"})
        await in_state(service, session_id, "interrupted")
        answer = await job.report(RESULT)
    assert (409, "call_over", "interrupted") == (
        answer.status_code, answer.json()["code"], answer.json()["state"],
    )  # fmt: skip


async def test_a_tool_without_callbacks_is_offered_none(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """Its 202 is an error that says why."""
    tool.reply = later
    async with replica() as service:
        await service.register("lookup", callback_timeout_s=0)
        session = upstream.create(turn(custom("lookup")))
        await live(service, session.id)
        upstream.say(session.id)
        await in_state(service, session.id, "posted")
    assert "callback" not in tool.deliveries[0].data
    assert "callback_timeout_s" in told(upstream, session.id)[0][0]


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"", "application/json", 400, "invalid_json"),
        (b"<p>done", "text/html", 415, "unsupported_media_type"),
        (b"", "text/plain", 415, "unsupported_media_type"),
        (b"done", "text/plain", 200, None),
        (b'[{"type":"text","text":"done"}]', "application/json", 200, None),
    ],
)
async def test_what_is_no_result_can_be_reported_again(
    replica: Start, upstream: Server, tool: Receiver, content: bytes, kind: str, status: int, code: str | None
) -> None:
    """A report that no reply could be is refused while the tool listens, and loses nothing."""
    tool.reply = later
    async with replica() as service:
        await service.register("lookup")
        session_id, (job,) = await taken(service, upstream, tool)
        headers = {"authorization": f"Bearer {job._token}", "content-type": kind}
        answer = await service.http.post(job.path, content=content, headers=headers)
        assert (status, code) == (answer.status_code, answer.json().get("code"))
        if status != 200:
            assert (await job.report({"content": "done"})).status_code == 200
        await in_state(service, session_id, "posted")
    assert [("done", False)] == told(upstream, session_id)


async def test_every_delivery_of_a_call_brings_the_same_token(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """Promise 4: from any replica, under the key that the first one was made with."""
    gone = asyncio.Event()

    async def first_breaks(delivery: Delivery) -> web.StreamResponse:
        if not gone.is_set():
            gone.set()
            return web.Response(status=500)
        return web.json_response(RESULT)

    tool.reply = first_breaks
    async with replica() as service:
        await service.register("lookup", retry="safe")
        session = upstream.create(turn(custom("lookup")))
        await live(service, session.id)
        upstream.say(session.id)
        await in_state(service, session.id, "posted")
    first, second = tool.deliveries
    assert first.body == second.body
    assert first.data["callback"]["token"].startswith("cbt.")


async def test_a_lost_job_is_delivered_again_when_an_operator_asks(
    replica: Start, upstream: Server, tool: Receiver
) -> None:
    """The same id, body and token; any other call is refused, and its state named."""
    tool.reply = later
    async with replica() as service:
        await service.register("lookup", retry="never")
        session_id, (job,) = await taken(service, upstream, tool)
        path = job.path.replace("/result", "/redeliver")
        assert (await service.http.post(path)).status_code == 202
        await tool.until(lambda: len(tool.deliveries) == 2)
        assert (await job.report(RESULT)).status_code == 200
        await in_state(service, session_id, "posted")
        refused = await service.http.post(path)
        unknown = await service.http.post(path.replace("sevt_", "sevt_no"))
    first, second = tool.deliveries
    assert (first.id, first.body, [1, 2]) == (second.id, second.body, [d.attempt for d in tool.deliveries])
    assert (409, "not_redeliverable", "posted") == (
        refused.status_code, refused.json()["code"], refused.json()["state"],
    )  # fmt: skip
    assert (404, "call_not_found") == (unknown.status_code, unknown.json()["code"])
    assert [("shipped", False)] == told(upstream, session_id)
