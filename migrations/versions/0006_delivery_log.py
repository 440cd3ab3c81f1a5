"""The delivery log: what an attempt took, what may be shown of its reply, and a way by tool"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column(
        "deliveries",
        sa.Column(
            "reply_excerpt",
            sa.Text(),
            nullable=True,
            comment="its beginning as one line without secrets, to be shown",
        ),
    )
    op.add_column(
        "deliveries",
        sa.Column(
            "duration_ms",
            sa.Integer(),
            nullable=True,
            comment="of the attempt itself, by the replica's clock",
        ),
    )
    op.alter_column(
        "deliveries",
        "reply",
        existing_type=sa.LargeBinary(),
        comment="the reply's first bytes, which may hold anything: never shown",
        existing_comment="the reply's first bytes",
        existing_nullable=True,
    )
    op.create_index("ix_deliveries_tool", "deliveries", ["tenant", "tool", "started_at"], unique=False)
    op.create_index(
        "ix_deliveries_failed",
        "deliveries",
        ["tenant", "tool", "started_at"],
        unique=False,
        postgresql_where=sa.text("code is not null"),
    )


def downgrade() -> None:
    op.drop_index("ix_deliveries_failed", table_name="deliveries")
    op.drop_index("ix_deliveries_tool", table_name="deliveries")
    op.alter_column(
        "deliveries",
        "reply",
        existing_type=sa.LargeBinary(),
        comment="the reply's first bytes",
        existing_comment="the reply's first bytes, which may hold anything: never shown",
        existing_nullable=True,
    )
    op.drop_column("deliveries", "duration_ms")
    op.drop_column("deliveries", "reply_excerpt")
