"""How the bytes of an event stream become frames.

The rules are those of the WHATWG standard for `text/event-stream`, over bytes: text is never decoded here,
so no separator other than CR, LF and CRLF can split a line, and a damaged character stays in its frame.
`id:` and `retry:` are ignored, since upstream cannot resume a stream.
"""

from __future__ import annotations

from typing import Final

import msgspec

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""A frame longer than this is dropped."""

_BOM: Final = b"\xef\xbb\xbf"
_DEFAULT_EVENT: Final = b"message"


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One dispatched frame. `event` is `message` where the stream named none; both are as they arrived."""

    event: bytes
    data: bytes


class Decoder:
    """Turn the chunks of one stream into frames, in time linear in their bytes, however they are cut.

    It never raises. Between chunks it holds at most `frame_bytes_max` bytes and one line end.

    Attributes:
        comments: how many comment lines were seen; servers send them to keep a stream alive.
        frames_dropped: how many frames were over `frame_bytes_max` bytes. Decoding resumes behind each.
    """

    __slots__ = (
        "_after_cr",
        "_after_lf",
        "_at_start",
        "_dropping",
        "_frame_bytes_max",
        "_tail",
        "comments",
        "frames_dropped",
    )

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        if frame_bytes_max < 1:
            raise ValueError("frame_bytes_max is at least 1")
        self.comments = 0
        self.frames_dropped = 0
        self._frame_bytes_max = frame_bytes_max
        self._tail = bytearray()  # an unfinished frame; never begins with LF or with a whole comment line
        self._at_start = True
        self._after_cr = False
        self._after_lf = False
        self._dropping = False

    @property
    def held_bytes(self) -> int:
        """How many bytes wait for the rest of their frame."""
        return len(self._tail)

    def feed(self, chunk: bytes) -> list[Frame]:
        """Take the next bytes and return the frames that end in them."""
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if b"\r" in chunk:
            # A CR at the end ends its line now: waiting for a LF could hold a finished frame for minutes.
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._at_start:
            chunk = self._past_bom(chunk)
        if self._dropping:
            chunk = self._past_dropped(chunk)
        if not chunk:
            return []
        tail = self._tail
        if tail:
            searched = len(tail)
            tail += chunk
            if tail.find(b"\n\n", searched - 1) < 0:
                self._settle_tail(searched)
                return []
            chunk = bytes(tail)
            tail.clear()
        *blocks, rest = chunk.split(b"\n\n")
        frames = self._frames(blocks)
        tail += rest.lstrip(b"\n")
        self._settle_tail(0)
        return frames

    def finish(self) -> list[Frame]:
        """Return what the stream ended with, if its blank line is missing; the decoder is then used up.

        Such a frame may have been cut anywhere: only if its data is complete JSON was it whole.
        """
        block = bytes(self._tail).rstrip(b"\n")
        self._tail.clear()
        return self._frames([block])

    def _past_bom(self, chunk: bytes) -> bytes:
        chunk = bytes(self._tail) + chunk
        self._tail.clear()
        if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
            self._tail += chunk
            return b""
        self._at_start = False
        return chunk.removeprefix(_BOM)

    def _past_dropped(self, chunk: bytes) -> bytes:
        """What follows the frame that is being dropped, if it ends in this chunk."""
        if not chunk:
            return chunk
        if self._after_lf and chunk.startswith(b"\n"):
            end = 1
        else:
            end = chunk.find(b"\n\n") + 2
            if end < 2:
                self._after_lf = chunk.endswith(b"\n")
                return b""
        self._dropping = False
        return chunk[end:]

    def _settle_tail(self, searched: int) -> None:
        """Forget whole comment lines at the head of the tail, and the tail itself if it is too long.

        `searched` is how much of the tail is known to hold no line end if it begins with a comment.
        """
        tail = self._tail
        while tail.startswith(b":"):
            end = tail.find(b"\n", searched)
            if end < 0 or end > self._frame_bytes_max:
                break
            self.comments += 1
            del tail[: end + 1]
            searched = 0
        # A LF at the end may be the first half of the blank line, which is no part of the frame.
        if len(tail) - tail.endswith(b"\n") > self._frame_bytes_max:
            self.frames_dropped += 1
            self._dropping = True
            self._after_lf = tail.endswith(b"\n")
            tail.clear()

    def _frames(self, blocks: list[bytes]) -> list[Frame]:
        frames: list[Frame] = []
        for block in blocks:
            if block.startswith(b"\n"):
                block = block.lstrip(b"\n")  # noqa: PLW2901 - a run of blank lines
            if len(block) <= self._frame_bytes_max and block.startswith(b"event: "):
                head, _, data = block.partition(b"\ndata: ")
                if data and b"\n" not in data and b"\n" not in head:
                    frames.append(Frame(head[7:] or _DEFAULT_EVENT, data))
                    continue
            if block and (frame := self._frame(block)) is not None:
                frames.append(frame)
        return frames

    def _frame(self, block: bytes) -> Frame | None:
        """Read a frame field by field; None if it has no data or, its first comments apart, is too long."""
        size, start = len(block), 0
        while block.startswith(b":", start):
            end = block.find(b"\n", start)
            end = size if end < 0 else end
            if end - start > self._frame_bytes_max:
                break
            self.comments += 1
            start = end + 1
        if size - start > self._frame_bytes_max:
            self.frames_dropped += 1
            return None
        event, data, has_data = b"", bytearray(), False
        while start < size:
            end = block.find(b"\n", start)
            end = size if end < 0 else end
            name, _, value = block[start:end].partition(b":")
            if not name:
                self.comments += 1
            elif name == b"data":
                if has_data:
                    data += b"\n"
                data += value.removeprefix(b" ")
                has_data = True
            elif name == b"event":
                event = value.removeprefix(b" ")
            start = end + 1
        return Frame(event or _DEFAULT_EVENT, bytes(data)) if has_data else None
