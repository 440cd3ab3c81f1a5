"""What docs/receiving-webhooks.md says word for word is what the agent gets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.core.tools import Tool
from app.webhooks.reply import read_reply

GUIDE = (Path(__file__).parents[2] / "docs" / "receiving-webhooks.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| (\d{3})(?: `([^`]+)`)? \| (?:`([^`]+)` )?\| (error: )?`([^`]+)` \|$", re.MULTILINE)
ROWS = _ROW.findall(GUIDE)


@pytest.mark.parametrize(("status", "kind", "body", "error", "text"), ROWS)
def test_a_reply_of_the_guide_becomes_what_it_says(
    status: str, kind: str, body: str, error: str, text: str
) -> None:
    tool = Tool("lookup_order", "https://tools.example/lookup")
    reply = read_reply(int(status), {"content-type": kind} if kind else {}, body.encode(), tool)
    assert json.loads(reply.result.content) == [{"type": "text", "text": text}]
    assert reply.result.is_error is bool(error)


def test_every_row_of_the_guides_table_is_tried() -> None:
    table = GUIDE.partition("| status, type | body | the agent gets |")[2].partition("\n\n")[0]
    assert len(ROWS) == len(table.strip().splitlines()) - 1
