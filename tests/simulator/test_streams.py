"""Streams over HTTP: their frames, and every way in which they end or fall silent."""

import json
from typing import Any

import httpx
import pytest

from app.simulator.server import Server
from app.simulator.switches import Fault
from tests.simulator.client import custom_result, opened

pytestmark = pytest.mark.anyio


async def test_frames_are_named_after_their_event(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    async with opened(api, session.id) as stream:
        server.say(session.id)
        frame = await stream.frame()
        name, data = frame.split(b"\n")
        assert name == b"event: user.message"
        assert json.loads(data.removeprefix(b"data: "))["type"] == "user.message"
        assert stream.response.headers["content-type"] == "text/event-stream"


async def test_the_stream_has_what_the_list_has_in_the_same_bytes(
    server: Server, api: httpx.AsyncClient
) -> None:
    session = server.create("custom")
    async with opened(api, session.id) as stream:
        server.say(session.id)
        server.world.send(session.id, {"events": [custom_result(session.waiting_ids()[0])]}, now=server.now)
        seen = [*await stream.until("session.status_idle"), *await stream.until("session.status_idle")]
    assert seen == [json.loads(entry.raw) for entry in session.primary.log.entries]


async def test_previews_come_to_those_who_ask(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create({"turns": [{"steps": [{"do": "message", "text": "Hello there.", "deltas": 3}]}]})
    async with opened(api, session.id, "?event_deltas[]=agent.message") as stream:
        server.say(session.id)
        kinds = [event["type"] for event in await stream.until("agent.message")]
    assert kinds[-5:] == ["event_start", "event_delta", "event_delta", "event_delta", "agent.message"]


async def test_previews_can_be_shed(server: Server, api: httpx.AsyncClient) -> None:
    server.world.switch(deltas_max=1)
    session = server.create({"turns": [{"steps": [{"do": "message", "text": "Hello there.", "deltas": 3}]}]})
    async with opened(api, session.id, "?event_deltas%5B%5D=agent.message") as stream:
        server.say(session.id)
        kinds = [event["type"] for event in await stream.until("agent.message")]
    assert kinds.count("event_delta") == 1


@pytest.mark.parametrize(
    "query", ["?event_deltas[]=agent.tool_use", "?" + "event_deltas[]=agent.message&" * 101]
)
async def test_previews_of_other_types_or_too_many_are_refused(
    server: Server, api: httpx.AsyncClient, query: str
) -> None:
    session = server.create("custom")
    assert (await api.get(f"/v1/sessions/{session.id}/events/stream{query}")).status_code == 400


async def test_a_quiet_stream_pings(server: Server, api: httpx.AsyncClient) -> None:
    server.world.switch(ping_interval_s=0.01)
    session = server.create("custom")
    async with opened(api, session.id) as stream:
        assert await stream.frame() == b'event: ping\ndata: {"type":"ping"}'


@pytest.mark.parametrize("newline", ["lf", "crlf", "cr"])
async def test_lines_end_as_the_switch_says(server: Server, api: httpx.AsyncClient, newline: str) -> None:
    server.world.switch(newline=newline)
    session = server.create("custom")
    server.world.strike(Fault("eof", after_events=2))
    end = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}[newline]
    async with opened(api, session.id) as stream:
        server.say(session.id)
        frames = (await stream.rest()).split(end + end)
    assert [each.split(end)[0] for each in frames] == [
        b"event: user.message",
        b"event: session.status_running",
        b"",
    ]


async def test_frames_can_be_nameless(server: Server, api: httpx.AsyncClient) -> None:
    server.world.switch(frame_names=False)
    session = server.create("custom")
    async with opened(api, session.id) as stream:
        server.say(session.id)
        assert (await stream.frame()).startswith(b'data: {"type":"user.message"')


async def test_a_stream_can_be_silent_but_open(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    server.world.switch(session.id, silent=True)
    async with opened(api, session.id) as stream:
        server.say(session.id)
        server.world.switch(session.id, silent=False)
        event_id = server.emit(session.id, {"type": "agent.thinking"})
        assert event_id == (await stream.until("agent.thinking"))[-1]["id"]


async def test_a_stream_can_replay_the_history(server: Server, api: httpx.AsyncClient) -> None:
    server.world.switch(replay_on_connect=True)
    session = server.create("custom")
    server.say(session.id)
    async with opened(api, session.id) as stream:
        assert (await stream.event())["type"] == "user.message"


async def test_events_can_come_twice(server: Server, api: httpx.AsyncClient) -> None:
    server.world.switch(stream_duplicates=True)
    session = server.create("custom")
    async with opened(api, session.id) as stream:
        server.say(session.id)
        assert await stream.event() == await stream.event()


@pytest.mark.parametrize("after_events", [0, 3])
async def test_a_clean_end_comes_after_so_many_events(
    server: Server, api: httpx.AsyncClient, after_events: int
) -> None:
    session = server.create("custom")
    server.world.strike(Fault("eof", after_events=after_events))
    async with opened(api, session.id) as stream:
        server.say(session.id)
        assert after_events == (await stream.rest()).count(b"\n\n")


async def test_a_cut_stops_in_the_middle_of_a_frame_and_of_the_connection(
    server: Server, api: httpx.AsyncClient
) -> None:
    session = server.create("custom")
    server.world.strike(Fault("cut", after_events=1))
    async with opened(api, session.id) as stream:
        server.say(session.id)
        with pytest.raises(httpx.RemoteProtocolError):
            await stream.rest()
    whole, part = stream.taken.split(b"\n\n")
    assert whole.startswith(b"event: user.message")
    assert part.startswith(b"event: session.status_running\ndata: {")


async def test_a_truncated_stream_ends_cleanly_in_the_middle_of_a_frame(
    server: Server, api: httpx.AsyncClient
) -> None:
    session = server.create("custom")
    server.world.strike(Fault("truncate", after_events=1))
    async with opened(api, session.id) as stream:
        server.say(session.id)
        assert (await stream.rest()).split(b"\n\n")[1].startswith(b"event: session.status_running\ndata: {")


async def test_an_error_frame_ends_the_stream(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    server.world.strike(Fault("error_frame", status=529, message="Overloaded."))
    async with opened(api, session.id) as stream:
        frame = await stream.frame()
        assert frame.startswith(b"event: error\n")
        body = json.loads(frame.split(b"data: ")[1])
        assert (body["error"]["type"], body["error"]["message"]) == ("overloaded_error", "Overloaded.")
        assert await stream.rest() == b""


@pytest.mark.parametrize("kind", ["eof", "cut", "truncate", "error_frame"])
async def test_open_streams_can_be_ended_now(server: Server, api: httpx.AsyncClient, kind: str) -> None:
    session = server.create("custom")
    async with opened(api, session.id) as stream:
        assert server.world.end_streams(session.id, kind) == 1
        try:
            rest = await stream.rest()
        except httpx.RemoteProtocolError:
            rest = stream.taken
            assert kind == "cut"
    assert (kind == "eof") == (rest == b"")


async def test_a_stream_can_be_refused(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    server.world.strike(Fault("refuse", endpoint="stream", status=503))
    assert (await api.get(f"/v1/sessions/{session.id}/events/stream")).status_code == 503
    assert (await api.get("/v1/sessions/sesn_nothing/events/stream")).status_code == 404


async def test_a_deleted_session_ends_its_streams(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    async with opened(api, session.id) as stream:
        server.world.delete(session.id)
        assert (await stream.event())["type"] == "session.deleted"
        assert await stream.rest() == b""


async def test_a_terminated_session_keeps_its_streams_unless_told_otherwise(
    server: Server, api: httpx.AsyncClient
) -> None:
    server.world.switch(close_terminated_streams=True)
    session = server.create("custom")
    async with opened(api, session.id) as stream:
        server.world.archive(session.id)
        assert b"session.status_terminated" in await stream.rest()


@pytest.mark.parametrize(
    ("settings", "frame"),
    [
        ({"name": "x.unknown"}, b'event: x.unknown\ndata: {"type": nonsense'),
        ({}, b'data: {"type": nonsense'),
        ({"is_frame": True}, b'{"type": nonsense'),
    ],
)
async def test_bytes_are_emitted_as_they_are(
    server: Server, api: httpx.AsyncClient, settings: dict[str, Any], frame: bytes
) -> None:
    session = server.create("custom")
    async with opened(api, session.id) as stream:
        end = b"\n\n" if settings.get("is_frame") else b""
        server.world.emit_raw(session.id, b'{"type": nonsense' + end, **settings)
        assert frame == await stream.frame()


async def test_a_thread_stream_has_only_its_thread(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("threads")
    server.say(session.id)
    call_id = session.waiting_ids()[0]
    thread_id = session.calls[call_id].thread_id
    async with opened(api, session.id, path=f"/threads/{thread_id}/stream") as stream:
        server.world.send(session.id, {"events": [custom_result(call_id)]}, now=server.now)
        seen = await stream.until("session.thread_status_idle")
    assert seen[0]["type"] == "user.custom_tool_result"
    assert seen[0]["session_thread_id"] is None


async def test_a_client_that_leaves_is_forgotten(server: Server, api: httpx.AsyncClient) -> None:
    session = server.create("custom")
    async with opened(api, session.id):
        assert server.streams.count == 1
    await server.until(lambda: server.streams.count == 0)
