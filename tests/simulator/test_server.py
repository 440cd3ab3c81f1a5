"""The API over HTTP, request by request."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from app.simulator.server import Server, running
from app.simulator.switches import FOREVER, Fault
from app.simulator.world import World
from tests.simulator.client import HEADERS, allow, custom_result, message

pytestmark = pytest.mark.anyio


async def post(api: httpx.AsyncClient, session_id: str, *events: dict[str, Any]) -> httpx.Response:
    return await api.post(f"/v1/sessions/{session_id}/events", json={"events": list(events)})


async def listed(api: httpx.AsyncClient, session_id: str, query: str = "") -> list[dict[str, Any]]:
    response = await api.get(f"/v1/sessions/{session_id}/events{query}")
    assert response.status_code == 200, response.text
    return response.json()["data"]


async def test_a_session_is_created_through_the_api_and_plays_its_agents_scenario(
    server: Server, api: httpx.AsyncClient
) -> None:
    created = await api.post(
        "/v1/sessions", json={"agent": "custom", "environment_id": "env_cloud", "title": "A"}
    )
    assert (created.status_code, created.json()["status"], created.json()["title"]) == (200, "idle", "A")
    session_id = created.json()["id"]
    assert (await post(api, session_id, message())).status_code == 200
    [call_id] = server.world.session(session_id).waiting_ids()
    sent = await post(api, session_id, custom_result(call_id))
    assert call_id == sent.json()["data"][0]["custom_tool_use_id"]
    last = (await listed(api, session_id))[-1]
    assert (last["type"], last["stop_reason"]) == ("session.status_idle", {"type": "end_turn"})


async def test_initial_events_begin_at_once(api: httpx.AsyncClient) -> None:
    body = {"agent": "agent_custom", "environment_id": "env_cloud", "initial_events": [message()]}
    session_id = (await api.post("/v1/sessions", json=body)).json()["id"]
    assert "agent.custom_tool_use" in [event["type"] for event in await listed(api, session_id)]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"environment_id": "env_cloud"}, 400, None),
        ({"agent": "custom"}, 400, None),
        ({"agent": "nothing", "environment_id": "env_cloud"}, 404, None),
        ({"agent": "custom", "environment_id": "env_x"}, 404, "environment_not_found"),
        ({"agent": "custom", "environment_id": "env_cloud", "initial_events": [{"type": "x"}]}, 400, None),
        ([], 400, None),
    ],
)
async def test_sessions_that_cannot_be_created_are_refused(
    api: httpx.AsyncClient, body: Any, status: int, code: str | None
) -> None:
    response = await api.post("/v1/sessions", json=body)
    error = response.json()["error"]
    assert (status, code) == (response.status_code, error.get("details", {}).get("error_code"))


async def test_errors_have_the_documented_form_and_name_their_request(api: httpx.AsyncClient) -> None:
    response = await api.get("/v1/sessions/sesn_nothing")
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    assert body["request_id"] == response.headers["request-id"]
    assert body["request_id"].startswith("req_")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (HEADERS, 200),
        ({**HEADERS, "x-api-key": None, "authorization": "Bearer key"}, 200),
        ({**HEADERS, "x-api-key": None}, 401),
        ({**HEADERS, "authorization": "Bearer key"}, 401),
        ({**HEADERS, "x-api-key": "wrong"}, 401),
        ({**HEADERS, "anthropic-beta": None}, 404),
        ({**HEADERS, "anthropic-beta": "files-api-2025-04-14,managed-agents-2026-04-01"}, 200),
        ({**HEADERS, "anthropic-beta": "managed-agents"}, 400),
        ({**HEADERS, "anthropic-version": None}, 400),
    ],
)
async def test_headers_are_checked(headers: dict[str, str | None], status: int) -> None:
    given = {key: value for key, value in headers.items() if value is not None}
    async with running(World(keys=["key"])) as server, httpx.AsyncClient(base_url=server.url) as api:
        session = server.create("custom")
        response = await api.get(f"/v1/sessions/{session.id}?beta=true", headers=given)
        assert status == response.status_code
        assert not {"x-api-key", "authorization"} & server.world.requests[-1].headers.keys()


async def test_the_beta_header_can_be_made_optional(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    server.world.switch(require_beta=False)
    del api.headers["anthropic-beta"]
    assert (await api.get(f"/v1/sessions/{session.id}")).status_code == 200


async def test_list_parameters_work_in_both_encodings(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    server.say(session.id)
    kinds = ["agent.thinking", "agent.custom_tool_use"]
    for query in (
        "?types[]=agent.thinking&types[]=agent.custom_tool_use",
        "?types%5B%5D=agent.thinking&types%5B%5D=agent.custom_tool_use&beta=true",
    ):
        assert kinds == [event["type"] for event in await listed(api, session.id, query)]
    stamp = (await listed(api, session.id))[3]["processed_at"]
    assert len(await listed(api, session.id, f"?created_at[lt]={stamp}")) == 3


@pytest.mark.parametrize(
    "query", ["?order=up", "?limit=0", "?limit=x", "?page=x", "?created_at[gt]=yesterday"]
)
async def test_bad_list_parameters_are_refused(server: Server, api: httpx.AsyncClient, query: str) -> None:
    session = server.create("custom")
    assert (await api.get(f"/v1/sessions/{session.id}/events{query}")).status_code == 400


async def test_threads_can_be_listed_read_and_archived(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("threads")
    server.say(session.id)
    base = f"/v1/sessions/{session.id}/threads"
    threads = (await api.get(base)).json()["data"]
    assert [None, session.primary.id, session.primary.id] == [each["parent_thread_id"] for each in threads]
    child = threads[2]["id"]
    assert child == (await api.get(f"{base}/{child}")).json()["id"]
    assert "agent.custom_tool_use" in [
        event["type"] for event in (await api.get(f"{base}/{child}/events")).json()["data"]
    ]
    assert (await api.post(f"{base}/{child}/archive")).json()["status"] == "terminated"
    assert [child] == [each["id"] for each in (await api.get(f"{base}?statuses[]=terminated")).json()["data"]]
    assert (await api.post(f"{base}/{session.primary.id}/archive")).status_code == 400
    assert (await api.get(f"{base}/sthr_nothing")).status_code == 404
    assert (await api.get(f"{base}/{child}/events/stream")).status_code == 404


async def test_an_environment_tells_its_kind(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("gated")
    response = await api.get(f"/v1/environments/{session.environment_id}")
    assert response.json()["config"]["type"] == "self_hosted"
    assert (await api.get("/v1/environments/env_nothing")).status_code == 404


async def test_a_session_can_be_updated_listed_archived_and_deleted(
    server: Server, api: httpx.AsyncClient
) -> None:
    session = server.create("custom", metadata={"a": "1", "b": "2"}, budget={"type": "limit"})
    url = f"/v1/sessions/{session.id}"
    updated = await api.post(url, json={"title": "New", "metadata": {"a": None}, "budget": None})
    assert tuple(updated.json()[name] for name in ("title", "metadata", "budget")) == (
        "New",
        {"b": "2"},
        None,
    )
    [event] = await listed(api, session.id, "?types[]=session.updated")
    assert {"title": "New", "metadata": {"b": "2"}, "budget": None}.items() <= event.items()
    assert [session.id] == [each["id"] for each in (await api.get("/v1/sessions")).json()["data"]]
    assert (await api.post(f"{url}/archive")).json()["status"] == "terminated"
    assert (await api.get("/v1/sessions")).json()["data"] == []
    assert {"id": session.id, "type": "session_deleted"} == (await api.delete(url)).json()
    assert (await api.get(url)).status_code == 404


async def test_a_running_session_is_neither_archived_nor_deleted(api: httpx.AsyncClient) -> None:
    async with running(World(pace=1)) as server:
        session = server.create({"turns": [{"steps": [{"do": "pause", "s": 60}]}]})
        server.say(session.id)
        url = f"{server.url}/v1/sessions/{session.id}"
        assert (await api.post(f"{url}/archive")).status_code == 400
        assert (await api.delete(url)).status_code == 400


async def test_the_status_field_can_lag_behind(server: Server, api: httpx.AsyncClient) -> None:
    server.world.switch(status_lag_s=3600)
    session = server.create("custom")
    server.say(session.id)
    assert (await api.get(f"/v1/sessions/{session.id}")).json()["status"] == "idle"
    server.world.switch(status_lag_s=0)
    assert (await api.post(f"/v1/sessions/{session.id}/archive")).status_code == 200


async def test_a_refusal_comes_before_the_work(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    server.world.strike(Fault("refuse", endpoint="send", status=503))
    assert (await post(api, session.id, message())).status_code == 503
    assert await listed(api, session.id) == []
    assert (await post(api, session.id, message())).status_code == 200


async def test_a_late_failure_comes_after_the_work(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    server.say(session.id)
    [call_id] = session.waiting_ids()
    server.world.strike(Fault("refuse_after", endpoint="send", status=500))
    assert (await post(api, session.id, custom_result(call_id))).status_code == 500
    assert len(server.world.answers(session.id)[call_id]) == 1
    [attempt] = server.world.attempts(session.id)[call_id]
    assert (attempt.status, attempt.was_done) == (500, True)
    assert (await post(api, session.id, custom_result(call_id))).status_code == 400


@pytest.mark.parametrize(("kind", "answers"), [("drop", 0), ("drop_after", 1)])
async def test_a_connection_can_be_dropped_before_or_after_the_work(
    server: Server, api: httpx.AsyncClient, kind: Any, answers: int
) -> None:
    session = server.create("custom")
    server.say(session.id)
    [call_id] = session.waiting_ids()
    server.world.strike(Fault(kind, endpoint="send"))
    with pytest.raises(httpx.RemoteProtocolError):
        await post(api, session.id, custom_result(call_id))
    assert answers == len(server.world.answers(session.id).get(call_id, []))
    [attempt] = server.world.attempts(session.id)[call_id]
    assert (None, bool(answers)) == (attempt.status, attempt.was_done)


async def test_a_rate_limit_says_when_to_come_back(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    server.world.strike(Fault.rate_limited(retry_after_s=7))
    response = await api.get(f"/v1/sessions/{session.id}")
    assert (
        response.status_code,
        response.headers["retry-after"],
        response.json()["error"]["type"],
    ) == (429, "7", "rate_limit_error")


async def test_a_slow_commit_does_not_know_the_call_at_first(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    server.say(session.id)
    [call_id] = session.waiting_ids()
    server.world.strike(Fault.slow_commit(2))
    responses = [await post(api, session.id, custom_result(call_id)) for _ in range(3)]
    assert [each.status_code for each in responses] == [400, 400, 200]
    said = f"tool_use_id {call_id} does not match any custom_tool_use event in this session"
    assert said == responses[0].json()["error"]["message"]


async def test_a_list_can_fail_on_a_chosen_page(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    server.say(session.id)
    server.world.strike(Fault("refuse", endpoint="list", page=2, status=500))
    url, statuses, cursor = f"/v1/sessions/{session.id}/events?limit=2", [], ""
    for _ in range(3):
        response = await api.get(url + cursor)
        statuses.append(response.status_code)
        cursor = f"&page={response.json().get('next_page')}"
    assert statuses == [200, 200, 500]


async def test_faults_count_skip_and_match(server: Server, api: httpx.AsyncClient) -> None:
    one, other = server.create("custom"), server.create("gated")
    server.world.strike(Fault("refuse", endpoint="retrieve", session_id=one.id, count=2, skip=1, status=409))
    statuses = [(await api.get(f"/v1/sessions/{one.id}")).status_code for _ in range(4)]
    assert statuses == [200, 409, 409, 200]
    server.world.strike(
        Fault("refuse", endpoint="send", event_type="user.tool_confirmation", count=FOREVER, status=529)
    )
    server.say(other.id)
    [call_id] = other.waiting_ids()
    assert [(await post(api, other.id, allow(call_id))).status_code for _ in range(2)] == [529, 529]
    assert (await api.get(f"/v1/sessions/{other.id}/events")).status_code == 200


async def test_an_accepted_send_can_answer_with_nothing(server: Server, api: httpx.AsyncClient) -> None:
    server.world.switch(send_reply="empty")
    session = server.create("custom")
    response = await post(api, session.id, message())
    assert (response.status_code, response.content) == (202, b"")


async def test_a_body_that_is_no_json_is_refused(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    response = await api.post(f"/v1/sessions/{session.id}/events", content=b"{nope")
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_unknown_paths_and_methods_are_refused(server: Server, api: httpx.AsyncClient) -> None:
    assert (await api.get("/v1/nothing")).status_code == 404
    assert (await api.put("/v1/sessions")).status_code == 404


async def test_every_request_is_remembered_with_its_answer(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    await post(api, session.id, message("Привет"))
    request = server.world.requests[-1]
    assert ("POST", "send", session.id, 200, "x-api-key") == (
        request.method,
        request.endpoint,
        request.session_id,
        request.status,
        request.auth,
    )
    assert request.body["events"][0]["content"][0]["text"] == "Привет"


async def test_pauses_go_by_on_the_clock() -> None:
    script = {"turns": [{"steps": [{"do": "pause", "s": 0.05}, {"do": "message", "text": "Done."}]}]}
    async with running(World(pace=1)) as server:
        session = server.create(script)
        server.say(session.id)
        assert session.status == "running"
        await server.until(lambda: session.status == "idle")


async def test_waiting_for_something_that_does_not_come_fails() -> None:
    async with running() as server:
        with pytest.raises(TimeoutError):
            await server.until(lambda: False, limit_s=0.01)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.com", ""])
async def test_only_loopback_addresses_are_served(host: str) -> None:
    with pytest.raises(ValueError, match="loopback"):
        async with running(host=host):
            pass


async def test_it_stops_promptly_with_open_streams(api: httpx.AsyncClient) -> None:
    async with asyncio.TaskGroup() as tasks:
        async with running() as server:
            session = server.create("custom")

            async def read() -> bytes:
                url = f"{server.url}/v1/sessions/{session.id}/events/stream"
                async with api.stream("GET", url) as response:
                    return await response.aread()

            streams = [tasks.create_task(read()) for _ in range(20)]
            await server.until(lambda: server.streams.count == 20)
            began = time.monotonic()
        assert time.monotonic() - began < 2
    assert [each.result() for each in streams] == [b""] * 20
