"""First schema"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "attachments",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column(
            "settings",
            sa.Text(),
            nullable=False,
            comment="JSON: the attach body as accepted, without secrets",
        ),
        sa.Column("extra_headers", sa.LargeBinary(), nullable=False, comment="encrypted"),
        sa.Column("detach_requested", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column(
            "wanted",
            postgresql.ARRAY(sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="calls to look for",
        ),
        sa.Column(
            "wish",
            sa.BigInteger(),
            server_default=sa.text("1"),
            nullable=False,
            comment="rises with each wish",
        ),
        sa.Column(
            "wish_seen",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="the last one acted on",
        ),
        sa.Column("replica_id", sa.Text(), nullable=True),
        sa.Column("term", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("status", sa.Text(), server_default=sa.text("'attaching'"), nullable=False),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.Column("end_detail", sa.Text(), nullable=True),
        sa.Column("terminal_event_id", sa.Text(), nullable=True),
        sa.Column(
            "cursor_at",
            sa.Double(),
            nullable=True,
            comment="newest processed_at whose consequences are stored, seconds since 1970",
        ),
        sa.Column("reconnects", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "restarts",
            sa.Integer(),
            server_default=sa.text("0"),
            nullable=False,
            comment="after internal errors",
        ),
        sa.Column("restarted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("idle_id", sa.Text(), nullable=True),
        sa.Column("idle_deadline", sa.DateTime(timezone=True), nullable=True),
        sa.Column("flags", postgresql.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("missing", postgresql.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("primary_thread_id", sa.Text(), nullable=True),
        sa.Column("environment", sa.Text(), nullable=True),
        sa.Column("message_seq", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_event_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("session_id ~ '^[A-Za-z0-9_-]{1,128}$'", name=op.f("ck_attachments_session_id")),
        sa.PrimaryKeyConstraint("tenant", "session_id", name=op.f("pk_attachments")),
    )
    op.create_index(
        "ix_attachments_open",
        "attachments",
        ["replica_id"],
        unique=False,
        postgresql_where=sa.text("status not in ('ended', 'detached')"),
    )
    op.create_index(
        "ix_attachments_wish",
        "attachments",
        ["replica_id"],
        unique=False,
        postgresql_where=sa.text("wish <> wish_seen"),
    )
    op.create_table(
        "bodies",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False, comment="what each delivery of the call sends"),
        sa.PrimaryKeyConstraint("tenant", "session_id", "call_id", name=op.f("pk_bodies")),
    )
    op.create_table(
        "calls",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False, comment="the event id of the agent's call"),
        sa.Column(
            "position",
            sa.BigInteger(),
            sa.Identity(always=True),
            nullable=False,
            comment="order of first record",
        ),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("tool", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=True),
        sa.Column("input", sa.Text(), nullable=False, comment="JSON as received"),
        sa.Column("processed_at", sa.Text(), nullable=True),
        sa.Column("permission", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("gate_by", sa.Text(), nullable=True),
        sa.Column("gate_reason", sa.Text(), nullable=True),
        sa.Column("gate_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("outcome_unknown", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("result", sa.Text(), nullable=True, comment="JSON array of content blocks"),
        sa.Column("is_error", sa.Boolean(), nullable=True),
        sa.Column("posted", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("detail", sa.Text(), nullable=True, comment="why it ended so, in a sentence"),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "session_id", "id", name=op.f("pk_calls")),
    )
    op.create_index(
        "ix_calls_held",
        "calls",
        ["tenant", "position"],
        unique=False,
        postgresql_where=sa.text("state = 'held'"),
    )
    op.create_index(
        "ix_calls_open",
        "calls",
        ["tenant", "session_id"],
        unique=False,
        postgresql_where=sa.text(
            "state in ('held', 'queued', 'dispatched', 'answered', 'posting', 'unowned')"
        ),
    )
    op.create_index(
        op.f("ix_calls_tenant_session_id_position"),
        "calls",
        ["tenant", "session_id", "position"],
        unique=False,
    )
    op.create_table(
        "decisions",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("decided_by", sa.Text(), nullable=False),
        sa.Column("via", sa.Text(), nullable=False),
        sa.Column("deny_message", sa.Text(), nullable=True),
        sa.Column(
            "refusal", sa.Text(), nullable=True, comment="upstream's own words, when it refused the verdict"
        ),
        sa.Column("decided_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "id", name=op.f("pk_decisions")),
    )
    op.create_index(
        op.f("ix_decisions_tenant_session_id_call_id"),
        "decisions",
        ["tenant", "session_id", "call_id"],
        unique=False,
    )
    op.create_index(
        "uq_decisions_standing",
        "decisions",
        ["tenant", "session_id", "call_id"],
        unique=True,
        postgresql_where=sa.text("status in ('accepted', 'sending')"),
    )
    op.create_table(
        "deliveries",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("tool", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "deadline_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="when it cannot report any more",
        ),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("http_status", sa.Integer(), nullable=True),
        sa.Column(
            "code",
            sa.Text(),
            nullable=True,
            comment="a code of the closed set in docs/errors.md, null when a result was read",
        ),
        sa.Column("reply", sa.LargeBinary(), nullable=True, comment="the reply's first bytes"),
        sa.PrimaryKeyConstraint("tenant", "session_id", "call_id", "attempt", name=op.f("pk_deliveries")),
    )
    op.create_table(
        "keys",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column(
            "hash", sa.LargeBinary(), nullable=False, comment="SHA-256 of the key, which has 256 random bits"
        ),
        sa.Column("scopes", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("tenant", "id", name=op.f("pk_keys")),
    )
    op.create_index(op.f("ix_keys_hash"), "keys", ["hash"], unique=True)
    op.create_table(
        "messages",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column(
            "position",
            sa.BigInteger(),
            sa.Identity(always=True),
            nullable=False,
            comment="order of first appearance",
        ),
        sa.Column("seq", sa.BigInteger(), nullable=True, comment="per session, given when the final commits"),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False, comment="JSON array of blocks"),
        sa.Column("thread_id", sa.Text(), nullable=True),
        sa.Column("processed_at", sa.Text(), nullable=True),
        sa.Column(
            "term",
            sa.BigInteger(),
            nullable=False,
            comment="the run that wrote it; an older one's partial is stale",
        ),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "session_id", "id", name=op.f("pk_messages")),
    )
    op.create_index(
        op.f("ix_messages_tenant_session_id_position"),
        "messages",
        ["tenant", "session_id", "position"],
        unique=False,
    )
    op.create_index(
        op.f("ix_messages_tenant_session_id_seq"), "messages", ["tenant", "session_id", "seq"], unique=True
    )
    op.create_table(
        "registries",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column(
            "version",
            sa.BigInteger(),
            nullable=False,
            comment="rises with every change of the tenant's tools",
        ),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_registries")),
    )
    op.create_table(
        "replicas",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
    )
    op.create_table(
        "tools",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("policy", sa.Text(), nullable=False, comment="JSON of the registration's policies"),
        sa.Column(
            "secrets", sa.LargeBinary(), nullable=False, comment="encrypted: signing keys, newest first"
        ),
        sa.Column("headers", sa.LargeBinary(), nullable=False, comment="encrypted: extra request headers"),
        sa.Column("version", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name=op.f("pk_tools")),
    )


def downgrade() -> None:
    op.drop_table("tools")
    op.drop_table("tenants")
    op.drop_table("replicas")
    op.drop_table("registries")
    op.drop_index(op.f("ix_messages_tenant_session_id_seq"), table_name="messages")
    op.drop_index(op.f("ix_messages_tenant_session_id_position"), table_name="messages")
    op.drop_table("messages")
    op.drop_index(op.f("ix_keys_hash"), table_name="keys")
    op.drop_table("keys")
    op.drop_table("deliveries")
    op.drop_index(
        "uq_decisions_standing",
        table_name="decisions",
        postgresql_where=sa.text("status in ('accepted', 'sending')"),
    )
    op.drop_index(op.f("ix_decisions_tenant_session_id_call_id"), table_name="decisions")
    op.drop_table("decisions")
    op.drop_index(op.f("ix_calls_tenant_session_id_position"), table_name="calls")
    op.drop_index(
        "ix_calls_open",
        table_name="calls",
        postgresql_where=sa.text(
            "state in ('held', 'queued', 'dispatched', 'answered', 'posting', 'unowned')"
        ),
    )
    op.drop_index("ix_calls_held", table_name="calls", postgresql_where=sa.text("state = 'held'"))
    op.drop_table("calls")
    op.drop_table("bodies")
    op.drop_index(
        "ix_attachments_wish", table_name="attachments", postgresql_where=sa.text("wish <> wish_seen")
    )
    op.drop_index(
        "ix_attachments_open",
        table_name="attachments",
        postgresql_where=sa.text("status not in ('ended', 'detached')"),
    )
    op.drop_table("attachments")
