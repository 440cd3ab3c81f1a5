"""What a webhook's reply means: the result that the agent gets, and a code when there is a fault.

Nothing here raises on what a server sends. Sentences name the tool, the limit and what happened, and
hold neither the URL nor the headers: the agent can print whatever it is told.
"""

from __future__ import annotations

import base64
import codecs
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote_plus, urlsplit

from app.core.calls import CALLBACK_PREFIX, Result
from app.core.tools import Tool
from app.webhooks.content import Block, Json, Unreadable, blocks, members, read_json, text_block

ReplyCode = Literal[
    "http_status",
    "gone",
    "redirect",
    "callbacks_not_enabled",
    "reply_too_large",
    "reply_compressed",
    "reply_empty",
    "reply_type",
    "reply_unreadable",
]

ERROR_CHARS_MAX: Final = 4096
STATUS_BODY_BYTES_MAX: Final = 4096
"""How much of the body of a 4xx or 5xx is looked at."""
STATUS_BODY_CHARS_MAX: Final = 1000
_SECRET_CHARS_MIN: Final = 4
"""Shorter values are too common in ordinary text to be blotted out."""

_CHARSETS: Final = re.compile(
    r"utf-8|ascii|utf-(16|32)(-[bl]e)?|iso8859-\d+|cp(125\d|437|85[028]|866|874|93[26]|949|950)|koi8-[ru]"
    r"|mac-(roman|cyrillic)|shift_jis|euc_(jp|kr)|iso2022_jp|gb2312|gbk|gb18030|big5"
)
_CHARSET: Final = re.compile(r';\s*charset\s*=\s*"?([^";\s]+)', re.IGNORECASE)
_CHARSET_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,40}")
_MARKUP: Final = re.compile(r"<(script|style)\b.*?(</\1\s*>|\Z)|<[^<>]*>", re.IGNORECASE | re.DOTALL)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_OURS: Final = re.compile(rf"v1,[A-Za-z0-9+/=]{{20,}}|{CALLBACK_PREFIX}(\.[\w-]+){{3}}")
"""Signatures, and tokens of callbacks."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a reply came to. `code` is None if it kept the contract, whatever the tool said in it.

    `result` is None for a 202: the tool reports it later.
    """

    result: Result | None
    code: ReplyCode | None = None


def read_reply(status: int, headers: Mapping[str, str], body: bytes, tool: Tool) -> Reply:
    """Read a complete reply. A body longer than `tool.reply_bytes_max` counts as cut at that limit."""
    fields = {name.lower(): value for name, value in reversed(list(headers.items()))}
    if not 200 <= status < 300:
        return _status(status, fields, body, tool)
    if status == 202:
        if tool.callback_timeout_s > 0:
            return Reply(None)
        return fault(
            "callbacks_not_enabled",
            f"{the_tool(tool)} answered 202, which promises a later result, but its `callback_timeout_s` is "
            "0. It may still do the work; its result cannot be received.",
        )
    if status == 204:
        return _result([text_block("")], is_error=False, tool=tool)
    if len(body) > tool.reply_bytes_max:
        return fault(
            "reply_too_large",
            f"{the_tool(tool)} answered more than {tool.reply_bytes_max} bytes, which is the limit; "
            "the reply was not read to its end.",
        )
    if _is_compressed(fields):
        return fault("reply_compressed", f"{the_tool(tool)} sent a compressed reply, which is not accepted.")
    if not body:
        return fault(
            "reply_empty", f"{the_tool(tool)} answered {status} with an empty body instead of a result."
        )
    return _success(fields.get("content-type", ""), body, tool)


def fault(code: ReplyCode, sentence: str) -> Reply:
    """A reply that broke the contract."""
    return Reply(error_result(sentence), code)


