"""What the service knows of the agent's messages, from the stream and from history.

Previews are a courtesy: nothing they do may disturb a run. What cannot be folded is counted and leaves
the text as it stood, so that every partial text is a beginning of the message; the final repairs all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from app.core.accumulator import FINAL_IDS_MAX, AccumulationError, Preview, RecentIds, text_of_blocks
from app.core.events import AnyEvent, Message, ModelRequestEnd, PreviewDelta, PreviewStart
from app.core.protocol import DropMessages, SaveMessage, Snapshot

MODEL_REQUEST_IDS_MAX: Final = 2_048
"""So many ended model requests are recognised when history lists them again."""
PREVIEWS_MAX: Final = 64
"""Starts beyond so many open previews are ignored; their messages appear when they are complete."""
PREVIEW_CHARS_MAX: Final = 4_194_304
PREVIEW_BLOCKS_MAX: Final = 4_096
"""A preview that would grow beyond either limit stays as it is until its message is complete."""


@dataclass(slots=True)
class _Open:
    """A preview whose message has not come. Only one that began on this connection may grow."""

    preview: Preview
    thread_id: str | None
    is_current: bool
    is_frozen: bool = False


class Messages:
    """The messages of one session, during one run.

    `open_ids` are the previews that an earlier run left behind in the store. Nothing here raises on what
    upstream sends; `errors` counts the previews and fragments that could not be used.
    """

    def __init__(self, open_ids: Iterable[str] = ()) -> None:
        self.errors = 0
        self._open = {id_: _Open(Preview(), None, is_current=False) for id_ in open_ids}
        self._changed: set[str] = set()
        self._final_ids = RecentIds(FINAL_IDS_MAX)
        self._request_ids = RecentIds(MODEL_REQUEST_IDS_MAX)

    @property
    def has_partials(self) -> bool:
        """Whether `partials` has something to tell."""
        return bool(self._changed)

    def is_final(self, id_: str) -> bool:
        """Whether the whole message is known."""
        return id_ in self._final_ids

    def partials(self) -> list[Snapshot]:
        """The open previews that changed since this was last asked, in the order of their first appearance.

        Each is encoded as a whole, so ask a few times a second at most, and save what it returns before
        the effects of later events.
        """
        snapshots = [
            Snapshot(id_, "partial", _encoded(open_.preview), open_.thread_id)
            for id_, open_ in self._open.items()
            if id_ in self._changed
        ]
        self._changed.clear()
        return snapshots

    def connected(self) -> None:
        """A stream connection opened: previews of earlier ones have a hole and grow no more."""
        for open_ in self._open.values():
            open_.is_current = False

    def live(self, event: AnyEvent) -> list[SaveMessage | DropMessages]:
        """Take an event of the stream, also one that history has shown before.

        Finals are to be saved at once, previews of an ended model request dropped; what a preview came
        to is told by `partials`.
        """
        match event:
            case PreviewStart():
                self._start(event)
            case PreviewDelta():
                self._grow(event)
            case Message():
                return self._finish(event)
            case ModelRequestEnd():
                # Shown before, it says nothing new of earlier connections, yet what it follows here is over.
                is_new = self._is_new(event)
                return self._drop(
                    lambda open_: (is_new or open_.is_current) and open_.thread_id == event.session_thread_id
                )
        return []

    def replay(self, event: AnyEvent) -> list[SaveMessage | DropMessages]:
        """Take an event of the history.

        A model request that ended during a gap drops previews of earlier connections. One that was known
        to have ended, or has no id to tell by, drops nothing: previews may have begun since.
        """
        match event:
            case Message():
                return self._finish(event)
            case ModelRequestEnd() if event.id and self._is_new(event):
                return self._drop(
                    lambda open_: not open_.is_current and open_.thread_id == event.session_thread_id
                )
        return []

    def end(self) -> list[SaveMessage | DropMessages]:
        """The session is over for us: messages that are still open will not come."""
        return self._drop(lambda _: True)

    def _start(self, event: PreviewStart) -> None:
        id_ = event.event.id
        if event.event.type != "agent.message" or id_ in self._final_ids:
            return
        if not id_ or (len(self._open) >= PREVIEWS_MAX and id_ not in self._open):
            self.errors += 1
            return
        self._open[id_] = _Open(Preview(), event.session_thread_id, is_current=True)
        self._changed.add(id_)

    def _grow(self, event: PreviewDelta) -> None:
        id_, fragment = event.event_id, event.delta.content
        if event.delta.type != "content_delta" or not isinstance(fragment, dict) or id_ in self._final_ids:
            return
        open_ = self._open.get(id_)
        if open_ is None or not open_.is_current:
            self.errors += 1
            return
        if open_.is_frozen:
            return
        try:
            open_.is_frozen = _is_full(open_.preview, fragment)
            if not open_.is_frozen and open_.preview.fold(event.delta.index, fragment):
                self._changed.add(id_)
        except (AccumulationError, RecursionError):
            open_.is_frozen = True
        self.errors += open_.is_frozen

    def _finish(self, event: Message) -> list[SaveMessage | DropMessages]:
        if not event.id:
            self.errors += 1
            return []
        self._open.pop(event.id, None)
        self._changed.discard(event.id)
        self._final_ids.add(event.id)
        content = _blocks(bytes(event.content))
        return [
            SaveMessage(Snapshot(event.id, "final", content, event.session_thread_id, event.processed_at))
        ]

    def _is_new(self, event: ModelRequestEnd) -> bool:
        is_new = event.id not in self._request_ids
        if event.id:
            self._request_ids.add(event.id)
        return is_new

    def _drop(self, is_over: Callable[[_Open], bool]) -> list[SaveMessage | DropMessages]:
        ids = tuple(id_ for id_, open_ in self._open.items() if is_over(open_))
        for id_ in ids:
            del self._open[id_]
            self._changed.discard(id_)
        return [DropMessages(ids)] if ids else []


def text_of(content: bytes) -> str:
    """The text of a stored message: its text blocks joined by nothing, `""` if there are none.

    Nothing is trimmed or normalised: the text may hold NUL and lone surrogates, which plain UTF-8 cannot
    carry. Content that is no list of blocks has no text.
    """
    try:
        return "".join([block.text for block in _text_decoder.decode(content) if block.type == "text"])
    except (msgspec.DecodeError, RecursionError, ValueError):
        pass
    try:
        blocks = json.loads(content, parse_int=float)  # an int of thousands of digits is refused
    except (RecursionError, ValueError):
        return ""
    return text_of_blocks(blocks) if isinstance(blocks, list) else ""


class _TextBlock(msgspec.Struct):
    type: str = ""
    text: str = ""


_text_decoder = msgspec.json.Decoder(list[_TextBlock])


def _is_full(preview: Preview, fragment: dict[str, Any]) -> bool:
    text = fragment.get("text")
    chars = len(text) if isinstance(text, str) else 0
    return preview.chars + chars > PREVIEW_CHARS_MAX or len(preview) >= PREVIEW_BLOCKS_MAX


def _blocks(content: bytes) -> bytes:
    """A final's content as an array of blocks, the bytes kept; some servers send a string for one text."""
    if content.startswith(b"["):
        return content
    if content.startswith(b'"'):
        return b'[{"type":"text","text":' + content + b"}]"
    return b"[]"


def _encoded(preview: Preview) -> bytes:
    """A preview's blocks as JSON in ASCII: escapes keep what UTF-8 or Postgres would refuse."""
    blocks = preview.content()
    try:
        return _dumps(blocks)
    except (RecursionError, ValueError):
        # A fragment of a kind we do not know holds what JSON cannot: infinity, or endless nesting.
        return _dumps([_bare(block) for block in blocks])


def _bare(block: dict[str, Any]) -> dict[str, Any]:
    kept = ("type", "text") if block.get("type") == "text" else ("type",)
    return {name: block[name] for name in kept if isinstance(block.get(name), str)}


def _dumps(blocks: list[dict[str, Any]]) -> bytes:
    return json.dumps(blocks, allow_nan=False, separators=(",", ":")).encode("ascii")
