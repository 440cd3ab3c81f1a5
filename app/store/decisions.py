"""Decisions: one person's allow or deny of a held call, of which the first one counts; and its expiry.

One transaction checks and writes. It locks the attachment, then the call, so that neither a second decision
nor the runner's own step can come between, and a partial unique index lets one decision per call stand. A
call that expires gets a deny in the same way. Both go by the moment at which their transaction began, by the
database's time: a person's decision counts before the moment at which the call expires, never after it.

An allow may carry an edited input, which runs in the place of the call's own and is stored beside it. It is
part of what was decided: the same allow with another input is contrary to it. Where two must allow, both
allow the same input: while an approval stands, another person's allow of anything else is refused, for what
runs would have one approval only. Who alone has approved may approve another input, which takes its place.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

import msgspec
from sqlalchemy import func, insert, literal_column, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.calls import END_STATES, digest
from app.core.edits import EditRefused, is_editable, read_edit
from app.core.events import Kind as CallKind
from app.core.inputs import misfit
from app.core.notifications import Event, decision_data
from app.core.rules import ASKING, VIA, like
from app.core.schemas import SchemaRefused
from app.core.strict_json import Unreadable
from app.core.tools import AGENT_SCHEMA, CATCH_ALL, registration_of
from app.store import attachments, audit, calls, outbox, rules, tables
from app.store.approvals import entitled
from app.store.audit import Entry, Kind
from app.store.calls import CallView
from app.store.rules import RuleView
from app.store.wakeups import notify, session_key, wish_key

WANTED_MAX: Final = 32
"""So many unknown calls are looked for at once in one session; a further one pushes out the oldest."""

DEFAULT_DENY_MESSAGE: Final = "Declined by a reviewer. Do not retry without new instructions."
DENY_MESSAGE_CHARS_MAX: Final = 10_000
EXPIRY_MESSAGE: Final = "Nobody decided on this call in time. Do not retry without new instructions."
"""Told to the agent when a call expired."""
EXPIRY: Final = "expiry"
"""Who and what decided then."""
RULE_MESSAGE: Final = "calls like this one are not allowed"
"""Told to the agent when a rule denies that has no words of its own."""
REMEMBERED_S: Final = 3_600.0
REMEMBERED_S_MAX: Final = 86_400.0
"""How long a rule may live that was made of an allow."""
EXPIRY_AGAIN_S: Final = 300.0
"""When upstream refused the deny of a call that expired, it is tried again so much later."""
SHOWN_MS_MAX: Final = 2**31 - 1

_UNAUDITED: Final = ("session_not_found", "call_not_found")
"""There is no call that such an attempt was about; any id could fill the audit."""

RefusalCode = Literal[
    "session_not_found",
    "session_ended",
    "not_attached",
    "call_not_found",
    "input_changed",
    "already_decided",
    "call_over",
    "not_awaiting_confirmation",
    "expired",
    "not_an_approver",
    "not_editable",
    "input_unfit",
    "approved_otherwise",
    "rule_unfit",
    "tool_changed",
]


@dataclass(frozen=True, slots=True)
class Refused:
    """The decision was not recorded, and why: a code of `app.api.problems`, and the call if there is one.

    `why` are lines that say where an edited input is unfit, of `input_unfit`, or why no rule can be made of
    the call, of `rule_unfit`; `edited` is the digest of one that came too late.
    """

    code: RefusalCode
    call: CallView | None = None
    why: str | None = None
    edited: str | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The decision stands; `is_new` is False when the same one stood already.

    `edited` is the digest of the input that it puts in the place of the call's, None for that itself. `rule`
    is the one that was made of it.
    """

    decision_id: str
    is_new: bool
    call: CallView
    edited: str | None = None
    rule: RuleView | None = None


@dataclass(frozen=True, slots=True)
class Remember:
    """With an allow: make a rule that allows calls like this one for its session.

    `same` names the arguments whose values must be this call's; None means all. Others that this call has
    may vary, and none may be added. The rule lives for `expires_in_s`.
    """

    same: tuple[str, ...] | None = None
    expires_in_s: float = REMEMBERED_S


@dataclass(frozen=True, slots=True)
class Approved:
    """One approval of several is recorded, or was by the same key before; the call waits for another.

    `edited` is as that of `Recorded`.
    """

    decision_id: str
    is_new: bool
    call: CallView
    edited: str | None = None


