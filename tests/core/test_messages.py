"""The service's view of messages, numbered as in the behaviour specification.

`Session` plays runner and store: it performs effects in order and asks for partials when told to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core import events, messages
from app.core.events import AnyEvent, Malformed
from app.core.messages import PREVIEWS_MAX, Messages, text_of
from app.core.protocol import DropMessages, SaveMessage, Snapshot

T = "2026-10-29T14:00:12.000000Z"
Json = dict[str, Any]


def event(value: Json | bytes) -> AnyEvent:
    parsed = events.parse(value if isinstance(value, bytes) else json.dumps(value).encode())
    assert not isinstance(parsed, Malformed)
    return parsed


def block(text: str) -> Json:
    return {"type": "text", "text": text}


def start(id_: str, type_: str = "agent.message", thread: str | None = None) -> AnyEvent:
    return event({"type": "event_start", "event": {"id": id_, "type": type_}, "session_thread_id": thread})


def fragment(id_: str, index: object, content: object, type_: str = "content_delta") -> AnyEvent:
    delta_ = {"type": type_, "index": index, "content": content}
    return event({"type": "event_delta", "event_id": id_, "delta": delta_})


def delta(id_: str, index: int | None, text: str) -> AnyEvent:
    return fragment(id_, index, block(text))


def final(id_: str, *texts: str, at: str | None = T, thread: str | None = None) -> AnyEvent:
    content = [block(text) for text in texts]
    return event(
        {
            "type": "agent.message",
            "id": id_,
            "content": content,
            "processed_at": at,
            "session_thread_id": thread,
        }
    )


def mre(id_: str = "s1", thread: str | None = None) -> AnyEvent:
    return event({"type": "span.model_request_end", "id": id_, "session_thread_id": thread})


class Session:
    """A session's messages and the rows that its effects leave."""

    def __init__(self, *rows: Snapshot) -> None:
        self.rows: dict[str, Snapshot] = {row.id: row for row in rows}
        self.messages = Messages(row.id for row in rows if row.state == "partial")
        self.writes = 0

    def stream(self, *events_: AnyEvent) -> None:
        self.messages.connected()
        self.more(*events_)

    def more(self, *events_: AnyEvent) -> None:
        for event_ in events_:
            self.perform(self.messages.live(event_))

    def history(self, *events_: AnyEvent) -> None:
        for event_ in events_:
            self.perform(self.messages.replay(event_))

    def perform(self, effects: Sequence[SaveMessage | DropMessages]) -> None:
        for effect in effects:
            match effect:
                case SaveMessage():
                    self.rows[effect.snapshot.id] = effect.snapshot
                    self.writes += 1
                case DropMessages():
                    for id_ in effect.ids:
                        self.rows.pop(id_, None)

    def flush(self) -> None:
        had_partials = self.messages.has_partials
        partials = self.messages.partials()
        assert had_partials == bool(partials)
        self.perform([SaveMessage(snapshot) for snapshot in partials])
        assert not self.messages.has_partials

    def text(self, id_: str = "m1") -> str | None:
        self.flush()
        return text_of(self.rows[id_].content) if id_ in self.rows else None

    def state(self, id_: str = "m1") -> tuple[str, str] | None:
        text = self.text(id_)
        return None if text is None else (self.rows[id_].state, text)


def streamed(*events_: AnyEvent) -> Session:
    session = Session()
    session.stream(*events_)
    return session


# ---- on one connection


def test_a_preview_whose_start_was_missed_is_ignored() -> None:
    """A-040: counted, not served; the final repairs it."""
    session = streamed(delta("m1", 0, "lo"))
    assert (session.state(), session.messages.errors) == (None, 1)
    session.more(final("m1", "Hello"))
    assert session.state() == ("final", "Hello")


def test_a_delta_of_a_thinking_preview_is_ignored() -> None:
    """A-029: as a delta whose start was missed."""
    session = streamed(start("k1", "agent.thinking"), delta("k1", 0, "hm"))
    assert (session.rows, session.messages.errors) == ({}, 1)


