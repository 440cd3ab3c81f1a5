"""The decoder reads what the standard says, however the bytes are cut, and stays within its limit."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.events import BuiltinUse, CustomUse, Malformed, Message, parse
from app.upstream.sse import Decoder, Frame

TOOL_USE = (
    b'{"type":"agent.tool_use","id":"sevt_011CZkZ9AtP2gRVsvnxrqM6e","name":"bash",'
    b'"input":{"command":"ls -l /srv/reports"},"evaluated_permission":"ask",'
    b'"processed_at":"2026-10-29T14:00:04.378000Z"}'
)
CUSTOM_USE = (
    b'{"type":"agent.custom_tool_use","id":"sevt_011CZkZ9AtP2gRVsvnxrqM6f","name":"lookup_order",'
    b'"input":{"order_id":"A-1042","total":1.10},"processed_at":"2026-10-29T14:00:04.377000Z"}'
)
MESSAGE = (
    '{"type":"agent.message","id":"sevt_011CZkZ9AtP2gRVsvnxrqM6g",'
    '"content":[{"type":"text","text":"Zürich — \u2028 „готово“ 🙂"}],'
    '"processed_at":"2026-10-29T14:00:05Z"}'
).encode()

STREAM = (
    b": hello\n\n"
    b"event: agent.tool_use\ndata: " + TOOL_USE + b"\n\n"
    b'event: ping\r\ndata: {"type":"ping"}\r\n\r\n'
    b"event: agent.custom_tool_use\rdata: " + CUSTOM_USE + b"\r\r"
    b"id: 7\nretry: 10\nevent: agent.message\ndata: " + MESSAGE + b"\n\n"
)


def decode(*chunks: bytes, frame_bytes_max: int = 1 << 20) -> list[tuple[bytes, bytes]]:
    decoder = Decoder(frame_bytes_max)
    return [(frame.event, frame.data) for chunk in chunks for frame in decoder.feed(chunk)]


def by_the_standard(text: bytes) -> list[tuple[bytes, bytes]]:
    """A slow and plain reading of the standard, line by line."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    *lines, _unfinished = re.split(rb"\r\n|\n|\r", text)
    frames, event, data = [], b"", b""
    for line in lines:
        if not line:
            if data:
                frames.append((event or b"message", data[:-1]))
            event, data = b"", b""
            continue
        field, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if field == b"event":
            event = value
        elif field == b"data":
            data += value + b"\n"
    return frames


@pytest.mark.parametrize(
    ("text", "frames"),
    [
        pytest.param(b"event: a\ndata: 1\n\n", [(b"a", b"1")], id="plain"),
        pytest.param(b"event: a\rdata: 1\r\r", [(b"a", b"1")], id="lone CR"),
        pytest.param(b"event: a\r\ndata: 1\r\n\r\n", [(b"a", b"1")], id="CRLF"),
        pytest.param(b"event: a\ndata: 1\r\r\n", [(b"a", b"1")], id="mixed line ends"),
        pytest.param(b"\xef\xbb\xbfevent: a\ndata: 1\n\n", [(b"a", b"1")], id="BOM"),
        pytest.param(b"data: 1\n\n\xef\xbb\xbfdata: 2\n\n", [(b"message", b"1")], id="BOM only at the start"),
        pytest.param(b"data: 1\n\n", [(b"message", b"1")], id="no event name"),
        pytest.param(b"event: \ndata: 1\n\n", [(b"message", b"1")], id="empty event name"),
        pytest.param(b"event:a\ndata:1\n\n", [(b"a", b"1")], id="no space"),
        pytest.param(b"event:  a\ndata:  1\n\n", [(b" a", b" 1")], id="two spaces"),
        pytest.param(b"data: 1\nevent: a\n\n", [(b"a", b"1")], id="event behind data"),
        pytest.param(b"event: a\nevent: b\ndata: 1\n\n", [(b"b", b"1")], id="last event name"),
        pytest.param(b"event: a\ndata: 1\ndata: 2\n\n", [(b"a", b"1\n2")], id="several data lines"),
        pytest.param(b"event: a\ndata: 1\ndata\ndata: 2\n\n", [(b"a", b"1\n\n2")], id="data without colon"),
        pytest.param(b"event: a\ndata:\n\n", [(b"a", b"")], id="empty data"),
        pytest.param(b"event: a\n\ndata: 1\n\n", [(b"message", b"1")], id="event without data"),
        pytest.param(b"id: 3\nretry: 5\n\n", [], id="id and retry alone"),
        pytest.param(b"id: 3\nevent: a\nretry: 5\ndata: 1\n\n", [(b"a", b"1")], id="id and retry"),
        pytest.param(b": c\n\n:\nevent: a\n: c\ndata: 1\n:c\n\n", [(b"a", b"1")], id="comments"),
        pytest.param(
            b"\n\n\ndata: 1\n\n\n\n\ndata: 2\n\n", [(b"message", b"1"), (b"message", b"2")], id="blank lines"
        ),
        pytest.param(b"data: 1", [], id="unfinished line"),
        pytest.param(b"data: 1\n", [], id="unfinished frame"),
        pytest.param(b"datas: 1\n\n data: 1\n\n", [], id="other fields"),
        pytest.param(
            "data: \u2028\u2029\u0085\v\f\x1c\n\n".encode(),
            [(b"message", "\u2028\u2029\u0085\v\f\x1c".encode())],
            id="what other readers split at",
        ),
    ],
)
def test_frames_are_read_as_the_standard_says(text: bytes, frames: list[tuple[bytes, bytes]]) -> None:
    assert frames == decode(text) == by_the_standard(text)
    assert frames == decode(*(text[i : i + 1] for i in range(len(text))))


