from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from app.api import problems
from app.api.lists import encode_cursor
from app.api.problems import BODY_BYTES_MAX
from app.store import attachments
from app.store.database import create_engine
from app.webhooks.attempt import FailureCode
from app.webhooks.delivery import NotTried
from app.webhooks.reply import ReplyCode
from tests.api.service import AS_ADMIN, Service, problem, served
from tests.store.rows import until

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
ERRORS = Path(__file__).parents[2] / "docs" / "errors.md"


async def post(service: Service, content: bytes, path: str = "/sessions/sesn_1/attach") -> httpx.Response:
    return await service.http.post(path, content=content, headers=JSON)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", (400, "invalid_json")),
        (b'{"a": }', (400, "invalid_json")),
        (b'{"a": "\xff"}', (400, "invalid_json")),
        (b"\x00", (400, "invalid_json")),
        (b"[" * 100_000, (400, "invalid_json")),
        (b'{"a":' * 100_000, (400, "invalid_json")),
        (b'{"concurrency": ' + b"9" * 10_000 + b"}", (400, "invalid_json")),
        (b'{"concurrency": ' + b"9" * 4_000 + b"}", (422, "invalid_request")),
        (b'{"concurrency": 1e999}', (422, "invalid_request")),
        (b'{"' + b"x" * 100_000 + b'": 1}', (422, "invalid_request")),
        (b'{"\\ud800": 1}', (422, "invalid_request")),
        (b'{"tools": ["\\ud800"]}', (422, "invalid_request")),
        (b'{"tools": ' + b"[" * 900 + b"]" * 900 + b"}", (422, "invalid_request")),
        (b"null1", (400, "invalid_json")),
    ],
)
async def test_a_malformed_body_is_never_a_failure_of_the_service(
    service: Service, content: bytes, expected: tuple[int, str]
) -> None:
    """C-012: NUL, half characters, depth and size end as problems of the request."""
    answer = await post(service, content)
    assert problem(answer) == expected
    assert len(answer.content) < 20_000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"tools": ["a",\n "b" "c"]}', "line 2, column 6: Expecting ',' delimiter."),
        (b"{url: secret}", "line 1, column 2: Expecting property name enclosed in double quotes."),
        (b'{"a": 1} secret', "line 1, column 10: Extra data."),
        (b'{"a": "secret\n"}', "line 1, column 14: Invalid control character."),
        (b'{"a": "\xff"}', "its byte 8 is not UTF-8."),
        (b"[" * 100_000, "it nests too deeply."),
        (b"9" * 10_000, "it holds a number of too many digits, or cannot be read."),
    ],
)
async def test_a_body_that_is_no_json_is_told_where_it_goes_wrong(
    service: Service, content: bytes, reason: str
) -> None:
    answer = await post(service, content)
    assert problem(answer) == (400, "invalid_json")
    assert answer.json()["detail"].startswith(f"The body is not JSON: {reason} ")
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "what"),
    [
        ("PUT", "/tools/x", "with url"),
        ("POST", "/sessions/s/confirm", "with tool_use_id and result"),
        ("POST", "/keys", "with name and scopes"),
        ("PATCH", "/sessions/s", "with the members to change"),
    ],
)
async def test_an_empty_body_is_told_what_to_send(
    service: Service, method: str, path: str, what: str
) -> None:
    for headers in ({}, JSON):
        answer = await service.http.request(method, path, headers=headers)
        assert problem(answer) == (422, "invalid_request")
        expected = f"The body is empty; send a JSON object {what}, and content-type: application/json."
        assert expected == answer.json()["detail"]
        assert [{"field": "body", "message": f"must be a JSON object {what}"}] == answer.json()["errors"]


@pytest.mark.parametrize("path", ["/sessions/s/attach", "/sessions/s/confirm", "/keys"])
async def test_malformed_bodies_are_refused_on_other_routes_too(service: Service, path: str) -> None:
    for content in (b"{", b"[]", b'"\\ud800"', b"[" * 50_000, b"1", b"true"):
        assert problem(await post(service, content, path))[0] in (400, 422)


