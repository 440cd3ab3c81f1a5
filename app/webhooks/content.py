"""What a JSON reply means as content blocks.

A value is kept together with the text it was written as, so that what is passed on unchanged keeps its
digits, key order and escapes. The tables below are the whole mapping.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, NoReturn

NO_OUTPUT: Final = "(no output)"
"""Stands where a text would be empty, which upstream refuses."""
DEPTH_MAX: Final = 200
NUMBER_CHARS_MAX: Final = 4300
BLOCKS_MAX: Final = 1000
"""An array of more elements becomes one text block that holds it."""

_SPACE: Final = re.compile(r"[ \t\n\r]*")
# Possessive, and content with a string that never ends: linear on any input.
_BRACKET_OR_STRING: Final = re.compile(r'"(?:[^"\\]++|\\.)*+\\?(?:"|\Z)|[\[\]{}]', re.DOTALL)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_LONE_ESCAPE: Final = re.compile(
    r"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|(\\.)"
)


class Unreadable(Exception):
    """Text that is no JSON, or JSON beyond a limit. The message is a clause that follows "the reply"."""


class Json(NamedTuple):
    """A JSON value and the text it was written as. Numbers have the value 0: only their spelling counts."""

    value: Any
    source: str


class Block(NamedTuple):
    """A content block: `body` is the text of a text block, and the block's own JSON for the other types."""

    type: str
    body: str

    def json(self) -> str:
        """The block as JSON text without lone surrogates."""
        if self.type != "text":
            return self.body
        return '{"type":"text","text":' + json.dumps(self.body, ensure_ascii=False) + "}"


