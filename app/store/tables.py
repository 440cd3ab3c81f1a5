"""The tables. Migrations are checked against this file.

Every key begins with the tenant. JSON that came from outside is text, never jsonb: jsonb refuses NUL and lone
surrogates, reorders keys and rewrites numbers, and what is stored here is sent on byte for byte.
States are text with no database enum, so that a rolling upgrade can add one. What `app.store.secrets` seals
is a column made by `_encrypted`, so that a rotation of keys reaches it.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    Table,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY

from app.core.calls import END_STATES

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _now(name: str) -> Column[datetime]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


def _encrypted(name: str, comment: str) -> Column[bytes]:
    """A column sealed for its `table.column` and the primary key of its row."""
    return Column(name, LargeBinary, nullable=False, comment=comment, info={"is_encrypted": True})


tenants = Table(
    "tenants",
    metadata,
    Column("id", Text, primary_key=True),
    _now("created_at"),
)

keys = Table(
    "keys",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False, comment="SHA-256 of the key, which has 256 random bits"),
    Column("scopes", ARRAY(Text), nullable=False),
    _now("created_at"),
    Column("revoked_at", DateTime(timezone=True)),
    Column("expires_at", DateTime(timezone=True)),
    Column("last_used_at", DateTime(timezone=True), comment="to about a minute: replicas gather uses"),
    Column("requests_per_min", Integer, comment="null: as the settings say"),
    PrimaryKeyConstraint("tenant", "id"),
    Index(None, "hash", unique=True),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("caller", Text, nullable=False, comment="the API key whose requests they are"),
    Column("key", Text, nullable=False, comment="Idempotency-Key, as the client chose it"),
    _encrypted("answer", "encrypted JSON: a digest of the request; the answer's status, headers and body"),
    _now("created_at"),
    PrimaryKeyConstraint("tenant", "caller", "key"),
    Index(None, "created_at"),
)

browser_passes = Table(
    "browser_passes",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False, comment="SHA-256 of its text, which has 256 random bits"),
    Column("kind", Text, nullable=False, comment="link: signs in once; session: a browser's cookie"),
    Column("key_id", Text, nullable=False, comment="whose rights it has"),
    Column("proof", Text, comment="of BASCULE_ADMIN_KEY, which is stored nowhere: it ends with that key"),
    _now("created_at"),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("tenant", "hash"),
    Index(None, "hash", unique=True),
    Index(None, "expires_at"),
)

tools = Table(
    "tools",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("description", Text),
    Column("policy", Text, nullable=False, comment="JSON of the registration's policies"),
    _encrypted("secrets", "encrypted: signing keys, newest first"),
    _encrypted("headers", "encrypted: extra request headers"),
    Column("version", Integer, nullable=False, server_default=text("1")),
    Column("disabled_reason", Text, comment="a code, when the service disabled it; the policy says enabled"),
    Column("disabled_at", DateTime(timezone=True)),
    _now("created_at"),
    _now("updated_at"),
    PrimaryKeyConstraint("tenant", "name"),
)

changes = Sequence("changes", metadata=metadata)
"""Numbers the changes that a session's stream tells of. Whoever takes one has locked the attachment, so that
those of a session are committed in the order of their numbers."""


def _change() -> Column[int]:
    return Column(
        "change", BigInteger, nullable=False, server_default=changes.next_value(), comment="the last one"
    )


registries = Table(
    "registries",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("version", BigInteger, nullable=False, comment="rises with every change of the tenant's tools"),
)

tool_tests = Table(
    "tool_tests",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("tool", Text, nullable=False),
    Column("input", Text, nullable=False, comment="JSON"),
    _now("requested_at"),
    Column("lost_at", DateTime(timezone=True), nullable=False, comment="when it is not waited for any more"),
    Column("replica_id", Text, comment="who took it up"),
    Column("finished_at", DateTime(timezone=True)),
    Column("result", Text, comment="JSON array of content blocks"),
    Column("is_error", Boolean),
    Column("code", Text),
    Column("http_status", Integer),
    Column("duration_ms", Integer),
    Column("url", Text),
    Column("reply_excerpt", Text),
    PrimaryKeyConstraint("tenant", "id"),
    Index("ix_tool_tests_waiting", "requested_at", postgresql_where=text("replica_id is null")),
    Index(None, "requested_at"),
)

tool_health = Table(
    "tool_health",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("tool", Text, nullable=False),
    Column("replica_id", Text, nullable=False),
    Column("url", Text, nullable=False, comment="counts only while the tool still has it"),
    Column("state", Text, nullable=False),
    Column("since", DateTime(timezone=True), nullable=False, comment="of the first failure in a row"),
    Column("last_error", Text, nullable=False),
    Column("failures", Integer, nullable=False, comment="in a row, when the state last changed"),
    _now("updated_at"),
    PrimaryKeyConstraint("tenant", "tool", "replica_id"),
    Index(None, "replica_id"),
)

replicas = Table(
    "replicas",
    metadata,
    Column("id", Text, primary_key=True),
    _now("started_at"),
    Column("expires_at", DateTime(timezone=True), nullable=False),
)

attachments = Table(
    "attachments",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    # The wish: written by the api, read by whoever runs the session.
    Column("settings", Text, nullable=False, comment="JSON: the attach body as accepted, without secrets"),
    _encrypted("extra_headers", "encrypted"),
    Column("detach_requested", Boolean, nullable=False, server_default=text("false")),
    Column("wanted", ARRAY(Text), nullable=False, server_default=text("'{}'"), comment="calls to look for"),
    Column(
        "again", ARRAY(Text), nullable=False, server_default=text("'{}'"), comment="calls to deliver again"
    ),
    Column("wish", BigInteger, nullable=False, server_default=text("1"), comment="rises with each wish"),
    Column(
        "wish_seen", BigInteger, nullable=False, server_default=text("0"), comment="the last one acted on"
    ),
    # The lease: a term, not an owner. Every write by a runner names it.
    Column("replica_id", Text),
    Column("term", BigInteger, nullable=False, server_default=text("0")),
    # The state: written by the runner.
    Column("status", Text, nullable=False, server_default=text("'attaching'")),
    Column("end_reason", Text),
    Column("end_detail", Text),
    Column("terminal_event_id", Text),
    Column(
        "cursor_at", Double, comment="newest processed_at whose consequences are stored, seconds since 1970"
    ),
    Column("reconnects", Integer, nullable=False, server_default=text("0")),
    Column("restarts", Integer, nullable=False, server_default=text("0"), comment="after internal errors"),
    Column("restarted_at", DateTime(timezone=True)),
    Column("idle_id", Text),
    Column("idle_deadline", DateTime(timezone=True)),
    Column("flags", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("missing", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("primary_thread_id", Text),
    Column("environment", Text),
    Column("upstream_updated_at", Text, comment="the session's, when the list last woke it"),
    Column("message_seq", BigInteger, nullable=False, server_default=text("0")),
    _change(),
    Column("last_event_at", DateTime(timezone=True)),
    _now("created_at"),
    _now("updated_at"),
    PrimaryKeyConstraint("tenant", "session_id"),
    CheckConstraint("session_id ~ '^[A-Za-z0-9_-]{1,128}$'", name="session_id"),
    Index("ix_attachments_wish", "replica_id", postgresql_where=text("wish <> wish_seen")),
    Index("ix_attachments_open", "replica_id", postgresql_where=text("status not in ('ended', 'detached')")),
    Index(
        "ix_attachments_over",
        "updated_at",
        "tenant",
        "session_id",
        postgresql_where=text("status in ('ended', 'detached')"),
    ),
)

_OVER = ", ".join(f"'{state}'" for state in sorted(END_STATES))

calls = Table(
    "calls",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("id", Text, nullable=False, comment="the event id of the agent's call"),
    Column("position", BigInteger, Identity(always=True), nullable=False, comment="order of first record"),
    Column("kind", Text, nullable=False),
    Column("tool", Text, nullable=False),
    Column("thread_id", Text),
    Column("input", Text, nullable=False, comment="JSON as received"),
    Column("edited_input", Text, comment="JSON that a person put in its place: what runs"),
    Column("processed_at", Text),
    Column("permission", Text),
    Column("state", Text, nullable=False),
    Column("gate_by", Text),
    Column("gate_reason", Text),
    Column("gate_rule", Text, comment="the rule that holds it, or is about to answer"),
    Column("gate_expires_at", DateTime(timezone=True)),
    Column("gate_on_expiry", Text, comment="deny or keep, as registered when the call came to be held"),
    Column("gate_remind_after_s", Double, comment="as registered when the call came to be held"),
    Column("gate_remind_at", DateTime(timezone=True), comment="of the next reminder; null after the last"),
    Column("gate_reminders", Integer, nullable=False, server_default=text("0"), comment="sent so far"),
    Column("outcome_unknown", Boolean, nullable=False, server_default=text("false")),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("result", Text, nullable=True, comment="JSON array of content blocks"),
    Column("is_error", Boolean),
    Column("posted", Boolean, nullable=False, server_default=text("false")),
    Column("detail", Text, comment="why it ended so, in a sentence"),
    _change(),
    _now("created_at"),
    _now("updated_at"),
    PrimaryKeyConstraint("tenant", "session_id", "id"),
    # What is open is read by each run that starts. It is counted by its few rows, and what is over from the
    # index alone. A state of a later version is open.
    Index("ix_calls_open", "tenant", "session_id", postgresql_where=text(f"state not in ({_OVER})")),
    Index("ix_calls_over", "tenant", "session_id", "state", postgresql_where=text(f"state in ({_OVER})")),
    Index(None, "tenant", "session_id", "change"),
    Index("ix_calls_held", "tenant", "position", postgresql_where=text("state = 'held'")),
    Index(
        "ix_calls_expiring",
        "gate_expires_at",
        postgresql_where=text("state = 'held' and gate_on_expiry = 'deny'"),
    ),
    Index(
        "ix_calls_reminding",
        "gate_remind_at",
        postgresql_where=text("state = 'held' and gate_remind_at is not null"),
    ),
    Index(None, "tenant", "session_id", "position"),
)

decisions = Table(
    "decisions",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("result", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("decided_by", Text, nullable=False),
    Column("via", Text, nullable=False),
    Column("deny_message", Text),
    Column("edited_input", Text, comment="JSON that an allow puts in the place of the call's input"),
    Column("tool_version", BigInteger, comment="of the registration that an allow leads to; 0: none"),
    Column("refusal", Text, comment="upstream's own words, when it refused the verdict"),
    _now("decided_at"),
    PrimaryKeyConstraint("tenant", "id"),
    Index(None, "tenant", "session_id", "call_id"),
    # One decision stands per call; a refused or spent one makes room for the next.
    Index(
        "uq_decisions_standing",
        "tenant",
        "session_id",
        "call_id",
        unique=True,
        postgresql_where=text("status in ('accepted', 'sending')"),
    ),
)

_DECIDED = "kind in ('decision.recorded', 'decision.seen') and via <> 'policy'"

audit = Table(
    "audit",
    metadata,
    # A trigger of the migration refuses to change, remove or truncate rows.
    Column("tenant", Text, nullable=False),
    Column("sequence", BigInteger, nullable=False, comment="1, 2, 3, … of the tenant, without a gap"),
    Column("at", DateTime(timezone=True), nullable=False),
    Column("kind", Text, nullable=False),
    Column("actor", Text, nullable=False, comment="a key's id, admin, upstream, expiry or service"),
    Column("via", Text, nullable=False, comment="how the actor was proved"),
    Column("session_id", Text),
    Column("call_id", Text),
    Column("subject", Text, comment="the tool's name, or the key's id"),
    Column("input_digest", Text),
    Column("decision_id", Text),
    Column("result", Text, comment="allow or deny"),
    Column("detail", Text, comment="a code"),
    Column("shown_ms", Integer, comment="for how long the call was looked at, as the client says"),
    Column("previous", LargeBinary, nullable=False, comment="hash of the tenant's row before"),
    Column("hash", LargeBinary, nullable=False, comment="SHA-256 over all of the above"),
    PrimaryKeyConstraint("tenant", "sequence"),
    Index(
        "ix_audit_session",
        "tenant",
        "session_id",
        "sequence",
        postgresql_where=text("session_id is not null"),
    ),
    Index("ix_audit_decided", "tenant", "subject", "sequence", postgresql_where=text(_DECIDED)),
    Index(
        "ix_audit_decided_inputs",
        "tenant",
        "subject",
        "input_digest",
        "sequence",
        postgresql_where=text(_DECIDED),
    ),
)

audit_heads = Table(
    "audit_heads",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("sequence", BigInteger, nullable=False, comment="of the tenant's last row"),
    Column("hash", LargeBinary, nullable=False, comment="of that row"),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("replica_id", Text, nullable=False),
    Column("tool", Text, nullable=False),
    Column("url", Text, comment="where it goes; null before this was noted"),
    _now("started_at"),
    Column("deadline_at", DateTime(timezone=True), nullable=False, comment="when it cannot report any more"),
    Column("callback_s", Double, comment="after a 202: what each word of progress grants"),
    Column("deadline_max_at", DateTime(timezone=True), comment="after a 202: no progress extends beyond"),
    Column("finished_at", DateTime(timezone=True)),
    Column("http_status", Integer),
    Column("code", Text, comment="a code of the closed set in docs/errors.md, null when a result was read"),
    Column("reply", LargeBinary, comment="the reply's first bytes, which may hold anything: never shown"),
    Column("reply_excerpt", Text, comment="its beginning as one line without secrets, to be shown"),
    Column("duration_ms", Integer, comment="of the attempt itself, by the replica's clock"),
    PrimaryKeyConstraint("tenant", "session_id", "call_id", "attempt"),
    Index(None, "started_at"),
    Index("ix_deliveries_tool", "tenant", "tool", "started_at"),
    # By the code alone: with `finished_at` in it no update of a delivery could stay on its page.
    Index("ix_deliveries_failed", "tenant", "tool", "started_at", postgresql_where=text("code is not null")),
)

bodies = Table(
    "bodies",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False, comment="what each delivery sends, but for the token"),
    Column("key_id", Text, comment="of the key that derives the token of its callback"),
    PrimaryKeyConstraint("tenant", "session_id", "call_id"),
)

callbacks = Table(
    "callbacks",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False, comment="the result as the tool reported it"),
    Column("content_type", Text, nullable=False),
    _now("received_at"),
    PrimaryKeyConstraint("tenant", "session_id", "call_id"),
)

attach_rules = Table(
    "attach_rules",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("agent_id", Text, comment="null: any"),
    Column("environment_id", Text, comment="null: any"),
    Column("settings", Text, nullable=False, comment="JSON, of the attachments that it makes"),
    Column("enabled", Boolean, nullable=False),
    _now("created_at"),
    _now("updated_at"),
    PrimaryKeyConstraint("tenant", "name"),
)

hook_keys = Table(
    "hook_keys",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("credential", Text, nullable=False),
    _encrypted("key", "encrypted: signs webhooks about the workspace of the credential"),
    PrimaryKeyConstraint("tenant", "credential"),
)

hooks = Table(
    "hooks",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("id", Text, nullable=False, comment="webhook-id of one that was taken"),
    _now("received_at"),
    PrimaryKeyConstraint("tenant", "id"),
    Index(None, "received_at"),
)

sightings = Table(
    "sightings",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("credential", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("tries", Integer, nullable=False, server_default=text("0")),
    Column("next_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    PrimaryKeyConstraint("tenant", "credential", "session_id"),
    Index(None, "next_at"),
)

sweeps = Table(
    "sweeps",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("credential", Text, nullable=False),
    Column("next_at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("tenant", "credential"),
)

watches = Table(
    "watches",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("until_at", DateTime(timezone=True), nullable=False),
    Column("term", BigInteger, comment="of the run that saw it"),
    PrimaryKeyConstraint("tenant", "session_id"),
)

upstream_events = Table(
    "upstream_events",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("number", BigInteger, Identity(always=True), nullable=False),
    Column("event", Text, nullable=False, comment="JSON as upstream sent it; kept for a minute"),
    _now("at"),
    PrimaryKeyConstraint("tenant", "session_id", "number"),
    prefixes=["UNLOGGED"],
)

sends = Table(
    "sends",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("position", BigInteger, Identity(always=True), nullable=False, comment="order of the wishes"),
    Column("events", Text, nullable=False, comment="JSON, comma-separated; empty once it is over"),
    Column("status", Text, nullable=False, server_default=text("'waiting'")),
    Column("term", BigInteger, comment="of the run that took it up"),
    Column("sending_at", DateTime(timezone=True)),
    Column("sent", Text, comment="JSON: the events as upstream took them"),
    Column("code", Text, comment="why it was refused"),
    Column("message", Text, comment="upstream's own"),
    Column("waiting_on", ARRAY(Text), comment="calls that upstream wants answered first"),
    _now("created_at"),
    Column("finished_at", DateTime(timezone=True)),
    PrimaryKeyConstraint("tenant", "session_id", "id"),
    Index(None, "created_at"),
    Index("ix_sends_open", "tenant", "session_id", "position", postgresql_where=text("finished_at is null")),
)

messages = Table(
    "messages",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column(
        "position", BigInteger, Identity(always=True), nullable=False, comment="order of first appearance"
    ),
    Column("seq", BigInteger, comment="per session, given when the final commits"),
    Column("state", Text, nullable=False),
    Column("content", Text, nullable=False, comment="JSON array of blocks"),
    Column("thread_id", Text),
    Column("processed_at", Text),
    Column(
        "term", BigInteger, nullable=False, comment="the run that wrote it; an older one's partial is stale"
    ),
    _change(),
    _now("updated_at"),
    PrimaryKeyConstraint("tenant", "session_id", "id"),
    Index(None, "tenant", "session_id", "seq", unique=True),
    Index(None, "tenant", "session_id", "change", postgresql_where=text("state = 'final'")),
    Index("ix_messages_partial", "tenant", "session_id", postgresql_where=text("state = 'partial'")),
    Index(None, "tenant", "session_id", "position"),
)

credentials = Table(
    "credentials",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("type", Text, nullable=False, comment="api_key or bearer"),
    _encrypted("secret", "encrypted"),
    Column("upstream_url", Text, comment="null: that of the service"),
    Column("version", BigInteger, nullable=False, server_default=text("1"), comment="rises with each change"),
    _now("created_at"),
    _now("updated_at"),
    PrimaryKeyConstraint("tenant", "name"),
)

rules = Table(
    "rules",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("position", BigInteger, Identity(always=True), nullable=False),
    Column("effect", Text, nullable=False, comment="allow, ask or deny"),
    Column("tool", Text, comment="null in this and the next two: any"),
    Column("kind", Text),
    Column("session_id", Text),
    Column("tests", Text, nullable=False, comment="JSON: what its arguments must pass"),
    Column("only", ARRAY(Text), comment="the arguments that there may be; null: any"),
    Column("deny_message", Text),
    Column("note", Text, comment="for people"),
    Column("created_by", Text, nullable=False, comment="a key's id"),
    _now("created_at"),
    Column("expires_at", DateTime(timezone=True)),
    Column("revoked_at", DateTime(timezone=True)),
    Column("revoked_by", Text),
    Column("uses", BigInteger, nullable=False, server_default=text("0")),
    Column("last_used_at", DateTime(timezone=True)),
    PrimaryKeyConstraint("tenant", "id"),
    Index("ix_rules_live", "tenant", "position", postgresql_where=text("revoked_at is null")),
)

subscriptions = Table(
    "subscriptions",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("events", ARRAY(Text), nullable=False),
    _encrypted("secret", "encrypted: the signing key"),
    _encrypted("headers", "encrypted: extra request headers"),
    Column("enabled", Boolean, nullable=False, server_default=text("true")),
    Column("disabled_reason", Text, comment="a code, when the service disabled it"),
    Column("disabled_at", DateTime(timezone=True)),
    Column("failures", Integer, nullable=False, server_default=text("0"), comment="in a row"),
    Column("retry_at", DateTime(timezone=True), comment="nothing is sent before"),
    Column("last_success_at", DateTime(timezone=True)),
    Column("last_error", Text),
    Column("last_error_at", DateTime(timezone=True)),
    Column("dropped", BigInteger, nullable=False, server_default=text("0"), comment="never delivered"),
    _now("created_at"),
    _now("updated_at"),
    PrimaryKeyConstraint("tenant", "name"),
)

notifications = Table(
    "notifications",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("id", Text, nullable=False, comment="the webhook-id of each attempt"),
    Column("position", BigInteger, Identity(always=True), nullable=False),
    Column("subscription", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("data", Text, nullable=False, comment="JSON"),
    Column("age_s", Double, comment="of the call, when this happened"),
    _now("created_at"),
    Column(
        "due_at",
        DateTime(timezone=True),
        nullable=False,
        server_default=func.now(),
        comment="when it may be sent, or sent again by another replica",
    ),
    Column("replica_id", Text, comment="who is sending it"),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    PrimaryKeyConstraint("tenant", "id"),
    Index(None, "tenant", "subscription", "due_at", "position"),
    Index(
        "ix_notifications_leased", "tenant", "subscription", postgresql_where=text("replica_id is not null")
    ),
)

budgets = Table(
    "budgets",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("credential", Text, nullable=False),
    Column(
        "tokens", Double, nullable=False, comment="as of updated_at; below zero when requests went unpaid"
    ),
    _now("updated_at"),
    Column("rate_per_min", Double, nullable=False, comment="what the last refusal left of the limit"),
    Column("refused_at", DateTime(timezone=True), comment="since when the rate recovers"),
    Column("paused_until", DateTime(timezone=True)),
    Column("paused_priority", Integer, comment="the highest priority that the pause holds, 0 first"),
    PrimaryKeyConstraint("tenant", "credential"),
)

ENCRYPTED = tuple(
    column
    for table in metadata.sorted_tables
    for column in table.columns
    if column.info.get("is_encrypted", False)
)
"""Every column that a rotation of BASCULE_SECRET_KEY rewrites."""
