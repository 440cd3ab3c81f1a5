"""Polls that cost little, and polls that wait."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from tests.api.service import Service, problem
from tests.store.rows import CONNECTIONS_MAX, add_attachment, add_call, add_message, until

pytestmark = pytest.mark.anyio

PATHS = (
    "/sessions/sesn_1", "/sessions/sesn_1/calls", "/sessions/sesn_1/calls/tu1", "/sessions/sesn_1/messages",
    "/sessions/sesn_1/messages/m1", "/sessions/sesn_1/messages/m1/text", "/sessions/sesn_1/text",
    "/sessions/sesn_1/confirmations", "/confirmations",
)  # fmt: skip


@pytest.fixture(autouse=True)
async def rows(service: Service) -> None:
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu1")
        await add_message(connection, "m1", ["hello"], seq=1)


async def get(service: Service, path: str, tag: str | None = None, **query: Any) -> httpx.Response:
    headers = {} if tag is None else {"if-none-match": tag}
    return await service.http.get(path, params=query, headers=headers)


async def change(service: Service) -> None:
    """A new message and a new call, as a run would commit them."""
    async with service.engine.begin() as connection:
        await add_message(connection, "m2", ["more"], seq=2)
        await add_call(connection, "tu2")
        await connection.execute(text("update attachments set reconnects = 7"))
        await connection.execute(text("select pg_notify('bascule', 'default/sesn_1')"))


async def waiting(service: Service, path: str, tag: str | None, **query: Any) -> asyncio.Task[httpx.Response]:
    """A poll that has read once and now waits."""
    poll = asyncio.create_task(get(service, path, tag, wait_s=20, **query))
    async with asyncio.timeout(5):
        while not service.wakeups._by_key:  # noqa: ASYNC110 - it listens before it reads
            await asyncio.sleep(0.01)
    done, _ = await asyncio.wait([poll], timeout=0.2)
    assert not done
    return poll


@pytest.mark.parametrize("path", PATHS)
async def test_an_unchanged_answer_is_a_304_without_a_body(service: Service, path: str) -> None:
    first = await get(service, path)
    again = await get(service, path, f'W/"other", {first.headers["etag"]}')
    assert (200, 304, b"") == (first.status_code, again.status_code, again.content)
    assert first.headers["etag"] == again.headers["etag"]


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in PATHS
        if path.endswith(("sesn_1", "calls", "messages", "text", "confirmations")) and "m1" not in path
    ],
)
async def test_a_poll_that_waits_gets_the_change(service: Service, path: str) -> None:
    tag = (await get(service, path)).headers["etag"]
    poll = await waiting(service, path, tag)
    await change(service)
    answer = await asyncio.wait_for(poll, 5)
    assert (200, True) == (answer.status_code, answer.headers["etag"] != tag)


async def test_a_poll_for_text_after_the_last_waits_for_more(service: Service) -> None:
    poll = await waiting(service, "/sessions/sesn_1/text", None, after=1)
    await change(service)
    answer = (await asyncio.wait_for(poll, 5)).json()
    assert (["more"], 2) == ([message["text"] for message in answer["data"]], answer["next_after"])


async def test_a_poll_whose_time_is_over_says_that_nothing_changed(service: Service) -> None:
    tag = (await get(service, "/sessions/sesn_1/calls")).headers["etag"]
    assert 304 == (await get(service, "/sessions/sesn_1/calls", tag, wait_s=0.05)).status_code
    empty = await get(service, "/sessions/sesn_1/text", after=1, wait_s=0.05)
    assert (200, []) == (empty.status_code, empty.json()["data"])


async def test_polls_that_wait_hold_no_connection(service: Service) -> None:
    """There are more of them than connections, and a write still gets one."""
    tag = (await get(service, "/sessions/sesn_1/calls")).headers["etag"]
    polls = [await waiting(service, "/sessions/sesn_1/calls", tag) for _ in range(3 * CONNECTIONS_MAX)]
    await change(service)
    assert {200} == {answer.status_code for answer in await asyncio.gather(*polls)}


async def test_a_service_that_stops_lets_nobody_wait(service: Service) -> None:
    """Otherwise its leases would be held until the last poll has ended."""
    tag = (await get(service, "/sessions/sesn_1/calls")).headers["etag"]
    poll = await waiting(service, "/sessions/sesn_1/calls", tag)
    service.app.state.bridge.stopping.set()
    assert 304 == (await asyncio.wait_for(poll, 5)).status_code


@pytest.mark.parametrize("wait_s", ["-1", "61", "nan", "soon", ""])
async def test_a_wait_is_a_number_up_to_a_minute(service: Service, wait_s: str) -> None:
    answer = await get(service, "/sessions/sesn_1/text", wait_s=wait_s)
    assert (422, "invalid_request") == problem(answer)
    assert "wait_s" in answer.json()["errors"][0]["field"]


async def test_a_failure_is_told_at_once_and_has_no_tag(service: Service) -> None:
    answer = await get(service, "/sessions/sesn_none/text", wait_s=20)
    assert (404, "session_not_found", None) == (*problem(answer), answer.headers.get("etag"))


async def test_a_preview_wakes_who_waits_although_nobody_notifies(service: Service) -> None:
    """Previews are saved too often for wake-ups of their own; a reader does not wait for the clock."""
    await until(lambda: _works(service))
    path = "/sessions/sesn_1/text"
    for words in ("so", "so far"):
        tag = (await get(service, path)).headers["etag"]
        poll = await waiting(service, path, tag)
        async with service.engine.begin() as connection:
            await connection.execute(text("delete from messages where id = 'm_open'"))
            await add_message(connection, "m_open", [words], state="partial", processed_at=None)
        shown = (await asyncio.wait_for(poll, 5)).json()["data"]
        assert words == shown[-1]["text"]


async def _works(service: Service) -> bool:
    return service.wakeups.works