@pytest.mark.parametrize("index", [5, -1, "0", 0.5, True], ids=str)
def test_a_broken_preview_is_frozen(index: object) -> None:
    """A-041: what was shown stays a beginning of the message, and the final repairs it."""
    session = streamed(
        start("m1"), delta("m1", 0, "a"), fragment("m1", index, block("x")), delta("m1", 0, "b")
    )
    assert (session.state(), session.messages.errors) == (("partial", "a"), 1)
    session.more(final("m1", "abc"))
    assert session.state() == ("final", "abc")


def test_a_new_start_thaws_a_broken_preview() -> None:
    """A-019, A-041: it begins anew."""
    session = streamed(start("m1"), delta("m1", 5, "x"), start("m1"), delta("m1", 0, "ab"))
    assert session.state() == ("partial", "ab")


def test_a_partial_message_is_told_as_it_stands() -> None:
    """A-042: state, no timestamp, and its blocks."""
    session = streamed(start("m1"), delta("m1", 0, "Hel"))
    assert [Snapshot("m1", "partial", b'[{"type":"text","text":"Hel"}]')] == session.messages.partials()


def test_a_started_message_is_told_before_its_first_text() -> None:
    """A-002: the empty text is not none."""
    assert [Snapshot("m1", "partial", b"[]")] == streamed(start("m1")).messages.partials()


def test_each_partial_text_begins_the_next() -> None:
    """A-043: and a final is never followed by a partial."""
    session = streamed(start("m1"))
    seen = [session.text()]
    for piece in ("Hel", "lo ", "wor", "ld"):
        session.more(delta("m1", 0, piece))
        seen.append(session.text())
    assert seen == ["", "Hel", "Hello ", "Hello wor", "Hello world"]
    session.more(final("m1", "Hello, world"), start("m1"), delta("m1", 0, "H"))
    assert session.state() == ("final", "Hello, world")
    assert session.rows["m1"].processed_at == T


def test_shed_deltas_are_no_error() -> None:
    """A-044: the final has it all."""
    session = streamed(start("m1"), delta("m1", 0, "He"), final("m1", "Hello world"))
    assert (session.state(), session.messages.errors) == (("final", "Hello world"), 0)


def test_many_deltas_are_one_snapshot() -> None:
    """A-045: how often a partial is written is up to who asks, not to how it arrives."""
    session = streamed(start("m1"), *[delta("m1", 0, "x") for _ in range(2_000)])
    session.flush()
    assert (session.text(), session.writes) == ("x" * 2_000, 1)


def test_a_final_is_saved_at_once_and_overtakes_its_partial() -> None:
    """A-045: a partial that was not yet told never follows its final."""
    session = streamed(start("m1"), delta("m1", 0, "Hel"))
    effects = session.messages.live(final("m1", "Hello"))
    assert [SaveMessage(Snapshot("m1", "final", b'[{"type": "text", "text": "Hello"}]', None, T))] == effects
    assert not session.messages.has_partials
    assert session.messages.partials() == []


def test_partials_are_told_once_and_in_order_of_appearance() -> None:
    """A-057: what did not change is not told again."""
    session = streamed(start("m2"), start("m1"), delta("m1", 0, "a"), delta("m2", 0, "b"))
    assert [snapshot.id for snapshot in session.messages.partials()] == ["m2", "m1"]
    session.more(delta("m1", 0, "c"))
    assert [snapshot.id for snapshot in session.messages.partials()] == ["m1"]


def test_an_idle_leaves_an_open_preview() -> None:
    """A-055: it goes at the end of the run."""
    idle = event({"type": "session.status_idle", "id": "i1", "stop_reason": {"type": "end_turn"}})
    session = streamed(start("m1"), delta("m1", 0, "a"), idle)
    assert session.state() == ("partial", "a")
    session.perform(session.messages.end())
    assert session.state() is None


def test_an_interrupted_message_goes_with_its_request() -> None:
    """A-056: the interrupt alone drops nothing."""
    session = streamed(start("m1"), delta("m1", 0, "a"), event({"type": "user.interrupt", "id": "u1"}))
    assert session.state() == ("partial", "a")
    session.more(mre())
    assert session.state() is None


def test_the_end_of_the_session_drops_what_is_open() -> None:
    """A-054: finals stay."""
    session = streamed(final("m1", "a"), start("m2"), delta("m2", 0, "b"), start("m3"))
    session.flush()
    assert [DropMessages(("m2", "m3"))] == session.messages.end()
    assert session.messages.end() == []
    assert not session.messages.has_partials
    assert session.state() == ("final", "a")


