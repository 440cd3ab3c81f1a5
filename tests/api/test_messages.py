from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.service import Service, problem
from tests.store.rows import add_attachment, add_message

pytestmark = pytest.mark.anyio

MESSAGES = "/sessions/sesn_1/messages"
TEXT = "/sessions/sesn_1/text"
PARTIAL: dict[str, Any] = {"state": "partial", "processed_at": None}


async def test_a_partial_message_is_readable(service: Service) -> None:
    """A-042: its text so far, without `processed_at` or `seq`."""
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_message(connection, "m1", ["Hel"], **PARTIAL)
    shown = (await service.http.get(f"{MESSAGES}/m1")).json()
    assert shown.pop("updated_at")
    assert shown == {
        "id": "m1",
        "state": "partial",
        "is_stale": False,
        "text": "Hel",
        "content": [{"type": "text", "text": "Hel"}],
        "thread_id": None,
        "processed_at": None,
        "seq": None,
    }


async def test_finals_from_history_are_readable_without_any_preview(service: Service) -> None:
    """A-047: three finals, each with its `seq`."""
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        for number in range(1, 4):
            await add_message(connection, f"m{number}", [f"text {number}"], seq=number)
    shown = (await service.http.get(MESSAGES)).json()["data"]
    assert [(one["id"], one["state"], one["text"], one["seq"]) for one in shown] == [
        (f"m{number}", "final", f"text {number}", number) for number in range(1, 4)
    ]


async def test_messages_are_listed_in_the_order_of_first_appearance(service: Service) -> None:
    """A-057: finals and open previews once each, by pages too."""
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_message(connection, "m1", ["a"], seq=2)
        await add_message(connection, "m2", ["b"], **PARTIAL)
        await add_message(connection, "m3", ["c"], seq=1)
    first = (await service.http.get(MESSAGES, params={"limit": 2})).json()
    rest = (await service.http.get(MESSAGES, params={"cursor": first["next_cursor"]})).json()
    shown = [(one["id"], one["state"]) for one in first["data"] + rest["data"]]
    assert shown == [("m1", "final"), ("m2", "partial"), ("m3", "final")]
    assert rest["next_cursor"] is None


async def test_the_same_message_id_in_two_sessions_is_two_messages(service: Service) -> None:
    """A-058: separate snapshots; another tenant gets 404."""
    async with service.engine.begin() as connection:
        for session in ("sesn_1", "sesn_2"):
            await add_attachment(connection, session_id=session)
            await add_message(connection, "m1", [session], session_id=session)
    for session in ("sesn_1", "sesn_2"):
        assert (await service.http.get(f"/sessions/{session}/messages/m1")).json()["text"] == session
    other = await service.key("read", tenant="other")
    assert problem(await service.http.get(f"{MESSAGES}/m1", headers=other)) == (404, "session_not_found")


async def test_a_large_message_is_returned_byte_for_byte(service: Service) -> None:
    """A-062: 2 MB in 500 blocks, with numbers and escapes as they came."""
    blocks = ",".join('{"type":"text", "text":"%s","n":1.10}' % ("\\u00e9x" * 580) for _ in range(500))
    content = f"[{blocks}]"
    assert len(content) > 2_000_000
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_message(connection, "m1", content=content, seq=1)
    answer = await service.http.get(f"{MESSAGES}/m1")
    assert f'"content":{content},' in answer.text
    assert answer.json()["text"] == "éx" * 580 * 500


async def test_a_page_of_large_messages_is_bounded_in_bytes(service: Service) -> None:
    content = json.dumps([{"type": "text", "text": "x" * 3_000_000}])
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        for number in range(1, 6):
            await add_message(connection, f"m{number}", content=content, seq=number)
    page = (await service.http.get(MESSAGES)).json()
    assert [one["id"] for one in page["data"]] == ["m1", "m2"]
    page = (await service.http.get(MESSAGES, params={"cursor": page["next_cursor"]})).json()
    assert [one["id"] for one in page["data"]] == ["m3", "m4"]
    poll = (await service.http.get(TEXT, params={"after": 4})).json()
    assert (len(poll["data"]), poll["next_after"]) == (1, 5)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('[{"type":"text","text":" a"},{"type":"image","text":"no"},{"type":"text","text":"b\\n"}]', " ab\n"),
        ('[{"type":"text","text":"e\\u0301\\u0000\\r\\n"}]', "e\u0301\0\r\n"),
        ('[{"type":"text","text":"\\ud83d\\ude00"}]', "😀"),
        (
            '[{"type":"text","text":"a\\ud83d"},{"type":"text","text":null},{"type":"text","text":"b"}]',
            "a\ufffdb",
        ),
        ("[]", ""),
    ],
)
async def test_the_text_is_concatenation_only(service: Service, content: str, text: str) -> None:
    """A-063, C-012: nothing added, trimmed or normalised; half characters become U+FFFD in plain text."""
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_message(connection, "m1", content=content, seq=1)
    answer = await service.http.get(f"{MESSAGES}/m1/text")
    assert answer.content == text.encode()
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-message-state"] == "final"
    whole = await service.http.get(f"{MESSAGES}/m1")
    assert f'"content":{content},' in whole.text


@pytest.mark.parametrize(
    ("status", "term", "is_stale"),
    [("live", 1, False), ("live", 2, True), ("reconnecting", 1, True), ("ended", 1, True)],
)
async def test_a_preview_that_nobody_writes_on_is_stale(
    service: Service, status: str, term: int, is_stale: bool
) -> None:
    """A-053: readable as partial, and marked."""
    async with service.engine.begin() as connection:
        await add_attachment(connection, status=status, term=term)
        await add_message(connection, "m1", ["a"], **PARTIAL)
        await add_message(connection, "m2", ["b"], seq=1)
    shown = (await service.http.get(MESSAGES)).json()["data"]
    assert [one["is_stale"] for one in shown] == [is_stale, False]


async def test_a_text_poll_gives_finals_after_seq_and_then_open_previews(service: Service) -> None:
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_message(connection, "p1", ["…"], **PARTIAL)
        for number in range(1, 4):
            await add_message(connection, f"m{number}", [str(number)], seq=number)
    poll = (await service.http.get(TEXT, params={"after": 1})).json()
    assert [one["id"] for one in poll["data"]] == ["m2", "m3", "p1"]
    assert poll["next_after"] == 3
    again = (await service.http.get(TEXT, params={"after": 3})).json()
    assert ([one["id"] for one in again["data"]], again["next_after"]) == (["p1"], 3)
    part = (await service.http.get(TEXT, params={"limit": 2})).json()
    assert ([one["id"] for one in part["data"]], part["next_after"]) == (["m1", "m2"], 2)


async def test_an_unknown_message_is_not_found(service: Service) -> None:
    async with service.engine.begin() as connection:
        await add_attachment(connection)
    for path in (f"{MESSAGES}/m1", f"{MESSAGES}/m1/text", f"{MESSAGES}/a%00b", f"{MESSAGES}/{'x' * 300}"):
        assert problem(await service.http.get(path)) == (404, "message_not_found")
