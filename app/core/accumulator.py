"""Agent messages while they stream: previews folded into text, complete messages in their place.

`EventAccumulator` works on plain dict events of the sessions API and needs nothing else of this project.
Previews are lossy and belong to one connection and one thread; the complete message is canonical.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, Literal, Self, TypeVar

FINAL_IDS_MAX: Final = 2_048
"""So many complete messages whose content is gone are still recognised, so that stragglers stay out."""

E = TypeVar("E", bound=Mapping[str, Any])


class AccumulationError(Exception):
    """A preview that cannot be folded. What was folded before stands, and folding may go on.

    `code` is `delta_before_start` (nobody opened that message) or `index_out_of_range` (a block was
    skipped, or the index is no position at all).
    """

    def __init__(self, code: Literal["delta_before_start", "index_out_of_range"], message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message


class RecentIds:
    """The ids added last, at most `ids_max` of them; adding one again makes it recent."""

    def __init__(self, ids_max: int) -> None:
        self._ids_max = ids_max
        self._ids: dict[str, None] = {}

    def __contains__(self, id_: str) -> bool:
        return id_ in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, id_: str) -> None:
        self._ids.pop(id_, None)
        self._ids[id_] = None
        if len(self._ids) > self._ids_max:
            del self._ids[next(iter(self._ids))]


class Preview:
    """The blocks of one message while it streams. Keeps copies: fragments are never changed nor shared."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self.chars = 0
        """Characters of text folded so far."""

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    def fold(self, index: object, fragment: Mapping[str, Any]) -> bool:
        """Append a fragment to block `index`, or open the next block with it; return whether that changed it.

        `index` None means 0; an index equal to the number of blocks opens one. Text goes to text blocks
        only, and a block that is not text never changes.

        Raises:
            AccumulationError: `index_out_of_range`; nothing has changed.
        """
        position = 0 if index is None else index
        length = len(self._blocks)
        if not isinstance(position, int) or isinstance(position, bool) or not 0 <= position <= length:
            shown = position if isinstance(position, int) and abs(position) < 10**9 else "unreadable"
            raise AccumulationError(
                "index_out_of_range", f"block index {shown} is outside 0 to {length} of this preview"
            )
        if position == length:
            self._blocks.append(_Block(fragment))
        elif not self._blocks[position].append(fragment):
            return False
        self.chars += len(_piece(fragment))
        return True

    def content(self) -> list[dict[str, Any]]:
        """The blocks as they stand, each a dict; not to be changed."""
        return [block.content() for block in self._blocks]

    def text(self) -> str:
        """The text of all text blocks, joined by nothing."""
        return "".join(block.text() for block in self._blocks)


class _Block:
    """One block: the fragment that opened it and, if it is text, the pieces that followed."""

    __slots__ = ("_head", "_pieces")

    def __init__(self, fragment: Mapping[str, Any]) -> None:
        self._head = copy.deepcopy(dict(fragment))
        self._pieces = [_piece(fragment)] if fragment.get("type") == "text" else None

    def append(self, fragment: Mapping[str, Any]) -> bool:
        piece = _piece(fragment)
        if self._pieces is None or not piece:
            return False
        self._pieces.append(piece)
        return True

    def text(self) -> str:
        if self._pieces is None:
            return ""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def content(self) -> dict[str, Any]:
        return self._head if self._pieces is None else self._head | {"text": self.text()}


@dataclass(frozen=True, slots=True)
class _Complete:
    content: list[Any]
    processed_at: Any


