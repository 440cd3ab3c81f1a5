from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.core.notifications import EVENTS, encode, link

GUIDE = (Path(__file__).parents[2] / "docs" / "notifications.md").read_text(encoding="utf-8")


def test_the_guide_lists_just_the_events_there_are() -> None:
    assert EVENTS == set(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|", GUIDE, re.MULTILINE))


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"session_id": "s", "call_id": "a/b?#", "tool": "t"}, "/sessions/s/calls/a%2Fb%3F%23"),
        ({"session_id": "s", "flag": "f"}, "/sessions/s"),
        ({"tool": "a b/../é"}, "/tools/a%20b%2F..%2F%C3%A9"),
        ({}, ""),
    ],
)
def test_a_link_leads_to_what_it_is_about_and_nowhere_else(data: dict[str, str], path: str) -> None:
    assert "https://bridge.example/console" + path == link("https://bridge.example", data)


def test_any_name_can_be_stored_and_sent() -> None:
    text = encode({"tool": "a\0b\ud800é"})
    text.encode()
    assert "\0" not in text
    assert {"tool": "a\0b?é"} == json.loads(text)
