"""The statements of a group commit: one per kind of row, for many runs at once.

Columns travel as arrays and are unnested as `w`. Each statement can be repeated with the same rows to the
same end. `Bulk.of` names the columns that a statement takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import TextClause, text

from app.core.calls import END_STATES
from app.core.rules import VIA
from app.store.outbox import ASKED

SEPARATOR: Final = "\x1f"
"""Between the members of a list that travels as text: `unnest` would flatten arrays of arrays."""


@dataclass(frozen=True, slots=True)
class Bulk:
    """A statement over rows that travel as columns; `columns` are their names."""

    statement: TextClause
    columns: tuple[str, ...]

    @classmethod
    def of(cls, sql: str, **types: str) -> Bulk:
        """Make a statement. `{rows}` in it stands for the unnested rows, `{names}` for their columns."""
        arrays = ", ".join(f"cast(:{name} as {type_}[])" for name, type_ in types.items())
        names = ", ".join(types)
        return cls(
            text(sql.replace("{rows}", f"unnest({arrays}) as w({names})").replace("{names}", names)),
            tuple(types),
        )


_SESSION: Final = {"tenant": "text", "session_id": "text"}
_ONE_CALL: Final = {**_SESSION, "call_id": "text"}
_SAME_SESSION: Final = "{0}.tenant = w.tenant and {0}.session_id = w.session_id"

HOLD: Final = Bulk.of(
    f"""
    select a.tenant, a.session_id, a.term, {ASKED.format("a")} as asked from attachments a
    join {{rows}} on a.tenant = w.tenant and a.session_id = w.session_id and a.term = w.term
    where a.replica_id = :replica
    order by a.tenant, a.session_id
    for no key update of a
    """,
    **_SESSION,
    term="bigint",
)
"""Lock the attachments whose terms still hold; a claim waits until the transaction is over.

