from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import select, update

from app.store import tables
from app.store.attachments import load_extra_headers
from tests.api.service import Service, problem
from tests.store.rows import SECRETS, add_attachment, add_call

pytestmark = pytest.mark.anyio

ATTACH = "/sessions/sesn_1/attach"
REOPENING = [
    "idle",
    "auth_failed",
    "upstream_rejected",
    "reconnects_exhausted",
    "internal_error",
    "session_gone",
]


async def row(service: Service) -> Any:
    async with service.engine.connect() as connection:
        return (await connection.execute(select(tables.attachments))).one()


async def write(service: Service, **values: Any) -> None:
    """Do what a runner does to the state."""
    async with service.engine.begin() as connection:
        await connection.execute(update(tables.attachments).values(**values))


async def test_attach_accepts_a_wish_with_every_default(service: Service) -> None:
    answer = await service.http.post(ATTACH)
    assert answer.status_code == 202
    shown = answer.json()
    assert (shown["session_id"], shown["status"], shown["term"]) == ("sesn_1", "attaching", 0)
    assert shown["settings"] == {
        "max_idle_s": 60.0,
        "max_reconnects": None,
        "tools": None,
        "concurrency": 8,
        "credential": "default",
        "environment": None,
        "labels": {},
    }
    assert (await row(service)).wish == 1


async def test_the_same_settings_again_are_the_same_attachment(service: Service) -> None:
    body = {"tools": ["b", "a", "a"], "extra_headers": {"x-trace-id": "abc"}}
    assert (await service.http.post(ATTACH, json=body)).status_code == 202
    same = {"tools": ["a", "b"], "extra_headers": {"x-trace-id": "abc"}}
    assert (await service.http.post(ATTACH, json=same)).status_code == 200
    assert (await row(service)).wish == 1


