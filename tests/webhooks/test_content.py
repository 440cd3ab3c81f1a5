"""How a JSON reply maps to content blocks: R-160 to R-175."""

from __future__ import annotations

import json

import pytest

from app.core.tools import Tool
from app.webhooks.content import BLOCKS_MAX, DEPTH_MAX, Unreadable, blocks, elements, members, read_json
from app.webhooks.reply import read_reply
from tests.webhooks.conftest import a_tool

TOOL = a_tool("https://h.example/hook")
NO_OUTPUT = '[{"type":"text","text":"(no output)"}]'
IMAGE = '{"type":"image","source":{"type":"base64","media_type":"image/png","data":"iVBORw0KGgo="}}'
DOCUMENT = '{"type":"document", "source":{"type":"url","url":"https://example.com/a.pdf"},"title":"doc"}'
FOUND = (
    '{"type":"search_result","source":"https://example.com","title":"T",'
    '"content":[{"type":"text","text":"5 days."}],"citations":{"enabled":true}}'
)
FOUND_UNCITED = FOUND.replace(',"citations":{"enabled":true}', "")
FOUND_DEFAULT = FOUND.replace("true", "false")


def text(value: str) -> str:
    return json.dumps({"type": "text", "text": value}, ensure_ascii=False, separators=(",", ":"))


def array(*blocks_: str) -> str:
    return "[" + ",".join(blocks_) + "]"


def replaced(block: str, old: str, new: str) -> str:
    return array(block.replace(old, new))


def posted(reply: str, tool: Tool = TOOL) -> tuple[str, bool]:
    result = read_reply(200, {"content-type": "application/json"}, reply.encode(), tool).result
    return result.content.decode(), result.is_error


UNKNOWN = '{"type":"tool_reference","tool_name":"w"}'
BARE_IMAGE = '{"type":"image","data":"x"}'
BARE_TEXT = '{"type":"text","txt":1.50}'
BARE_FOUND = '{"type":"search_result","source":"s","content":[]}'
LIST_TYPE = '{"type":["text"],"text":"x"}'
NUMBERS = '{"a":1.10,"b":1E400,"c":9007199254740993}'
FOREIGN = '{"content":{"id":1},"title":"t"}'
FILE = '{"type":"image","x":1.10,"source":{"type":"file","file_id":"f"}}'

MAPPING = [
    ("R-160", '"hello"', array(text("hello"))),
    ("R-160 in content", '{"content":"hello"}', array(text("hello"))),
    ("R-161", '""', NO_OUTPUT),
    ("R-161 in content", '{"content":""}', NO_OUTPUT),
    ("R-162", "null", NO_OUTPUT),
    ("R-162 in content", '{"content":null}', NO_OUTPUT),
    ("R-163", "[]", NO_OUTPUT),
    ("R-163 in content", '{"content":[]}', NO_OUTPUT),
    ("R-164", array(text(""), text("b")), array(text("(no output)"), text("b"))),
    ("R-165", array(IMAGE), array(IMAGE)),
    ("R-165 digit for digit", '{"content":' + array(FILE) + "}", array(FILE)),
    ("R-166", array(DOCUMENT), array(DOCUMENT)),
    ("R-167", array(FOUND), array(FOUND)),
    ("R-168", array(FOUND_UNCITED), array(FOUND_DEFAULT)),
    ("R-168 null", replaced(FOUND, '{"enabled":true}', "null"), array(FOUND_DEFAULT)),
    ("R-164 in a search result", replaced(FOUND, "5 days.", ""), replaced(FOUND, "5 days.", "(no output)")),
    ("R-169", array(UNKNOWN), array(text(UNKNOWN))),
    ("R-169 redacted", '[{"type":"redacted"}]', array(text('{"type":"redacted"}'))),
    ("R-169 image without source", array(BARE_IMAGE), array(text(BARE_IMAGE))),
    ("R-169 text without text", array(BARE_TEXT), array(text(BARE_TEXT))),
    ("R-169 search result without title", array(BARE_FOUND), array(text(BARE_FOUND))),
    ("R-169 type that is no string", array(LIST_TYPE), array(text(LIST_TYPE))),
    ("R-170", array(text("a"), IMAGE, UNKNOWN, text("b")), array(text("a"), IMAGE, text(UNKNOWN), text("b"))),
    ("R-171 object", NUMBERS, array(text(NUMBERS))),
    ("R-171 number", "1.10", array(text("1.10"))),
    ("R-171 boolean", "true", array(text("true"))),
    ("R-171 keys twice", ' {"a":1,"a":2}\n', array(text('{"a":1,"a":2}'))),
    ("R-171 content of another kind", FOREIGN, array(text(FOREIGN))),
    ("R-172 string", '["a",""]', array(text("a"), text("(no output)"))),
    ("R-172 no type", '[{"a":1.0},2,null,[3]]', array(*map(text, ('{"a":1.0}', "2", "null", "[3]")))),
    ("R-173", '"a\\ud800b\\udc00"', array(text("a\ufffdb\ufffd"))),
    ("R-173 pair", '"\\ud83d\\ude00"', array(text("😀"))),
    (
        "R-173 in a kept block",
        replaced(DOCUMENT, '"doc"', '"' + "\\ud800\\\\ud800\\ud83d\\ude00" + '"'),
        replaced(DOCUMENT, '"doc"', '"' + "\\ufffd\\\\ud800\\ud83d\\ude00" + '"'),
    ),
    ("text keeps only its text", '[{"type":"text","text":"a","annotations":{}}]', array(text("a"))),
    ("NUL is a character", '"a\\u0000b"', '[{"type":"text","text":"a\\u0000b"}]'),
]