def test_a_subagents_messages_follow_the_same_rules() -> None:
    """A-059: taken, marked with their thread, and dropped only by a request of that thread."""
    session = streamed(start("m1"), start("m2", thread="t2"), final("m3", "c", thread="t3"))
    session.flush()
    assert [session.rows[id_].thread_id for id_ in ("m1", "m2", "m3")] == [None, "t2", "t3"]
    session.more(mre("s1", thread="t2"))
    assert list(session.rows) == ["m3", "m1"]
    session.more(mre("s2"))
    assert list(session.rows) == ["m3"]


def test_a_subagents_request_in_history_spares_other_threads() -> None:
    """A-049, A-059: a cut preview goes with a request of its own thread."""
    session = streamed(start("m1"), start("m2", thread="t2"))
    session.flush()
    session.stream()
    session.history(mre("s1", thread="t2"))
    assert list(session.rows) == ["m1"]


def test_previews_of_an_unknown_type_are_ignored() -> None:
    """A-030: and are no error."""
    session = streamed(start("z1", "agent.tool_use"))
    assert (session.messages.has_partials, session.messages.errors) == (False, 0)


@pytest.mark.parametrize("content", [None, "x", [block("x")], {}], ids=str)
def test_a_delta_of_an_unknown_type_freezes_nothing(content: object) -> None:
    """A-064: ignored."""
    session = streamed(
        start("m1"),
        delta("m1", 0, "a"),
        fragment("m1", 9, content, "usage_delta"),
        fragment("m2", 0, content, "usage_delta"),
        delta("m1", 0, "b"),
    )
    assert (session.state(), session.messages.errors) == (("partial", "ab"), 0)


@pytest.mark.parametrize("late", [[delta("m1", 0, "x")], [delta("m1", 9, "x")], [start("m1")]])
def test_stragglers_after_a_final_are_no_error(late: list[AnyEvent]) -> None:
    """A-016, A-017, A-018, A-065: also when retention has removed the final meanwhile."""
    session = streamed(final("m1", "a"))
    session.rows.clear()
    session.more(*late)
    assert (session.state(), session.messages.errors) == (None, 0)
    session.more(final("m1", "a"))
    assert session.state() == ("final", "a")


def test_previews_create_nothing_but_messages() -> None:
    """A-061: no effect but of messages comes out of a preview."""
    session = Session()
    assert [
        effect
        for event_ in (start("m1"), delta("m1", 0, "a"), delta("m2", 0, "a"))
        for effect in session.messages.live(event_)
    ] == []


@pytest.mark.parametrize(
    "other",
    [
        {"type": "agent.tool_use", "id": "m1", "name": "n"},
        {"type": "agent.thinking", "id": "m1"},
        {"type": "session.status_terminated", "id": "x"},
        {"type": "agent.hologram", "id": "m1"},
    ],
    ids=str,
)
def test_other_events_change_no_message(other: Json) -> None:
    """A-031: live or replayed."""
    session = streamed(start("m1"), delta("m1", 0, "a"))
    assert session.messages.live(event(other)) + session.messages.replay(event(other)) == []
    assert (session.state(), session.messages.errors) == (("partial", "a"), 0)


def test_sessions_share_nothing() -> None:
    """A-058: the same id in two sessions is two messages."""
    one, two = streamed(start("m1"), delta("m1", 0, "one")), streamed(start("m1"), delta("m1", 0, "two"))
    assert (one.text(), two.text()) == ("one", "two")


# ---- history and reconnects


def test_a_final_of_history_outlives_the_buffered_stream() -> None:
    """A-046: no poll sees it partial again."""
    session = streamed()
    session.history(final("m1", "Hello"))
    for event_ in (start("m1"), delta("m1", 0, "H"), final("m1", "Hello")):
        session.more(event_)
        assert session.state() == ("final", "Hello")
    assert session.messages.errors == 0


def test_finals_of_history_need_no_start() -> None:
    """A-047: all of them are saved."""
    session = Session()
    session.history(final("m1", "a"), final("m2", "b"), final("m3", "c"))
    assert [session.state(f"m{n}") for n in (1, 2, 3)] == [("final", "a"), ("final", "b"), ("final", "c")]


