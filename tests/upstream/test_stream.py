"""An event stream gives its events in order, says how it ended, and keeps nothing open."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from app.core.events import AnyEvent, BuiltinUse, Malformed, Other, PreviewStart, type_of
from app.core.protocol import Failure
from app.upstream.client import UpstreamClient
from app.upstream.failures import UpstreamError
from app.upstream.stream import EventStream
from app.upstream.transport import Timeouts
from tests.upstream.conftest import MakeClient
from tests.upstream.wire import WAIT_S, Wire, closed_port, cut, events, frame, hang, reply, serve_bytes

pytestmark = pytest.mark.anyio

PATH = "/v1/sessions/sesn_1/events/stream"
RUNNING = {"type": "session.status_running", "id": "e1", "processed_at": "2026-10-29T14:00:00Z"}
USE = {"type": "agent.tool_use", "id": "tu1", "name": "bash", "input": {"command": "ls"}}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def type_or_reason(item: AnyEvent | Malformed) -> str:
    return f"malformed: {item.reason}" if isinstance(item, Malformed) else type_of(item)


async def drain(stream: EventStream) -> tuple[list[str], Failure | None]:
    """All that a stream gives, and the failure that ended it."""
    items: list[str] = []
    try:
        async for item in stream:
            items.append(type_or_reason(item))  # noqa: PERF401 - what came before a failure counts
    except UpstreamError as error:
        return items, error.failure
    return items, None


async def read_all(client: UpstreamClient) -> tuple[list[str], Failure | None]:
    async with client.stream("sesn_1", previews=True) as stream:
        return await drain(stream)


async def refusal(client: UpstreamClient) -> Failure:
    with pytest.raises(UpstreamError) as caught:
        async with client.stream("sesn_1", previews=True):
            pass
    return caught.value.failure


async def test_the_stream_is_established_before_anything_else_is_asked(
    client: UpstreamClient, wire: Wire
) -> None:
    """R-002: entering means established; an event sent meanwhile waits in the stream (R-003)."""
    wire.on("GET", PATH, events(frame(RUNNING), end="hold"))
    wire.on("GET", "/v1/sessions/sesn_1/events", reply(body={"data": [RUNNING]}))

    async with client.stream("sesn_1", previews=True) as stream:
        listed = [event.id async for page in client.pages("sesn_1", None) for event in page]
        streamed = await anext(stream)

    assert [seen.path for seen in wire.seen] == [PATH, "/v1/sessions/sesn_1/events"]
    assert not isinstance(streamed, Malformed)
    assert listed == [streamed.id]


async def test_events_come_in_order_and_a_clean_end_ends_the_iteration(
    client: UpstreamClient, wire: Wire
) -> None:
    """R-001: the calls of a session, then its end."""
    wire.on(
        "GET",
        PATH,
        events(frame(USE) + frame(RUNNING), frame({"type": "session.status_terminated", "id": "e9"})),
    )

    types, failure = await read_all(client)

    assert types == ["agent.tool_use", "session.status_running", "session.status_terminated"]
    assert failure is None


async def test_a_call_s_input_arrives_digit_for_digit(client: UpstreamClient, wire: Wire) -> None:
    text = b'{"b": 1.10, "a": 12345678901234567890}'
    wire.on(
        "GET",
        PATH,
        events(b'data: {"type":"agent.tool_use","id":"tu1","name":"x","input":' + text + b"}\n\n"),
    )

    async with client.stream("sesn_1", previews=False) as stream:
        use = await anext(stream)

    assert isinstance(use, BuiltinUse)
    assert text == bytes(use.input)


async def test_previews_are_asked_for_only_when_wanted(client: UpstreamClient, wire: Wire) -> None:
    """R-010: the retry without previews sends no `event_deltas`."""
    wire.on(
        "GET", PATH, events(frame({"type": "event_start", "event": {"id": "m1", "type": "agent.message"}}))
    )

    async with client.stream("sesn_1", previews=True) as stream:
        assert isinstance(await anext(stream), PreviewStart)
    async with client.stream("sesn_1", previews=False):
        pass

    assert [seen.query for seen in wire.seen] == [[("event_deltas[]", "agent.message")], []]
    assert not any("last-event-id" in seen.headers for seen in wire.seen)


async def test_pings_and_comments_are_no_events(client: UpstreamClient, wire: Wire) -> None:
    wire.on(
        "GET",
        PATH,
        events(PING, b": keep\n\n", b'data: {"type":"ping"}\n\n', frame(RUNNING), b"event: ping\ndata:\n\n"),
    )

    assert await read_all(client) == (["session.status_running"], None)


async def test_frames_without_a_name_and_with_a_wrong_one_go_by_their_json(
    client: UpstreamClient, wire: Wire
) -> None:
    nameless = b"data: " + json.dumps(USE).encode() + b"\n\n"
    wire.on(
        "GET",
        PATH,
        events(nameless, frame(USE, name="agent.hologram"), frame({"type": "agent.hologram", "id": "h"})),
    )

    assert await read_all(client) == (["agent.tool_use", "agent.tool_use", "agent.hologram"], None)


async def test_malformed_events_are_skipped_by_count_and_cost_nothing_else(
    client: UpstreamClient, wire: Wire
) -> None:
    """R-026: no name, no type, no JSON; the next event comes."""
    wire.on(
        "GET",
        PATH,
        events(
            frame({"type": "agent.tool_use", "id": "tu1", "name": None}, name="agent.tool_use"),
            frame({"id": "x"}, name="odd"),
            b"event: agent.tool_use\ndata: {not json\n\n",
            b"event: agent.tool_use\ndata:\n\n",
            frame(RUNNING),
        ),
    )

    types, failure = await read_all(client)

    assert failure is None
    assert sum(name.startswith("malformed") for name in types) == 3
    assert types[-1] == "session.status_running"


async def test_a_frame_over_the_limit_is_one_malformed_event(make_client: MakeClient, wire: Wire) -> None:
    wire.on("GET", PATH, events(b"data: " + b"x" * 5000 + b"\n\n" + frame(RUNNING)))

    types, failure = await read_all(make_client(frame_bytes_max=1000))

    assert {"malformed: frame is too long", "session.status_running"} == set(types)
    assert failure is None


async def test_a_cut_gives_first_what_had_arrived(client: UpstreamClient, wire: Wire) -> None:
    """R-052 and its like: whatever came before the end of a connection is not lost with it."""
    wire.on("GET", PATH, events(frame(USE), frame(RUNNING), end="cut"))

    types, failure = await read_all(client)

    assert types == ["agent.tool_use", "session.status_running"]
    assert failure is not None
    assert (failure.reach, failure.status, failure.is_silence) == ("unknown", None, False)


async def test_a_cut_while_nobody_reads_loses_nothing(make_client: MakeClient, wire: Wire) -> None:
    """R-072 and its like: a call that arrived counts, however busy its reader was when the cut came."""
    wire.on("GET", "/v1/sessions/sesn_1", reply(body={}))
    body = frame(USE) + frame(RUNNING)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    closed = asyncio.Event()
    async with (
        serve_bytes(head + b"%x\r\n%s\r\n" % (len(body), body), closed=closed) as authority,
        make_client(f"http://{authority}").stream("sesn_1", previews=False) as stream,
    ):
        async with asyncio.timeout(WAIT_S):
            await closed.wait()
        await make_client().retrieve("sesn_1")  # time enough for the loop to notice the end of the stream
        types, failure = await drain(stream)

    assert types == ["agent.tool_use", "session.status_running"]
    assert failure is not None
    assert failure.reach == "unknown"


@pytest.mark.parametrize("end", ["eof", "cut"])
async def test_a_whole_event_without_its_blank_line_is_not_lost(
    client: UpstreamClient, wire: Wire, end: str
) -> None:
    wire.on("GET", PATH, events(frame(RUNNING), frame(USE).rstrip(b"\n"), end=end))

    types, _ = await read_all(client)

    assert types == ["session.status_running", "agent.tool_use"]


@pytest.mark.parametrize("end", ["eof", "cut"])
async def test_a_truncated_event_is_no_event(client: UpstreamClient, wire: Wire, end: str) -> None:
    wire.on("GET", PATH, events(frame(RUNNING), frame(USE).rstrip(b"\n")[:-1], end=end))

    types, _ = await read_all(client)

    assert types == ["session.status_running"]


async def test_a_broken_encoding_is_noticed_as_silence(make_client: MakeClient, wire: Wire) -> None:
    """aiohttp drops such a connection without telling its reader; the silence limit does."""
    client = make_client(timeouts=Timeouts(silence_s=0.05))
    is_read = asyncio.Event()

    async def garble(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(frame(RUNNING))
        await is_read.wait()
        assert request.transport is not None
        request.transport.write(b"zz\r\n")  # no length of a chunk
        return await hang(request)

    wire.on("GET", PATH, garble)

    async with client.stream("sesn_1", previews=False) as stream:
        await anext(stream)
        is_read.set()
        items, failure = await drain(stream)

    assert items == []
    assert failure is not None
    assert (failure.reach, failure.status) == ("unknown", None)
    assert failure.is_silence


async def test_each_stream_has_a_connection_of_its_own(client: UpstreamClient, wire: Wire) -> None:
    """R-041: after a clean end, the next stream must not open on a connection that upstream is closing."""
    wire.on("GET", PATH, events(frame(RUNNING)))

    await read_all(client)
    await read_all(client)

    assert wire.seen[0].peer != wire.seen[1].peer


async def test_all_that_is_there_can_be_read_at_once(client: UpstreamClient, wire: Wire) -> None:
    wire.on("GET", PATH, events(frame(USE) + frame(RUNNING)))

    async with client.stream("sesn_1", previews=False) as stream:
        batch = await stream.read()
        assert [type_or_reason(item) for item in batch] == ["agent.tool_use", "session.status_running"]
        assert await stream.read() == []


# ---- error frames


@pytest.mark.parametrize(
    ("kind", "status", "reach"),
    [
        ("overloaded_error", 529, "unknown"),
        ("authentication_error", 401, "refused"),
        ("permission_error", 403, "refused"),
        ("not_found_error", 404, "refused"),
        ("rate_limit_error", 429, "unsent"),
        ("api_error", 500, "unknown"),
        ("invalid_request_error", 400, "refused"),
        ("timeout_error", 504, "unknown"),
        ("brand_new_error", 500, "unknown"),
        (None, 500, "unknown"),
    ],
    ids=lambda value: f"R-052 {value}",
)
async def test_an_error_frame_ends_the_stream_with_its_status(
    client: UpstreamClient, wire: Wire, kind: str | None, status: int, reach: str
) -> None:
    """R-052: an overload counts as a disconnect, a failed authentication as fatal."""
    error = {"type": "error", "error": {"type": kind, "message": "so it is"}}
    wire.on("GET", PATH, events(frame(RUNNING) + frame(error) + frame(USE), end="hold"))

    types, failure = await read_all(client)

    assert types == ["session.status_running"]
    assert Failure(reach, status, "so it is") == failure  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'event: error\ndata: {"type":"error"}\n\n', id="R-052 no error object"),
        pytest.param(b"event: error\ndata: overloaded\n\n", id="R-052 no JSON"),
        pytest.param(b"event: error\ndata:\n\n", id="R-052 no data"),
        pytest.param(b'data: {"type":"error","error":{"type":"api_error"}}\n\n', id="R-052 no name"),
        pytest.param(b'event: error\ndata: {"type":"error","error":["x"]}\n\n', id="R-052 odd error"),
    ],
)
async def test_an_unreadable_error_frame_is_a_transient_error(
    client: UpstreamClient, wire: Wire, data: bytes
) -> None:
    wire.on("GET", PATH, events(data, end="hold"))

    types, failure = await read_all(client)

    assert types == []
    assert failure is not None
    assert (failure.reach, failure.status) == ("unknown", 500)


async def test_a_failed_stream_stays_failed(client: UpstreamClient, wire: Wire) -> None:
    wire.on("GET", PATH, events(frame({"type": "error", "error": {"type": "api_error"}}), end="hold"))

    async with client.stream("sesn_1", previews=False) as stream:
        for _ in range(2):
            with pytest.raises(UpstreamError):
                await anext(stream)


# ---- silence


@pytest.mark.parametrize(
    ("sign_of_life", "limit"),
    [
        pytest.param(b"", "30 s", id="R-016 never a ping"),
        pytest.param(frame(RUNNING), "30 s", id="R-016 events but no ping"),
        pytest.param(PING, "0.03 s", id="R-016 ping"),
        pytest.param(b": keep\n\n", "0.03 s", id="R-016 comment"),
        pytest.param(b":\n", "0.03 s", id="R-016 comment without blank line"),
        pytest.param(b'data: {"type":"ping"}\n\n', "0.03 s", id="R-016 nameless ping"),
    ],
)
async def test_a_silent_stream_is_broken_sooner_once_it_has_pinged(
    make_client: MakeClient, wire: Wire, sign_of_life: bytes, limit: str
) -> None:
    """R-016: 90 s after a ping, 300 s without; here 0.03 s and 30 s, of which the test awaits the first."""
    wire.on("GET", PATH, events(sign_of_life, end="hold") if sign_of_life else events(end="hold"))
    client = make_client(timeouts=Timeouts(silence_pinged_s=0.03, silence_s=30.0))

    async with client.stream("sesn_1", previews=False) as stream:
        if limit == "30 s":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await drain(stream)
            assert not stream.is_pinging
        else:
            _, failure = await drain(stream)
            assert Failure("unknown", message=f"no byte came for {limit}", is_silence=True) == failure


async def test_a_stream_that_never_pinged_is_broken_after_the_longer_silence(
    make_client: MakeClient, wire: Wire
) -> None:
    """R-016: nothing at all, not even keep-alives."""
    wire.on("GET", PATH, events(frame(RUNNING), end="hold"))
    client = make_client(timeouts=Timeouts(silence_pinged_s=30.0, silence_s=0.03))

    types, failure = await read_all(client)

    assert types == ["session.status_running"]
    assert failure is not None
    assert failure.is_silence


async def test_any_byte_is_a_sign_of_life(make_client: MakeClient, wire: Wire) -> None:
    """R-016: half a frame every few milliseconds keeps the stream open well beyond its limit."""
    text = frame(USE)

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for at in range(0, len(text), 4):
            await response.write(text[at : at + 4])
            await asyncio.sleep(0.02)  # time itself is what is tested
        return response

    wire.on("GET", PATH, drip)
    client = make_client(timeouts=Timeouts(silence_pinged_s=0.3, silence_s=0.3))

    assert await read_all(client) == (["agent.tool_use"], None)


# ---- opening


STATUSES = {
    **dict.fromkeys((408, 409), "unknown"),
    429: "unsent",
    **dict.fromkeys((500, 502, 503, 504, 529, 599), "unknown"),
    **dict.fromkeys((400, 401, 402, 403, 404, 405, 410, 413, 422, 451, 418), "refused"),
    **dict.fromkeys((301, 302, 307), "unknown"),
}
SCENARIOS = {
    401: "R-007",
    403: "R-007",
    404: "R-008",
    410: "R-008",
    400: "R-009",
    405: "R-009",
    413: "R-009",
    422: "R-009",
}


@pytest.mark.parametrize(
    ("status", "reach"),
    [pytest.param(s, r, id=" ".join(["R-046", SCENARIOS.get(s, ""), str(s)])) for s, r in STATUSES.items()],
)
async def test_a_refused_stream_is_asked_for_once_and_tells_the_status(
    client: UpstreamClient, wire: Wire, status: int, reach: str
) -> None:
    """R-007, R-008, R-009, R-046: one attempt, and upstream's own words."""
    error = {"type": "error", "error": {"type": "x", "message": "event_deltas: no"}}
    wire.on("GET", PATH, reply(status, error, {"location": wire.url + "/elsewhere"}))

    assert Failure(reach, status, "event_deltas: no") == await refusal(client)  # type: ignore[arg-type]
    assert [seen.path for seen in wire.seen] == [PATH]


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"retry-after": "20"}, 20.0),
        ({"retry-after": "3600"}, 3600.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "retry-after": "20"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "20"}, 20.0),
        ({"retry-after": "Thu, 29 Oct 2026 14:00:20 GMT", "date": "Thu, 29 Oct 2026 14:00:00 GMT"}, 20.0),
        ({"retry-after": "Thu, 29 Oct 2026 14:00:20 GMT", "date": "today"}, 5.0),
        ({"retry-after": "Thu, 29 Oct 2026 13:00:00 GMT", "date": "Thu, 29 Oct 2026 14:00:00 GMT"}, 0.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "later"}, None),
        ({}, None),
    ],
    ids=lambda value: f"R-051 {value}",
)
async def test_retry_after_is_read_in_seconds_milliseconds_and_as_a_date(
    make_client: MakeClient, wire: Wire, headers: dict[str, str], wait_s: float | None
) -> None:
    """R-051: the floor of the next wait; the core cuts it at 60 s."""
    client = make_client(clock=lambda: 1_793_282_415.0)  # 2026-10-29T14:00:15Z
    wire.on("GET", PATH, reply(429, b"slow down", headers))

    assert Failure("unsent", 429, "slow down", wait_s) == await refusal(client)


