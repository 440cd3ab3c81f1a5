"""What a reply's status, type, charset and size make of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.core.tools import Tool
from app.webhooks.reply import ERROR_CHARS_MAX, Reply, error_result, read_reply
from tests.webhooks.conftest import a_tool

TOOL = a_tool("https://h.example/hook")
JSON = "application/json"


def read(status: int, body: bytes, kind: str | None = JSON, tool: Tool = TOOL, **headers: str) -> Reply:
    fields = headers if kind is None else {"Content-Type": kind, **headers}
    return read_reply(status, fields, body, tool)


def text_of(reply: Reply) -> str:
    blocks = json.loads(reply.result.content)
    assert [block["type"] for block in blocks] == ["text"]
    text: str = blocks[0]["text"]
    return text


def test_a_202_promises_a_result_where_the_tool_may_call_back() -> None:
    """Whatever comes with it: the answer is not the result."""
    tool = a_tool("https://h.example/hook", callback_timeout_s=60.0)
    for body in (b"", b'{"content":"x"}', b"\xff"):
        assert Reply(None) == read(202, body, tool=tool)


FAULTS: list[tuple[str, Reply, str, str]] = [
    ("R-155 422", read(422, b"nope", "text/plain"), "http_status", "HTTP status 422: nope"),
    ("R-155 400 empty", read(400, b"", None), "http_status", "HTTP status 400."),
    ("R-155 404 HTML", read(404, b"<html><style>p{}</style><p>No&nbsp;such <b>page</b></html>", "text/html"),
     "http_status", "HTTP status 404: No such page"),
    ("R-155 410", read(410, b"gone", "text/plain"), "gone", "HTTP status 410"),
    ("R-157 500", read(500, b'{"detail":"db"}'), "http_status", 'with HTTP status 500: {"detail":"db"}'),
    ("R-157 429", read(429, b""), "http_status", "failed with HTTP status 429."),
    ("R-158 302", read(302, b""), "redirect", "redirect (302)"),
    ("R-158 307", read(307, b"", Location="https://x"), "redirect", "redirect (307)"),
    ("202", read(202, b'{"content":"x"}'), "callbacks_not_enabled", "answered 202"),
    ("empty 200", read(200, b""), "reply_empty", "empty body"),
    ("empty text", read(200, b"\xef\xbb\xbf", "text/plain"), "reply_empty", "empty text"),
    ("HTML with 200", read(200, b"<html>in</html>", "text/html;charset=utf-8"), "reply_type", "an HTML page"),
    ("no type", read(200, b"{}", None), "reply_type", "no content type"),
    ("octets", read(200, b"\0", "application/octet-stream"), "reply_type", "application/octet-stream"),
    ("form", read(200, b"a=b", "application/x-www-form-urlencoded"), "reply_type", "x-www-form-urlencoded"),
    ("R-159 cut JSON", read(200, b'{"a":'), "reply_unreadable", "not valid JSON"),
    ("latin JSON", read(200, b'"\xe9"'), "reply_unreadable", "cannot be decoded"),
    ("bytes as JSON", read(200, b"\xff\xfe"), "reply_unreadable", "cannot be decoded"),
    ("unknown charset", read(200, b'"a"', JSON + ";charset=x-no"), "reply_unreadable", "cannot be decoded"),
    ("HTML as JSON", read(200, b"<html>"), "reply_unreadable", "not valid JSON"),
    ("R-176", read(200, b'"' + b"a" * 1_048_576), "reply_too_large", "1048576 bytes"),
    ("compressed", read(200, b"\x1f", **{"Content-Encoding": "gzip"}), "reply_compressed", "compressed"),
    ("compressed 500", read(500, b"\x1f\x8b\x08", JSON, **{"Content-Encoding": "br"}), "http_status",
     "failed with HTTP status 500."),
    ("101", read(101, b"", None), "http_status", "HTTP status 101"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "code", "said"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS]
)
def test_a_reply_against_the_contract_is_an_error_that_says_so(reply: Reply, code: str, said: str) -> None:
    assert reply.result.is_error
    assert code == reply.code
    assert said in text_of(reply)
    assert '"echo"' in text_of(reply)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (read(204, b"", None), "(no output)"),
        (read(200, b"plain words", "text/plain"), "plain words"),
        (read(201, b'"made"', "application/vnd.x+json"), "made"),
        (read(200, b'\xef\xbb\xbf"bom"'), "bom"),
        (read(200, b'"\xe9"', JSON + '; charset="ISO-8859-1"'), "é"),
        (read(200, b"caf\xe9", "text/plain; charset=iso-8859-1"), "café"),
        (read(200, "Привет".encode("cp1251"), "TEXT/PLAIN;Charset=windows-1251"), "Привет"),
        (read(200, "日本".encode("shift_jis"), "text/plain; charset=Shift_JIS"), "日本"),
        (read(200, "é".encode("utf-16"), "text/plain; charset=utf-16"), "é"),
        (read(200, b"a\0b", "text/plain"), "a\0b"),
        (read(200, b'{"ok":false}'), '{"ok":false}'),
        (read(200, b"caf\xe9", "text/plain"), "caf\ufffd\n(bytes that are not valid utf-8 were replaced)"),
        (
            read(200, b"ab", "text/plain; charset=x-klingon"),
            "ab\n(the charset x-klingon is unknown; read as UTF-8)",
        ),
        (
            read(200, b"ab", "text/plain; charset=unicode_escape"),
            "ab\n(the charset unicode_escape is unknown; read as UTF-8)",
        ),
    ],
    ids=["R-162 204", "text", "json suffix", "BOM", "latin JSON", "latin", "cyrillic", "japanese", "utf-16",
         "NUL", "no contract", "bad bytes", "unknown charset", "a codec that is no charset"],
)  # fmt: skip
def test_a_reply_by_the_contract_is_a_result(reply: Reply, text: str) -> None:
    assert (text, False, None) == (text_of(reply), reply.result.is_error, reply.code)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a" * 10, "a" * 10),
        ("a" * 11, "a" * 10 + "\ncut: 10 of 11 characters"),
        ("😀" * 11, "😀" * 10 + "\ncut: 10 of 11 characters"),
    ],
)
def test_a_long_text_is_cut_on_a_character_and_says_so(value: str, text: str) -> None:
    tool = a_tool(TOOL.url, result_chars_max=10)
    assert text == text_of(read(200, json.dumps(value).encode(), tool=tool))
    assert text == text_of(read(200, value.encode(), "text/plain", tool=tool))


def test_all_texts_of_a_reply_share_one_limit_and_one_notice() -> None:
    image = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    reply = read(
        200, json.dumps(["a" * 6, image, "b" * 6, "c"]).encode(), tool=a_tool("", result_chars_max=10)
    )
    assert json.loads(reply.result.content) == [
        {"type": "text", "text": "a" * 6},
        image,
        {"type": "text", "text": "bbbb\ncut: 10 of 13 characters"},
    ]


def test_a_cut_between_two_blocks_still_shows_its_notice() -> None:
    reply = read(200, json.dumps(["a" * 10, "b", "c"]).encode(), tool=a_tool("", result_chars_max=10))
    assert json.loads(reply.result.content)[1:] == [{"type": "text", "text": "cut: 10 of 12 characters"}]


def test_an_error_of_ours_is_bounded() -> None:
    """R-155: at most 4,096 characters."""
    text = json.loads(error_result("x" * 9000).content)[0]["text"]
    assert len(text) == ERROR_CHARS_MAX
    assert len(text_of(read(422, b"y" * 9000, "text/plain"))) < ERROR_CHARS_MAX
    assert len(text_of(read(422, b"y", tool=a_tool("", name="n" * 9000)))) == ERROR_CHARS_MAX


LEAKY = a_tool(
    "https://h.example/hook/T0K3NPATH?token=S3CR3T&x=a%20b%20c%20d",
    headers=(
        ("Authorization", "Bearer HEADERKEY"),
        ("X-Key", 'K3Y&"K3Y'),
        ("X-A", "PREF"),
        ("X-B", "PREFIXED"),
    ),
)
ECHO = (
    b"Cannot POST /hook/T0K3NPATH?token=S3CR3T&amp;x=a%20b%20c%20d (https://h.example/hook/T0K3NPATH?token=S3CR3T)"
    b" a b c d HEADERKEY Bearer HEADERKEY K3Y&amp;&quot;K3Y PREFIXED"
    b" v1,Ktbg7PGd1gRBLRaR8IzkR7Jdf9Fy6xs3mq7WVEHtPJU="
    b' "callback":{"token":"cbt.0a1b2c3d.ZGVmYXVsdA.KtbMAC-Pd1gRBLRaR8IzkR7Jdf9Fy6xs3mq7WVEHtPJ"}'
)


@pytest.mark.parametrize("status", [301, 400, 404, 410, 500, 503])
@pytest.mark.parametrize("kind", ["text/html", "text/plain", JSON])
def test_a_page_that_echoes_the_request_gives_no_secret_away(status: int, kind: str) -> None:
    said = text_of(read(status, ECHO, kind, tool=LEAKY))
    for secret in (
        "S3CR3T",
        "T0K3NPATH",
        "HEADERKEY",
        "K3Y",
        "IXED",
        "a b c d",
        "v1,Ktbg",
        "h.example/hook",
        "KtbMAC",
    ):
        assert secret not in said


def test_control_characters_of_an_error_page_are_dropped() -> None:
    assert text_of(read(500, b"a\x1b[31mred\0\r\n\tb", "text/plain")).endswith("status 500: a [31mred b")


def _accepted(block: Any) -> bool:
    """The rules by which upstream takes a block of a tool result."""
    if block["type"] == "text":
        return isinstance(block["text"], str) and len(block["text"]) >= 1
    if block["type"] == "search_result":
        return set(block) >= {"source", "title", "content", "citations"} and all(
            part["type"] == "text" and part["text"] for part in block["content"]
        )
    return block["type"] in ("image", "document") and isinstance(block["source"], dict)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
kinds = st.sampled_from(["text", "image", "document", "search_result", "tool_reference", "base64", "url"])
keys = st.sampled_from(
    [
        "type",
        "text",
        "source",
        "title",
        "content",
        "citations",
        "enabled",
        "is_error",
        "data",
        "media_type",
        "url",
    ]
)
values = st.recursive(
    scalars | kinds,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys | st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=25,
)
bodies = st.binary(max_size=300) | st.text(max_size=100).map(
    lambda text: text.encode("utf-8", "surrogatepass")
)
json_bodies = st.builds(
    lambda value, is_ascii: json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass"),
    values,
    st.booleans(),
)
types = st.sampled_from(
    ["", JSON, "text/plain", "text/html", "text/plain; charset=utf-16", "application/json;charset=", "a+json",
     "text/plain; charset=idna", "text/plain;charset=\"utf-7\"", "text/plain; charset=shift_jis"]
) | st.text(max_size=40)  # fmt: skip


@settings(max_examples=600, deadline=None)
@example(202, JSON, b"{}", "", 1)
@given(
    st.integers(0, 999) | st.just(200),
    types | st.just(JSON),
    bodies | json_bodies,
    st.sampled_from(["", "gzip", "identity"]),
    st.integers(1, 50),
)
def test_no_reply_raises_and_all_give_content_that_upstream_accepts(
    status: int, kind: str, body: bytes, encoding: str, chars_max: int
) -> None:
    tool = a_tool(
        "https://h.example/", reply_bytes_max=250, result_chars_max=chars_max, callback_timeout_s=60.0
    )
    result = read_reply(status, {"content-type": kind, "content-encoding": encoding}, body, tool).result
    assert (result is None) == (status == 202)
    if result is None:
        return
    content = json.loads(result.content.decode())
    json.dumps(content, ensure_ascii=False).encode()
    assert content
    assert all(_accepted(block) for block in content)
    assert not result.is_error or all(block["type"] == "text" for block in content)