def read_json(text: str) -> Json:
    """Read a whole text as one JSON value.

    Raises:
        Unreadable: it is not exactly one valid value, nests deeper than `DEPTH_MAX`, or holds a number
            longer than `NUMBER_CHARS_MAX`.
    """
    _check_depth(text)
    try:
        value = _decoder.decode(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise Unreadable(f"has more text after its JSON, from character {error.pos}") from error
        what = error.msg.removesuffix(" at")
        raise Unreadable(f"was not valid JSON ({what} at character {error.pos})") from error
    except RecursionError as error:
        raise Unreadable("nests too deeply") from error
    return Json(value, text.strip(" \t\n\r"))


def blocks(reply: Json) -> list[Block]:
    """Map a reply's value to content blocks: never none, never an empty text."""
    return _BY_VALUE.get(type(reply.value), _as_json_text)(reply)


def text_block(text: str) -> Block:
    """A text block that upstream accepts: not empty, lone surrogates replaced by U+FFFD."""
    return Block("text", _SURROGATE.sub("\ufffd", text) or NO_OUTPUT)


def members(object_: Json) -> dict[str, Json]:
    """The members of a JSON object with the text of each value; the last of equal keys counts."""
    found: dict[str, Json] = {}
    source = object_.source
    at = _skip(source, 1)
    while source[at] != "}":
        key, at = _decoder.raw_decode(source, at)
        at = _skip(source, _skip(source, at) + 1)
        value, end = _decoder.raw_decode(source, at)
        found[key] = Json(value, source[at:end])
        at = _skip(source, end)
        if source[at] == ",":
            at = _skip(source, at + 1)
    return found


def elements(array: Json) -> Iterator[Json]:
    """The elements of a JSON array with the text of each."""
    source = array.source
    at = _skip(source, 1)
    while source[at] != "]":
        value, end = _decoder.raw_decode(source, at)
        yield Json(value, source[at:end])
        at = _skip(source, end)
        if source[at] == ",":
            at = _skip(source, at + 1)


def _string(reply: Json) -> list[Block]:
    return [text_block(reply.value)]


def _null(_reply: Json) -> list[Block]:
    return [text_block("")]


def _array(reply: Json) -> list[Block]:
    if len(reply.value) > BLOCKS_MAX:
        return _as_json_text(reply)
    return [_element(element) for element in elements(reply)] or [text_block("")]


def _element(element: Json) -> Block:
    if isinstance(element.value, str):
        return text_block(element.value)
    known = None
    if isinstance(element.value, dict) and isinstance(element.value.get("type"), str):
        known = _BY_TYPE.get(element.value["type"])
    block = known(element) if known else None
    return block or _as_json_text(element)[0]


def _as_json_text(reply: Json) -> list[Block]:
    return [text_block(reply.source)]


# Each of these returns None for a block that upstream would refuse; its JSON is then shown as text.


def _text(block: Json) -> Block | None:
    text = block.value.get("text")
    return text_block(text) if isinstance(text, str) else None


def _image(block: Json) -> Block | None:
    return _unchanged(block) if _has_source(block, _IMAGE_SOURCES) else None


def _document(block: Json) -> Block | None:
    are_texts = all(isinstance(block.value.get(key), str | None) for key in ("title", "context"))
    return _unchanged(block) if are_texts and _has_source(block, _DOCUMENT_SOURCES) else None


def _search_result(block: Json) -> Block | None:
    value = block.value
    content, citations = value.get("content"), value.get("citations")
    is_whole = isinstance(value.get("source"), str) and isinstance(value.get("title"), str)
    is_cited = isinstance(citations, dict) and isinstance(citations.get("enabled"), bool)
    if not is_whole or not isinstance(content, list) or not (citations is None or is_cited):
        return None
    texts = [_text(Json(item, "")) if _is_text(item) else None for item in content]
    if None in texts:
        return None
    is_empty_within = any(item["text"] == "" for item in content)
    if is_cited and not is_empty_within:
        return _unchanged(block)
    parts = {key: member.source for key, member in members(block).items()}
    if not is_cited:
        parts["citations"] = '{"enabled":false}'
    if is_empty_within:
        parts["content"] = "[" + ",".join(text.json() for text in texts if text) + "]"
    joined = ",".join(f"{json.dumps(key)}:{source}" for key, source in parts.items())
    return _unchanged(Json(None, "{" + joined + "}"), value["type"])


_BY_VALUE: Final[dict[type, Callable[[Json], list[Block]]]] = {
    str: _string,
    type(None): _null,
    list: _array,
}
_BY_TYPE: Final[dict[str, Callable[[Json], Block | None]]] = {
    "text": _text,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
}
_IMAGE_SOURCES: Final = {"base64": ("media_type", "data"), "url": ("url",), "file": ("file_id",)}
_DOCUMENT_SOURCES: Final = _IMAGE_SOURCES | {"text": ("media_type", "data")}


def _unchanged(block: Json, type_: str | None = None) -> Block:
    return Block(type_ or block.value["type"], _LONE_ESCAPE.sub(_mended, block.source))


def _mended(escape: re.Match[str]) -> str:
    return "\\ufffd" if escape[2] else escape[0]


def _has_source(block: Json, sources: dict[str, tuple[str, ...]]) -> bool:
    source = block.value.get("source")
    if not isinstance(source, dict) or not isinstance(source.get("type"), str):
        return False
    needed = sources.get(source["type"])
    return needed is not None and all(isinstance(source.get(key), str) and source[key] for key in needed)


def _is_text(item: object) -> bool:
    return isinstance(item, dict) and item.get("type") == "text" and isinstance(item.get("text"), str)


def _check_depth(text: str) -> None:
    """Count brackets outside strings before the recursive parser meets them."""
    if text.count("[") + text.count("{") <= DEPTH_MAX:
        return
    depth = 0
    for token in _BRACKET_OR_STRING.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth > DEPTH_MAX:
                raise Unreadable(f"nests deeper than {DEPTH_MAX} levels")
        elif token[0] in "]}":
            depth -= 1


def _number(spelling: str) -> int:
    if len(spelling) > NUMBER_CHARS_MAX:
        raise Unreadable(f"holds a number of {len(spelling)} digits; the limit is {NUMBER_CHARS_MAX}")
    return 0


def _constant(name: str) -> NoReturn:
    raise Unreadable(f"was not valid JSON ({name} is no JSON number)")


def _skip(source: str, at: int) -> int:
    space = _SPACE.match(source, at)
    assert space is not None
    return space.end()


_decoder: Final = json.JSONDecoder(parse_int=_number, parse_float=_number, parse_constant=_constant)