def test_a_cut_preview_stays_until_history_has_its_final() -> None:
    """A-048: served as it was during the gap, also what was not told before the cut."""
    session = streamed(start("m1"), delta("m1", 0, "Hel"))
    session.messages.connected()
    assert session.state() == ("partial", "Hel")
    session.history(final("m1", "Hello"))
    assert session.state() == ("final", "Hello")


def test_a_request_that_ended_in_the_gap_drops_its_preview() -> None:
    """A-049: the message will not come."""
    session = streamed(start("m1"), delta("m1", 0, "Hel"))
    session.stream()
    session.history(mre("s9"))
    assert session.state() is None


def test_a_request_of_history_spares_previews_of_this_connection() -> None:
    """A-049: history may be read long after the stream opened."""
    session = streamed(start("m1"), delta("m1", 0, "a"))
    session.history(mre("s9"))
    assert session.state() == ("partial", "a")


def test_a_known_request_drops_nothing_when_history_lists_it() -> None:
    """A-050: the preview began after it."""
    session = streamed(mre("s1"), start("m2"), delta("m2", 0, "x"))
    session.stream()
    session.history(mre("s1"))
    assert session.state("m2") == ("partial", "x")
    session.history(mre("s2"), mre("s2"))
    assert session.state("m2") is None


def test_a_request_without_id_drops_nothing_in_history() -> None:
    """A-050: nothing tells whether it is new."""
    session = streamed(start("m1"))
    session.stream()
    session.history(mre(""))
    assert session.state() == ("partial", "")


def test_a_request_that_history_showed_first_still_ends_on_the_stream() -> None:
    """A-022, A-046: the buffered preview of it was opened in between."""
    session = streamed()
    session.history(mre("s1"))
    session.more(start("m1"), delta("m1", 0, "a"), mre("s1"))
    assert session.state() is None


def test_a_request_that_the_stream_shows_again_spares_a_cut_preview() -> None:
    """A-050: some servers replay the whole history on each connect."""
    session = streamed(mre("s1"), start("m2"), delta("m2", 0, "x"))
    session.stream(mre("s1"), start("m3"))
    assert (session.state("m2"), session.state("m3")) == (("partial", "x"), ("partial", ""))
    session.more(mre("s2"))
    assert session.rows == {}


def test_requests_without_id_are_never_taken_for_known() -> None:
    """A-024: each one that the stream shows drops all that is open."""
    session = streamed(mre(""), start("m1"))
    session.stream(mre(""))
    assert session.state() is None


def test_a_preview_does_not_go_on_across_connections() -> None:
    """A-051: there would be a hole in it."""
    session = streamed(start("m1"), delta("m1", 0, "Hel"))
    session.stream(delta("m1", 0, "world"))
    assert (session.state(), session.messages.errors) == (("partial", "Hel"), 1)


def test_a_new_start_after_a_reconnect_begins_anew() -> None:
    """A-052: and is of this connection."""
    session = streamed(start("m1"), delta("m1", 0, "Hel"))
    session.stream(start("m1"), delta("m1", 0, "Hello "))
    session.history(mre("s9"))
    assert session.state() == ("partial", "Hello ")


def restarted() -> Session:
    return Session(
        Snapshot("m0", "final", b"[]"), Snapshot("m1", "partial", b'[{"type":"text","text":"Hel"}]')
    )


def test_a_preview_of_an_earlier_run_takes_no_delta() -> None:
    """A-053: it is still served, and not written again."""
    session = restarted()
    session.stream(delta("m1", 0, "lo"))
    assert (session.state(), session.messages.errors, session.writes) == (("partial", "Hel"), 1, 0)


def test_history_may_drop_a_preview_of_an_earlier_run_before_the_stream_opens() -> None:
    """A-053: it began on no connection of this run."""
    session = restarted()
    session.more(delta("m1", 0, "lo"))
    assert session.messages.errors == 1
    session.history(mre("s9"))
    assert session.state() is None


