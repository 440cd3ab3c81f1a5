from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.api.deliveries import DeliveryView, shown_url
from app.api.lists import encode_cursor
from tests.api.service import Service, problem
from tests.store.rows import add_delivery

pytestmark = pytest.mark.anyio

LOG = "/tools/bash/deliveries"
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


async def put(service: Service, name: str = "bash") -> None:
    answer = await service.http.put(f"/tools/{name}", json={"url": "https://tools.example/hook"})
    assert answer.status_code == 201


async def add(service: Service, call_id: str, *, minute: int = 0, **values: Any) -> None:
    async with service.engine.begin() as connection:
        started_at = NOON + timedelta(minutes=minute)
        await add_delivery(connection, call_id, **({"started_at": started_at} | values))


async def listed(service: Service, **params: Any) -> list[str]:
    """Read the log page by page; return its calls."""
    seen: list[str] = []
    while True:
        page = (await service.http.get(LOG, params=params)).json()
        seen += [delivery["call_id"] for delivery in page["data"]]
        if page["next_cursor"] is None:
            return seen
        params["cursor"] = page["next_cursor"]


async def test_a_delivery_is_shown_whole_and_without_secrets(service: Service) -> None:
    await put(service)
    await add(
        service, "tu1", attempt=2, url="https://me:pass@tools.example:8443/hook?key=s3cret#part",
        finished_at=NOON + timedelta(seconds=1), duration_ms=950, http_status=500, code="http_status",
        reply=b"raw s3cret", reply_excerpt="raw [redacted]",
    )  # fmt: skip
    answer = await service.http.get(LOG)
    assert "s3cret" not in answer.text
    assert answer.json() == {
        "data": [
            {
                "session_id": "sesn_1",
                "call_id": "tu1",
                "attempt": 2,
                "tool": "bash",
                "url": "https://tools.example:8443/hook",
                "replica": "r1",
                "started_at": "2026-11-30T12:00:00Z",
                "finished_at": "2026-11-30T12:00:01Z",
                "duration_ms": 950,
                "http_status": 500,
                "code": "http_status",
                "reply_excerpt": "raw [redacted]",
            }
        ],
        "next_cursor": None,
    }
    assert DeliveryView.model_fields.keys() == answer.json()["data"][0].keys()


async def test_the_log_of_a_tool_is_read_newest_first_by_pages(service: Service) -> None:
    """Deliveries of one commit share their time; none of them is lost between two pages."""
    await put(service)
    for number in range(4):
        await add(service, f"tu{number}", minute=5)
    await add(service, "newest", minute=9)
    await add(service, "oldest", minute=1)
    await add(service, "other", tool="other")
    await add(service, "foreign", tenant="acme")
    assert await listed(service, limit=2) == ["newest", "tu3", "tu2", "tu1", "tu0", "oldest"]


async def test_the_log_shows_only_failures_when_asked(service: Service) -> None:
    await put(service)
    await add(service, "worked", minute=1, finished_at=NOON)
    await add(service, "failed", minute=2, finished_at=NOON, code="timeout")
    await add(service, "gone", minute=3, finished_at=NOON, code="gone")
    assert await listed(service, limit=1, failed="true") == ["gone", "failed"]


@pytest.mark.parametrize(
    "place", [["2026-11-30T12:00:00", "s", "c", 1], ["2026-11-30T12:00:00Z", "\0", "c", 1], [1], ["x"]]
)
async def test_a_cursor_of_another_form_is_refused(service: Service, place: list[Any]) -> None:
    await put(service)
    answer = await service.http.get(LOG, params={"cursor": encode_cursor(place)})
    assert problem(answer) == (422, "invalid_request")


async def test_the_log_of_a_tool_that_is_not_registered_is_not_found(service: Service) -> None:
    await add(service, "tu1")
    assert problem(await service.http.get(LOG)) == (404, "tool_not_found")


async def test_a_key_without_the_scope_tools_does_not_see_the_log(service: Service) -> None:
    await put(service)
    headers = await service.key("read", "sessions", "confirm")
    assert problem(await service.http.get(LOG, headers=headers)) == (403, "forbidden")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://tools.example/a/b?x=1#y", "https://tools.example/a/b"),
        ("https://user:pass@tools.example", "https://tools.example"),
        ("http://[::1]:80/x", "http://[::1]:80/x"),
        ("https://[broken", None),
    ],
)
def test_what_may_be_secret_in_a_url_is_not_shown(url: str, shown: str | None) -> None:
    assert shown_url(url) == shown