async def decide(
    connection: AsyncConnection,
    tenant: str,
    session_id: str,
    call_id: str,
    *,
    result: Literal["allow", "deny"],
    deny_message: str | None,
    by: str,
    via: str,
    input_digest: str | None = None,
    edited_input: str | None = None,
    shown_ms: int | None = None,
    remember: Remember | None = None,
    tool_version: int | None = None,
) -> Recorded | Approved | Refused:
    """Record a decision on a held call, unless one stands already; the attempt goes into the audit.

    `deny_message` goes with a deny; when it is blank the default sentence is stored. `input_digest` is that
    of the input that the person saw, `shown_ms` for how long, `tool_version` that of the registration to
    which an allow led then. `edited_input` goes with an allow: the JSON text of the object that shall run
    instead; one that says the same as the call's input is none. An allow
    without it whose `input_digest` names an edited input that was approved allows that. The call stays
    `held`: its runner is told, and moves it. `remember` goes with an allow of the agent's own input. The
    transaction shall lock nothing more afterwards.

    Raises:
        TooManyRulesError: nothing is recorded if the transaction ends so.
    """
    done = await _record(
        connection, tenant, session_id, call_id, result=result, deny_message=deny_message, by=by, via=via,
        input_digest=input_digest, edited_input=edited_input, remember=remember, tool_version=tool_version,
    )  # fmt: skip
    entries: list[Entry] = []
    if remember is not None and isinstance(done, Recorded) and done.is_new:
        made = await rules.create(connection, tenant, _draft(done.call, remember), by=by)
        done = replace(done, rule=made)
        entries.append(rules.entry(tenant, "rule.created", made, by, via))
    if not isinstance(done, Refused) or done.code not in _UNAUDITED:
        kind, decision_id, detail = _audited(done)
        attempt = Entry(
            tenant, kind, by, via, session_id, call_id,
            subject=None if done.call is None else done.call.tool,
            input_digest=None if done.call is None else digest(done.call.input.encode()),
            decision_id=decision_id, result=result, detail=detail, shown_ms=shown_ms,
        )  # fmt: skip
        await audit.append(connection, [attempt, *entries])
    return done


def _draft(call: CallView, remember: Remember) -> rules.Draft:
    tests, only = like(call.input.encode(), remember.same)
    return rules.Draft(
        "allow", call.tool, cast("CallKind", call.kind), call.session_id, tests, only,
        note=f"Made of {call.id}", expires_in_s=remember.expires_in_s,
    )  # fmt: skip


def _audited(done: Recorded | Approved | Refused) -> tuple[Kind, str | None, str | None]:
    """What the audit says of an attempt: its kind, the decision that counts, and a code."""
    edited = None if done.edited is None else f"edited {done.edited}"
    if isinstance(done, Recorded | Approved):
        new: Kind = "decision.recorded" if isinstance(done, Recorded) else "decision.approved"
        return (new if done.is_new else "decision.repeated"), done.decision_id, edited
    standing = done.call.decision.id if done.call is not None and done.call.decision is not None else None
    if done.code == "already_decided":
        return "decision.contrary", standing, edited
    return "decision.rejected", standing, done.code


