"""Standing rules as stored: made, listed, revoked, and used to answer for a person.

A rule never changes, it only ends. It stays on record after that, for the audit names it. Every change raises
the registry's version, so that runs hear of it; whether a rule still lives counts when it answers.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, cast

import msgspec
from sqlalchemy import ColumnElement, Row, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.events import Kind
from app.core.rules import ArgumentTest, Effect, Rule, ruling
from app.store import tables
from app.store.approvals import entitled
from app.store.audit import Entry
from app.store.calls import CallView
from app.store.tools import raise_version

RULES_MAX: Final = 500
"""Live ones of one tenant: each call is held against all of them."""
EXPIRES_IN_S_MAX: Final = 366 * 86_400

_rules = tables.rules


@dataclass(frozen=True, slots=True)
class Draft:
    """A rule to be made, as `app.core.rules.Rule` has it; `expires_in_s` None: it lives until it is revoked.

    `note` says for people what it is for.
    """

    effect: Effect
    tool: str | None = None
    kind: Kind | None = None
    session_id: str | None = None
    tests: tuple[ArgumentTest, ...] = ()
    only: frozenset[str] | None = None
    deny_message: str | None = None
    note: str | None = None
    expires_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class RuleView:
    """A rule as listed, who made it and what it did. `is_live` is by the database's time."""

    rule: Rule
    note: str | None
    position: int
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    revoked_by: str | None
    uses: int
    last_used_at: datetime | None
    is_live: bool


class TooManyRulesError(Exception):
    """The tenant has `RULES_MAX` live rules."""


async def create(connection: AsyncConnection, tenant: str, draft: Draft, *, by: str) -> RuleView:
    """Make a rule; `by` is the id of a key.

    Raises:
        TooManyRulesError: it would be one too many.
    """
    await raise_version(connection, tenant)  # first: its lock puts those that are counted in order
    live = select(func.count()).where(_rules.c.tenant == tenant, _is_live())
    if (await connection.scalar(live) or 0) >= RULES_MAX:
        raise TooManyRulesError
    made = insert(_rules).values(
        tenant=tenant, id="rul_" + secrets.token_hex(12), created_by=by,
        effect=draft.effect, tool=draft.tool, kind=draft.kind, session_id=draft.session_id,
        tests=msgspec.json.encode(draft.tests).decode(),
        only=None if draft.only is None else sorted(draft.only),
        deny_message=draft.deny_message, note=draft.note,
        expires_at=None if draft.expires_in_s is None else func.now() + _seconds(draft.expires_in_s),
    )  # fmt: skip
    return _view((await connection.execute(made.returning(_rules, _is_live().label("is_live")))).one())


async def revoke(
    connection: AsyncConnection, tenant: str, rule_id: str, *, by: str, only_own: bool = False
) -> tuple[RuleView, bool] | None:
    """End a rule; return it, and whether this did it: one that is over stays as it is.

    None: there is none, or with `only_own` none that the key `by` has made.
    """
    row = (await connection.execute(_one(tenant, rule_id).with_for_update())).one_or_none()
    if row is None or (only_own and row.created_by != by):
        return None
    if not row.is_live:
        return _view(row), False
    is_it = (_rules.c.tenant == tenant, _rules.c.id == rule_id)
    await connection.execute(update(_rules).where(*is_it).values(revoked_at=func.now(), revoked_by=by))
    await raise_version(connection, tenant)
    return _view((await connection.execute(_one(tenant, rule_id))).one()), True


def entry(
    tenant: str, kind: Literal["rule.created", "rule.revoked"], one: RuleView, by: str, via: str
) -> Entry:
    """What the audit says of a change of the rules."""
    rule = one.rule
    return Entry(
        tenant, kind, by, via, rule.session_id, subject=rule.tool, result=rule.effect, detail=rule.id
    )


async def get(connection: AsyncConnection, tenant: str, rule_id: str) -> RuleView | None:
    row = (await connection.execute(_one(tenant, rule_id))).one_or_none()
    return None if row is None else _view(row)


