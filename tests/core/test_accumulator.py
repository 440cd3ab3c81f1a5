"""The accumulator on plain dict events, numbered as in the behaviour specification."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.accumulator import FINAL_IDS_MAX, AccumulationError, EventAccumulator, RecentIds

T = "2026-10-29T14:00:12.000000Z"
Json = dict[str, Any]


def start(id_: str, type_: str = "agent.message") -> Json:
    return {"type": "event_start", "event": {"id": id_, "type": type_}}


def fragment(id_: str, index: object, content: object, type_: str = "content_delta") -> Json:
    return {
        "type": "event_delta",
        "event_id": id_,
        "delta": {"type": type_, "index": index, "content": content},
    }


def delta(id_: str, index: object, text: str) -> Json:
    return fragment(id_, index, {"type": "text", "text": text})


def final(id_: str, *texts: str, at: str | None = T) -> Json:
    return {
        "type": "agent.message",
        "id": id_,
        "content": [block(text) for text in texts],
        "processed_at": at,
    }


def block(text: str) -> Json:
    return {"type": "text", "text": text}


MRE: Json = {"type": "span.model_request_end", "id": "s1"}
CHART: Json = {"type": "chart", "points": [1, 2], "text": "not text"}


def folded(*events: Json) -> EventAccumulator:
    accumulator = EventAccumulator()
    for event in events:
        accumulator.accumulate(event)
    return accumulator


def content(accumulator: EventAccumulator, id_: str = "m1") -> Any:
    return accumulator.agent_messages[id_]["content"]


def refused(accumulator: EventAccumulator, event: Json) -> str:
    """The code of the error, after checking that it left every message as it was."""
    before = dict(accumulator.agent_messages)
    with pytest.raises(AccumulationError) as caught:
        accumulator.accumulate(event)
    assert before == dict(accumulator.agent_messages)
    return caught.value.code


# ---- starting and growing


def test_a_new_accumulator_is_empty() -> None:
    """A-001: nothing folded, nothing known."""
    assert folded().agent_messages == {}
    assert folded().agent_message_text("m1") is None


def test_a_start_opens_an_empty_preview() -> None:
    """A-002: an open message has the empty text, which is not none."""
    accumulator = folded(start("m1"))
    assert accumulator.agent_messages == {
        "m1": {"id": "m1", "type": "agent.message", "state": "partial", "content": [], "processed_at": None}
    }
    assert accumulator.agent_message_text("m1") == ""


@pytest.mark.parametrize(
    ("deltas", "texts"),
    [
        pytest.param([(0, "Hello")], ["Hello"], id="A-003 first delta opens slot 0"),
        pytest.param(
            [(0, "Hel"), (0, "lo"), (1, "World")], ["Hello", "World"], id="A-004 append, then the next slot"
        ),
        pytest.param(
            [(0, "Hel"), (0, "lo"), (1, "World"), (0, "!")],
            ["Hello!", "World"],
            id="A-005 back to an earlier slot",
        ),
        pytest.param([(None, "a"), (None, "b")], ["ab"], id="A-006 a null index means 0"),
    ],
)
def test_deltas_append_to_their_block(deltas: list[tuple[int | None, str]], texts: list[str]) -> None:
    accumulator = folded(start("m1"), *(delta("m1", index, text) for index, text in deltas))
    assert [block(text) for text in texts] == content(accumulator)
    assert "".join(texts) == accumulator.agent_message_text("m1")


def test_an_absent_index_means_0() -> None:
    """A-006: absent is as good as null."""
    without = {
        "type": "event_delta",
        "event_id": "m1",
        "delta": {"type": "content_delta", "content": block("a")},
    }
    assert [block("aa")] == content(folded(start("m1"), without, without))


# ---- what cannot be folded


@pytest.mark.parametrize(
    ("before", "index"),
    [
        pytest.param([], 2, id="A-007 gap"),
        pytest.param([delta("m1", 0, "a")], 2, id="A-008 gap by one"),
        pytest.param([delta("m1", 0, "a")], -1, id="A-009 negative"),
        pytest.param([delta("m1", 0, "a")], "0", id="A-009 a string"),
        pytest.param([delta("m1", 0, "a")], True, id="A-009 a boolean"),
        pytest.param([delta("m1", 0, "a")], 0.5, id="A-009 a fraction"),
        pytest.param([delta("m1", 0, "a")], 10**5000, id="A-009 a number of thousands of digits"),
    ],
)
def test_an_index_outside_the_blocks_is_an_error(before: list[Json], index: object) -> None:
    accumulator = folded(start("m1"), *before)
    assert refused(accumulator, delta("m1", index, "x")) == "index_out_of_range"


def test_an_index_error_names_index_and_length() -> None:
    """A-007: the message says what was asked for and what would have been possible."""
    with pytest.raises(AccumulationError, match=r"index 2 is outside 0 to 0"):
        folded(start("m1")).accumulate(delta("m1", 2, "x"))


def test_index_equal_to_the_length_opens_a_block() -> None:
    """A-008: the permitted range is 0 to length, inclusive."""
    accumulator = folded(start("m1"), delta("m1", 0, "a"), delta("m1", 1, "x"))
    assert [block("a"), block("x")] == content(accumulator)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([], id="A-010 nothing at all"),
        pytest.param([start("m2")], id="A-011 another message"),
        pytest.param([start("m1"), MRE], id="A-025 after the drop"),
        pytest.param([start("m1", "agent.thinking")], id="A-029 a thinking preview"),
    ],
)
def test_a_delta_without_start_is_an_error(before: list[Json]) -> None:
    accumulator = folded(*before)
    assert refused(accumulator, delta("m1", 0, "x")) == "delta_before_start"
    assert "m1" not in accumulator.agent_messages


def test_a_preview_forgotten_from_outside_takes_no_delta() -> None:
    """A-012: who removes an open message makes its deltas errors."""
    accumulator = folded(start("m1"))
    accumulator.forget("m1")
    assert refused(accumulator, delta("m1", 0, "x")) == "delta_before_start"


def test_forgetting_a_message_that_is_not_there_does_nothing() -> None:
    accumulator = folded(start("m1"))
    accumulator.forget("m2")
    assert list(accumulator.agent_messages) == ["m1"]


def test_folding_goes_on_after_an_error() -> None:
    """A-039: an error leaves the state intact."""
    accumulator = folded(start("m1"), delta("m1", 0, "a"))
    refused(accumulator, delta("m1", 5, "x"))
    refused(accumulator, delta("m2", 0, "x"))
    accumulator.accumulate(delta("m1", 0, "b"))
    assert accumulator.agent_message_text("m1") == "ab"


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(AccumulationError("index_out_of_range", "why")))
    assert (error.code, error.message, str(error)) == ("index_out_of_range", "why", "why")


# ---- finals


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([start("m1"), delta("m1", 0, "partial")], id="A-013 replaces the preview"),
        pytest.param(
            [start("m1"), delta("m1", 0, "a"), delta("m1", 1, "b")],
            id="A-014 nothing of the preview survives",
        ),
        pytest.param([], id="A-015 without start"),
        pytest.param([final("m1", "complete")], id="A-020 twice"),
        pytest.param([start("m1"), delta("m1", 0, "partial"), MRE], id="A-026 after the drop"),
    ],
)
def test_a_final_is_the_message(before: list[Json]) -> None:
    accumulator = folded(*before, final("m1", "complete"))
    assert {
        "m1": {
            "id": "m1",
            "type": "agent.message",
            "state": "final",
            "content": [block("complete")],
            "processed_at": T,
        }
    } == accumulator.agent_messages
    assert accumulator.agent_message_text("m1") == "complete"


@pytest.mark.parametrize(
    "late",
    [
        pytest.param([delta("m1", 0, "late")], id="A-016 straggler"),
        pytest.param([delta("m1", 9, "late")], id="A-017 straggler out of range"),
        pytest.param([start("m1"), delta("m1", 0, "x")], id="A-018 start after final"),
        pytest.param([start("m1"), MRE], id="A-018 start after final, then a request's end"),
    ],
)
def test_nothing_but_another_final_changes_a_final(late: list[Json]) -> None:
    before = [start("m1"), delta("m1", 0, "p"), final("m1", "complete")]
    assert folded(*before).agent_messages == folded(*before, *late).agent_messages


def test_a_second_start_begins_anew() -> None:
    """A-019: the text so far is given up."""
    accumulator = folded(start("m1"), delta("m1", 0, "abc"), start("m1"), delta("m1", 0, "ab"))
    assert accumulator.agent_message_text("m1") == "ab"


def test_previews_are_kept_apart() -> None:
    """A-021: two messages may stream at once."""
    accumulator = folded(
        start("m1"), start("m2"), delta("m1", 0, "one"), delta("m2", 0, "two"), delta("m1", 0, "!")
    )
    assert (accumulator.agent_message_text("m1"), accumulator.agent_message_text("m2")) == ("one!", "two")


def test_the_end_of_a_model_request_drops_its_preview() -> None:
    """A-022: the message will not come."""
    accumulator = folded(start("m1"), delta("m1", 0, "partial"), MRE)
    assert accumulator.agent_messages == {}
    assert accumulator.agent_message_text("m1") is None


def test_the_end_of_a_model_request_keeps_finals() -> None:
    """A-023: only what is open goes."""
    accumulator = folded(start("m1"), final("m1", "complete"), start("m2"), delta("m2", 0, "cut"), MRE)
    assert list(accumulator.agent_messages) == ["m1"]


@pytest.mark.parametrize("flag", [{"is_error": True}, {"is_error": False}, {"is_error": None}, {}])
def test_the_end_of_a_model_request_drops_all_that_is_open(flag: Json) -> None:
    """A-024: whether or not it failed."""
    assert folded(start("m1"), start("m2"), MRE | flag).agent_messages == {}


def test_a_final_needs_no_timestamp() -> None:
    """A-027: what is final does not hang on `processed_at`."""
    accumulator = folded(start("m1"), final("m1", "c", at=None), delta("m1", 0, "x"), MRE)
    snapshot = accumulator.agent_messages["m1"]
    assert ("final", [block("c")], None) == (snapshot["state"], snapshot["content"], snapshot["processed_at"])


def test_messages_stand_in_the_order_of_their_first_appearance() -> None:
    """A-057: becoming final, or starting anew, moves nothing."""
    accumulator = folded(start("m1"), final("m2", "b"), start("m3"), final("m1", "a"), start("m3"))
    assert list(accumulator.agent_messages) == ["m1", "m2", "m3"]


@pytest.mark.parametrize(
    ("content_", "blocks"),
    [("Hello", [block("Hello")]), (None, []), ({"type": "text"}, []), (7, []), ([], [])],
)
def test_content_that_is_no_list_becomes_one(content_: object, blocks: list[Json]) -> None:
    """A-035: some servers send a bare string."""
    assert blocks == content(folded({"type": "agent.message", "id": "m1", "content": content_}))


# ---- what is not a message


def test_thinking_creates_nothing() -> None:
    """A-028: neither its preview nor its event."""
    thinking = {"type": "agent.thinking", "id": "k1", "processed_at": T}
    assert folded(start("k1", "agent.thinking"), thinking).agent_messages == {}


def test_a_preview_of_an_unknown_type_creates_nothing() -> None:
    """A-030: and is no error."""
    assert folded(start("z1", "agent.tool_use")).agent_messages == {}


OTHERS: list[Json] = [
    {"type": "agent.tool_use", "id": "m1", "name": "n", "input": {}},
    {"type": "agent.hologram", "id": "m1", "content": [block("x")]},
    {"type": "session.status_idle", "stop_reason": {"type": "end_turn"}},
    {"type": "user.message", "id": "m1", "content": [block("x")]},
    {"id": "m1"},
    {"type": None},
    {"type": ["agent.message"], "id": "m1"},
    {"type": "event_start"},
    {"type": "event_start", "event": {"type": "agent.message"}},
    {"type": "event_start", "event": {"type": "agent.message", "id": ""}},
    {"type": "event_start", "event": "m1"},
    {"type": "event_delta", "event_id": "m1"},
    {"type": "event_delta", "event_id": None, "delta": {"type": "content_delta", "content": block("x")}},
    {"type": "event_delta", "event_id": "m1", "delta": {"type": "content_delta"}},
    {"type": "agent.message", "content": [block("x")]},
]


@pytest.mark.parametrize("event", OTHERS, ids=str)
def test_other_events_change_no_message(event: Json) -> None:
    """A-031: known, unknown or damaged."""
    accumulator = folded(start("m1"), delta("m1", 0, "a"), final("m2", "b"))
    before = dict(accumulator.agent_messages)
    assert accumulator.accumulate(event) is event
    assert before == accumulator.agent_messages


def test_a_delta_of_an_unknown_type_is_ignored() -> None:
    """A-064: also when nobody opened that message."""
    usage = fragment("m1", 7, block("x"), "usage_delta")
    assert folded(usage).agent_messages == {}
    assert [block("ab")] == content(folded(start("m1"), delta("m1", 0, "a"), usage, delta("m1", 0, "b")))


# ---- fragments that are not text


def test_an_unknown_fragment_opens_a_block_with_a_copy() -> None:
    """A-032: kept as it came, and no text."""
    accumulator = folded(start("m1"), fragment("m1", 0, CHART))
    assert content(accumulator) == [CHART]
    assert content(accumulator)[0] is not CHART
    assert accumulator.agent_message_text("m1") == ""


def test_an_unknown_fragment_leaves_text_alone() -> None:
    """A-033: a block keeps its kind."""
    assert [block("a")] == content(folded(start("m1"), delta("m1", 0, "a"), fragment("m1", 0, CHART)))


def test_text_leaves_an_unknown_block_alone() -> None:
    """A-034: a block keeps its kind."""
    assert content(folded(start("m1"), fragment("m1", 0, CHART), delta("m1", 0, "ignored"))) == [CHART]


@pytest.mark.parametrize("text", [{}, {"text": None}, {"text": 7}])
def test_a_text_fragment_without_text_adds_none(text: Json) -> None:
    accumulator = folded(start("m1"), delta("m1", 0, "a"), fragment("m1", 0, {"type": "text"} | text))
    assert accumulator.agent_message_text("m1") == "a"


def test_what_else_opened_a_text_block_stays_with_it() -> None:
    accumulator = folded(
        start("m1"), fragment("m1", 0, {"type": "text", "text": "a", "citations": []}), delta("m1", 0, "b")
    )
    assert content(accumulator) == [{"type": "text", "text": "ab", "citations": []}]


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        pytest.param([block("a"), {"type": "redacted"}, block("b")], "ab", id="A-035 skips the others"),
        pytest.param([{"type": "redacted"}], "", id="A-035 only others"),
        pytest.param(
            ["a", None, {"type": "text"}, {"type": "text", "text": 7}, CHART], "", id="A-035 damaged"
        ),
        pytest.param([block(" a\n"), block("\u0301\0")], " a\n\u0301\0", id="A-063 concatenation only"),
    ],
)
def test_text_is_that_of_the_text_blocks(blocks: list[object], text: str) -> None:
    accumulator = folded({"type": "agent.message", "id": "m1", "content": blocks})
    assert text == accumulator.agent_message_text("m1")


def test_the_text_of_an_unknown_id_is_none() -> None:
    """A-036: which is not the empty text."""
    assert folded(start("m1")).agent_message_text("m2") is None
    with pytest.raises(KeyError):
        folded(start("m1")).agent_messages["m2"]


# ---- who owns what


def test_events_are_never_changed() -> None:
    """A-037: neither the delta that opened a block nor the final."""
    events = [
        start("m1"),
        delta("m1", 0, "a"),
        fragment("m1", 1, CHART),
        delta("m1", 0, "b"),
        final("m1", "c"),
        delta("m1", 0, "d"),
    ]
    before = copy.deepcopy(events)
    folded(*events)
    assert before == events


def test_a_snapshot_handed_out_never_changes() -> None:
    """A-037: the caller may keep it."""
    accumulator = folded(start("m1"), delta("m1", 0, "a"))
    snapshot = accumulator.agent_messages["m1"]
    before = copy.deepcopy(snapshot)
    accumulator.accumulate(delta("m1", 0, "b"))
    accumulator.accumulate(final("m1", "c"))
    assert before == snapshot


@pytest.mark.parametrize("events", [[start("m1"), fragment("m1", 0, CHART)], [final("m1", "a")]])
def test_changing_a_snapshot_changes_no_message(events: list[Json]) -> None:
    """A-037: the caller may change it."""
    accumulator = folded(*events)
    before = copy.deepcopy(accumulator.agent_messages["m1"])
    accumulator.agent_messages["m1"]["content"][0].clear()
    assert before == accumulator.agent_messages["m1"]


def test_changing_an_event_afterwards_changes_no_message() -> None:
    """A-037: what was folded was copied."""
    opening, complete = fragment("m1", 0, copy.deepcopy(CHART)), final("m2", "a")
    accumulator = folded(start("m1"), opening, complete)
    before = dict(accumulator.agent_messages)
    opening["delta"]["content"]["points"].clear()
    complete["content"].clear()
    assert before == accumulator.agent_messages


@pytest.mark.parametrize(
    "event", [start("m1"), final("m1", "a"), MRE, {"type": "x"}, start("k1", "agent.thinking")], ids=str
)
def test_folding_returns_the_very_event(event: Json) -> None:
    """A-038: also when it changed nothing."""
    assert folded().accumulate(event) is event


def test_the_view_shows_itself_as_a_dict() -> None:
    accumulator = folded(start("m1"))
    assert repr(dict(accumulator.agent_messages)) == repr(accumulator.agent_messages)


# ---- memory


def test_every_final_is_kept_by_default() -> None:
    accumulator = folded(*(final(f"m{n}", "x") for n in range(3_000)))
    assert len(accumulator.agent_messages) == 3_000


@pytest.mark.parametrize("finals_max", [0, 1, 2])
def test_only_the_newest_finals_are_kept_when_bounded(finals_max: int) -> None:
    accumulator = EventAccumulator(finals_max)
    for n in range(5):
        accumulator.accumulate(final(f"m{n}", "x"))
    assert [f"m{n}" for n in range(5 - finals_max, 5)] == list(accumulator.agent_messages)


def test_a_forgotten_final_still_keeps_stragglers_out() -> None:
    """A-065: nothing revives it but another final."""
    accumulator = EventAccumulator(finals_max=1)
    for event in (final("m1", "a"), final("m2", "b"), start("m1"), delta("m1", 3, "x")):
        accumulator.accumulate(event)
    assert list(accumulator.agent_messages) == ["m2"]
    accumulator.accumulate(final("m1", "a"))
    assert list(accumulator.agent_messages) == ["m1"]


def test_a_final_that_comes_again_is_new() -> None:
    accumulator = EventAccumulator(finals_max=2)
    for id_ in ("m1", "m2", "m1", "m3"):
        accumulator.accumulate(final(id_, "x"))
    assert list(accumulator.agent_messages) == ["m1", "m3"]


def test_an_id_that_is_added_again_is_recent() -> None:
    ids = RecentIds(2)
    for id_ in ("a", "b", "a", "c"):
        ids.add(id_)
    assert [id_ for id_ in "abc" if id_ in ids] == ["a", "c"]
    assert len(ids) == 2


def test_the_ids_of_forgotten_finals_are_bounded() -> None:
    accumulator = EventAccumulator(finals_max=0)
    for n in range(FINAL_IDS_MAX + 1):
        accumulator.accumulate(final(f"m{n}", "x"))
    accumulator.accumulate(delta("m1", 0, "still known"))
    assert refused(accumulator, delta("m0", 0, "no longer known")) == "delta_before_start"


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        EventAccumulator(-1)


# ---- wrapping a stream

HELLO = [start("m1"), delta("m1", 0, "Hel"), delta("m1", None, "lo")]


class Source:
    """A stream that can be closed and counts how often it was."""

    def __init__(self, *events: Json) -> None:
        self.events = iter(events)
        self.closed = 0

    def __iter__(self) -> Iterator[Json]:
        return self.events

    def close(self) -> None:
        self.closed += 1


def test_wrapping_folds_each_event_as_it_is_pulled() -> None:
    """A-066: lazy."""
    accumulator = EventAccumulator()
    pulled = []
    wrapped = accumulator.wrap(HELLO)
    assert accumulator.agent_messages == {}
    for expected in ("", "Hel", "Hello"):
        pulled.append(next(wrapped))
        assert expected == accumulator.agent_message_text("m1")
    assert pulled == HELLO
    assert all(given is got for given, got in zip(HELLO, pulled, strict=True))


def test_a_stream_that_ended_yields_nothing_more() -> None:
    """A-067: fused, although the list could be read again."""
    accumulator = EventAccumulator()
    wrapped = accumulator.wrap(HELLO)
    assert list(wrapped) == HELLO
    assert list(wrapped) == []
    assert accumulator.agent_message_text("m1") == "Hello"


def test_a_second_iteration_yields_nothing() -> None:
    """A-067: also when the first one stopped early."""
    accumulator, source = EventAccumulator(), Source(*HELLO)
    wrapped = accumulator.wrap(source)
    for event in wrapped:
        if event is HELLO[1]:
            break
    assert list(wrapped) == []
    assert (source.closed, accumulator.agent_message_text("m1")) == (1, "Hel")


def test_an_error_inside_closes_the_source() -> None:
    """A-068: and ends the iteration."""
    source = Source(start("m1"), delta("m9", 0, "x"), start("m2"))
    wrapped = EventAccumulator().wrap(source)
    next(wrapped)
    with pytest.raises(AccumulationError):
        next(wrapped)
    assert list(wrapped) == []
    assert source.closed == 1


def test_an_error_of_the_source_closes_it() -> None:
    """A-068: whoever raised."""

    class Broken(Source):
        def __iter__(self) -> Iterator[Json]:
            yield start("m1")
            raise ConnectionError

    source = Broken()
    wrapped = EventAccumulator().wrap(source)
    next(wrapped)
    with pytest.raises(ConnectionError):
        next(wrapped)
    assert (list(wrapped), source.closed) == ([], 1)


def test_breaking_out_of_the_loop_closes_the_source_once() -> None:
    """A-069: the snapshot so far stays readable."""
    accumulator, source = EventAccumulator(), Source(*HELLO)
    for _ in accumulator.wrap(source):
        break
    assert (source.closed, accumulator.agent_message_text("m1")) == (1, "")


def test_leaving_the_block_closes_the_source_once() -> None:
    """A-069: by `with`, and by `close`."""
    source = Source(*HELLO)
    with EventAccumulator().wrap(source) as wrapped:
        next(wrapped)
    wrapped.close()
    assert (list(wrapped), source.closed) == ([], 1)


def test_a_generator_is_closed_too() -> None:
    """A-069: its own clean-up runs."""
    cleaned = []

    def source() -> Iterator[Json]:
        try:
            yield from HELLO
        finally:
            cleaned.append(True)

    with EventAccumulator().wrap(source()) as wrapped:
        next(wrapped)
    assert cleaned == [True]


def test_the_text_of_each_delta_is_there_to_print() -> None:
    """A-070: the typical use."""
    accumulator = EventAccumulator()
    printed = [
        accumulator.agent_message_text(event["event_id"])
        for event in accumulator.wrap([*HELLO, final("m1", "Hello!"), MRE])
        if event["type"] == "event_delta"
    ]
    assert printed == ["Hel", "Hello"]


class AsyncSource:
    """An asynchronous stream that can be closed and counts how often it was."""

    def __init__(self, *events: Json) -> None:
        self.events = events
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[Json]:
        for event in self.events:
            yield event

    async def close(self) -> None:
        self.closed += 1


def test_an_asynchronous_stream_is_folded_as_it_is_pulled() -> None:
    """A-066: lazy; A-067: fused."""

    async def story() -> None:
        accumulator, source = EventAccumulator(), AsyncSource(*HELLO)
        wrapped = accumulator.wrap_async(source)
        assert accumulator.agent_messages == {}
        texts = [accumulator.agent_message_text("m1") async for _ in wrapped]
        assert texts == ["", "Hel", "Hello"]
        assert [event async for event in wrapped] == []
        assert source.closed == 1

    asyncio.run(story())


def test_a_second_asynchronous_iteration_yields_nothing() -> None:
    """A-067: also when the first one stopped early."""

    async def story() -> None:
        source = AsyncSource(*HELLO)
        wrapped = EventAccumulator().wrap_async(source)
        async for _ in wrapped:
            break
        assert [event async for event in wrapped] == []
        assert source.closed == 1

    asyncio.run(story())


def test_an_error_inside_closes_an_asynchronous_source() -> None:
    """A-068: and ends the iteration."""

    async def story() -> None:
        source = AsyncSource(start("m1"), delta("m9", 0, "x"), start("m2"))
        wrapped = EventAccumulator().wrap_async(source)
        await anext(wrapped)
        with pytest.raises(AccumulationError):
            await anext(wrapped)
        assert [event async for event in wrapped] == []
        assert source.closed == 1

    asyncio.run(story())


def test_leaving_the_block_closes_an_asynchronous_source_once() -> None:
    """A-069: the snapshot so far stays readable; a generator runs its own clean-up."""
    cleaned = []

    async def generator() -> AsyncIterator[Json]:
        try:
            for event in HELLO:
                yield event
        finally:
            cleaned.append(True)

    async def story() -> None:
        accumulator = EventAccumulator()
        async with accumulator.wrap_async(generator()) as wrapped:
            await anext(wrapped)
        await wrapped.aclose()
        assert accumulator.agent_message_text("m1") == ""

    asyncio.run(story())
    assert cleaned == [True]


# ---- any order of events

IDS = st.sampled_from(["m1", "m2", "m3"])
FRAGMENTS = st.one_of(
    st.text(max_size=3).map(block),
    st.just(CHART),
    st.dictionaries(st.text(max_size=2), st.none() | st.integers() | st.text(max_size=2), max_size=2),
)
EVENTS = st.one_of(
    st.builds(start, IDS),
    st.builds(fragment, IDS, st.none() | st.integers(-1, 3), FRAGMENTS),
    st.builds(delta, IDS, st.none() | st.integers(0, 1), st.text(max_size=3)),
    st.builds(final, IDS, st.text(max_size=3)),
    st.just(MRE),
)


@given(st.lists(EVENTS, max_size=40))
def test_any_order_of_events_keeps_the_promises(events: list[Json]) -> None:
    """A-037, A-039: partials only grow until a reset, the last final stands, events stay as they were."""
    accumulator = EventAccumulator()
    before = copy.deepcopy(events)
    finals: dict[str, Any] = {}
    texts: dict[str, list[Any]] = {}
    for event in events:
        try:
            assert accumulator.accumulate(event) is event
        except AccumulationError:
            assert event["type"] == "event_delta"
        if event["type"] == "agent.message":
            finals[event["id"]] = event["content"]
        messages = dict(accumulator.agent_messages)
        partials = {id_: message for id_, message in messages.items() if message["state"] == "partial"}
        assert finals == {id_: messages[id_]["content"] for id_ in messages.keys() - partials.keys()}
        now = {id_: [part.get("text") for part in message["content"]] for id_, message in partials.items()}
        for id_, blocks in now.items():
            then = [] if event == start(id_) else texts[id_]
            assert len(blocks) >= len(then)
            assert all(str(new).startswith(str(old)) for new, old in zip(blocks, then, strict=False))
        texts = now
    assert before == events