async def _record(
    connection: AsyncConnection,
    tenant: str,
    session_id: str,
    call_id: str,
    *,
    result: Literal["allow", "deny"],
    deny_message: str | None,
    by: str,
    via: str,
    input_digest: str | None,
    edited_input: str | None,
    remember: Remember | None,
    tool_version: int | None,
) -> Recorded | Approved | Refused:
    attachment = await attachments.lock(connection, tenant, session_id)
    if attachment is None:
        return Refused("session_not_found")
    if attachment.status in attachments.NOT_ATTACHED:
        is_over = attachment.end_reason in attachments.OVER_FOR_GOOD
        return Refused("session_ended" if is_over else "not_attached")
    call = await _lock_call(connection, tenant, session_id, call_id)
    if call is None:
        return Refused("call_not_found")
    edited = _approved_by(call, input_digest) if result == "allow" else None
    shown = (None, digest(call.input.encode()), _digest_of(call.edited_input))
    if edited is None and input_digest not in shown:
        return Refused("input_changed", call)
    if edited_input is not None:
        kind, gate = cast("CallKind", call.kind), call.gate
        if not is_editable(kind, *((gate.by, gate.reason) if gate is not None else (None, None))):
            return Refused("not_editable", call)
        try:
            edited = read_edit(edited_input, call.input.encode())
        except EditRefused as error:
            return Refused("input_unfit", call, str(error))
    named = None if edited is None else digest(edited)
    if call.decision is not None and call.decision.status != "refused":
        if call.decision.via == EXPIRY:
            return Refused("expired", call)
        if call.decision.result == result and _digest_of(call.decision.edited_input) == named:
            return Recorded(call.decision.id, is_new=False, call=call, edited=named)
        return Refused("already_decided", call, edited=named)
    if call.state in END_STATES:
        return Refused("call_over", call)
    if call.state != "held":
        return Refused("not_awaiting_confirmation", call)
    if _is_expired(call):
        return Refused("expired", call)
    assert call.gate is not None, "a held call has a gate"
    earlier = {approval.by: approval.id for approval in call.gate.approvals}
    needed = call.gate.rules
    if result == "allow" and tool_version not in (None, needed.version):
        return Refused("tool_changed", call)
    may_decide, others = await entitled(connection, tenant, needed, by, list(earlier))
    if not may_decide:
        return Refused("not_an_approver", call)
    if result == "deny":
        message = deny_message or DEFAULT_DENY_MESSAGE
        decision_id = await _insert(connection, tenant, call, result, by, via, message)
        return Recorded(decision_id, is_new=True, call=call)
    if remember is not None and (why := _unrememberable(call, edited, remember)) is not None:
        return Refused("rule_unfit", call, why)
    # Who allowed it when the tool was another one has not allowed this.
    outdated = {one.by for one in call.gate.approvals if one.tool_version not in (None, needed.version)}
    others -= outdated
    approved = {approval.by: _digest_of(approval.edited_input) for approval in call.gate.approvals}
    if any(approved[other] != named for other in others):
        return Refused("approved_otherwise", call)
    if edited is not None and (why := await _misfit(connection, tenant, call, edited)) is not None:
        return Refused("input_unfit", call, why)
    if len(others) + 1 >= needed.approvals_required:
        decision_id = await _insert(connection, tenant, call, result, by, via, None, edited)
        return Recorded(decision_id, is_new=True, call=call, edited=named)
    if by in earlier and by not in outdated and approved[by] == named:
        return Approved(earlier[by], is_new=False, call=call, edited=named)
    if by in earlier:
        await _withdraw(connection, tenant, earlier[by])
    approval_id = await _approve(connection, tenant, call, by, via, edited)
    return Approved(approval_id, is_new=True, call=call, edited=named)


def _unrememberable(call: CallView, edited: bytes | None, remember: Remember) -> str | None:
    """Why no rule can be made of an allow, in a sentence; None if one can."""
    if edited is not None:
        return "The input was edited; a rule is made of the agent's own."
    if call.gate is not None and call.gate.rules.approvals_required > 1:
        return "It takes two people to allow calls of this tool, and a rule stands for one."
    if call.gate is not None and call.gate.reason == "outcome_unknown":
        return "No rule answers for calls whose outcome is unknown."
    try:
        _draft(call, remember)
    except KeyError as error:
        return f"The input has no argument {error.args[0]!r}; name those that it has."
    except Unreadable as error:
        return f"The input cannot be compared: {error}."
    return None


def _approved_by(call: CallView, input_digest: str | None) -> bytes | None:
    """The edited input of this digest that was approved on the call, or decided."""
    given = [] if call.gate is None else [approval.edited_input for approval in call.gate.approvals]
    if call.decision is not None and call.decision.status != "refused":
        given = [call.decision.edited_input]
    known = {digest(one.encode()): one.encode() for one in given if one is not None}
    return known.get(input_digest or "")


def _digest_of(text: str | None) -> str | None:
    return None if text is None else digest(text.encode())


async def _misfit(
    connection: AsyncConnection, tenant: str, call: CallView, edited_input: bytes
) -> str | None:
    """Why an input does not fit the schema that the call's tool is registered with; None if it does.

    The schema with which an agent declares its tool is not known here: the runner checks by that.
    """
    tools = tables.tools
    names = {call.tool, CATCH_ALL}
    query = select(tools.c.name, tools.c.policy).where(tools.c.tenant == tenant, tools.c.name.in_(names))
    policies = {row.name: row.policy for row in await connection.execute(query)}
    policy = policies.get(registration_of(policies, cast("CallKind", call.kind), call.tool) or "")
    schema: Any = None if policy is None else msgspec.json.decode(policy).get("input_schema")
    if schema is None or schema == AGENT_SCHEMA:
        return None
    try:
        return misfit(msgspec.json.encode(schema).decode(), edited_input)
    except SchemaRefused:
        return "The tool's schema cannot be used; its operator must register it again."