async def page(
    connection: AsyncConnection,
    tenant: str,
    *,
    before: int | None,
    limit: int,
    has_ended: bool = False,
) -> list[RuleView]:
    """Return rules, newest first, from the one made before the position `before` on; live ones, or all."""
    query = select(_rules, _is_live().label("is_live")).where(_rules.c.tenant == tenant)
    if before is not None:
        query = query.where(_rules.c.position < before)
    if not has_ended:
        query = query.where(_is_live())
    rows = await connection.execute(query.order_by(_rules.c.position.desc()).limit(limit))
    return [_view(row) for row in rows]


async def live(connection: AsyncConnection, tenant: str) -> tuple[tuple[Rule, ...], float | None]:
    """Return the live rules, oldest first, and in how many seconds the next one of them expires."""
    left_s = func.extract("epoch", _rules.c.expires_at - func.now()).label("left_s")
    query = select(_rules, left_s).where(_rules.c.tenant == tenant, _is_live()).order_by(_rules.c.position)
    rows = (await connection.execute(query)).all()
    lefts = [float(row.left_s) for row in rows if row.left_s is not None]
    return tuple(_rule(row) for row in rows), min(lefts, default=None)


async def use(connection: AsyncConnection, tenant: str, call: CallView) -> Rule | None:
    """Return the rule that answers for a person on a held call, with its use counted; None if none does.

    A rule allows only what whoever made it may allow alone: never a call that takes two people.
    """
    about = or_(_rules.c.session_id.is_(None), _rules.c.session_id == call.session_id)
    named = or_(_rules.c.tool.is_(None), _rules.c.tool == call.tool)
    query = select(_rules).where(_rules.c.tenant == tenant, _is_live(), about, named)
    rows = (await connection.execute(query.order_by(_rules.c.position))).all()
    able = [row for row in rows if row.effect != "allow" or await _may_allow(connection, tenant, call, row)]
    kind = cast("Kind", call.kind)
    rule = ruling([_rule(row) for row in able], kind, call.tool, call.input.encode())
    if rule is None or rule.effect == "ask":
        return None
    used = (
        update(_rules)
        .where(_rules.c.tenant == tenant, _rules.c.id == rule.id, _is_live())
        .values(uses=_rules.c.uses + 1, last_used_at=func.now())
        .returning(_rules.c.id)
    )
    return rule if await connection.scalar(used) is not None else None


async def _may_allow(connection: AsyncConnection, tenant: str, call: CallView, row: Row[Any]) -> bool:
    assert call.gate is not None, "a held call has a gate"
    needed = call.gate.rules
    if needed.approvals_required > 1:
        return False
    if needed.approvers is None:
        return True
    is_named, _ = await entitled(connection, tenant, needed, row.created_by, [])
    keys = tables.keys
    is_revoked = select(keys.c.id).where(
        keys.c.tenant == tenant, keys.c.id == row.created_by, keys.c.revoked_at.is_not(None)
    )
    return is_named and await connection.scalar(is_revoked) is None


def _is_live() -> ColumnElement[bool]:
    is_in_time = or_(_rules.c.expires_at.is_(None), _rules.c.expires_at > func.now())
    return _rules.c.revoked_at.is_(None) & is_in_time


def _seconds(count: float) -> Any:
    return func.make_interval(0, 0, 0, 0, 0, 0, count)


def _one(tenant: str, rule_id: str) -> Any:
    query = select(_rules, _is_live().label("is_live"))
    return query.where(_rules.c.tenant == tenant, _rules.c.id == rule_id)


def _rule(row: Row[Any]) -> Rule:
    return Rule(
        id=row.id, effect=row.effect, tool=row.tool, kind=row.kind, session_id=row.session_id,
        tests=tuple(msgspec.json.decode(row.tests, type=list[ArgumentTest])),
        only=None if row.only is None else frozenset(row.only),
        deny_message=row.deny_message,
    )  # fmt: skip


def _view(row: Row[Any]) -> RuleView:
    return RuleView(
        rule=_rule(row), note=row.note, position=row.position, created_by=row.created_by,
        created_at=row.created_at, expires_at=row.expires_at, revoked_at=row.revoked_at,
        revoked_by=row.revoked_by, uses=row.uses, last_used_at=row.last_used_at, is_live=row.is_live,
    )  # fmt: skip