@pytest.mark.parametrize("is_live", [False, True])
def test_a_preview_of_an_earlier_run_is_finished_or_dropped(is_live: bool) -> None:
    """A-053: by what stream and history show."""
    for end, expected in ((final("m1", "Hello"), ("final", "Hello")), (mre("s9"), None)):
        session = restarted()
        session.messages.connected()
        (session.more if is_live else session.history)(end)
        assert expected == session.state()


def test_a_preview_of_an_earlier_run_may_start_anew() -> None:
    """A-053: only a start gives it text again."""
    session = restarted()
    session.stream(start("m1"), delta("m1", 0, "H"))
    assert session.state() == ("partial", "H")


def test_a_preview_of_an_earlier_run_goes_with_the_session() -> None:
    """A-053, A-054: it is as open as any other."""
    assert [DropMessages(("m1",))] == restarted().messages.end()


def test_previews_in_history_are_ignored() -> None:
    """R-090: they are never persisted, so these are nobody's."""
    session = streamed()
    session.history(start("m1"), delta("m1", 0, "a"))
    assert (session.messages.has_partials, session.messages.errors) == (False, 0)


# ---- content


def saved(content: bytes) -> bytes:
    """What is stored of a final whose `content` is these bytes."""
    session = streamed(event(b'{"type":"agent.message","id":"m1","content":' + content + b"}"))
    return session.rows["m1"].content


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b'[ {"text" : "a\\u0000\\ud800","type":"text"} , {"n":1.10,"n":1E400,"k":9007199254740993}]',
        b"[" + b"7" * 5_000 + b"]",
        b"[" * 3_000 + b"]" * 3_000,
        '[{"type":"text","text":"é\u2028🙂"}]'.encode(),
    ],
    ids=["empty", "odd numbers and text", "digits", "depth", "unicode"],
)
def test_a_final_keeps_its_bytes(content: bytes) -> None:
    """A-062: order, spaces, numbers and escapes included."""
    assert content == saved(content)


def test_a_large_final_keeps_its_bytes() -> None:
    """A-062: 2 MB in 500 blocks."""
    texts = ["é" * 1_500 + str(n) * 500 for n in range(500)]
    content = json.dumps([block(text) for text in texts], ensure_ascii=False).encode()
    assert len(content) > 2_000_000
    assert content == saved(content)
    assert text_of(content) == "".join(texts)


@pytest.mark.parametrize(
    ("content", "stored"),
    [
        (b'"Hello"', b'[{"type":"text","text":"Hello"}]'),
        (b'"\\ud83d\\u0000"', b'[{"type":"text","text":"\\ud83d\\u0000"}]'),
        (b"null", b"[]"),
        (b'{"type":"text","text":"a"}', b"[]"),
        (b"7", b"[]"),
    ],
)
def test_content_that_is_no_list_becomes_one(content: bytes, stored: bytes) -> None:
    """A-035: some servers send a bare string."""
    assert stored == saved(content)


def test_a_final_without_content_is_empty() -> None:
    session = streamed(event({"type": "agent.message", "id": "m1"}))
    assert session.rows["m1"].content == b"[]"


@pytest.mark.parametrize("text", ["\0", "\ud800", "\udc00", "é🙂", '"\\\n', "\u2028"], ids=ascii)
def test_a_partial_is_kept_as_ascii(text: str) -> None:
    """A-063: what UTF-8 or Postgres would refuse stays what it was."""
    session = streamed(start("m1"), delta("m1", 0, text))
    assert text == session.text()
    assert session.rows["m1"].content.isascii()
    assert b"\0" not in session.rows["m1"].content


def test_a_character_cut_between_two_deltas_is_whole() -> None:
    """A-063: the halves of a surrogate pair, as stored JSON, are one character."""
    session = streamed(start("m1"), delta("m1", 0, "\ud83d"), delta("m1", 0, "\ude42"))
    assert session.text() == "🙂"


def test_unknown_fragments_of_a_partial_are_kept() -> None:
    """A-032, A-033, A-034: beside the text."""
    chart = {"type": "chart", "points": [1, 2.5, None], "text": "x"}
    session = streamed(start("m1"), fragment("m1", 0, chart), delta("m1", 1, "a"), fragment("m1", 1, chart))
    session.more(delta("m1", 0, "ignored"))
    session.flush()
    assert [chart, block("a")] == json.loads(session.rows["m1"].content)