def test_every_split_in_two_gives_the_same_frames() -> None:
    frames = by_the_standard(STREAM)

    assert [f[0] for f in frames] == [b"agent.tool_use", b"ping", b"agent.custom_tool_use", b"agent.message"]
    for at in range(len(STREAM) + 1):
        assert frames == decode(STREAM[:at], STREAM[at:])


def test_real_events_survive_the_way_through_the_decoder() -> None:
    tool_use, _ping, custom_use, message = (parse(data) for _, data in decode(STREAM))

    assert isinstance(tool_use, BuiltinUse)
    assert isinstance(custom_use, CustomUse)
    assert isinstance(message, Message)
    assert bytes(custom_use.input) == b'{"order_id":"A-1042","total":1.10}'
    assert "готово" in bytes(message.content).decode()


PIECES = st.sampled_from(
    [
        *(b"data", b"event", b"id", b":", b": ", b" ", b"x", b'{"a":1}', b"event: a\ndata: b\n\n"),
        *(b"\n", b"\r", b"\r\n", b"\n\n", b"\0", b"\v", b"\f", b"\xff", b"\xef", b"\xef\xbb\xbf"),
        *("é".encode(), "\u2028".encode(), "\u0085".encode()),
    ]
)
TEXTS = st.lists(PIECES, max_size=40).map(b"".join)


