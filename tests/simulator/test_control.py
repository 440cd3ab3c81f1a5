"""The control surface, as a test in another process or language uses it."""

import httpx
import pytest

from app.simulator.server import Server
from tests.simulator.client import opened

pytestmark = pytest.mark.anyio


async def test_a_session_is_made_from_a_name_or_a_script_or_a_burst(
    server: Server, api: httpx.AsyncClient
) -> None:
    inline = {"turns": [{"steps": [{"do": "message", "text": "Hello."}]}]}
    for body in (
        {"scenario": "custom"},
        {"scenario": inline},
        {"burst": {"calls": 3, "gated": 1, "parallel": 2}},
        {},
    ):
        made = await api.post("/_sim/sessions", json=body)
        assert made.status_code == 201
        started = await api.post(f"/_sim/sessions/{made.json()['id']}/start")
        assert started.json()["data"][0]["type"] == "user.message"
    assert len(server.world.sessions) == 4


@pytest.mark.parametrize("body", [{"scenario": "nothing"}, {"scenario": {}}, {"burst": {"calls": 1}}, []])
async def test_a_bad_script_is_refused(api: httpx.AsyncClient, body: object) -> None:
    assert (await api.post("/_sim/sessions", json=body)).status_code == 400


async def test_no_credentials_are_needed(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/_sim/log")).status_code == 200


async def test_the_log_has_every_request_and_every_event_in_order(
    server: Server, api: httpx.AsyncClient
) -> None:
    session = server.create("custom")
    await api.get(f"/v1/sessions/{session.id}")
    await api.post(f"/_sim/sessions/{session.id}/start", json={"text": "Where?"})
    log = (await api.get("/_sim/log")).json()
    assert [each["endpoint"] for each in log["requests"]] == ["retrieve"]
    assert [(each["who"], each["what"]) for each in log["sessions"][session.id][:2]] == [
        ("client", "accepted"),
        ("server", "emitted"),
    ]


async def test_faults_are_set_shown_and_cleared(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    fault = {"kind": "refuse", "endpoint": "retrieve", "status": 503, "count": 5}
    shown = (await api.post("/_sim/faults", json={**fault, "switches": {"nulls": "absent"}})).json()
    assert (shown["faults"][0]["endpoint"], shown["switches"]["nulls"]) == ("retrieve", "absent")
    assert (await api.get(f"/v1/sessions/{session.id}")).status_code == 503
    assert (await api.delete("/_sim/faults")).json()["faults"] == []
    assert (await api.get(f"/v1/sessions/{session.id}")).status_code == 200
    assert server.world.switches.nulls == "null"


@pytest.mark.parametrize("body", [{"kind": "refuse", "nonsense": 1}, {"switches": {"nonsense": 1}}])
async def test_an_unknown_fault_or_switch_is_refused(api: httpx.AsyncClient, body: dict[str, object]) -> None:
    assert (await api.post("/_sim/faults", json=body)).status_code == 400


async def test_anything_can_be_emitted(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    url = f"/_sim/sessions/{session.id}/emit"
    async with opened(api, session.id) as stream:
        event_id = (await api.post(url, json={"event": {"type": "agent.dreaming", "about": "sheep"}})).json()[
            "id"
        ]
        assert event_id == (await stream.event())["id"]
        await api.post(url, json={"data": '{"type":"agent.thinking"', "name": "agent.thinking"})
        assert await stream.frame() == b'event: agent.thinking\ndata: {"type":"agent.thinking"'
        await api.post(url, json={"frame": ": a comment\n\n"})
        assert await stream.frame() == b": a comment"
        await api.post("/_sim/faults", json={"session_id": session.id, "end_streams": "eof"})
        assert await stream.rest() == b""
    listed = (await api.get(f"/v1/sessions/{session.id}/events")).json()["data"]
    assert [each["type"] for each in listed] == ["agent.dreaming"]
    assert (await api.post(url, json={})).status_code == 400
    assert (await api.post("/_sim/sessions/sesn_nothing/emit", json={"event": {}})).status_code == 404
