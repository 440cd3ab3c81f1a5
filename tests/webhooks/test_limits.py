"""What a server may send, and what the agent hears when it sends something else.

The servers write raw bytes. Each fault has one code and one sentence, and none of them holds a delivery past
its limits: where nothing else ends it, the wall clock does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.webhooks.attempt import (
    FRAMING_BYTES_MAX,
    FRAMING_PER_BODY_BYTE_MAX,
    HEADER_LINE_BYTES_MAX,
    HEADERS_MAX,
)
from app.webhooks.delivery import Deliverer, DeliveryOutcome
from tests.webhooks.conftest import (
    Log,
    Receiver,
    Step,
    Time,
    a_request,
    a_tool,
    delivering,
    hang_up,
    receiving,
    reply,
    saying,
)

pytestmark = pytest.mark.anyio

BODY = b'"done"'
OK = reply(body=BODY)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
LENGTH = b"content-length: 6\r\n"
EARLY_HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SECOND_LIMIT = "of headers, interim answers or chunk framing"


def flooding(head: bytes, part: bytes) -> Step:
    """Say the head, then the part for as long as anybody listens."""

    async def step(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(part)
            await writer.drain()

    return step


def dripping(head: bytes, part: bytes) -> Step:
    """Say the head, then the part again and again, with pauses."""

    async def step(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while not reader.at_eof():
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)

    return step


def text_of(outcome: DeliveryOutcome) -> str:
    text: str = json.loads(outcome.result.content)[0]["text"]
    return text


async def deliver(log: Log, step: Step, *, timeout_s: float = 5.0) -> DeliveryOutcome:
    async with receiving(step) as receiver, delivering() as deliverer:
        return await deliverer.deliver(a_request(a_tool(receiver.url, timeout_s=timeout_s)), log)


def with_headers(count: int, line: bytes = b"x: 1") -> bytes:
    """An answer with so many header lines in all."""
    return HEAD + LENGTH + (line + b"\r\n") * (count - 2) + b"\r\n" + BODY


LONGEST = b"x:" + b"a" * (HEADER_LINE_BYTES_MAX - 1)

ACCEPTED: dict[str, Step] = {
    "as many headers as may be": with_headers(HEADERS_MAX),
    "headers as long as may be": with_headers(HEADERS_MAX, LONGEST),
    "early hints": EARLY_HINTS * 3 + OK,
    "100 Continue": CONTINUE + OK,
    "a hundred interim answers": (CONTINUE + EARLY_HINTS) * 50 + OK,
    "chunks of one byte": CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    "a chunk extension": CHUNKED + b'6;a=b;c="d"\r\n' + BODY + b"\r\n0\r\n\r\n",
    "a trailer": CHUNKED + b"6\r\n" + BODY + b"\r\n0\r\nx-sum: 1\r\n\r\n",
    "no length, ended by a close": saying(HEAD + b"\r\n" + BODY, then=hang_up),
    "HTTP/1.0": saying(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + BODY, then=hang_up),
    "content-encoding: identity": HEAD + LENGTH + b"content-encoding: identity\r\n\r\n" + BODY,
}


@pytest.mark.parametrize("name", ACCEPTED)
async def test_what_is_within_the_limits_is_an_answer(log: Log, name: str) -> None:
    assert text_of(await deliver(log, ACCEPTED[name])) == "done"


FAULTS: dict[str, tuple[str, str, Step]] = {
    "one header too many": ("headers_too_large", "100 lines", with_headers(HEADERS_MAX + 1)),
    "a header too long": ("headers_too_large", "8190 bytes", with_headers(3, LONGEST + b"aa")),
    "headers without end": ("headers_too_large", "100 lines", flooding(HEAD, b"x: 1\r\n" * 1000)),
    "a header without end": ("headers_too_large", "8190 bytes", flooding(HEAD + b"x: ", b"a" * 10_000)),
    "a name without end": ("headers_too_large", "8190 bytes", flooding(HEAD, b"a" * 10_000)),
    "a reason without end": ("headers_too_large", "lines", flooding(b"HTTP/1.1 200 ", b"a" * 10_000)),
    "trailers without end": (
        "headers_too_large", "100 lines", flooding(CHUNKED + b"0\r\n", b"x: 1\r\n" * 1000)
    ),
    "early hints without end": ("framing_too_large", SECOND_LIMIT, flooding(b"", EARLY_HINTS * 500)),
    "100 Continue without end": ("framing_too_large", SECOND_LIMIT, flooding(b"", CONTINUE * 500)),
    "empty lines without end": ("framing_too_large", SECOND_LIMIT, flooding(b"", b"\r\n" * 10_000)),
    "a chunk extension without end": (
        "framing_too_large", SECOND_LIMIT, flooding(CHUNKED + b"6;x=", b"a" * 10_000)
    ),
    "extensions without end": ("framing_too_large", SECOND_LIMIT, flooding(CHUNKED + b"6", b";a=b" * 5000)),
    "a chunk size without end": ("framing_too_large", SECOND_LIMIT, flooding(CHUNKED, b"0" * 10_000)),
    "extensions longer than their chunks": (
        "framing_too_large", SECOND_LIMIT, flooding(CHUNKED, (b"1;" + b"x" * 5000 + b"\r\na\r\n") * 4)
    ),
    "chunks without end": (
        "reply_too_large", "20000 bytes", flooding(CHUNKED, b"1000\r\n" + b"a" * 4096 + b"\r\n")
    ),
    "tiny chunks without end": ("reply_too_large", "20000 bytes", flooding(CHUNKED, b"1\r\na\r\n" * 1000)),
    "a chunk of 2**64-1 bytes": (
        "reply_too_large", "20000 bytes", flooding(CHUNKED + b"f" * 16 + b"\r\n", b"a" * 10_000)
    ),
    "a body without length or end": (
        "reply_too_large", "20000 bytes", flooding(HEAD + b"\r\n", b"a" * 10_000)
    ),
    "a length of a terabyte": (
        "reply_too_large", "20000 bytes", flooding(HEAD + b"content-length: %d\r\n\r\n" % 2**40, b"a" * 9999)
    ),
    "a chunk size that overflows": ("bad_http", "not valid HTTP", CHUNKED + b"f" * 17 + b"\r\naaa"),
    "a chunk size below zero": ("bad_http", "not valid HTTP", CHUNKED + b"-1\r\naaa"),
    "a chunk size that is no number": ("bad_http", "not valid HTTP", CHUNKED + b"zz\r\naaa"),
    "a chunk longer than its size": ("bad_http", "not valid HTTP", CHUNKED + b"2\r\naaaa\r\n0\r\n\r\n"),
    "HTTP/0.9": ("bad_http", "not valid HTTP", saying(b"<html>done</html>\r\n", then=hang_up)),
    "HTTP/2": ("bad_http", "not valid HTTP", b"\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0d"),
    "HTTP/9.9": ("bad_http", "not valid HTTP", OK.replace(b"/1.1", b"/9.9")),
    "another protocol": ("bad_http", "not valid HTTP", b"SSH-2.0-OpenSSH_9.9\r\n"),
    "noise without end": ("bad_http", "not valid HTTP", flooding(b"", b"\0\xff" * 1000)),
    "a status of four digits": ("bad_http", "not valid HTTP", OK.replace(b" 200 ", b" 2000 ")),
    "a status below 100": ("bad_http", "not valid HTTP", OK.replace(b" 200 ", b" 20 ")),
    "NUL in a header": ("bad_http", "not valid HTTP", HEAD + LENGTH + b"x: a\0b\r\n\r\n" + BODY),
    "two equal lengths": ("bad_http", "not valid HTTP", HEAD + LENGTH + LENGTH + b"\r\n" + BODY),
    "two lengths": ("bad_http", "not valid HTTP", HEAD + LENGTH + b"content-length: 7\r\n\r\n" + BODY + b" "),
    "a list of lengths": ("bad_http", "not valid HTTP", HEAD + b"content-length: 6, 6\r\n\r\n" + BODY),
    "a signed length": ("bad_http", "not valid HTTP", HEAD + b"content-length: +6\r\n\r\n" + BODY),
    "a length below zero": ("bad_http", "not valid HTTP", HEAD + b"content-length: -6\r\n\r\n" + BODY),
    "a length that overflows": (
        "bad_http", "not valid HTTP", HEAD + b"content-length: %d\r\n\r\n" % 10**30 + BODY
    ),
    "a length and chunks": (
        "bad_http", "not valid HTTP", HEAD + LENGTH + b"transfer-encoding: chunked\r\n\r\n6\r\n" + BODY
    ),
    "a length beyond the body": (
        "bad_http", "broken off", saying(HEAD + b"content-length: 7\r\n\r\n" + BODY, then=hang_up)
    ),
    "chunks without the last": ("bad_http", "broken off", saying(CHUNKED + b"6\r\n" + BODY, then=hang_up)),
    "a head without its end": ("disconnected", "closed the connection", saying(HEAD, then=hang_up)),
    "a close instead of an answer": ("disconnected", "closed the connection", hang_up),
    "a close after early hints": ("disconnected", "closed the connection", saying(EARLY_HINTS, then=hang_up)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
async def test_what_is_not_is_one_readable_fault(log: Log, name: str) -> None:
    """R-152: and since the request was sent, the tool may have run, unless its status is known."""
    code, said, step = FAULTS[name]
    async with receiving(step) as receiver, delivering() as deliverer:
        tool = a_tool(receiver.url, retry="never", timeout_s=20.0, reply_bytes_max=20_000)
        outcome = await deliverer.deliver(a_request(tool), log)
    assert (log.codes, outcome.result.is_error) == ([code], True)
    assert said in text_of(outcome)
    assert ("may have run" in text_of(outcome)) == outcome.outcome_unknown == (code != "reply_too_large")


DRIPS = {
    "empty lines": dripping(b"", b"\r\n"),
    "a status line": dripping(b"HTTP/1.1 200 ", b"a"),
    "headers": dripping(HEAD + b"x: ", b"a"),
    "early hints": dripping(b"", EARLY_HINTS),
    "a body": dripping(HEAD + b"content-length: 1000\r\n\r\n", b" "),
    "a body without length": dripping(HEAD + b"\r\n", b" "),
    "chunks": dripping(CHUNKED, b"1\r\n \r\n"),
    "a chunk size": dripping(CHUNKED, b"0"),
    "a chunk extension": dripping(CHUNKED + b"6;", b"a"),
    "a trailer": dripping(CHUNKED + b"6\r\n" + BODY + b"\r\n0\r\nx: ", b"a"),
}


@pytest.mark.parametrize("name", DRIPS)
async def test_an_answer_that_trickles_is_ended_by_the_wall_clock(log: Log, name: str) -> None:
    """R-152: every byte is progress, and none of it buys time."""
    outcome = await deliver(log, DRIPS[name], timeout_s=0.2)
    assert (outcome.code, outcome.outcome_unknown) == ("timeout", True)
    assert "no complete answer within 0.2 s" in text_of(outcome)


@pytest.mark.parametrize(
    "coding", ["gzip", "x-gzip", "br", "deflate", "zstd", "compress", "GZIP", "identity, gzip"]
)
@pytest.mark.parametrize("header", ["content-encoding", "transfer-encoding"])
async def test_a_compressed_answer_is_refused_whatever_its_coding(log: Log, header: str, coding: str) -> None:
    if header == "transfer-encoding":
        step = f"{HEAD.decode()}{header}: {coding}, chunked\r\n\r\n6\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
    else:
        step = f"{HEAD.decode()}{header}: {coding}\r\n".encode() + LENGTH + b"\r\n" + BODY
    outcome = await deliver(log, step)
    assert (outcome.code, outcome.outcome_unknown) == ("reply_compressed", False)
    assert "compressed reply, which is not accepted" in text_of(outcome)


async def test_a_compressed_page_is_not_told_to_the_agent(log: Log) -> None:
    outcome = await deliver(log, reply(400, b"\x1f\x8bpacked", "content-encoding: gzip"))
    assert text_of(outcome) == 'The tool "echo" answered with HTTP status 400.'


async def test_what_is_no_body_may_grow_with_the_body(log: Log) -> None:
    """A server that writes its chunks byte by byte sends six times its body, which is no attack."""
    body = b'"' + b"a" * (FRAMING_BYTES_MAX // FRAMING_PER_BODY_BYTE_MAX * 3) + b'"'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert len(chunks) - len(body) > FRAMING_BYTES_MAX
    assert (await deliver(log, CHUNKED + chunks)).code is None


# One answer, one request: what a connection that is kept may bring.


@asynccontextmanager
async def keeping(step: Step) -> AsyncIterator[tuple[Receiver, Deliverer]]:
    time_ = Time()
    async with receiving(step) as receiver, delivering(clock=time_.clock, sleep=time_.sleep) as deliverer:
        yield receiver, deliverer


LATE = {
    "a second answer": reply(body=b'"of nobody"'),
    "half an answer": HEAD + b"content-length: 100\r\n\r\nof nobody",
    "a farewell": reply(408, b"too slow", "connection: close"),
    "noise": b"\0\xff",
}


@pytest.mark.parametrize("late", LATE)
async def test_what_comes_after_an_answer_is_not_the_answer_to_the_next_request(log: Log, late: str) -> None:
    let_go = asyncio.Event()

    async def step(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()
        await let_go.wait()
        writer.write(LATE[late])
        await writer.drain()

    async with keeping(step) as (receiver, deliverer):
        tool = a_tool(receiver.url, retry="safe")
        for connections in (1, 2):
            let_go.clear()
            outcome = await deliverer.deliver(a_request(tool), log)
            assert text_of(outcome) == "done"
            let_go.set()
            await receiver.wait_for_close()
            assert receiver.connections == connections
    assert log.codes == [None, None]


async def test_of_two_answers_in_one_packet_the_first_counts(log: Log) -> None:
    async with keeping(OK + reply(body=b'"of nobody"')) as (receiver, deliverer):
        for _ in range(2):
            outcome = await deliverer.deliver(a_request(a_tool(receiver.url, retry="safe")), log)
            assert text_of(outcome) == "done"
    assert (log.codes, receiver.connections) == ([None, None], 2)


def dying(seen: set[asyncio.StreamWriter]) -> Step:
    """Answer the first request of a connection and cut it in the moment of the second."""

    async def step(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer in seen:
            writer.transport.abort()
            return
        seen.add(writer)
        writer.write(OK)

    return step


@pytest.mark.parametrize("retry", ["never", "connect_only"])
async def test_no_idle_connection_can_make_a_careful_call_unknown(log: Log, retry: str) -> None:
    """A tool that a lost reply would harm gets a new connection each time, also beside one that is kept."""
    async with keeping(dying(set())) as (receiver, deliverer):
        await deliverer.deliver(a_request(a_tool(receiver.url, retry="safe")), log)
        for _ in range(5):
            outcome = await deliverer.deliver(a_request(a_tool(receiver.url, retry=retry)), log)
            assert (text_of(outcome), outcome.outcome_unknown) == ("done", False)
    assert (log.codes, receiver.connections) == ([None] * 6, 6)


async def test_a_kept_connection_that_dies_under_a_safe_call_costs_one_attempt(log: Log) -> None:
    async with keeping(dying(set())) as (receiver, deliverer):
        for _ in range(3):
            outcome = await deliverer.deliver(a_request(a_tool(receiver.url, retry="safe")), log)
            assert (text_of(outcome), outcome.outcome_unknown) == ("done", False)
    assert log.codes == [None, "disconnected", None, "disconnected", None]


async def say_goodbye(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer, and end the connection as a server does that keeps none."""
    writer.write(OK)
    writer.write_eof()
    await reader.read()


async def test_a_kept_connection_that_the_server_closed_is_not_used(log: Log) -> None:
    async with keeping(say_goodbye) as (receiver, deliverer):
        for _ in range(3):
            outcome = await deliverer.deliver(a_request(a_tool(receiver.url, retry="safe")), log)
            assert text_of(outcome) == "done"
            await receiver.wait_for_close()
    assert (log.codes, receiver.connections) == ([None] * 3, 3)
