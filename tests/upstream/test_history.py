"""History is walked to its end or not at all, and one damaged entry costs only itself."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from app.core.events import AnyEvent, Confirmation, PreviewStart
from app.core.protocol import Failure
from app.upstream.client import PAGES_EMPTY_MAX, UpstreamClient
from app.upstream.failures import UpstreamError
from app.upstream.pages import UnreadablePageError, read_page
from app.upstream.transport import Timeouts
from tests.upstream.conftest import MakeClient
from tests.upstream.wire import Wire, cut, hang, reply

pytestmark = pytest.mark.anyio

PATH = "/v1/sessions/sesn_1/events"


def event(id_: str, type_: str = "session.status_running") -> dict[str, object]:
    return {"type": type_, "id": id_, "processed_at": "2026-10-29T14:00:00Z"}


def page(*ids: str, next_page: object = None) -> dict[str, object]:
    return {"data": [event(id_) for id_ in ids], "next_page": next_page}


async def walk(
    client: UpstreamClient, since: float | None = None
) -> tuple[list[list[AnyEvent]], Failure | None]:
    """The pages of a walk, and the failure that broke it off."""
    pages: list[list[AnyEvent]] = []
    try:
        async for events in client.pages("sesn_1", since):
            pages.append(events)  # noqa: PERF401 - what came before a failure counts
    except UpstreamError as error:
        return pages, error.failure
    return pages, None


def ids_of(pages: list[list[AnyEvent]]) -> list[list[str]]:
    return [[event.id for event in events] for events in pages]


async def test_every_page_is_read_until_there_is_no_cursor(client: UpstreamClient, wire: Wire) -> None:
    """R-063: an answer on another page is seen; only the last page ends the walk."""
    wire.on(
        "GET",
        PATH,
        reply(body=page("a", "b", next_page="p/2+&=")),
        reply(body=page(next_page="p3")),
        reply(body=page("c")),
    )

    pages, failure = await walk(client)

    assert ids_of(pages) == [["a", "b"], ["c"]]
    assert failure is None
    assert [seen.query for seen in wire.seen] == [
        [("order", "asc"), ("limit", "1000")],
        [("order", "asc"), ("limit", "1000"), ("page", "p/2+&=")],
        [("order", "asc"), ("limit", "1000"), ("page", "p3")],
    ]


async def test_a_bound_and_types_are_asked_for_on_every_page(client: UpstreamClient, wire: Wire) -> None:
    """R-074: inclusive, in UTC."""
    wire.on("GET", PATH, reply(body=page("a", next_page="2")), reply(body=page("b")))

    async for _ in client.pages("sesn_1", 1_793_282_400.25, types=("agent.tool_use", "user.interrupt")):
        pass

    for seen in wire.seen:
        assert ("created_at[gte]", "2026-10-29T14:00:00.250000Z") in seen.query
        assert [value for name, value in seen.query if name == "types[]"] == [
            "agent.tool_use",
            "user.interrupt",
        ]


@pytest.mark.parametrize(
    "failing",
    [
        pytest.param(reply(500), id="R-064 500"),
        pytest.param(cut, id="R-064 cut"),
        pytest.param(hang, id="R-064 timeout"),
        pytest.param(reply(body=b'{"data":[{"type":"x","id":"b"}'), id="R-064 half a page"),
        pytest.param(reply(body=b"[]"), id="R-064 an array"),
        pytest.param(reply(body=b""), id="R-064 nothing"),
        pytest.param(reply(body=b"<html>"), id="R-064 HTML"),
        pytest.param(reply(body={"data": {"a": 1}}), id="R-064 data is an object"),
        pytest.param(reply(body={"data": [], "next_page": {}}), id="R-064 cursor is an object"),
        pytest.param(reply(body={"data": [], "next_page": "x" * 5000}), id="R-064 endless cursor"),
        pytest.param(reply(body=page("b"), headers={"content-encoding": "gzip"}), id="R-064 compressed"),
    ],
)
async def test_a_failing_page_fails_the_walk_and_leaves_what_came_before(
    make_client: MakeClient, wire: Wire, failing: object
) -> None:
    """R-064, R-065: the earlier page stands, the end of the history was not seen."""
    wire.on("GET", PATH, reply(body=page("a", next_page="2")), failing)  # type: ignore[arg-type]

    pages, failure = await walk(make_client(timeouts=Timeouts(page_s=0.2)))

    assert ids_of(pages) == [["a"]]
    assert failure is not None
    assert (failure.reach, failure.is_paging_loop) == ("unknown", False)
    assert len(wire.seen) == 2


async def test_a_fatal_answer_tells_its_status(client: UpstreamClient, wire: Wire) -> None:
    """R-068: the core decides by it."""
    wire.on("GET", PATH, reply(403, {"error": {"type": "permission_error", "message": "not yours"}}))

    assert ([], Failure("refused", 403, "not yours")) == await walk(client)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"next_page": None}, id="no data"),
        pytest.param({"data": None}, id="null data"),
        pytest.param({}, id="empty object"),
        pytest.param({"data": [], "next_page": ""}, id="empty cursor"),
    ],
)
async def test_absent_and_null_mean_an_empty_page(client: UpstreamClient, wire: Wire, body: object) -> None:
    wire.on("GET", PATH, reply(body=body))

    assert await walk(client) == ([], None)


async def test_entries_wrapped_in_data_are_unwrapped(client: UpstreamClient, wire: Wire) -> None:
    wire.on("GET", PATH, reply(body={"data": [{"seq": 1, "type": event("a")["type"], "data": event("a")}]}))

    pages, _ = await walk(client)

    assert ids_of(pages) == [["a"]]


async def test_previews_and_queued_verdicts_in_history_are_read(client: UpstreamClient, wire: Wire) -> None:
    """R-089: `processed_at` null. R-090: a preview does not break the read."""
    verdict = {
        "type": "user.tool_confirmation",
        "id": "v",
        "tool_use_id": "tu1",
        "result": "allow",
        "processed_at": None,
    }
    preview = {"type": "event_start", "event": {"id": "m1", "type": "agent.message"}}
    wire.on("GET", PATH, reply(body={"data": [verdict, preview, event("a")]}))

    pages, failure = await walk(client)

    assert [Confirmation, PreviewStart] == [type(item) for item in pages[0][:2]]
    assert failure is None


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(b'{"type":"x","id":"b","text":"\\ud800"}', id="lone surrogate"),
        pytest.param(b'{"type":"x","id":"b","text":"\xff"}', id="no UTF-8"),
        pytest.param(b'{"type":"x","id":"b","deep":' + b"[" * 200_000 + b"]" * 200_000 + b"}", id="deep"),
        pytest.param(b'{"type":"x","id":"b","n":' + b"9" * 10_000 + b"}", id="huge number"),
        pytest.param(b'{"type":"x","id":"b","n":tru}', id="no JSON"),
        pytest.param(b'{"type":"agent.tool_use","id":"b"}', id="call without a name"),
        pytest.param(b'{"id":"b"}', id="R-026 no type"),
        pytest.param(b'"b"', id="a string"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="an array"),
    ],
)
async def test_a_damaged_entry_costs_only_itself(client: UpstreamClient, wire: Wire, damaged: bytes) -> None:
    good = [json.dumps(event(id_)).encode() for id_ in ("a", "c")]
    body = b'{"data":[' + good[0] + b" ,\n" + damaged + b", " + good[1] + b'],"next_page":"2"}'
    wire.on("GET", PATH, reply(body=body), reply(body=page("d")))

    pages, failure = await walk(client)

    assert failure is None
    assert [id_ for ids in ids_of(pages) for id_ in ids if id_ != "b"] == ["a", "c", "d"]
    assert sum(map(len, pages)) - ids_of(pages)[0].count("b") == 3
    assert client.entries_skipped + ids_of(pages)[0].count("b") == 1


# ---- walks that go nowhere


@pytest.mark.parametrize(
    "cursors",
    [pytest.param(["1", "1"], id="R-091 at once"), pytest.param(["1", "2", "1"], id="R-091 after a while")],
)
async def test_a_cursor_that_comes_back_fails_the_walk(
    client: UpstreamClient, wire: Wire, cursors: list[str]
) -> None:
    """R-091: failed like R-064 instead of looping; its pages stand."""
    wire.on("GET", PATH, *(reply(body=page(f"e{n}", next_page=cursor)) for n, cursor in enumerate(cursors)))

    pages, failure = await walk(client)

    assert len(cursors) == len(pages) == len(wire.seen)
    assert failure is not None
    assert (failure.reach, failure.is_paging_loop) == ("refused", True)


async def test_a_page_that_comes_back_under_another_cursor_fails_the_walk(
    client: UpstreamClient, wire: Wire
) -> None:
    """R-091: a server whose cursors move but whose paging does not."""
    wire.on("GET", PATH, *(reply(body=page("a", "b", next_page=str(n))) for n in range(5)))

    pages, failure = await walk(client)

    assert ids_of(pages) == [["a", "b"]]
    assert failure is not None
    assert failure.is_paging_loop


async def test_empty_pages_are_legal_up_to_a_limit(client: UpstreamClient, wire: Wire) -> None:
    """R-091: and a history of many short runs of them is no loop."""
    empty = [reply(body=page(next_page=f"a{n}")) for n in range(PAGES_EMPTY_MAX)]
    more = [reply(body=page(next_page=f"b{n}")) for n in range(PAGES_EMPTY_MAX + 1)]
    wire.on("GET", PATH, *empty, reply(body=page("x", next_page="mid")), *more, reply(body=page("y")))

    pages, failure = await walk(client)

    assert ids_of(pages) == [["x"]]
    assert failure is not None
    assert failure.is_paging_loop


async def test_a_page_over_the_limit_is_asked_for_in_smaller_pieces(
    make_client: MakeClient, wire: Wire
) -> None:
    stored = [f"e{n}" for n in range(30)]

    async def answer(request: web.Request) -> web.StreamResponse:
        start, limit = int(request.query.get("page", "0")), int(request.query["limit"])
        end = start + limit
        return web.json_response(page(*stored[start:end], next_page=str(end) if end < len(stored) else None))

    wire.on("GET", PATH, answer)

    pages, failure = await walk(make_client(page_bytes_max=1500))

    assert failure is None
    assert stored == [id_ for ids in ids_of(pages) for id_ in ids]
    assert {"1000", "100", "10"} == {dict(seen.query)["limit"] for seen in wire.seen}
    assert [dict(seen.query)["limit"] for seen in wire.seen] == ["1000", "100", "10", "10", "10"]


async def test_an_entry_over_the_limit_fails_the_walk(make_client: MakeClient, wire: Wire) -> None:
    wire.on("GET", PATH, reply(body=page("x" * 200)))

    pages, failure = await walk(make_client(page_bytes_max=100))

    assert pages == []
    assert Failure("unknown", 200, "the answer is over 100 bytes") == failure
    assert [dict(seen.query)["limit"] for seen in wire.seen] == ["1000", "100", "10", "1"]


async def test_a_long_history_takes_the_memory_of_a_page(client: UpstreamClient, wire: Wire) -> None:
    """R-092: memory does not grow with the number of pages."""
    pages_max = 30

    async def answer(request: web.Request) -> web.StreamResponse:
        number = int(request.query.get("page", "0"))
        ids = [f"event-{number}-{n}" for n in range(1000)]
        return web.json_response(page(*ids, next_page=str(number + 1) if number < pages_max else None))

    wire.on("GET", PATH, answer)
    count = 0
    peaks: list[int] = []
    tracemalloc.start()
    try:
        async for events in client.pages("sesn_1", None):
            count += len(events)
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()

    assert 1000 * (pages_max + 1) == count
    assert peaks[-1] < 2 * peaks[2]


# ---- taking pages apart


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=5), st.none() | st.text(max_size=8), st.booleans())
def test_the_slow_reader_sees_what_the_fast_one_sees(
    entries: list[object], cursor: str | None, is_ascii: bool
) -> None:
    fast = json.dumps({"data": entries, "next_page": cursor, "more": [{}]}, ensure_ascii=is_ascii, indent=1)
    fast = fast.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    # A member that the strict decoder refuses and the brackets do not mind.
    slow = fast[:-1] + ',"x":tru}'

    expected = read_page(fast.encode())
    found = read_page(slow.encode())

    assert [json.loads(entry) for entry in expected.entries] == [json.loads(entry) for entry in found.entries]
    assert expected.next_page == found.next_page


@given(st.binary(max_size=60) | st.text('{}[],:"\\ datnex_pg', max_size=60).map(str.encode))
def test_any_bytes_are_a_page_or_unreadable(body: bytes) -> None:
    for text in (body, b'{"data":[' + body, b'{"data":[' + body + b"]}"):
        with contextlib.suppress(UnreadablePageError):
            read_page(text)


def test_a_truncated_page_is_never_a_page() -> None:
    body = json.dumps({"data": [event("a"), {"q": 'a"]}'}], "next_page": None}).encode()
    for end in range(len(body)):
        for text in (body[:end], body[:end].replace(b"null", b"nul")):
            with pytest.raises(UnreadablePageError):
                read_page(text)


def test_a_truncated_page_of_escaped_quotes_takes_linear_time() -> None:
    with pytest.raises(UnreadablePageError):
        read_page(b'{"data":["' + b'\\"' * 500_000)
