from __future__ import annotations

import time

import pytest

from app.console.text import FIELDS_MAX, INLINE_CHARS_MAX, PAGE_CHARS, line, read_input, visible


def plain(text: str) -> str:
    return visible(text).replace('<i class="odd">', "[").replace("</i>", "]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ls -la", "ls -la"),
        ("two\nlines\n\nand a gap", "two\nlines\n\nand a gap"),
        ("größe 日本語 שלום 🙂", "größe 日本語 שלום 🙂"),
        ("<img src=x onerror=alert(1)> & \"'`", "&lt;img src=x onerror=alert(1)&gt; &amp; &#34;&#39;`"),
        ("invoice\u202egpj.exe", "invoice[U+202E]gpj.exe"),
        ("a\u200bb\u00a0c\u2066d\ufeff", "a[U+200B]b[U+00A0]c[U+2066]d[U+FEFF]"),
        ("\0\x1b[2K\x7f\u0085\u2028", "[U+0000][U+001B][2K[U+007F][U+0085][U+2028]"),
        ("a\tb\rc", "a[⇥\t]b[␍]c"),
        ("\ud800 \U000e0041 \U000e0100 \ufe0f \u3164", "[U+D800] [U+E0041] [U+E0100] [U+FE0F] [U+3164]"),
        ("ex\u0430mple.com", "ex[\u0430 U+0430]mple.com"),
        ("при\u0435м", "при\u0435м"),
        ("a" + "\n" * 301 + "b", "a\n[300 blank lines]\nb"),
        ("a\n \n\t\n \nb", "a\n[3 blank lines]\nb"),
        ("a" + " " * 500 + "b", "a[500 spaces]b"),
    ],
)
def test_what_cannot_be_seen_is_named_and_markup_is_text(text: str, shown: str) -> None:
    assert shown == plain(text)


@pytest.mark.parametrize("piece", ["x", "\n", "\n  x", "\u202e", " ", "\t\r", "&<", "a\u0430"])
def test_a_full_inbox_of_hostile_text_is_shown_in_little_time(piece: str) -> None:
    """It is made in the loop that also keeps the leases."""
    text = piece * (100 * INLINE_CHARS_MAX // len(piece))
    started = time.process_time()
    visible(text)
    assert time.process_time() - started < 2


def test_a_member_is_shown_as_it_reads_or_as_it_was_written() -> None:
    shown = read_input(
        '{"command": "ls\\nrm", "n": 12345678901234567890.10, "deep": {"a": [1, 2]}, "none": null}'
    )
    assert shown.fields is not None
    assert [
        ("command", "ls\nrm", True),
        ("n", "12345678901234567890.10", False),
        ("deep", '{"a": [1, 2]}', False),
        ("none", "null", False),
    ] == [(one.name, one.value, one.is_text) for one in shown.fields]


@pytest.mark.parametrize("raw", ['{"to": "alice", "to": "mallory"}', '{"x": {"to": 1, "to": 2}}'])
def test_a_name_that_occurs_twice_is_said_and_only_the_json_is_shown(raw: str) -> None:
    """C-069."""
    shown = read_input(raw)
    assert shown.is_ambiguous
    assert shown.fields is None


@pytest.mark.parametrize(
    "raw",
    [
        "[1, 2]",
        '"text"',
        "null",
        "",
        "{",
        '{"a": 1',
        '{"a": 1} {"b": 2}',
        '{"a" 1}',
        "{1: 2}",
        '{"a": ' + "[" * 1900 + "]" * 1900 + "}",
        '{"a": ' + "9" * 3990 + "}",
        "{" + ", ".join(f'"{n}": 1' for n in range(FIELDS_MAX + 1)) + "}",
    ],
)
def test_whatever_is_no_plain_object_is_shown_as_its_json(raw: str) -> None:
    """C-066."""
    shown = read_input(raw)
    assert raw == shown.beginning
    if shown.fields is not None:  # a number of any length is a plain member, where this Python reads it
        assert [raw[6:-1]] == [field.value for field in shown.fields]


def test_an_empty_object_has_no_members() -> None:
    assert () == read_input(" { } ").fields


def test_the_pages_of_a_long_input_are_all_of_it() -> None:
    raw = "".join(chr(32 + n % 90) for n in range(PAGE_CHARS * 3 + 7))
    shown = read_input(raw)
    assert (not shown.is_whole, 4) == (True, shown.pages)
    assert raw == "".join(shown.page(number) for number in range(1, shown.pages + 1))
    assert raw[:INLINE_CHARS_MAX] == shown.beginning


def test_a_line_says_that_something_follows() -> None:
    assert "ls" == line("ls\n", 10)
    assert "ls …" == line("ls\nrm", 10)
    assert "0123456789 …" == line("0123456789x", 10)