async def _withdraw(connection: AsyncConnection, tenant: str, approval_id: str) -> None:
    """Let an approval count no more, whose key approves another input now."""
    table = tables.decisions
    is_it = (table.c.tenant == tenant) & (table.c.id == approval_id)
    await connection.execute(update(table).where(is_it).values(status="spent"))


async def _touch(connection: AsyncConnection, tenant: str, call: CallView) -> None:
    """Number the change of a call whose decisions changed; the attachment is locked."""
    table = tables.calls
    is_it = (table.c.tenant == tenant, table.c.session_id == call.session_id, table.c.id == call.id)
    await connection.execute(update(table).where(*is_it).values(change=tables.changes.next_value()))


async def _approve(
    connection: AsyncConnection, tenant: str, call: CallView, by: str, via: str, edited_input: bytes | None
) -> str:
    """Record an allow that waits for another one, for whoever looks at the call."""
    approval_id = "dec_" + secrets.token_hex(12)
    row: dict[str, Any] = {"session_id": call.session_id, "call_id": call.id}
    row |= {"result": "allow", "status": "approved", "tool_version": call.gate and call.gate.rules.version}
    if edited_input is not None:
        row["edited_input"] = edited_input.decode()
    await connection.execute(
        insert(tables.decisions).values(tenant=tenant, id=approval_id, decided_by=by, via=via, **row)
    )
    await _touch(connection, tenant, call)
    await notify(connection, [session_key(tenant, call.session_id)])
    return approval_id


async def consult(connection: AsyncConnection, tenant: str, session_id: str, call_id: str) -> bool:
    """Let a standing rule answer for a person on a held call, unless somebody decided; return whether it did.

    Where none does, people are told of the call if they were not. No rule answers whether a delivery whose
    outcome is unknown shall be repeated, nor again where upstream refused a rule's answer. The transaction
    shall lock nothing more afterwards.
    """
    attachment = await attachments.lock(connection, tenant, session_id)
    if attachment is None or attachment.status in attachments.NOT_ATTACHED:
        return False
    call = await _lock_call(connection, tenant, session_id, call_id)
    if call is None or call.state != "held" or call.gate is None or _is_expired(call):
        return False
    has_answered = call.decision is not None and call.decision.via == VIA
    if call.decision is not None and call.decision.status != "refused":
        return False
    is_open = call.gate.reason != "outcome_unknown" and not has_answered
    rule = await rules.use(connection, tenant, call) if is_open else None
    if rule is None:
        await _leave_to_people(connection, tenant, call)
        return False
    result: Literal["allow", "deny"] = "deny" if rule.effect == "deny" else "allow"
    message = (rule.deny_message or RULE_MESSAGE) if result == "deny" else None
    decision_id = await _insert(connection, tenant, call, result, rule.id, VIA, message)
    entry = Entry(
        tenant, "decision.ruled", rule.id, VIA, session_id, call_id, call.tool,
        digest(call.input.encode()), decision_id=decision_id, result=result,
    )  # fmt: skip
    await audit.append(connection, [entry])
    return True


async def _leave_to_people(connection: AsyncConnection, tenant: str, call: CallView) -> None:
    """Tell of a held call of which nobody was told, as a rule was about to answer."""
    table = tables.calls
    is_it = (table.c.tenant == tenant, table.c.session_id == call.session_id, table.c.id == call.id)
    is_promised = (table.c.gate_rule.is_not(None), table.c.gate_reason.not_in(ASKING))
    promised = (
        update(table)
        .where(*is_it, *is_promised)
        .values(gate_rule=None, updated_at=func.now(), change=tables.changes.next_value())
    )
    if (await connection.execute(promised)).rowcount:
        await outbox.put(
            connection, tenant, "confirmation.requested", outbox.of_view(call), since=call.created_at
        )
        await notify(connection, [session_key(tenant, call.session_id)])


async def due(connection: AsyncConnection, replica_id: str, limit: int) -> list[tuple[str, str, str]]:
    """Return calls of the replica's sessions to `expire`: tenant, session and call, the longest due first."""
    rows = await connection.execute(_DUE, {"replica": replica_id, "again_s": EXPIRY_AGAIN_S, "limit": limit})
    return [(row.tenant, row.session_id, row.id) for row in rows]


