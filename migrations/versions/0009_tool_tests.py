"""Test calls of tools"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "tool_tests",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tool", sa.Text(), nullable=False),
        sa.Column("input", sa.Text(), nullable=False, comment="JSON"),
        sa.Column(
            "requested_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.Column(
            "lost_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="when it is not waited for any more",
        ),
        sa.Column("replica_id", sa.Text(), nullable=True, comment="who took it up"),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("result", sa.Text(), nullable=True, comment="JSON array of content blocks"),
        sa.Column("is_error", sa.Boolean(), nullable=True),
        sa.Column("code", sa.Text(), nullable=True),
        sa.Column("http_status", sa.Integer(), nullable=True),
        sa.Column("duration_ms", sa.Integer(), nullable=True),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("reply_excerpt", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("tenant", "id", name=op.f("pk_tool_tests")),
    )
    op.create_index(op.f("ix_tool_tests_requested_at"), "tool_tests", ["requested_at"], unique=False)
    op.create_index(
        "ix_tool_tests_waiting",
        "tool_tests",
        ["requested_at"],
        unique=False,
        postgresql_where=sa.text("replica_id is null"),
    )


def downgrade() -> None:
    op.drop_index("ix_tool_tests_waiting", table_name="tool_tests")
    op.drop_index(op.f("ix_tool_tests_requested_at"), table_name="tool_tests")
    op.drop_table("tool_tests")