async def test_a_refused_connection_is_unsent(make_client: MakeClient) -> None:
    """R-046: refused at connect."""
    failure = await refusal(make_client(f"http://127.0.0.1:{closed_port()}"))

    assert (failure.reach, failure.status) == ("unsent", None)
    assert failure.message


async def test_a_stream_that_never_answers_is_given_up(make_client: MakeClient, wire: Wire) -> None:
    """R-046: read timeout."""
    wire.on("GET", PATH, hang)

    failure = await refusal(make_client(timeouts=Timeouts(stream_open_s=0.05)))

    assert Failure("unknown", message="no complete answer within 0.05 s") == failure
    async with asyncio.timeout(WAIT_S):
        await wire.gone.wait()


async def test_a_connection_cut_before_the_answer_is_one_attempt(client: UpstreamClient, wire: Wire) -> None:
    """R-046: reset; aiohttp by itself would ask a second time."""
    wire.on("GET", PATH, cut)

    failure = await refusal(client)

    assert (failure.reach, failure.status) == ("unknown", None)
    assert len(wire.seen) == 1


@pytest.mark.parametrize("content_type", ["text/html", "application/json"])
async def test_a_page_in_place_of_a_stream_is_said_to_be_one(
    client: UpstreamClient, wire: Wire, content_type: str
) -> None:
    wire.on("GET", PATH, reply(200, b"<html>", {"content-type": content_type}))

    failure = await refusal(client)

    assert (failure.reach, failure.status) == ("unknown", 200)
    assert content_type in failure.message