async def expire(connection: AsyncConnection, tenant: str, session_id: str, call_id: str) -> bool:
    """Deny a held call whose time is over, unless somebody decided; return whether this did it.

    The transaction shall lock nothing more afterwards.
    """
    attachment = await attachments.lock(connection, tenant, session_id)
    if attachment is None or attachment.status in attachments.NOT_ATTACHED:
        return False
    call = await _lock_call(connection, tenant, session_id, call_id)
    if call is None or call.state != "held" or not _is_expired(call):
        return False
    if call.decision is not None and call.decision.status != "refused":
        return False
    decision_id = await _insert(connection, tenant, call, "deny", EXPIRY, EXPIRY, EXPIRY_MESSAGE)
    entry = Entry(
        tenant, "decision.expired", EXPIRY, EXPIRY, session_id, call_id, call.tool,
        digest(call.input.encode()), decision_id=decision_id, result="deny",
    )  # fmt: skip
    await audit.append(connection, [entry])
    return True


_DUE: Final = text(
    """
    select c.tenant, c.session_id, c.id from calls c
    join attachments a on a.tenant = c.tenant and a.session_id = c.session_id
    where c.state = 'held' and c.gate_on_expiry = 'deny' and c.gate_expires_at <= now()
        and a.replica_id = :replica and a.status not in ('ended', 'detached')
        and not exists (
            select from decisions d
            where d.tenant = c.tenant and d.session_id = c.session_id and d.call_id = c.id
                and (d.status in ('accepted', 'sending')
                    or d.via = 'expiry' and d.decided_at > now() - make_interval(secs => :again_s))
        )
    order by c.gate_expires_at limit :limit
    """
)


def _is_expired(call: CallView) -> bool:
    return call.gate is not None and call.gate.is_overdue and call.gate.on_expiry == "deny"


async def _lock_call(
    connection: AsyncConnection, tenant: str, session_id: str, call_id: str
) -> CallView | None:
    rows = tables.calls
    await connection.execute(
        select(rows.c.id)
        .where(rows.c.tenant == tenant, rows.c.session_id == session_id, rows.c.id == call_id)
        .with_for_update(key_share=True)
    )
    return await calls.get(connection, tenant, session_id, call_id)


async def _insert(
    connection: AsyncConnection,
    tenant: str,
    call: CallView,
    result: str,
    by: str,
    via: str,
    deny_message: str | None,
    edited_input: bytes | None = None,
) -> str:
    """Let a decision stand, tell the session's runner, and return its id."""
    decision_id = "dec_" + secrets.token_hex(12)
    by_upstream = call.gate is not None and call.gate.by == "upstream"
    status_now = "sending" if by_upstream else "accepted"
    table, session_id = tables.attachments, call.session_id
    await connection.execute(
        insert(tables.decisions).values(
            tenant=tenant,
            id=decision_id,
            session_id=session_id,
            call_id=call.id,
            result=result,
            status=status_now,
            decided_by=by,
            via=via,
            deny_message=deny_message,
            edited_input=edited_input and edited_input.decode(),
            tool_version=call.gate and call.gate.rules.version,
        )
    )
    await _touch(connection, tenant, call)
    asked = await connection.scalar(
        update(table)
        .where(table.c.tenant == tenant, table.c.session_id == session_id)
        .values(wish=table.c.wish + 1)
        .returning(literal_column(outbox.ASKED.format("attachments")))
    )
    event: Event = "confirmation.expired" if via == EXPIRY else "confirmation.decided"
    if event in (asked or ()):
        data = outbox.of_view(call) | decision_data(decision_id, result, status_now, by, via)
        await outbox.put(connection, tenant, event, data, since=call.created_at)
    await notify(connection, [session_key(tenant, session_id), wish_key(tenant, session_id)])
    return decision_id


async def want(connection: AsyncConnection, tenant: str, session_id: str, call_id: str) -> None:
    """Ask the session's runner to look for a call in history at once."""
    table = tables.attachments
    attachment = await attachments.lock(connection, tenant, session_id)
    if attachment is None or call_id in attachment.wanted:
        return
    await connection.execute(
        update(table)
        .where(table.c.tenant == tenant, table.c.session_id == session_id)
        .values(wanted=[*attachment.wanted, call_id][-WANTED_MAX:], wish=table.c.wish + 1)
    )
    await notify(connection, [session_key(tenant, session_id), wish_key(tenant, session_id)])


async def status(connection: AsyncConnection, tenant: str, decision_id: str) -> tuple[str, str | None] | None:
    """Return a decision's status, and upstream's words if it refused."""
    table = tables.decisions
    query = select(table.c.status, table.c.refusal).where(table.c.tenant == tenant, table.c.id == decision_id)
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else (row.status, row.refusal)
