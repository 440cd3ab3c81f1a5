"""Subscriptions and their notifications"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "subscriptions",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("events", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False, comment="encrypted: the signing key"),
        sa.Column("headers", sa.LargeBinary(), nullable=False, comment="encrypted: extra request headers"),
        sa.Column("enabled", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column(
            "disabled_reason", sa.Text(), nullable=True, comment="a code, when the service disabled it"
        ),
        sa.Column("disabled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failures", sa.Integer(), server_default=sa.text("0"), nullable=False, comment="in a row"),
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=True, comment="nothing is sent before"),
        sa.Column("last_success_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("last_error_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "dropped", sa.BigInteger(), server_default=sa.text("0"), nullable=False, comment="never delivered"
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name=op.f("pk_subscriptions")),
    )
    op.create_table(
        "notifications",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False, comment="the webhook-id of each attempt"),
        sa.Column("position", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("subscription", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False, comment="JSON"),
        sa.Column("age_s", sa.Double(), nullable=True, comment="of the call, when this happened"),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "due_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="when it may be sent, or sent again by another replica",
        ),
        sa.Column("replica_id", sa.Text(), nullable=True, comment="who is sending it"),
        sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "id", name=op.f("pk_notifications")),
    )
    op.create_index(
        op.f("ix_notifications_tenant_subscription_due_at_position"),
        "notifications",
        ["tenant", "subscription", "due_at", "position"],
        unique=False,
    )
    op.create_index(
        "ix_notifications_leased",
        "notifications",
        ["tenant", "subscription"],
        unique=False,
        postgresql_where=sa.text("replica_id is not null"),
    )


def downgrade() -> None:
    op.drop_table("notifications")
    op.drop_table("subscriptions")