`asked` are the events that the tenant's subscriptions want to hear of.
"""

TELL: Final = Bulk.of(
    f"""
    insert into notifications (tenant, subscription, id, type, data, age_s)
    select w.tenant, s.name, 'ntf_' || replace(gen_random_uuid()::text, '-', ''), w.type, w.data,
        case when w.call_id is not null then extract(epoch from now() - coalesce(c.created_at, now())) end
    from {{rows}}
    join subscriptions s on s.tenant = w.tenant and s.enabled and w.type = any(s.events)
    join attachments a on {_SAME_SESSION.format("a")}
    left join lateral (
        select * from calls c where {_SAME_SESSION.format("c")} and c.id = w.call_id limit 1
    ) c on true
    where case w.type
        when 'confirmation.requested' then
            c.state is distinct from 'held' or c.gate_reason is distinct from w.mark or exists (
                select from decisions d where {_SAME_SESSION.format("d")} and d.call_id = w.call_id
                    and d.status in ('accepted', 'sending'))
        when 'confirmation.decided' then c.state = 'held' and not exists (
            select from decisions d where d.tenant = w.tenant and d.id = w.mark)
        when 'call.failed' then
            case w.mark when 'rejected' then c.state is distinct from 'rejected' else c.result is null end
        when 'call.outcome_unknown' then not coalesce(c.outcome_unknown, false)
        when 'call.unowned' then c.state is distinct from 'unowned'
            and not (w.mark = 'builtin' and coalesce(a.environment = 'cloud', false))
        when 'session.stuck' then not (w.mark = any(a.flags))
        when 'session.ended' then not (w.mark = 'idle' and exists (
            select from sends s where {_SAME_SESSION.format("s")} and s.finished_at is null))
        when 'message.final' then not exists (
            select from messages m where {_SAME_SESSION.format("m")} and m.id = w.mark and m.state = 'final')
        else true
    end
    order by w.place
    """,
    **_SESSION,
    type="text",
    data="text",
    call_id="text",
    mark="text",
    place="integer",
)
"""Put what is news into the outbox: this comes before the statements that make it old."""

_OVER: Final = ", ".join(f"'{state}'" for state in sorted(END_STATES - {"interrupted"}))
_CHANGING: Final = (
    "state", "gate_by", "gate_reason", "outcome_unknown", "attempts", "result", "is_error", "posted", "detail"
)  # fmt: skip
_IS_LEFT: Final = (
    "excluded.state in ('dispatched', 'interrupted') and excluded.result is null"
    " and calls.result is not null and excluded.attempts <= calls.attempts"
)
"""An earlier run left the result of the delivery that the writer still waits for, or has given up."""
_KEPT: Final = ("outcome_unknown", "attempts", "result", "is_error")
NEXT: Final = "nextval('changes')"
"""The number of a change; the attachment is locked."""
_AS_HELD: Final = (
    "gate_expires_at", "gate_on_expiry", "gate_remind_after_s", "gate_remind_at", "gate_reminders",
    "gate_rule",
)  # fmt: skip
_SAVED: Final = {
    **{name: f"excluded.{name}" for name in _CHANGING},
    **{name: f"case when {_IS_LEFT} then calls.{name} else excluded.{name} end" for name in _KEPT},
    # A call that is over is remembered without its inputs.
    "edited_input": f"case when excluded.state in ({_OVER})"
    " then calls.edited_input else excluded.edited_input end",
    "state": f"case when {_IS_LEFT} and excluded.state = 'dispatched'"
    " then 'answered' else excluded.state end",
    # Set once, when the call comes to be held: neither a refused decision nor a restart grants more time,
    # begins the reminders again, or promises that a rule answers.
    **{
        name: f"case when excluded.state = 'held' and calls.state <> 'held'"
        f" then excluded.{name} else calls.{name} end"
        for name in _AS_HELD
    },
}
_CALL: Final = {
    **_SESSION, "id": "text", "kind": "text", "tool": "text", "thread_id": "text", "input": "text",
    "processed_at": "text", "permission": "text", "state": "text", "gate_by": "text", "gate_reason": "text",
    "gate_on_expiry": "text", "gate_remind_after_s": "double precision", "gate_rule": "text",
    "outcome_unknown": "boolean",
    "attempts": "integer", "result": "text", "is_error": "boolean", "posted": "boolean", "detail": "text",
    "edited_input": "text",
}  # fmt: skip
_SHOWN: Final = (
    "({0}.state, {0}.gate_by, {0}.gate_reason, {0}.outcome_unknown, {0}.attempts, {0}.posted, {0}.detail,"
    " {0}.result is null, {0}.edited_input is null)"
)
"""What is shown of a call and changes; the texts themselves are set once."""
SAVE_CALLS: Final = Bulk.of(
    f"""
    insert into calls ({", ".join(_CALL)}, gate_expires_at, gate_remind_at)
    select {", ".join(_CALL)}, now() + make_interval(secs => w.expires_in_s),
        now() + make_interval(secs => w.gate_remind_after_s)
    from {{rows}}
    on conflict (tenant, session_id, id) do update
    set {", ".join(f"{name} = {value}" for name, value in _SAVED.items())},
        updated_at = now(),
        change = case when {_SHOWN.format("calls")} is distinct from {_SHOWN.format("excluded")}
            then {NEXT} else calls.change end
    where calls.state not in ({_OVER}) or calls.state = excluded.state
    returning calls.id
    """,
    **_CALL,
    expires_in_s="double precision",
)
"""Store calls as they now stand; a result that was left meanwhile stays.

One that is over in the store is not opened again, nor its id returned.
"""

TOUCH_CALLS: Final = Bulk.of(
    f"update calls c set change = {NEXT} from {{rows}}"
    f" where {_SAME_SESSION.format('c')} and c.id = w.call_id",
    **_ONE_CALL,
)
"""Something that is shown with the calls has changed, and they have not."""

_CHANGED: Final = "returning d.tenant, d.session_id, d.call_id, d.id, d.result, d.decided_by, d.via"
"""What the audit says of a decision; a statement that is repeated changes nothing and returns nothing."""

RULE: Final = Bulk.of(
    f"""
    update decisions d set status = w.status, refusal = w.refusal from {{rows}}
    where d.tenant = w.tenant and d.id = w.id and d.session_id = w.session_id
        and (d.status, d.refusal) is distinct from (w.status, w.refusal)
    {_CHANGED}, d.status
    """,
    **_SESSION,
    id="text",
    status="text",
    refusal="text",
)
"""Note what became of decisions that were made through the service."""

SPEND: Final = Bulk.of(
    f"""
    update decisions d set status = 'spent' from {{rows}}
    where {_SAME_SESSION.format("d")} and d.call_id = w.call_id
        and (d.status in ('accepted', 'approved') or d.status = 'sending' and d.via = '{VIA}')
    {_CHANGED}
    """,
    **_ONE_CALL,
)
"""A call needs a second decision: its first has released a delivery, or was a rule's that is live no more."""

