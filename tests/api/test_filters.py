"""What waits for a person, narrowed down: by each filter, by several, by pages, and while somebody waits."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.calls import Reason
from tests.api.service import Service, problem
from tests.store.rows import add_attachment, add_call

pytestmark = pytest.mark.anyio

BOTH = ("/confirmations", "/sessions/sesn_1/confirmations")


@pytest.fixture(autouse=True)
async def rows(service: Service) -> None:
    async with service.engine.begin() as connection:
        for session in ("sesn_1", "sesn_2"):
            await add_attachment(connection, session_id=session)
        await add_call(connection, "plain")
        await add_call(connection, "asked", tool="refund", kind="custom", gate_reason="tool_asks")
        await add_call(connection, "old", created_at=text("now() - interval '1 h'"))
        await add_call(connection, "elsewhere", session_id="sesn_2", gate_reason="unread_policy")


async def get(
    service: Service, path: str = "/confirmations", who: dict[str, str] | None = None, **query: Any
) -> httpx.Response:
    return await service.http.get(path, params=query, headers=who)


async def ids(
    service: Service, path: str = "/confirmations", who: dict[str, str] | None = None, **query: Any
) -> list[str]:
    answer = await get(service, path, who, **query)
    assert answer.status_code == 200, answer.text
    return [call["id"] for call in answer.json()["data"]]


async def person(service: Service, name: str) -> dict[str, str]:
    made = (await service.http.post("/keys", json={"name": name, "scopes": ["confirm"]})).json()
    return {"authorization": f"Bearer {made['key']}"}


async def register(service: Service, name: str, **policy: Any) -> None:
    answer = await service.http.put(f"/tools/{name}", json={"url": "https://tools.example/hook", **policy})
    assert answer.status_code in (200, 201), answer.text


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"tool": "refund"}, ["asked"]),
        ({"tool": "nobody's"}, []),
        ({"reason": "tool_asks"}, ["asked"]),
        ({"reason": "outcome_unknown"}, []),
        ({"older_than_s": 1800}, ["old"]),
        ({"older_than_s": 7200}, []),
        ({"tool": "bash", "reason": "ask", "older_than_s": 60.5}, ["old"]),
    ],
)
async def test_each_filter_must_fit(
    service: Service, path: str, query: dict[str, Any], found: list[str]
) -> None:
    assert await ids(service, path, **query) == found


async def test_one_session_is_asked_for_by_its_id(service: Service) -> None:
    assert await ids(service, session="sesn_2") == ["elsewhere"]
    assert await ids(service, session="sesn_3") == []


@pytest.mark.parametrize("reason", get_args(Reason))
async def test_each_reason_for_which_a_call_is_held_can_be_asked_for(service: Service, reason: str) -> None:
    async with service.engine.begin() as connection:
        await connection.execute(text("update calls set gate_reason = :r where id = 'old'"), {"r": reason})
    assert "old" in await ids(service, reason=reason)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool", ""), ("tool", "a\nb"), ("tool", "x" * 129), ("reason", "boredom"), ("older_than_s", "-1"),
        ("older_than_s", "nan"), ("older_than_s", "1e9"), ("mine", "perhaps"),
    ],
)  # fmt: skip
async def test_a_filter_that_says_nothing_is_refused_by_its_name(
    service: Service, path: str, name: str, value: str
) -> None:
    answer = await get(service, path, **{name: value})
    assert problem(answer) == (422, "invalid_request")
    assert name in answer.json()["errors"][0]["field"]


async def test_mine_are_those_that_the_key_may_decide(service: Service) -> None:
    """By the registration that rules them now, for custom calls also the catch-all; the operator too."""
    ana, ben = await person(service, "ana"), await person(service, "ben")
    await register(service, "bash", approvers=["ana"])
    await register(service, "*", approvers=["ben"])
    assert await ids(service, who=ana, mine=True) == ["plain", "old", "elsewhere"]
    assert await ids(service, who=ben, mine=True) == ["asked"]
    assert await ids(service, mine=True) == []
    assert len(await ids(service, who=ben, mine=False)) == 4
    await register(service, "bash")
    assert len(await ids(service, who=ben, mine=True)) == 4


async def test_pages_of_what_fits_leave_nothing_out(service: Service) -> None:
    """However many lie between that do not fit."""
    async with service.engine.begin() as connection:
        for n in range(10):
            await add_call(connection, f"other{n}", tool="other")
            await add_call(connection, f"refund{n}", tool="refund")
    query: dict[str, Any] = {"tool": "refund", "mine": True, "limit": 4}
    seen, cursor = [], None
    for _ in range(3):
        answer = (await get(service, **query, **({"cursor": cursor} if cursor else {}))).json()
        seen += [call["id"] for call in answer["data"]]
        cursor = answer["next_cursor"]
    assert seen == ["asked", *(f"refund{n}" for n in range(10))]
    assert cursor is None


async def waiting(service: Service, **query: Any) -> asyncio.Task[list[str]]:
    """A poll that has read once, found nothing that fits, and now waits."""
    poll = asyncio.create_task(ids(service, wait_s=20, **query))
    async with asyncio.timeout(5):
        while not service.wakeups._by_key:  # noqa: ASYNC110 - it listens before it reads
            await asyncio.sleep(0.01)
    done, _ = await asyncio.wait([poll], timeout=0.2)
    assert not done
    return poll


async def come(connection: AsyncConnection, call_id: str, **values: Any) -> None:
    await add_call(connection, call_id, **values)
    await connection.execute(text("select pg_notify('bascule', 'default/sesn_1')"))


@pytest.mark.parametrize("path", BOTH)
async def test_a_poll_waits_for_a_call_that_fits_and_not_for_others(service: Service, path: str) -> None:
    poll = await waiting(service, path=path, tool="deploy")
    async with service.engine.begin() as connection:
        await come(connection, "misfit")
    done, _ = await asyncio.wait([poll], timeout=0.5)
    assert not done
    async with service.engine.begin() as connection:
        await come(connection, "fits", tool="deploy")
    assert await asyncio.wait_for(poll, 5) == ["fits"]


async def test_a_poll_waits_for_a_call_to_grow_old_enough(service: Service) -> None:
    """Nothing is written then: the clock alone makes it fit."""
    async with service.engine.begin() as connection:
        await connection.execute(text("delete from calls where id = 'old'"))
        await connection.execute(text("update calls set created_at = now() where id = 'plain'"))
    poll = await waiting(service, tool="bash", older_than_s=1, session="sesn_1")
    assert await asyncio.wait_for(poll, 5) == ["plain"]


async def test_an_unchanged_answer_with_a_filter_is_a_304_and_a_misfit_changes_nothing(
    service: Service,
) -> None:
    tag = (await get(service, tool="refund")).headers["etag"]
    async with service.engine.begin() as connection:
        await come(connection, "misfit")
    answer = await get(service, who={"if-none-match": tag}, tool="refund")
    assert answer.status_code == 304
