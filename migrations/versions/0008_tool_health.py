"""Each replica's view of the tools' health"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "tool_health",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("tool", sa.Text(), nullable=False),
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False, comment="counts only while the tool still has it"),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column(
            "since",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="of the first failure in a row",
        ),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False, comment="in a row, when the state last changed"),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "tool", "replica_id", name=op.f("pk_tool_health")),
    )
    op.create_index(op.f("ix_tool_health_replica_id"), "tool_health", ["replica_id"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_tool_health_replica_id"), table_name="tool_health")
    op.drop_table("tool_health")