DISPLACE: Final = Bulk.of(
    f"""
    update decisions d set status = 'refused', refusal = 'Somebody else decided first.' from {{rows}}
    where {_SAME_SESSION.format("d")} and d.call_id = w.call_id and d.status = 'sending'
    {_CHANGED}
    """,
    **_ONE_CALL,
)
"""A verdict was seen upstream: one that is on its way makes room for it."""

CLOSE_QUESTIONS: Final = Bulk.of(
    f"""
    update decisions d set status = 'refused', refusal = 'The call had moved on before this was read.'
    from {{rows}}
    where {_SAME_SESSION.format("d")} and d.call_id = w.call_id and d.id <> w.kept
        and (d.status in ('sending', 'accepted') or d.status = 'approved' and w.kept = '')
    {_CHANGED}
    """,
    **_ONE_CALL,
    kept="text",
)
"""A call is held no longer: what nobody acted on answers no later question. `kept` is the one acted on."""

SEE_DECISIONS: Final = Bulk.of(
    "insert into decisions as d ({names}) select {names} from {rows} on conflict do nothing " + _CHANGED,
    **_ONE_CALL,
    id="text",
    result="text",
    status="text",
    decided_by="text",
    via="text",
    deny_message="text",
)
"""Keep verdicts that others gave."""

KEEP_BODIES: Final = Bulk.of(
    "insert into bodies ({names}) select {names} from {rows} on conflict do nothing",
    **_ONE_CALL,
    body="bytea",
    key_id="text",
)

START_ATTEMPTS: Final = Bulk.of(
    """
    insert into deliveries (tenant, session_id, call_id, attempt, tool, url, replica_id, deadline_at)
    select tenant, session_id, call_id, attempt, tool, url, :replica, now() + make_interval(secs => left_s)
    from {rows} on conflict (tenant, session_id, call_id, attempt) do update
    set deadline_at = excluded.deadline_at, url = excluded.url where deliveries.finished_at is null
    """,
    **_ONE_CALL,
    attempt="integer",
    tool="text",
    url="text",
    left_s="double precision",
)

END_ATTEMPTS: Final = Bulk.of(
    f"""
    update deliveries d set http_status = w.http_status, code = w.code, reply = w.reply,
        reply_excerpt = w.excerpt, duration_ms = w.duration_ms,
        finished_at = greatest(d.started_at, now() - make_interval(secs => w.age_s)),
        callback_s = w.callback_s, deadline_max_at = now() + make_interval(secs => w.callback_max_s),
        deadline_at = coalesce(now() + make_interval(secs => w.callback_s), d.deadline_at)
    from {{rows}} where {_SAME_SESSION.format("d")} and d.call_id = w.call_id and d.attempt = w.attempt
    """,
    **_ONE_CALL,
    attempt="integer",
    http_status="integer",
    code="text",
    reply="bytea",
    excerpt="text",
    duration_ms="integer",
    age_s="double precision",
    callback_s="double precision",
    callback_max_s="double precision",
)

_MESSAGE: Final = {
    **_SESSION, "id": "text", "content": "text", "thread_id": "text", "processed_at": "text", "term": "bigint"
}  # fmt: skip

DROP_PARTIALS: Final = Bulk.of(
    f"""
    delete from messages m using {{rows}}
    where {_SAME_SESSION.format("m")} and m.id = w.id and m.state = 'partial'
    """,
    **_SESSION,
    id="text",
)

SAVE_PARTIALS: Final = Bulk.of(
    """
    insert into messages ({names}, state) select {names}, 'partial' from {rows}
    on conflict (tenant, session_id, id) do update
    set content = excluded.content, term = excluded.term, updated_at = now()
    where messages.state = 'partial'
    """,
    **_MESSAGE,
)

