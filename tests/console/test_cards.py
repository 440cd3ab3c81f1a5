from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import event, insert, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.console import cards
from app.console.cards import Card
from app.console.text import INLINE_CHARS_MAX
from app.core.calls import digest
from app.store import audit, calls, decisions, keys, tables, tools
from app.store.audit import Entry
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


async def decided(engine: AsyncEngine, call_id: str, result: Any, by: str, **values: Any) -> None:
    """Add a call and let somebody decide on it."""
    values = {"input": '{"command": "other"}', "gate_by": "tool"} | values
    message, edited = values.pop("deny_message", None), values.pop("edited_input", None)
    async with engine.begin() as connection:
        await add_call(connection, call_id, **values)
        given = {"result": result, "deny_message": message, "by": by, "via": "console"}
        given["edited_input"] = edited
        done = await decisions.decide(connection, "default", "sesn_1", call_id, **given)
        assert isinstance(done, decisions.Recorded)


async def person(engine: AsyncEngine, name: str) -> str:
    async with engine.begin() as connection:
        key, _ = await keys.create(connection, "default", name, ["confirm"])
    return key.id


async def test_a_card_tells_how_the_last_calls_of_its_tool_were_decided(engine: AsyncEngine) -> None:
    """Five of them, the newest first, by name; and no others'."""
    ana, ben = await person(engine, "Ana"), await person(engine, "Ben")
    assert ([], None) == ((shown := await card(engine)).last, shown.same)
    await decided(engine, "tu_2", "deny", ben)
    for n in range(3, 6):
        await decided(engine, f"tu_{n}", "allow", ben)
    await decided(engine, "tu_6", "deny", "admin", deny_message="Use the replica.\nAlways.")
    await decided(engine, "tu_7", "allow", ana)
    await decided(engine, "tu_8", "deny", ben, tool="refund")
    shown = await read(engine)
    assert "The last 5 of this tool: 4 allowed, 1 denied" == shown.tally
    assert "Use the replica. …" == shown.deny_reason
    assert ["Ana", "the operator’s key", "Ben", "Ben", "Ben"] == [one.by for one in shown.last]
    assert shown.same is None


async def test_a_card_tells_of_an_allow_of_the_same_input_that_another_one_ran(engine: AsyncEngine) -> None:
    same = (await card(engine)).call.input
    ben = await person(engine, "Ben")
    await decided(engine, "tu_2", "allow", ben, input=same, kind="custom", edited_input='{"command":"true"}')
    shown = await read(engine)
    assert shown.same is not None
    assert ("allow", True) == (shown.same.result, shown.same.is_edited)


async def test_a_card_tells_what_became_of_the_very_same_input(engine: AsyncEngine) -> None:
    """However long ago, and only for the same tool."""
    ben = await person(engine, "Ben")
    same = (await card(engine)).call.input
    await decided(engine, "tu_2", "deny", ben, input=same)
    for n in range(3, 10):
        await decided(engine, f"tu_{n}", "allow", ben)
    await decided(engine, "tu_10", "allow", ben, input=same, tool="refund")
    shown = await read(engine)
    assert shown.same is not None
    assert ("deny", "Ben", "") == (shown.same.result, shown.same.by, shown.deny_reason)
    assert "The last 5 of this tool: 5 allowed" == shown.tally


async def test_what_upstream_refused_and_what_time_or_a_policy_decided_is_no_precedent(
    engine: AsyncEngine,
) -> None:
    await card(engine)
    await decided(engine, "tu_2", "allow", "admin", gate_by="upstream")
    async with engine.begin() as connection:
        await connection.execute(text("update decisions set status = 'refused'"))
        over = {"gate_on_expiry": "deny", "gate_expires_at": text("now() - interval '1 s'")}
        await add_call(connection, "tu_3", **over)
        assert await decisions.expire(connection, "default", "sesn_1", "tu_3")
        seen = [Entry("default", "decision.seen", "upstream", via, "sesn_1", "tu_2", result="deny")
                for via in ("policy", "stream")]  # fmt: skip
        await audit.append(connection, seen)
    shown = await read(engine)
    assert "The last one of this tool was denied" == shown.tally
    assert ["another client or the vendor's console"] == [one.by for one in shown.last]


async def test_another_tenants_decisions_are_no_precedent(engine: AsyncEngine) -> None:
    await card(engine)
    async with engine.begin() as connection:
        await add_attachment(connection, "other")
        await add_call(connection, "tu_2", "other", gate_by="tool")
        given: dict[str, Any] = {"result": "allow", "deny_message": None, "by": "admin", "via": "api"}
        await decisions.decide(connection, "other", "sesn_1", "tu_2", **given)
    shown = await read(engine)
    assert ([], None) == (shown.last, shown.same)


async def test_many_cards_ask_the_database_no_more_than_one(engine: AsyncEngine) -> None:
    async def asked(count: int) -> int:
        async with engine.connect() as connection:
            found = (await calls.waiting(connection, "default", after=0, limit=count)).items
            assert len(found) == count
            statements: list[str] = []

            def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
                statements.append(statement)

            event.listen(engine.sync_engine, "before_cursor_execute", note)
            try:
                await cards.make(connection, "default", found)
            finally:
                event.remove(engine.sync_engine, "before_cursor_execute", note)
        return len(statements)

    await card(engine)
    async with engine.begin() as connection:
        for n in range(40):
            await add_call(connection, f"more_{n}", tool=f"tool_{n % 7}", input=f'{{"n": {n}}}')
    assert await asked(1) == await asked(41)


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