def error_result(sentence: str) -> Result:
    """An error result of our own making: one text block of at most 4,096 characters."""
    if len(sentence) > ERROR_CHARS_MAX:
        sentence = sentence[: ERROR_CHARS_MAX - 1] + "…"
    return Result(_encode([text_block(sentence)]), is_error=True)


def cleaned(body: bytes, headers: Mapping[str, str], tool: Tool, *, chars_max: int) -> str:
    """A reply's body as one line for people: no markup, control characters, URL, headers or secrets."""
    media, charset = _media(next((v for k, v in headers.items() if k.lower() == "content-type"), ""))
    text = _decode(body, charset)[0]
    if "html" in media or text.lstrip()[:1] == "<":
        text = html.unescape(_MARKUP.sub(" ", text))
    return " ".join(_CONTROL.sub(" ", redacted(text, tool)).split())[:chars_max]


def the_tool(tool: Tool, article: str = "T") -> str:
    """How a sentence names the tool."""
    return f"{article}he tool {json.dumps(tool.name, ensure_ascii=False)}"


def is_endpoint_failure(status: int) -> bool:
    """Whether the status speaks of the endpoint rather than of the call: 408, 425, 429 and 5xx."""
    return status in (408, 425, 429) or 500 <= status < 600


def redacted(text: str, tool: Tool) -> str:
    """The text without what only we and the tool should know: a page may echo the request."""
    for secret in _secrets(tool):
        text = text.replace(secret, "[redacted]")
    return _OURS.sub("[redacted]", text)


def _status(status: int, fields: Mapping[str, str], body: bytes, tool: Tool) -> Reply:
    if 300 <= status < 400:
        return fault(
            "redirect", f"{the_tool(tool)} answered with a redirect ({status}), which is never followed."
        )
    said = ""
    if not _is_compressed(fields):
        excerpt = body[:STATUS_BODY_BYTES_MAX]
        said = cleaned(excerpt, fields, tool, chars_max=STATUS_BODY_CHARS_MAX)
    told = f": {said}" if said else "."
    if is_endpoint_failure(status):
        return fault(
            "http_status", f"The endpoint of {the_tool(tool, 't')} failed with HTTP status {status}{told}"
        )
    return fault(
        "gone" if status == 410 else "http_status",
        f"{the_tool(tool)} answered with HTTP status {status}{told}",
    )


def _is_compressed(fields: Mapping[str, str]) -> bool:
    """Whether the body is encoded on top of its framing, for its content or for this transfer."""
    codings = f"{fields.get('content-encoding', '')},{fields.get('transfer-encoding', '')}".lower().split(",")
    return any(coding.strip() not in ("", "identity", "chunked") for coding in codings)


def _success(content_type: str, body: bytes, tool: Tool) -> Reply:
    media, charset = _media(content_type)
    if media == "text/plain":
        text, remark = _decode(body, charset)
        if not text:
            return fault("reply_empty", f"{the_tool(tool)} answered with an empty text instead of a result.")
        return _result([text_block(text)], is_error=False, tool=tool, remark=remark)
    if media not in ("application/json", "text/json") and not media.endswith("+json"):
        kind = f"the content type {redacted(media[:100], tool)!r}" if media else "no content type"
        if "html" in media:
            kind = "an HTML page"
        return fault(
            "reply_type",
            f"{the_tool(tool)} answered with {kind} instead of a result, "
            "which must be application/json or text/plain.",
        )
    text, remark = _decode(body, charset)
    if remark:
        return fault("reply_unreadable", f"{the_tool(tool)} sent JSON that cannot be decoded; send UTF-8.")
    try:
        reply = read_json(text)
    except Unreadable as error:
        return fault("reply_unreadable", f"{the_tool(tool)} sent a reply that {error}.")
    return _mapped(reply, tool)