SAVE_FINALS: Final = Bulk.of(
    f"""
    with new as (
        select w.*, row_number() over (partition by w.tenant, w.session_id order by w.place) as step
        from {{rows}}
        where not exists (
            select from messages m where {_SAME_SESSION.format("m")} and m.id = w.id and m.state = 'final')
    ), raised as (
        update attachments a set message_seq = a.message_seq + n.steps
        from (select tenant, session_id, count(*) as steps from new group by 1, 2) n
        where a.tenant = n.tenant and a.session_id = n.session_id
        returning a.tenant, a.session_id, a.message_seq - n.steps as base
    )
    insert into messages ({", ".join(_MESSAGE)}, state, seq)
    select {", ".join(f"new.{name}" for name in _MESSAGE)}, 'final', raised.base + new.step
    from new join raised on raised.tenant = new.tenant and raised.session_id = new.session_id
    on conflict (tenant, session_id, id) do update
    set state = 'final', seq = excluded.seq, content = excluded.content, term = excluded.term,
        thread_id = excluded.thread_id, processed_at = excluded.processed_at,
        updated_at = now(), change = {NEXT}
    """,
    **_MESSAGE,
    place="bigint",
)
"""Finals get the session's next numbers as they commit, in the order of `place`.

The attachment is locked, so that numbers have no gaps and a poll cursor passes none. A final that is stored
already stands.
"""


def _list(name: str) -> str:
    return f"coalesce(string_to_array(nullif(w.{name}, ''), '{SEPARATOR}'), '{{}}')"


_IS_STEERED: Final = (
    "(w.is_over and w.end_reason = 'idle' and exists (select from sends s"
    " where s.tenant = a.tenant and s.session_id = a.session_id and s.finished_at is null))"
)
"""A client has asked for events to be sent just before the session ended by idleness: it goes on."""
_IS_ENDING: Final = f"(w.is_over and not {_IS_STEERED})"

SAVE_ATTACHMENTS: Final = Bulk.of(
    f"""
    update attachments a set
        cursor_at = case when w.has_progress then w.cursor_at else a.cursor_at end,
        reconnects = case when w.has_progress then w.reconnects else a.reconnects end,
        idle_id = case when w.has_progress then w.idle_id else a.idle_id end,
        idle_deadline = case when w.has_progress then now() + make_interval(secs => w.idle_left_s)
            else a.idle_deadline end,
        flags = case when w.has_progress then {_list("flags")} else a.flags end,
        missing = case when w.has_progress then {_list("missing")} else a.missing end,
        primary_thread_id = case when w.has_progress then w.primary_thread_id else a.primary_thread_id end,
        environment = case when w.has_progress then w.environment else a.environment end,
        status = case when {_IS_STEERED} then 'reconnecting' when w.has_progress or w.is_over then w.status
            else a.status end,
        end_reason = case when {_IS_ENDING} then w.end_reason else a.end_reason end,
        end_detail = case when {_IS_ENDING} then w.end_detail else a.end_detail end,
        terminal_event_id = case when {_IS_ENDING} then w.terminal_event_id else a.terminal_event_id end,
        replica_id = case when {_IS_ENDING} then null else a.replica_id end,
        change = case
            when w.is_over or w.has_progress and (a.status, a.flags, a.missing, a.reconnects, a.idle_id)
                is distinct from (w.status, {_list("flags")}, {_list("missing")}, w.reconnects, w.idle_id)
            then {NEXT} else a.change end,
        last_event_at = case when w.has_events then now() else a.last_event_at end,
        wish_seen = greatest(a.wish_seen, w.wish_seen),
        wanted = case when w.wish_seen >= a.wish then '{{}}' else a.wanted end,
        again = case when w.wish_seen >= a.wish then '{{}}' else a.again end,
        updated_at = now()
    from {{rows}} where {_SAME_SESSION.format("a")}
    """,
    **_SESSION,
    status="text",
    cursor_at="double precision",
    reconnects="integer",
    idle_id="text",
    idle_left_s="double precision",
    flags="text",
    missing="text",
    primary_thread_id="text",
    environment="text",
    end_reason="text",
    end_detail="text",
    terminal_event_id="text",
    is_over="boolean",
    has_events="boolean",
    has_progress="boolean",
    wish_seen="bigint",
)

DROP_SENDS: Final = Bulk.of(
    f"""
    update sends s set status = 'refused', code = w.code, message = w.message, events = '',
        finished_at = now()
    from {{rows}} where {_SAME_SESSION.format("s")} and s.status = 'waiting'
    """,
    **_SESSION,
    code="text",
    message="text",
)
"""A session is served no more: what waits for it is not sent. What is under way has its outcome to come."""