class EventAccumulator:
    """Folds the events of one thread, in stream order, into the agent's messages as known so far.

    A message opens with `event_start`, grows by `event_delta` and is replaced as a whole by its
    `agent.message`, which is final whatever its timestamp says: later starts and deltas of it change
    nothing. `span.model_request_end` drops what is still open, because its message will never come.
    All other events pass through.

    Every final is kept, so memory grows with the conversation. With `finals_max` only that many newest
    ones are kept; the ids of the last `FINAL_IDS_MAX` forgotten ones still keep stragglers out. Use one
    accumulator per thread, and a new one per connection: a preview does not continue on another.
    """

    def __init__(self, finals_max: int | None = None) -> None:
        if finals_max is not None and finals_max < 0:
            raise ValueError("finals_max is at least 0, or None to keep every final")
        self._finals_max = finals_max
        self._order: dict[str, None] = {}
        self._open: dict[str, Preview] = {}
        self._finals: dict[str, _Complete] = {}
        self._forgotten = RecentIds(FINAL_IDS_MAX)

    @property
    def agent_messages(self) -> Mapping[str, dict[str, Any]]:
        """The messages by id, open ones included, in the order of their first appearance.

        The mapping follows the accumulator; copy it with `dict` to keep a moment. Each value is
        `{"id", "type": "agent.message", "state": "partial" | "final", "content": [block], "processed_at"}`,
        made anew on every read: it is the caller's, and nothing that is folded later changes it.
        """
        return _View(self)

    def agent_message_text(self, id_: str) -> str | None:
        """The message's text: its text blocks joined by nothing. None if there is no such message."""
        preview = self._open.get(id_)
        if preview is not None:
            return preview.text()
        final = self._finals.get(id_)
        return None if final is None else text_of_blocks(final.content)

    def accumulate(self, event: E) -> E:
        """Fold one event and return that very event, unchanged.

        Raises:
            AccumulationError: a delta of a message that is neither open nor final, or one that skips a
                block. No message has changed.
        """
        match event.get("type"):
            case "event_start":
                self._start(event.get("event"))
            case "event_delta":
                self._delta(event.get("event_id"), event.get("delta"))
            case "agent.message":
                self._finish(event)
            case "span.model_request_end":
                for id_ in self._open:
                    del self._order[id_]
                self._open.clear()
        return event

    def forget(self, id_: str) -> None:
        """Remove a message. Deltas of a removed preview are errors; those of a removed final stay ignored."""
        self._open.pop(id_, None)
        if self._finals.pop(id_, None) is not None:
            self._forgotten.add(id_)
        self._order.pop(id_, None)

    def wrap(self, events: Iterable[E]) -> Wrapped[E]:
        """Return an iterator over the same events that folds each one as it is pulled."""
        return Wrapped(self, events)

    def wrap_async(self, events: AsyncIterable[E]) -> WrappedAsync[E]:
        """Return an asynchronous iterator over the same events that folds each one as it is pulled."""
        return WrappedAsync(self, events)

    def _start(self, head: object) -> None:
        if not isinstance(head, Mapping) or head.get("type") != "agent.message":
            return
        id_ = head.get("id")
        if not isinstance(id_, str) or not id_ or self._is_final(id_):
            return
        self._open[id_] = Preview()
        self._order[id_] = None

    def _delta(self, id_: object, delta: object) -> None:
        if not isinstance(delta, Mapping) or delta.get("type") != "content_delta":
            return
        fragment = delta.get("content")
        if not isinstance(id_, str) or not isinstance(fragment, Mapping) or self._is_final(id_):
            return
        preview = self._open.get(id_)
        if preview is None:
            raise AccumulationError(
                "delta_before_start", f"a delta of message {id_[:100]!r} came without its event_start"
            )
        preview.fold(delta.get("index"), fragment)

    def _finish(self, event: Mapping[str, Any]) -> None:
        id_ = event.get("id")
        if not isinstance(id_, str) or not id_:
            return
        final = _Complete(copy.deepcopy(_blocks(event.get("content"))), event.get("processed_at"))
        self._open.pop(id_, None)
        self._finals.pop(id_, None)
        self._finals[id_] = final
        self._order[id_] = None
        if self._finals_max is not None and len(self._finals) > self._finals_max:
            self.forget(next(iter(self._finals)))

    def _is_final(self, id_: str) -> bool:
        return id_ in self._finals or id_ in self._forgotten