async def test_a_body_over_the_limit_is_refused(service: Service) -> None:
    content = b'{"labels": {"a": "' + b"x" * BODY_BYTES_MAX + b'"}}'
    assert problem(await post(service, content)) == (413, "body_too_large")

    async def chunks() -> Any:
        for start in range(0, len(content), 65_536):
            yield content[start : start + 65_536]

    answer = await service.http.post("/sessions/sesn_1/attach", content=chunks(), headers=JSON)
    assert problem(answer) == (413, "body_too_large")


async def test_a_body_that_is_not_json_is_named_so(service: Service) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = await service.http.post("/sessions/sesn_1/attach", content=b"{}", headers=headers)
    assert problem(answer) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "path",
    [
        "/sessions/a%00b",
        "/sessions/" + "x" * 129,
        "/sessions/a.b",
        "/sessions/%F0%9F%98%80/calls",
        "/sessions/a%0Ab/messages",
        "/sessions/%FF/text",
    ],
)
async def test_an_id_that_no_session_has_is_not_found(service: Service, path: str) -> None:
    assert problem(await service.http.get(path)) == (404, "session_not_found")


@pytest.mark.parametrize(
    ("method", "path", "sentence"),
    [
        ("POST", "/sessions/sesn_%E2%80%A6/attach", "This cannot be the id of a session: "),
        ("PUT", "/tools/a%0Ab", "This cannot be the name of a tool: "),
        ("GET", "/sessions/s/calls/" + "x" * 257, "This cannot be the id of a call: "),
        ("GET", "/sessions/s/messages/a%0Ab", "This cannot be the id of a message: "),
        ("DELETE", "/keys/x", "This cannot be the id of a key: "),
        ("POST", "/sessions//attach", "The address has an empty part (//); "),
        ("POST", "/nope", "There is no such address; "),
    ],
)
async def test_what_cannot_be_an_id_is_told_so(
    service: Service, method: str, path: str, sentence: str
) -> None:
    answer = await service.http.request(method, path, json={"url": "https://a.example"})
    assert problem(answer)[0] == 404
    assert answer.json()["detail"].startswith(sentence)


async def test_the_root_leads_to_the_description(service: Service) -> None:
    answer = await service.http.get("/", headers={"authorization": ""})
    assert (answer.status_code, answer.headers["location"]) == (307, "/docs")


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=201",
        "limit=x",
        "limit=" + "9" * 5000,
        "limit=%00",
        "cursor=x",
        "cursor=%00",
        "cursor=",
        "cursor=" + "A" * 2000,
        "cursor=" + encode_cursor(["x"]),
        "cursor=" + encode_cursor([2**70, "x"]),
        "cursor=" + encode_cursor(["2026-01-01T00:00:00", "x"]),
        "cursor=" + encode_cursor(["2026-01-01T00:00:00Z", "a\0b"]),
        "cursor=" + encode_cursor([-1]),
        "cursor=%ED%A0%80",
    ],
)
async def test_an_invalid_page_is_refused_on_every_list(service: Service, query: str) -> None:
    await service.http.post("/sessions/s/attach")
    for path in ("/sessions", "/confirmations", "/keys", "/sessions/s/calls", "/sessions/s/messages"):
        assert problem(await service.http.get(f"{path}?{query}")) == (422, "invalid_request"), path


@pytest.mark.parametrize("after", ["-1", "x", str(2**63), "1e400", ""])
async def test_an_invalid_place_in_the_text_is_refused(service: Service, after: str) -> None:
    await service.http.post("/sessions/s/attach")
    answer = await service.http.get("/sessions/s/text", params={"after": after})
    assert problem(answer) == (422, "invalid_request")