async def test_two_attaches_at_once_make_one_attachment(service: Service) -> None:
    """D-071: both requests succeed with the same attachment."""
    answers = await asyncio.gather(*(service.http.post(ATTACH) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [202]
    assert len({answer.json()["created_at"] for answer in answers}) == 1


@pytest.mark.parametrize("body", [{"max_idle_s": None}, {"extra_headers": {"x-trace-id": "other"}}])
async def test_other_settings_are_refused_and_change_nothing(service: Service, body: dict[str, Any]) -> None:
    """D-072: 409 showing the current settings."""
    await service.http.post(ATTACH)
    answer = await service.http.post(ATTACH, json=body)
    assert problem(answer) == (409, "settings_differ")
    assert answer.json()["attachment"]["settings"]["max_idle_s"] == 60.0
    assert (await row(service)).wish == 1


@pytest.mark.parametrize("reason", REOPENING)
async def test_an_ended_attachment_is_opened_again(service: Service, reason: str) -> None:
    """D-073, D-074: a new run with the new settings, and nothing left of the old one's end."""
    async with service.engine.begin() as connection:
        await add_attachment(
            connection, status="ended", end_reason=reason, end_detail="…", reconnects=3, idle_id="i1", term=4,
            detach_requested=True, cursor_at=5.0,
        )  # fmt: skip
    answer = await service.http.post(ATTACH, json={"max_idle_s": None})
    assert answer.status_code == 202
    stored = await row(service)
    assert (stored.status, stored.end_reason, stored.end_detail) == ("attaching", None, None)
    assert (stored.reconnects, stored.idle_id, stored.detach_requested) == (0, None, False)
    assert (stored.term, stored.cursor_at, stored.wish) == (4, 5.0, 2)
    assert answer.json()["settings"]["max_idle_s"] is None


@pytest.mark.parametrize("reason", ["terminated", "deleted"])
async def test_a_session_that_is_over_cannot_be_attached(service: Service, reason: str) -> None:
    """D-075: 409 `session_ended`."""
    async with service.engine.begin() as connection:
        await add_attachment(connection, status="ended", end_reason=reason)
    assert problem(await service.http.post(ATTACH)) == (409, "session_ended")
    assert problem(await service.http.patch("/sessions/sesn_1", json={"concurrency": 1})) == (
        409,
        "session_ended",
    )
    assert (await row(service)).status == "ended"


@pytest.mark.parametrize(
    "body",
    [
        b'{"max_idle_s": 0}',
        b'{"max_idle_s": -5}',
        b'{"max_idle_s": "60"}',
        b'{"max_idle_s": NaN}',
        b'{"max_idle_s": Infinity}',
        b'{"max_idle_s": true}',
        b'{"max_idle_s": 1e308}',
        b'{"max_reconnects": -1}',
        b'{"concurrency": 0}',
        b'{"concurrency": 33}',
        b'{"concurrency": 1.5}',
        b'{"tools": ["a/b"]}',
        b'{"tools": ["a\\u0000b"]}',
        b'{"tools": "a"}',
        b'{"credential": "other"}',
        b'{"environment": "moon"}',
        b'{"labels": {"a": "\\u0000"}}',
        b'{"labels": {"a": "\\ud800"}}',
        b'{"labels": {"\\ud800": "a"}}',
        b'{"labels": {"a": 1}}',
        b'{"unknown": 1}',
        b"[]",
        b'"x"',
    ],
)
async def test_invalid_settings_are_refused(service: Service, body: bytes) -> None:
    """R-233: 0, negatives, strings and NaN are 422, and so is what else no setting can be."""
    answer = await service.http.post(ATTACH, content=body, headers={"content-type": "application/json"})
    assert problem(answer) == (422, "invalid_request")
    assert answer.json()["errors"]
    assert (await service.http.get("/sessions")).json()["data"] == []


@pytest.mark.parametrize("max_idle_s", [None, 0.5, 60, 2_592_000])
async def test_valid_idle_times_are_accepted(service: Service, max_idle_s: float | None) -> None:
    answer = await service.http.post(ATTACH, json={"max_idle_s": max_idle_s})
    assert answer.json()["settings"]["max_idle_s"] == max_idle_s


@pytest.mark.parametrize(
    "name",
    [
        "Authorization", "x-api-key", "X_Api_Key", "anthropic-beta", "Anthropic-Version", "host", "cookie",
        "content-length", "transfer-encoding", "connection", "proxy-authorization", "user-agent",
    ],
)  # fmt: skip
async def test_headers_that_are_ours_cannot_be_passed_through(service: Service, name: str) -> None:
    """R-006: a name of authentication, beta, version or framing is refused at attach."""
    answer = await service.http.post(ATTACH, json={"extra_headers": {name: "secret-value"}})
    assert problem(answer) == (422, "invalid_request")
    assert "secret-value" not in answer.text
    assert answer.json()["errors"][0]["field"] == "extra_headers"


@pytest.mark.parametrize(
    "headers", [{"x": "a\r\nb"}, {"x y": "a"}, {"": "a"}, {"x": "a\0"}, {"X": "1", "x": "2"}]
)
async def test_malformed_headers_are_refused(service: Service, headers: dict[str, str]) -> None:
    assert problem(await service.http.post(ATTACH, json={"extra_headers": headers})) == (
        422,
        "invalid_request",
    )


async def test_extra_headers_are_encrypted_and_write_only(service: Service) -> None:
    answer = await service.http.post(ATTACH, json={"extra_headers": {"x-trace-id": "hidden-value"}})
    assert "hidden-value" not in answer.text
    assert b"hidden-value" not in (await row(service)).extra_headers
    async with service.engine.connect() as connection:
        stored = await load_extra_headers(connection, SECRETS, "default", "sesn_1")
    assert stored == {"x-trace-id": "hidden-value"}


async def test_settings_of_an_attachment_can_be_changed(service: Service) -> None:
    await service.http.post(ATTACH, json={"max_reconnects": 7})
    change = {"max_idle_s": None, "concurrency": 1, "tools": ["x"], "labels": {"team": "a"}}
    answer = await service.http.patch("/sessions/sesn_1", json=change)
    assert answer.status_code == 200
    settings = answer.json()["settings"]
    assert {name: settings[name] for name in change} == change
    assert settings["max_reconnects"] == 7
    assert (await row(service)).wish == 2
    await service.http.patch("/sessions/sesn_1", json={"concurrency": 1})
    assert (await row(service)).wish == 2


async def test_only_some_settings_can_be_changed(service: Service) -> None:
    await service.http.post(ATTACH)
    for body in ({"environment": "cloud"}, {"extra_headers": {}}, {"concurrency": 0}, {"concurrency": None}):
        answer = await service.http.patch("/sessions/sesn_1", json=body)
        assert problem(answer) == (422, "invalid_request")


async def test_detach_is_a_wish_that_drains(service: Service) -> None:
    await service.http.post(ATTACH)
    answer = await service.http.post("/sessions/sesn_1/detach")
    assert (answer.status_code, answer.json()["status"]) == (202, "detaching")
    assert ((await row(service)).detach_requested, (await row(service)).wish) == (True, 2)
    assert (await service.http.post("/sessions/sesn_1/detach")).status_code == 202
    assert (await row(service)).wish == 2
    assert problem(await service.http.post(ATTACH)) == (409, "detaching")
    assert problem(await service.http.patch("/sessions/sesn_1", json={})) == (409, "detaching")
    await write(service, status="detached", end_reason="detached")
    assert (await service.http.post("/sessions/sesn_1/detach")).status_code == 200
    assert problem(await service.http.patch("/sessions/sesn_1", json={})) == (409, "not_attached")
    assert (await service.http.post(ATTACH)).status_code == 202


async def test_an_attachment_shows_how_it_stands(service: Service) -> None:
    async with service.engine.begin() as connection:
        await add_attachment(
            connection, cursor_at=1790000000.25, flags=["posting_degraded"], missing=["sevt_9"], term=3,
            environment="cloud",
        )  # fmt: skip
        for number, state in enumerate(["held", "posted", "posted"]):
            await add_call(connection, f"tu{number}", state=state)
        await connection.execute(
            update(tables.attachments).values(
                last_event_at=select(tables.attachments.c.created_at).scalar_subquery()
            )
        )
    shown = (await service.http.get("/sessions/sesn_1")).json()
    assert shown["calls"] == {"held": 1, "posted": 2}
    assert (shown["flags"], shown["missing"]) == (["posting_degraded"], ["sevt_9"])
    assert (shown["replica"], shown["term"], shown["environment"]) == ("r1", 3, "cloud")
    assert shown["cursor"] == "2026-09-21T14:13:20.250000Z"
    assert 0 <= shown["last_event_age_s"] < 60


async def test_attachments_are_listed_newest_first_and_by_pages(service: Service) -> None:
    for number in range(5):
        await service.http.post(f"/sessions/sesn_{number}/attach")
    seen, cursor = [], None
    while True:
        params = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = (await service.http.get("/sessions", params=params)).json()
        seen += [shown["session_id"] for shown in page["data"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == [f"sesn_{number}" for number in reversed(range(5))]