def cuts_of(text: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(position, len(text)) for position in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(TEXTS, st.lists(st.integers(0, 120), max_size=12))
def test_any_text_in_any_cut_reads_as_the_standard_says(text: bytes, at: list[int]) -> None:
    assert by_the_standard(text) == decode(*cuts_of(text, at))


@given(TEXTS, st.lists(st.integers(0, 120), max_size=12), st.integers(1, 12))
def test_the_cut_does_not_change_what_is_dropped(text: bytes, at: list[int], limit: int) -> None:
    whole, cut = Decoder(limit), Decoder(limit)

    frames = whole.feed(text)
    cut_frames = []
    for chunk in cuts_of(text, at):
        cut_frames += cut.feed(chunk)
        assert cut.held_bytes <= limit + 1

    assert frames == cut_frames
    assert whole.frames_dropped == cut.frames_dropped
    assert all(len(frame.data) <= limit for frame in frames)


@given(st.lists(st.binary(max_size=64), max_size=20), st.integers(1, 40))
def test_arbitrary_bytes_neither_raise_nor_pile_up(chunks: list[bytes], limit: int) -> None:
    decoder = Decoder(limit)
    for chunk in chunks:
        decoder.feed(chunk)
        assert decoder.held_bytes <= limit + 1
    decoder.finish()
    assert decoder.held_bytes == 0


def test_a_lone_cr_ends_a_frame_without_waiting_for_more() -> None:
    decoder = Decoder()

    assert [Frame(b"a", b"1")] == decoder.feed(b"event: a\rdata: 1\r\r")
    assert [Frame(b"a", b"2")] == decoder.feed(b"\nevent: a\rdata: 2\r\r")


def test_a_frame_without_its_blank_line_comes_at_the_end() -> None:
    decoder = Decoder()

    assert decoder.feed(b"event: agent.tool_use\ndata: " + TOOL_USE) == []
    (frame,) = decoder.finish()

    assert isinstance(parse(frame.data), BuiltinUse)


def test_a_truncated_frame_is_never_a_whole_event() -> None:
    text = b"event: agent.tool_use\ndata: " + TOOL_USE
    for end in range(len(text)):
        decoder = Decoder()
        decoder.feed(text[:end])
        assert all(isinstance(parse(frame.data), Malformed) for frame in decoder.finish())


def test_nothing_comes_at_the_end_of_a_complete_stream() -> None:
    decoder = Decoder()
    decoder.feed(STREAM)

    assert decoder.finish() == []


@pytest.mark.parametrize("position", range(0, len(MESSAGE), 7))
def test_a_damaged_byte_costs_neither_its_frame_nor_the_next(position: int) -> None:
    damaged = MESSAGE[:position] + b"\xff" + MESSAGE[position + 1 :]
    frames = decode(b"data: " + damaged + b"\n\ndata: " + TOOL_USE + b"\n\n")

    assert [(b"message", damaged), (b"message", TOOL_USE)] == frames


def test_a_damaged_byte_in_a_text_leaves_the_message_readable() -> None:
    ((_, data),) = decode(b"data: " + MESSAGE.replace("ü".encode(), b"\xfc") + b"\n\n")
    message = parse(data)

    assert isinstance(message, Message)
    assert "Z\ufffdrich" in bytes(message.content).decode()


@pytest.mark.parametrize("cut", [1, 7, 100, 5000])
def test_a_frame_over_the_limit_is_dropped_and_the_next_is_read(cut: int) -> None:
    text = b"data: a\n\nevent: b\ndata: " + b"x" * 1000 + b"\ndata: y\n\ndata: c\n\n"
    decoder = Decoder(frame_bytes_max=100)

    frames = [f for i in range(0, len(text), cut) for f in decoder.feed(text[i : i + cut])]

    assert [frame.data for frame in frames] == [b"a", b"c"]
    assert decoder.frames_dropped == 1


def test_a_frame_of_exactly_the_limit_is_kept() -> None:
    assert decode(b"data: xxxx", b"\n", b"\n", frame_bytes_max=10) == [(b"message", b"xxxx")]
    assert decode(b"data: xxxxx", b"\n", b"\n", frame_bytes_max=10) == []


def test_comments_without_blank_lines_do_not_pile_up() -> None:
    decoder = Decoder(frame_bytes_max=50)
    for _ in range(1000):
        decoder.feed(b": still here\n")

    assert decoder.comments == 1000
    assert 0 == decoder.held_bytes == decoder.frames_dropped
    assert [Frame(b"message", b"1")] == decoder.feed(b"data: 1\n\n")


def test_a_long_frame_byte_by_byte_takes_linear_time() -> None:
    decoder = Decoder()
    data = b"y" * 1_000_000
    frames = [f for i in range(len(data)) for f in decoder.feed(data[i : i + 1] if i else b"data: y")]

    assert frames == []  # quadratic time would run into the test's own limit
    assert [Frame(b"message", data)] == decoder.feed(b"\n\n")


def test_many_comment_lines_in_one_chunk_take_linear_time() -> None:
    decoder = Decoder()

    assert [Frame(b"message", b"1")] == decoder.feed(b":\n" * 1_000_000 + b"data: 1\n\n")
    assert decoder.comments == 1_000_000


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Decoder(0)