def odd(content: bytes) -> AnyEvent | Malformed:
    """A delta of m1 with this fragment."""
    head = b'{"type":"event_delta","event_id":"m1","delta":{"type":"content_delta","content":'
    return events.parse(head + content + b"}}")


@pytest.mark.parametrize("content", [b'{"type":"x","n":1E400}', b'{"type":"x","n":-1e999}'], ids=str)
def test_a_fragment_that_json_cannot_hold_is_kept_by_its_type(content: bytes) -> None:
    """A-060: the text beside it is still told."""
    parsed = odd(content)
    assert not isinstance(parsed, Malformed)
    session = streamed(start("m1"), parsed, delta("m1", 1, "a"))
    session.flush()
    assert [{"type": "x"}, block("a")] == json.loads(session.rows["m1"].content)


@pytest.mark.parametrize("depth", [100, 300, 400, 500, 900, 990])
def test_a_deep_fragment_disturbs_nothing(depth: int) -> None:
    """A-060: kept or frozen, never raised."""
    parsed = odd(b'{"type":"x","of":' * depth + b"1" + b"}" * depth)
    session = streamed(start("m1"))
    if not isinstance(parsed, Malformed):
        session.more(parsed)
    session.flush()
    assert session.text() == ""
    session.more(final("m1", "a"))
    assert session.state() == ("final", "a")


def test_a_deep_fragment_disturbs_nothing_deep_in_the_stack() -> None:
    """A-060: what could be folded may still be too deep to encode."""

    def partials(frames: int) -> list[Snapshot]:
        return partials(frames - 1) if frames else session.messages.partials()

    parsed = odd(b'{"type":"x","of":' * 300 + b"1" + b"}" * 300)
    assert not isinstance(parsed, Malformed)
    session = streamed(start("m1"), parsed, delta("m1", 1, "a"))
    assert [{"type": "x"}, block("a")] == json.loads(partials(750)[0].content)


def test_an_empty_delta_changes_nothing() -> None:
    session = streamed(start("m1"), delta("m1", 0, "a"))
    session.flush()
    session.more(delta("m1", 0, ""))
    assert not session.messages.has_partials


# ---- limits


def test_starts_beyond_the_limit_are_ignored() -> None:
    """A-060: their finals still come."""
    session = streamed(*[start(f"m{n}") for n in range(PREVIEWS_MAX + 1)], start("m0"), delta("m0", 0, "a"))
    session.flush()
    assert (len(session.rows), session.messages.errors) == (PREVIEWS_MAX, 1)
    assert session.text("m0") == "a"
    session.more(final(f"m{PREVIEWS_MAX}", "a"))
    assert session.state(f"m{PREVIEWS_MAX}") == ("final", "a")