class _View(Mapping[str, dict[str, Any]]):
    """The messages of an accumulator as they stand."""

    def __init__(self, accumulator: EventAccumulator) -> None:
        self._of = accumulator

    def __getitem__(self, id_: str) -> dict[str, Any]:
        snapshot = {"id": id_, "type": "agent.message", "state": "partial"}
        preview = self._of._open.get(id_)
        if preview is not None:
            return snapshot | {"content": copy.deepcopy(preview.content()), "processed_at": None}
        final = self._of._finals[id_]
        content = copy.deepcopy(final.content)
        return snapshot | {"state": "final", "content": content, "processed_at": final.processed_at}

    def __contains__(self, id_: object) -> bool:
        return id_ in self._of._order

    def __iter__(self) -> Iterator[str]:
        return iter(self._of._order)

    def __len__(self) -> int:
        return len(self._of._order)

    def __repr__(self) -> str:
        return repr(dict(self))


class Wrapped(Iterator[E], Generic[E]):
    """A stream that is folded as it is pulled: nothing ahead of the consumer, everything once.

    It can be iterated once: another `for` over it, even after a `break`, closes it and yields nothing.
    The source is closed once, at its end, on an error, by `close()`, at the end of a `with` block, or
    when the last reference goes, as after a `break` out of a loop over `wrap(…)` itself.
    """

    def __init__(self, accumulator: EventAccumulator, events: Iterable[E]) -> None:
        self._accumulator = accumulator
        self._events = events
        self._iterator: Iterator[E] | None = None
        self._is_begun = False
        self._is_over = False

    def __iter__(self) -> Self:
        if self._is_begun:
            self.close()
        self._is_begun = True
        return self

    def __next__(self) -> E:
        if self._is_over:
            raise StopIteration
        try:
            if self._iterator is None:
                self._iterator = iter(self._events)
            return self._accumulator.accumulate(next(self._iterator))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the iteration and close the source, if it can be closed. Again, it does nothing."""
        if self._is_over:
            return
        self._is_over = True
        try:
            if self._iterator is not self._events:
                _close(self._iterator)
        finally:
            _close(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class WrappedAsync(AsyncIterator[E], Generic[E]):
    """`Wrapped` for an asynchronous source, closed by its `aclose()`, or else its `close()`.

    To stop early, leave an `async with` block or call `aclose()`: a `break` alone closes nothing.
    """

    def __init__(self, accumulator: EventAccumulator, events: AsyncIterable[E]) -> None:
        self._accumulator = accumulator
        self._events = events
        self._iterator: AsyncIterator[E] | None = None
        self._is_begun = False
        self._is_refused = False
        self._is_over = False

    def __aiter__(self) -> Self:
        # Closing has to wait for the next pull, which may await.
        self._is_refused = self._is_begun
        self._is_begun = True
        return self

    async def __anext__(self) -> E:
        if self._is_refused:
            await self.aclose()
        if self._is_over:
            raise StopAsyncIteration
        try:
            if self._iterator is None:
                self._iterator = aiter(self._events)
            return self._accumulator.accumulate(await anext(self._iterator))
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End the iteration and close the source, if it can be closed. Again, it does nothing."""
        if self._is_over:
            return
        self._is_over = True
        try:
            if self._iterator is not self._events:
                await _aclose(self._iterator)
        finally:
            await _aclose(self._events)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def text_of_blocks(blocks: Iterable[object]) -> str:
    """The text of the text blocks among `blocks`, joined by nothing."""
    return "".join(_piece(block) for block in blocks if isinstance(block, Mapping))


def _piece(fragment: Mapping[str, Any]) -> str:
    text = fragment.get("text")
    return text if fragment.get("type") == "text" and isinstance(text, str) else ""


def _blocks(content: object) -> list[Any]:
    """A message's content as blocks: some servers send a bare string for one text block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else []


def _close(source: object) -> None:
    close = getattr(source, "close", None)
    if callable(close):
        close()


async def _aclose(source: object) -> None:
    close = getattr(source, "aclose", None) or getattr(source, "close", None)
    if callable(close):
        closing = close()
        if inspect.isawaitable(closing):
            await closing
