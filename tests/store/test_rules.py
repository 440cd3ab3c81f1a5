"""A standing rule that answers for a person: what counts is what the store holds when it answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.calls import Gate
from app.core.notifications import EVENTS
from app.core.rules import ArgumentTest
from app.store import audit, calls, decisions, keys, rules, subscriptions
from app.store.batches import Batch, write
from app.store.rules import Draft
from tests.store.batches import MINE, a_call, column, held_by_r1
from tests.store.rows import SECRETS, add_attachment, add_call

pytestmark = pytest.mark.anyio

ALLOW = Draft("allow", tool="bash")
SMALL = (ArgumentTest("/n", "at_most", "10"),)


async def held(engine: AsyncEngine, *, input: str = '{"n":1}', **values: Any) -> None:
    async with engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu1", input=input, **({"gate_by": "tool"} | values))


async def make(engine: AsyncEngine, draft: Draft = ALLOW, by: str = "key_1") -> str:
    async with engine.begin() as connection:
        return (await rules.create(connection, "default", draft, by=by)).rule.id


async def revoke(engine: AsyncEngine, rule_id: str) -> None:
    async with engine.begin() as connection:
        assert await rules.revoke(connection, "default", rule_id, by="key_1") is not None


async def consult(engine: AsyncEngine) -> bool:
    async with engine.begin() as connection:
        return await decisions.consult(connection, "default", "sesn_1", "tu1")


async def decided(engine: AsyncEngine) -> list[tuple[str, str, str, str]]:
    shown = "result || ' ' || status || ' ' || decided_by || ' ' || via"
    return [tuple(one.split(" ")) for one in await column(engine, "decisions", shown, "decided_at")]


async def register(engine: AsyncEngine, policy: str) -> None:
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "insert into tools (tenant, name, url, policy, secrets, headers)"
                " values ('default', 'bash', 'https://tools.example', :policy, '', '')"
            ),
            {"policy": policy},
        )


async def test_an_allow_is_recorded_as_the_rules_and_its_use_is_counted(engine: AsyncEngine) -> None:
    await held(engine)
    rule_id = await make(engine)
    assert await consult(engine)
    assert not await consult(engine)
    assert [("allow", "accepted", rule_id, "rule")] == await decided(engine)
    async with engine.connect() as connection:
        (shown,) = await rules.page(connection, "default", before=None, limit=10)
        (row,) = await audit.page(connection, "default", after=None, limit=10)
    assert (1, True) == (shown.uses, shown.last_used_at is not None)
    entry = row.entry
    assert ("decision.ruled", rule_id, "rule", "tu1", "allow") == (
        entry.kind, entry.actor, entry.via, entry.call_id, entry.result
    )  # fmt: skip


async def test_a_deny_tells_the_rules_own_words_or_a_default(engine: AsyncEngine) -> None:
    await held(engine, gate_by="rule", gate_reason="rule_denies")
    await make(engine, Draft("deny", deny_message="Ask finance."))
    assert await consult(engine)
    assert ["Ask finance."] == await column(engine, "decisions", "deny_message")


@pytest.mark.parametrize("end", ["revoked", "expired", "never made", "asks", "unfit"])
async def test_without_a_live_rule_the_call_waits_for_a_person(engine: AsyncEngine, end: str) -> None:
    await held(engine, input='{"n":11}' if end == "unfit" else "{}")
    if end in ("revoked", "expired"):
        rule_id = await make(engine, Draft("allow", tool="bash", expires_in_s=60))
        if end == "revoked":
            await revoke(engine, rule_id)
        else:
            async with engine.begin() as connection:
                await connection.execute(text("update rules set expires_at = now()"))
    if end == "asks":
        await make(engine)
        await make(engine, Draft("ask", session_id="sesn_1"))
    if end == "unfit":
        await make(engine, Draft("allow", tool="bash", tests=SMALL))
    assert not await consult(engine)
    assert [] == await decided(engine)


@pytest.mark.parametrize(
    "draft",
    [
        Draft("allow", tool="other"),
        Draft("allow", tool="bash", session_id="sesn_2"),
        Draft("deny", kind="mcp"),
    ],
)
async def test_a_rule_answers_for_nothing_that_it_is_not_about(engine: AsyncEngine, draft: Draft) -> None:
    await held(engine)
    await make(engine, draft)
    assert not await consult(engine)


async def test_a_rule_of_another_tenant_is_nothing(engine: AsyncEngine) -> None:
    await held(engine)
    async with engine.begin() as connection:
        made = await rules.create(connection, "other", ALLOW, by="key_1")
        assert await rules.revoke(connection, "default", made.rule.id, by="key_1") is None
        assert await rules.get(connection, "default", made.rule.id) is None
    assert not await consult(engine)


async def test_what_a_person_decided_stands(engine: AsyncEngine) -> None:
    await held(engine)
    await make(engine)
    async with engine.begin() as connection:
        await decisions.decide(
            connection, "default", "sesn_1", "tu1", result="deny", deny_message=None, by="key_1", via="api"
        )
    assert not await consult(engine)
    assert [("deny", "accepted", "key_1", "api")] == await decided(engine)


async def test_what_upstream_refused_a_rule_is_not_answered_by_one_again(engine: AsyncEngine) -> None:
    await held(engine)
    await make(engine)
    assert await consult(engine)
    async with engine.begin() as connection:
        await connection.execute(text("update decisions set status = 'refused'"))
    assert not await consult(engine)


@pytest.mark.parametrize(
    "values",
    [
        {"state": "queued"},
        {"gate_reason": "outcome_unknown"},
        {"gate_on_expiry": "deny", "gate_expires_at": text("now() - interval '1 second'")},
    ],
)
async def test_no_rule_answers_what_is_no_persons_to_answer_or_is_another_question(
    engine: AsyncEngine, values: dict[str, Any]
) -> None:
    await held(engine, **values)
    await make(engine)
    assert not await consult(engine)


async def test_a_rule_never_stands_for_two_people(engine: AsyncEngine) -> None:
    """Four eyes stay four; a deny needs two."""
    await held(engine)
    await register(engine, '{"approvals_required":2}')
    await make(engine)
    assert not await consult(engine)
    await make(engine, Draft("deny", tool="bash"))
    assert await consult(engine)


async def test_a_rule_allows_only_what_its_maker_may(engine: AsyncEngine) -> None:
    """Named approvers are not gone round; and a key that was revoked speaks no more."""
    await held(engine)
    async with engine.begin() as connection:
        ana, _ = await keys.create(connection, "default", "ana", ["confirm"])
        ben, _ = await keys.create(connection, "default", "ben", ["confirm"])
    await register(engine, '{"approvers":["ana"]}')
    await make(engine, by=ben.id)
    assert not await consult(engine)
    anas = await make(engine, by=ana.id)
    async with engine.begin() as connection:
        await keys.revoke(connection, "default", ana.id)
    assert not await consult(engine)
    async with engine.begin() as connection:
        await connection.execute(text("update keys set revoked_at = null"))
    assert await consult(engine)
    assert [anas] == await column(engine, "decisions", "decided_by")


async def test_of_a_revocation_and_a_use_at_the_same_time_one_comes_first(engine: AsyncEngine) -> None:
    await held(engine)
    rule_id = await make(engine)
    _, used = await asyncio.gather(revoke(engine, rule_id), consult(engine))
    assert (1 if used else 0) == len(await decided(engine))
    assert [1 if used else 0] == await column(engine, "rules", "uses")


async def test_a_tenant_has_only_so_many_live_rules(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "RULES_MAX", 2)
    first = await make(engine)
    await make(engine)
    with pytest.raises(rules.TooManyRulesError):
        await make(engine)
    await revoke(engine, first)
    await make(engine)


# ---- who is told


async def subscribe(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await subscriptions.put(
            connection, SECRETS, "default", "all",
            url="https://hooks.example", events=EVENTS, headers={}, enabled=True,
        )  # fmt: skip


async def told(engine: AsyncEngine) -> list[str]:
    return [str(one) for one in await column(engine, "notifications", "type", "position")]


async def save_held(engine: AsyncEngine, rule_id: str | None, reason: str = "tool_asks") -> None:
    call = a_call("tu1", tool="bash", state="held", gate=Gate("tool", None, reason, rule=rule_id))
    async with engine.begin() as connection:
        assert await write(connection, "r1", [Batch(MINE, calls=[call])]) == set()


async def test_people_hear_of_the_decision_only_where_a_rule_answers(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    await subscribe(engine)
    await save_held(engine, await make(engine))
    assert await consult(engine)
    assert ["confirmation.decided"] == await told(engine)


async def test_people_are_told_of_a_call_once_no_rule_answers_after_all(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    await subscribe(engine)
    rule_id = await make(engine)
    await save_held(engine, rule_id)
    await revoke(engine, rule_id)
    assert not await consult(engine)
    assert not await consult(engine)
    assert ["confirmation.requested"] == await told(engine)


async def waiting(engine: AsyncEngine) -> list[str]:
    async with engine.connect() as connection:
        return [call.id for call in (await calls.waiting(connection, "default", after=0, limit=10)).items]


async def test_what_a_rule_is_about_to_answer_is_listed_only_when_it_takes_too_long(
    engine: AsyncEngine,
) -> None:
    await held_by_r1(engine, MINE)
    rule_id = await make(engine)
    await save_held(engine, rule_id)
    assert [] == await waiting(engine)
    async with engine.begin() as connection:
        late = text("update calls set updated_at = now() - make_interval(secs => :seconds)")
        await connection.execute(late, {"seconds": calls.RULE_S})
    assert ["tu1"] == await waiting(engine)
    await revoke(engine, rule_id)
    assert not await consult(engine)
    assert ["tu1"] == await waiting(engine)


async def test_a_call_that_a_rule_holds_for_a_person_is_told_at_once(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    await subscribe(engine)
    await save_held(engine, "rul_1", "rule_asks")
    assert ["confirmation.requested"] == await told(engine)
    assert not await consult(engine)
    async with engine.connect() as connection:
        shown = await calls.get(connection, "default", "sesn_1", "tu1")
    assert shown is not None and shown.gate is not None
    assert "rul_1" == shown.gate.rule