def test_a_preview_beyond_its_size_is_frozen() -> None:
    """A-041, A-060: what was told stays a beginning."""
    half = "x" * (messages.PREVIEW_CHARS_MAX // 2)
    session = streamed(start("m1"), *[delta("m1", 0, text) for text in (half, half, "y", "", "z")])
    assert ("partial", half + half) == session.state()
    assert session.messages.errors == 1


def test_a_preview_beyond_its_number_of_blocks_is_frozen() -> None:
    """A-041, A-060: what was told stays a beginning."""
    session = streamed(start("m1"), *[delta("m1", n, "x") for n in range(messages.PREVIEW_BLOCKS_MAX + 2)])
    assert session.state() == ("partial", "x" * messages.PREVIEW_BLOCKS_MAX)
    assert session.messages.errors == 1


def test_the_memory_of_ids_is_bounded() -> None:
    """A-050, A-065: what is long past is forgotten, which drops a cut preview early at worst."""
    session = Session()
    for n in range(messages.MODEL_REQUEST_IDS_MAX + 1):
        session.history(final(f"m{n}", "a"), mre(f"s{n}"))
    session.stream(start("m0"), start("m1"), start("m9999"))
    assert [snapshot.id for snapshot in session.messages.partials()] == ["m0", "m9999"]
    session.messages.connected()
    assert session.messages.replay(mre("s1")) == []
    assert [DropMessages(("m0", "m9999"))] == session.messages.replay(mre("s0"))


# ---- the text of stored content


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(
            b'[{"type":"text","text":"a"},{"type":"redacted"},{"type":"text","text":"b"}]', "ab", id="A-035"
        ),
        pytest.param(b'[{"type":"redacted"}]', "", id="A-035 none"),
        pytest.param(
            b'[{"type":"text","text":" a\\n"},{"type":"text","text":"\\tb "}]', " a\n\tb ", id="A-063"
        ),
        pytest.param(
            '[{"type":"text","text":"e"},{"type":"text","text":"\u0301"}]'.encode(), "e\u0301", id="A-063 NFD"
        ),
        pytest.param(b'[{"type":"text","text":"\\u0000\\ud800"}]', "\0\ud800", id="A-063 NUL and surrogate"),
        pytest.param(
            b'["a",null,7,{"type":"text"},{"type":"text","text":7},{"type":"text","text":"b"}]',
            "b",
            id="damaged",
        ),
        pytest.param(b'[{"type":"x","text":{}},{"type":"text","text":"b"}]', "b", id="other text"),
        pytest.param(
            b'[{"type":7,"text":"a"},{"text":"c"},{"type":"text","text":"b"}]', "b", id="other type"
        ),
        pytest.param(
            b'[{"type":"x","n":' + b"7" * 5_000 + b'},{"type":"text","text":"\\ud800"}]',
            "\ud800",
            id="digits",
        ),
        pytest.param(b'[{"type":"x","n":1E400},{"type":"text","text":"b"}]', "b", id="1E400"),
        pytest.param(b"[" * 100_000 + b"]" * 100_000, "", id="depth"),
        pytest.param(b'{"type":"text","text":"a"}', "", id="no list"),
        pytest.param(b'"a"', "", id="string"),
        pytest.param(b"", "", id="nothing"),
        pytest.param(b"\xff", "", id="not UTF-8"),
        pytest.param(b'[{"type":"text","text":"\xff"}]', "", id="not UTF-8 inside"),
    ],
)
def test_text_is_that_of_the_text_blocks(content: bytes, text: str) -> None:
    assert text == text_of(content)


@given(st.binary(max_size=50))
def test_text_of_anything_is_a_text(content: bytes) -> None:
    assert isinstance(text_of(content), str)


# ---- any order of events

IDS = st.sampled_from(["m1", "m2", "m3"])
STEPS = st.one_of(
    st.tuples(st.just("start"), IDS),
    st.tuples(st.just("delta"), IDS, st.none() | st.integers(0, 1), st.text(max_size=3)),
    st.tuples(st.just("delta"), IDS, st.sampled_from([0, 5, -1]), st.text(max_size=3)),
    st.tuples(st.just("final"), IDS, st.text(max_size=3), st.booleans()),
    st.tuples(st.just("mre"), st.sampled_from(["s1", "s2", "s3"]), st.booleans()),
    st.tuples(st.just("connected")),
)


@given(st.lists(STEPS, max_size=50))
def test_any_order_of_events_keeps_the_promises(steps: list[tuple[Any, ...]]) -> None:
    """A-043, A-046, A-051: partials grow until a start, finals stand, nothing raises."""
    session = Session()
    finals: dict[str, str] = {}
    texts: dict[str, list[str]] = {}
    for step in steps:
        match step:
            case "start", id_:
                session.more(start(id_))
                texts.pop(id_, None)
            case "delta", id_, index, text:
                session.more(delta(id_, index, text))
            case "final", id_, text, is_live:
                (session.more if is_live else session.history)(final(id_, text))
                finals[id_] = text
            case "mre", id_, is_live:
                (session.more if is_live else session.history)(mre(id_))
            case ("connected",):
                session.messages.connected()
        session.flush()
        rows = session.rows.values()
        assert finals == {row.id: text_of(row.content) for row in rows if row.state == "final"}
        now = {
            row.id: [part["text"] for part in json.loads(row.content)]
            for row in rows
            if row.state == "partial"
        }
        for id_, blocks in now.items():
            then = texts.get(id_, [])
            assert len(blocks) >= len(then)
            assert all(new.startswith(old) for new, old in zip(blocks, then, strict=False))
        texts = now
    session.perform(session.messages.end())
    assert finals == {id_: text_of(row.content) for id_, row in session.rows.items()}
