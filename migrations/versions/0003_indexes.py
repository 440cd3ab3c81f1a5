"""Indexes for retention and for what is over"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

OVER = (
    "'answered_elsewhere', 'denied', 'expired', 'interrupted', 'posted', 'rejected', 'session_ended',"
    " 'thread_terminated'"
)


def upgrade() -> None:
    op.create_index(
        "ix_attachments_over",
        "attachments",
        ["updated_at", "tenant", "session_id"],
        unique=False,
        postgresql_where=sa.text("status in ('ended', 'detached')"),
    )
    op.create_index(op.f("ix_deliveries_started_at"), "deliveries", ["started_at"], unique=False)
    op.drop_index("ix_calls_open", table_name="calls")
    op.create_index(
        "ix_calls_open",
        "calls",
        ["tenant", "session_id"],
        unique=False,
        postgresql_where=sa.text(f"state not in ({OVER})"),
    )
    op.create_index(
        "ix_calls_over",
        "calls",
        ["tenant", "session_id", "state"],
        unique=False,
        postgresql_where=sa.text(f"state in ({OVER})"),
    )


def downgrade() -> None:
    op.drop_index("ix_calls_over", table_name="calls")
    op.drop_index("ix_calls_open", table_name="calls")
    op.create_index(
        "ix_calls_open",
        "calls",
        ["tenant", "session_id"],
        unique=False,
        postgresql_where=sa.text(
            "state in ('held', 'queued', 'dispatched', 'answered', 'posting', 'unowned')"
        ),
    )
    op.drop_index(op.f("ix_deliveries_started_at"), table_name="deliveries")
    op.drop_index("ix_attachments_over", table_name="attachments")
