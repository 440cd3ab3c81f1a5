from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.console import cards
from app.console.cards import Card
from app.console.text import INLINE_CHARS_MAX
from app.core.calls import digest
from app.store import calls, tables, tools
from tests.store.rows import SECRETS, add_attachment, add_call, add_message

pytestmark = pytest.mark.anyio

HOOK = "https://tools.example/hook"
PLATFORMS = "Allowed, the platform or another client runs it; no webhook of this session does."


async def card(engine: AsyncEngine, attachment: dict[str, Any] | None = None, **values: Any) -> Card:
    """The card of one call, which the values describe."""
    async with engine.begin() as connection:
        await add_attachment(connection, **(attachment or {}))
        await add_call(connection, "tu_1", **values)
    return await read(engine)


async def read(engine: AsyncEngine) -> Card:
    async with engine.connect() as connection:
        call = await calls.get(connection, "default", "sesn_1", "tu_1")
        assert call is not None
        return (await cards.make(connection, "default", [call]))[0]


async def register(engine: AsyncEngine, *names: str) -> None:
    async with engine.begin() as connection:
        for name in names:
            await tools.put(
                connection, SECRETS, "default", name, url=f"{HOOK}/{name}?token=secret", description=None,
                policy={}, headers={},
            )  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "kind", "attachment", "leads"),
    [
        ("bash", "builtin", {}, f"Allowed, it goes to {HOOK}/bash."),
        ("bash", "builtin", {"environment": "cloud"}, PLATFORMS),
        ("bash", "builtin", {"settings": '{"tools": ["other"]}'}, PLATFORMS),
        ("read", "builtin", {}, PLATFORMS),
        ("refund", "custom", {}, f"Allowed, it goes to {HOOK}/*."),
        ("refund", "custom", {"settings": '{"tools": ["bash"]}'}, PLATFORMS),
        ("merge", "mcp", {}, "Allowed, the platform sends it to the MCP server."),
    ],
)
async def test_a_card_says_where_an_allow_leads(
    engine: AsyncEngine, tool: str, kind: str, attachment: dict[str, Any], leads: str
) -> None:
    await register(engine, "bash", "*")
    assert leads == (await card(engine, attachment, tool=tool, kind=kind)).destination


@pytest.mark.parametrize(
    ("tool", "kind", "input_", "said"),
    [
        ("bash", "builtin", {"command": "ls\nrm"}, ("Run the command", "ls …")),
        ("write", "builtin", {"content": "x", "file_path": "/a"}, ("Write the file", "/a")),
        ("bash", "builtin", {"restart": True}, ("Call bash with", "restart true")),
        ("refund", "custom", {"order": "A-1", "n": 2}, ("Call refund with", "order A-1, n 2")),
        ("merge", "mcp", {"pr": 7}, ("Call merge on an MCP server with", "pr 7")),
        ("now", "custom", {}, ("Call now", "")),
        ("sum", "custom", [1], ("Call sum", "with the input below")),
        ("put", "custom", {"x": "y" * INLINE_CHARS_MAX}, ("Call put", "with the input below")),
    ],
)
async def test_a_card_begins_with_a_sentence(
    engine: AsyncEngine, tool: str, kind: str, input_: Any, said: tuple[str, str]
) -> None:
    shown = await card(engine, tool=tool, kind=kind, input=json.dumps(input_))
    assert said == (shown.verb, shown.object)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "The agent’s own policy asks a person before this tool runs."),
        (
            {"gate_reason": "unknown_permission", "permission": "maybe"},
            "Upstream says “maybe”, which this version",
        ),
        ({"gate_by": "tool", "gate_reason": "tool_asks"}, "The tool is registered with gate: ask"),
        ({"gate_by": "tool", "gate_reason": "outcome_unknown"}, "It was delivered once and nobody knows"),
        ({"gate_reason": "of a later version"}, "It is held: of a later version."),
    ],
)
async def test_a_card_says_why_a_person_is_asked(
    engine: AsyncEngine, values: dict[str, str], reason: str
) -> None:
    assert (await card(engine, **values)).reason.startswith(reason)


async def test_a_card_shows_the_sessions_newest_messages_in_their_order(engine: AsyncEngine) -> None:
    await card(engine)
    async with engine.begin() as connection:
        for n in range(5):
            await add_message(connection, f"m_{n}", [f"word {n}"], seq=n)
    assert ["word 2", "word 3", "word 4"] == [one.text for one in (await read(engine)).messages]


async def test_a_card_says_how_long_it_is_held_and_whose_word_it_takes(engine: AsyncEngine) -> None:
    policy = {"approvers": ["ana", "bo"], "approvals_required": 2}
    async with engine.begin() as connection:
        await tools.put(
            connection, SECRETS, "default", "bash", url=HOOK, description=None, policy=policy, headers={}
        )
    shown = await card(engine, gate_on_expiry="deny", gate_expires_at=text("now() + interval '1 h'"))
    assert "It takes 2 different people to allow it, one to deny. Only ana, bo may decide." == shown.needs
    async with engine.begin() as connection:
        approval = {"id": "dec_1", "session_id": "sesn_1", "call_id": "tu_1", "result": "allow"}
        told = {"status": "approved", "decided_by": "admin", "via": "api"}
        await connection.execute(insert(tables.decisions).values(tenant="default", **approval, **told))
    later = await read(engine)
    assert later.needs.startswith("Allowed so far by the operator’s key. It takes 2")
    assert shown.version != later.version


async def test_a_card_shows_what_was_edited_and_lets_an_allow_be_about_it(engine: AsyncEngine) -> None:
    """As long as another must allow it too; its tool then gets just what the second person saw."""
    raw, edited = '{"a": 1, "b": 2, "c": true}', '{"a":1,"b":3,"c":1}'
    row = {"tenant": "default", "id": "dec_1", "session_id": "sesn_1", "call_id": "tu_1", "decided_by": "ana"}
    before = await card(engine, kind="custom", gate_by="tool", gate_reason="tool_asks", input=raw)
    assert (None, raw, True) == (before.edited, before.to_edit, before.can_be_edited)
    async with engine.begin() as connection:
        marks = await calls.waiting_marks(connection, "default", limit=1)
        approval = {"via": "api", "result": "allow", "status": "approved", "edited_input": edited}
        await connection.execute(insert(tables.decisions).values(**row, **approval))
        assert marks != await calls.waiting_marks(connection, "default", limit=1)
    after = await read(engine)
    assert (edited, before.digest) == (after.to_edit, after.digest)
    assert digest(edited.encode()) == after.digest_to_allow
    assert ({"b", "c"}, ()) == (after.changed, after.dropped)
    assert before.version != after.version