async def test_unknown_addresses_and_methods_are_problems(service: Service) -> None:
    assert problem(await service.http.get("/nope")) == (404, "not_found")
    assert problem(await service.http.get("/tools/a/b")) == (404, "not_found")
    assert problem(await service.http.get("/sessions/")) == (404, "not_found")
    answer = await service.http.patch("/tools")
    assert problem(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET"
    answer = await service.http.patch("/tools/echo")
    assert answer.headers["allow"] == "DELETE, GET, PUT"


async def test_every_answer_has_an_id_and_takes_over_a_plain_one(service: Service) -> None:
    for path in ("/healthz", "/tools", "/nope"):
        assert re.fullmatch("req_[0-9a-f]{24}", (await service.http.get(path)).headers["x-request-id"])
        given = await service.http.get(path, headers={"x-request-id": "abc-1"})
        assert given.headers["x-request-id"] == "abc-1"
        odd = await service.http.get(path, headers={"x-request-id": "a b" * 50})
        assert odd.headers["x-request-id"].startswith("req_")


async def test_a_defect_is_a_problem_that_tells_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(attachments, "page", broken)
    answer = await service.http.get("/sessions")
    assert problem(answer) == (500, "internal_error")
    assert "secret detail" not in answer.text


async def test_without_its_database_the_service_says_when_to_come_back() -> None:
    url = "postgresql://nobody@127.0.0.1:1/none"
    async with served(create_engine(url, connections_max=2), url) as service:
        answer = await service.http.get("/tools")
        assert problem(answer) == (503, "database_unavailable")
        assert int(answer.headers["retry-after"]) > 0
        key = {"authorization": "Bearer " + "bsk_" + "0" * 43 + "000000"}
        assert (await service.http.get("/tools", headers=key)).status_code in (401, 503)
        assert (await service.http.get("/healthz")).status_code == 200
        ready = await service.http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json() == {
            "status": "not_ready",
            "database": "unavailable",
            "schema": "unknown",
            "wakeups": "polling",
        }


async def test_a_pool_that_runs_dry_is_a_503(service: Service, migrated_url: str) -> None:
    """C-030: a request waits a bounded time for a connection."""
    engine = create_engine(migrated_url, connections_max=2)
    engine.pool._timeout = 0.05  # type: ignore[attr-defined]
    async with served(engine, migrated_url) as small:
        async with engine.connect(), engine.connect():
            answer = await small.http.get("/tools", headers=AS_ADMIN)
        assert problem(answer) == (503, "database_unavailable")
        assert (await small.http.get("/tools")).status_code == 200


async def test_requests_that_are_cut_off_leave_no_connection_behind(service: Service) -> None:
    """C-031: clients hang up all the time."""

    async def cut(number: int) -> None:
        task = asyncio.create_task(service.http.get("/sessions"))
        await asyncio.sleep(0.0005 * (number % 20))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(cut(number) for number in range(100)))
    assert (await service.http.get("/sessions")).status_code == 200
    await until(lambda: _is_idle(service))


async def _is_idle(service: Service) -> bool:
    checked_out: int = service.engine.pool.checkedout()  # type: ignore[attr-defined]
    return checked_out == 0


async def test_the_service_is_ready_once_wake_ups_work(service: Service) -> None:
    async with asyncio.timeout(5):
        while not service.wakeups.works:  # noqa: ASYNC110 - it is no event
            await asyncio.sleep(0.01)
    answer = await service.http.get("/readyz")
    assert answer.status_code == 200
    shown = {"status": "ready", "database": "ok", "schema": "current", "wakeups": "working"}
    assert answer.json() == shown


def test_every_code_is_documented_with_its_status() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| (\d{3}) \|", ERRORS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {code: int(status) for code, status in rows} == {
        code: status for code, (status, _) in problems.CODES.items()
    }
    assert len(rows) == len(problems.CODES)


def test_every_code_of_a_delivery_is_documented() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| [A-Z]", ERRORS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {*get_args(FailureCode), *get_args(ReplyCode), *get_args(NotTried)} <= set(rows)