def _mapped(reply: Json, tool: Tool) -> Reply:
    if not isinstance(reply.value, dict):
        return _result(blocks(reply), is_error=False, tool=tool)
    is_error = reply.value.get("is_error")
    if "content" not in reply.value:
        return _result(blocks(reply), is_error=is_error is True, tool=tool)
    if not isinstance(is_error, bool | None):
        return fault("reply_unreadable", f"{the_tool(tool)} answered with an is_error that is no boolean.")
    is_contract = isinstance(reply.value["content"], str | list | None) or is_error is not None
    content = members(reply)["content"] if is_contract else reply
    return _result(blocks(content), is_error=bool(is_error), tool=tool)


def _result(found: Sequence[Block], *, is_error: bool, tool: Tool, remark: str = "") -> Reply:
    """Bound the text; an error result holds text only, as upstream wants it."""
    kept = [block for block in found if block.type == "text"] if is_error else list(found)
    kept = _cut(kept, tool.result_chars_max)
    if remark:
        kept[-1] = Block("text", f"{kept[-1].body}\n({remark})")
    return Reply(Result(_encode(kept or [text_block("")]), is_error))


def _cut(found: list[Block], chars_max: int) -> list[Block]:
    """Cut all text together at `chars_max` characters and say so in one line behind the cut."""
    total = sum(len(block.body) for block in found if block.type == "text")
    if total <= chars_max:
        return found
    notice = f"cut: {chars_max} of {total} characters"
    kept: list[Block] = []
    room = chars_max
    is_cut = False
    for block in found:
        if block.type != "text":
            kept.append(block)
        elif not is_cut:
            is_cut = len(block.body) > room
            text = f"{block.body[:room]}\n{notice}" if is_cut else block.body
            kept.append(Block("text", text.lstrip("\n") if room == 0 else text))
            room -= min(room, len(block.body))
    return kept


def _encode(found: Sequence[Block]) -> bytes:
    return ("[" + ",".join(block.json() for block in found) + "]").encode()


def _media(content_type: str) -> tuple[str, str | None]:
    """The media type in lower case, and the declared charset."""
    charset = _CHARSET.search(content_type)
    return content_type.partition(";")[0].strip().lower(), charset[1] if charset else None


def _decode(body: bytes, charset: str | None) -> tuple[str, str]:
    """The text, and a remark if it is not exactly what the tool sent."""
    name, remark = "utf-8", ""
    if charset is not None:
        known = _codec(charset)
        name = known or name
        if known is None:
            shown = charset if _CHARSET_NAME.fullmatch(charset) else "given"
            remark = f"the charset {shown} is unknown; read as UTF-8"
    codec = "utf-8-sig" if name == "utf-8" else name
    try:
        return body.decode(codec), remark
    except UnicodeError:
        replaced = f"bytes that are not valid {name} were replaced"
        return body.decode(codec, "replace"), f"{remark}; {replaced}" if remark else replaced


def _codec(charset: str) -> str | None:
    """Only character sets: Python's registry also knows transforms that cost time or mean something else."""
    if not _CHARSET_NAME.fullmatch(charset):
        return None
    try:
        name = codecs.lookup(charset).name
    except LookupError:
        return None
    return name if _CHARSETS.fullmatch(name) else None


def _secrets(tool: Tool) -> list[str]:
    """What must not come back in a sentence, longest first."""
    split = urlsplit(tool.url)
    path = split.path or "/"
    pairs = [pair.partition("=")[2] for pair in split.query.split("&")]
    raw = [
        tool.url,
        tool.url.partition("://")[2],
        f"{path}?{split.query}" if split.query else path,
        path,
        split.query,
        *pairs,
        *(unquote_plus(pair) for pair in pairs),
        *(value for _, value in tool.headers),
        *(value.partition(" ")[2] for _, value in tool.headers),
        *(base64.b64encode(secret.key).decode() for secret in tool.secrets),
    ]
    spellings = {spelling for secret in raw for spelling in (secret, html.escape(secret))}
    return sorted((s for s in spellings if len(s) >= _SECRET_CHARS_MIN), key=len, reverse=True)