async def test_a_compressed_stream_is_refused(client: UpstreamClient, wire: Wire) -> None:
    wire.on("GET", PATH, events(frame(RUNNING), headers={"content-encoding": "gzip"}))

    assert "compressed" in (await refusal(client)).message
    assert wire.seen[0].headers["accept-encoding"] == "identity"


# ---- closing


async def test_leaving_the_stream_closes_its_connection(client: UpstreamClient, wire: Wire) -> None:
    wire.on("GET", PATH, events(frame(RUNNING), end="hold"))

    async with client.stream("sesn_1", previews=False) as stream:
        await anext(stream)

    async with asyncio.timeout(WAIT_S):
        await wire.gone.wait()


@pytest.mark.parametrize("script", [hang, events(frame(RUNNING), end="hold")], ids=["opening", "reading"])
async def test_cancellation_passes_through_and_closes_the_connection(
    client: UpstreamClient, wire: Wire, script: object
) -> None:
    """R-013 and its like: ending a run leaves nothing behind, wherever it waits."""
    wire.on("GET", PATH, script)  # type: ignore[arg-type]
    reader = asyncio.create_task(read_all(client))
    async with asyncio.timeout(WAIT_S):
        await wire.arrived.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await wire.gone.wait()


async def test_an_unknown_event_is_passed_on(client: UpstreamClient, wire: Wire) -> None:
    wire.on("GET", PATH, events(frame({"type": "agent.hologram", "id": "h1", "anything": True})))

    async with client.stream("sesn_1", previews=False) as stream:
        assert Other(id="h1", type="agent.hologram") == await anext(stream)