@pytest.mark.parametrize(("reply", "content"), [row[1:] for row in MAPPING], ids=[row[0] for row in MAPPING])
def test_a_reply_becomes_content(reply: str, content: str) -> None:
    got, is_error = posted(reply)
    assert (json.loads(content), False) == (json.loads(got), is_error)
    assert content.replace(" ", "") == got.replace(" ", "")


def failing(content: str) -> str:
    return '{"is_error":true,"content":' + content + "}"


ERRORS = [
    ("R-154", failing(array(text("structured"))), array(text("structured"))),
    ("R-174", failing(array(text("t"), IMAGE, FOUND)), array(text("t"))),
    ("R-175 image", failing(array(IMAGE)), NO_OUTPUT),
    ("R-175 empty", failing("[]"), NO_OUTPUT),
    ("R-175 null", failing("null"), NO_OUTPUT),
    ("R-171 error without content", '{"is_error":true,"m":1}', array(text('{"is_error":true,"m":1}'))),
    ("R-171 error with other content", failing('{"m":1}'), array(text('{"m":1}'))),
]


@pytest.mark.parametrize(("reply", "content"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_an_error_of_the_tool_stays_an_error_with_its_own_text(reply: str, content: str) -> None:
    assert (content, True) == posted(reply)


def test_an_is_error_that_is_no_boolean_is_not_taken_for_success() -> None:
    got, is_error = posted('{"is_error":"yes","content":"boom"}')
    assert is_error
    assert "no boolean" in got


def test_very_many_blocks_become_one() -> None:
    at_most, too_many = (json.dumps([1] * count) for count in (BLOCKS_MAX, BLOCKS_MAX + 1))
    assert len(blocks(read_json(at_most))) == BLOCKS_MAX
    assert [block.body for block in blocks(read_json(too_many))] == [too_many]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ('{"a":', "not valid JSON"),
        ("{} x", "more text after its JSON"),
        ("[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1), "nests deeper than 200"),
        ("[" * 100_000, "nests deeper than 200"),
        ('{"a":' * 1000 + "1" + "}" * 1000, "nests deeper than 200"),
        ("1" * 5000, "a number of 5000 digits"),
        ("[1." + "1" * 5000 + "]", "a number of 5002 digits"),
        ("NaN", "NaN is no JSON number"),
        ("[-Infinity]", "no JSON number"),
        ('"a\nb"', "not valid JSON"),
        ("<html></html>", "not valid JSON"),
    ],
    ids=["R-159 cut", "R-159 junk", "depth", "deep", "deep objects", "digits", "fraction", "NaN", "Infinity",
         "newline", "HTML"],
)  # fmt: skip
def test_json_that_cannot_be_read_is_an_error_that_says_why(reply: str, said: str) -> None:
    got, is_error = posted(reply)
    assert is_error
    assert said in got
    assert "echo" in got


def test_brackets_in_strings_are_no_depth() -> None:
    assert read_json(json.dumps("[" * 1000)).value == "[" * 1000


def test_a_string_that_never_ends_costs_no_time() -> None:
    with pytest.raises(Unreadable):
        read_json("[" * (DEPTH_MAX + 1) + '"' + '\\"' * 400_000)


def test_members_and_elements_keep_the_spelling_of_each_value() -> None:
    object_ = read_json('{ "a" : 1.10 , "b":[ 1e5 ,"x" ] , "a" : {"c": 2} }')
    assert {key: value.source for key, value in members(object_).items()} == {
        "a": '{"c": 2}',
        "b": '[ 1e5 ,"x" ]',
    }
    assert [value.source for value in elements(members(object_)["b"])] == ["1e5", '"x"']
