from __future__ import annotations

import pytest
from sqlalchemy import text

from app.api.tool_tests import ToolTestView
from app.store import tool_tests
from tests.api.service import Service, problem

pytestmark = pytest.mark.anyio


async def put(service: Service, name: str = "echo") -> None:
    body = {"url": "https://tools.example/hook", "timeout_s": 1}
    assert (await service.http.put(f"/tools/{name}", json=body)).status_code == 201


async def test_a_test_that_nobody_makes_in_time_is_accepted_and_shown_later(service: Service) -> None:
    await put(service)
    answer = await service.http.post("/tools/echo/test", json={"input": {"a": 1}})
    assert answer.status_code == 202
    assert ToolTestView.model_fields.keys() == answer.json().keys()
    assert answer.json()["status"] == "waiting"
    path = answer.headers["location"]
    assert (await service.http.get(path)).json() == answer.json()
    assert problem(await service.http.get(path.replace("echo", "other"))) == (404, "test_not_found")
    headers = await service.key("tools", tenant="acme")
    assert problem(await service.http.get(path, headers=headers)) == (404, "test_not_found")
    async with service.engine.begin() as connection:
        claimed = await tool_tests.claim(connection, "r1", 10)
        assert [(claimed[0].tool, claimed[0].input)] == [("echo", '{"a": 1}')]
        assert await tool_tests.claim(connection, "r2", 10) == []
    assert (await service.http.get(path)).json()["status"] == "running"
    async with service.engine.begin() as connection:
        await connection.execute(text("update tool_tests set lost_at = now()"))
    assert (await service.http.get(path)).json()["status"] == "lost"


async def test_a_tenant_has_a_limited_number_of_tests_under_way(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_tests, "OPEN_MAX", 1)
    await put(service)
    assert (await service.http.post("/tools/echo/test")).status_code == 202
    assert problem(await service.http.post("/tools/echo/test")) == (409, "too_many_tests")


async def test_a_test_of_an_unknown_tool_or_with_an_odd_input_is_refused(service: Service) -> None:
    await put(service)
    assert problem(await service.http.post("/tools/other/test")) == (404, "tool_not_found")
    for body in ({"input": []}, {"input": "x"}, {"unknown": 1}):
        answer = await service.http.post("/tools/echo/test", json=body)
        assert problem(answer) == (422, "invalid_request")
    assert problem(await service.http.get("/tools/echo/tests/x")) == (404, "test_not_found")
    headers = await service.key("read", "confirm")
    assert problem(await service.http.post("/tools/echo/test", headers=headers)) == (403, "forbidden")
