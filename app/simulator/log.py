"""One log of events: in order, as the bytes that were sent, read page by page and watched live."""

import base64
import binascii
import bisect
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from app.simulator.refusal import Refused
from app.simulator.switches import Switches
from app.simulator.timeline import US_PER_S

UNSTAMPED_US = 2**62
FRAMES_MAX = 100_000

Order = Literal["asc", "desc"]
Key = tuple[int, int]


class Entry(NamedTuple):
    """One event: its place (stamp and sequence number), and the bytes that every reader gets."""

    key: Key
    id: str
    type: str
    raw: bytes
    visible_us: int


@dataclass(frozen=True)
class Query:
    """What a list request asks for. Times are microseconds since 1970; a null `processed_at` matches no
    range."""

    order: Order = "asc"
    types: frozenset[str] | None = None
    gt_us: int | None = None
    gte_us: int | None = None
    lt_us: int | None = None
    lte_us: int | None = None
    limit: int | None = None
    page: str | None = None

    def admits(self, entry: Entry) -> bool:
        """Say whether the filters let this event through."""
        if self.types is not None and entry.type not in self.types:
            return False
        stamp_us = entry.key[0]
        ranged = not (
            self.gt_us is None and self.gte_us is None and self.lt_us is None and self.lte_us is None
        )
        if stamp_us == UNSTAMPED_US:
            return not ranged
        return (
            (self.gt_us is None or stamp_us > self.gt_us)
            and (self.gte_us is None or stamp_us >= self.gte_us)
            and (self.lt_us is None or stamp_us < self.lt_us)
            and (self.lte_us is None or stamp_us <= self.lte_us)
        )


class Cursor(NamedTuple):
    """Where a page starts, and which page of the walk it is. Opaque outside this file."""

    order: str
    after: Key
    page: int

    def text(self) -> str:
        """Return the cursor as a client gets it."""
        packed = json.dumps([self.order, *self.after, self.page], separators=(",", ":")).encode()
        return "page_" + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str, order: str) -> "Cursor":
        """Return the cursor that `text` holds.

        Raises:
            Refused: it is none of ours, or was issued for the other order.
        """
        try:
            packed = text.removeprefix("page_")
            found = json.loads(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))
            cursor = cls(str(found[0]), (int(found[1]), int(found[2])), int(found[3]))
        except (binascii.Error, ValueError, TypeError, LookupError) as error:
            raise Refused(400, "page: invalid cursor") from error
        if cursor.order != order:
            raise Refused(400, f"page: the cursor was issued for order {cursor.order}, not {order}")
        return cursor


@dataclass(frozen=True)
class Page:
    """A part of a log and the cursor of the next one, if there is more."""

    items: list[bytes]
    next_page: str | None

    def body(self, nulls: str) -> bytes:
        """Return the response body, made of the bytes that are already there."""
        head = b'{"data":[' + b",".join(self.items) + b"]"
        if self.next_page is None:
            return head + (b"}" if nulls == "absent" else b',"next_page":null}')
        return head + b',"next_page":' + json.dumps(self.next_page).encode() + b"}"


class EventLog:
    """Events in the order of their stamps, queued ones last."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Put an event in its place."""
        bisect.insort(self.entries, entry, key=lambda each: each.key)

    def remove(self, key: Key) -> None:
        """Take the event at this place out, as when a queued one gets its stamp."""
        place = bisect.bisect_left(self.entries, key, key=lambda each: each.key)
        if place < len(self.entries) and self.entries[place].key == key:
            del self.entries[place]

    def page(self, query: Query, switches: Switches, now_us: int) -> Page:
        """Return one page. The cost grows with the page, and with what the filters skip.

        Raises:
            Refused: the cursor is not one of this order.
        """
        size_max = min(query.limit or switches.page_size_default, switches.page_size_max)
        cursor = Cursor.parse(query.page, query.order) if query.page is not None else None
        page_number = cursor.page if cursor else 0
        seen_until_us = now_us - round(switches.list_lag_s * US_PER_S)
        if switches.empty_pages and cursor and page_number % 2 == 1:
            return Page([], cursor._replace(page=page_number + 1).text())
        items: list[bytes] = []
        last: Key | None = None
        for entry in self._walk(query, cursor):
            if entry.visible_us > seen_until_us or not query.admits(entry):
                continue
            if entry.key[0] == UNSTAMPED_US and not switches.list_queued:
                continue
            if len(items) == size_max:
                assert last is not None, "a page that is full has a last event"
                if switches.stuck_cursor and query.page is not None:
                    return Page(items, query.page)
                return Page(items, Cursor(query.order, last, page_number + 1).text())
            items.append(entry.raw)
            last = entry.key
        return Page(items, None)

    def _walk(self, query: Query, cursor: Cursor | None) -> Iterator[Entry]:
        first, end = 0, len(self.entries)
        floor_us = max((each for each in (query.gt_us, query.gte_us) if each is not None), default=None)
        if floor_us is not None:
            first = bisect.bisect_left(self.entries, (floor_us, -1), key=lambda each: each.key)
        if cursor is not None and query.order == "asc":
            first = max(first, bisect.bisect_right(self.entries, cursor.after, key=lambda each: each.key))
        if cursor is not None and query.order == "desc":
            end = min(end, bisect.bisect_left(self.entries, cursor.after, key=lambda each: each.key))
        places = range(first, end) if query.order == "asc" else range(end - 1, first - 1, -1)
        return (self.entries[place] for place in places)


FrameKind = Literal["event", "verbatim", "eof", "cut", "truncate", "error_frame"]


class Frame(NamedTuple):
    """One thing that happens on a stream: an event, bytes as they are, or an ending."""

    kind: FrameKind
    name: str
    data: bytes


@dataclass(eq=False)
class Subscription:
    """One open stream: what it asked for and what waits to be written."""

    thread_id: str
    deltas: frozenset[str] = frozenset()
    on_ready: Callable[[], None] = lambda: None
    frames: deque[Frame] = field(default_factory=deque)
    started: set[str] = field(default_factory=set)
    is_closed: bool = False

    def push(self, frame: Frame) -> None:
        """Add what comes next. A reader that leaves `FRAMES_MAX` frames unread is cut off."""
        if self.is_closed:
            return
        if len(self.frames) >= FRAMES_MAX:
            self.frames.clear()
            frame = Frame("eof", "", b"")
        self.is_closed = frame.kind not in ("event", "verbatim")
        self.frames.append(frame)
        self.on_ready()

    def drain(self) -> list[Frame]:
        """Return what waits, and forget it."""
        waiting = list(self.frames)
        self.frames.clear()
        return waiting
