"""Results that tools report later"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column(
        "deliveries",
        sa.Column("callback_s", sa.Double(), comment="after a 202: what each word of progress grants"),
    )
    op.add_column(
        "deliveries",
        sa.Column(
            "deadline_max_at",
            sa.DateTime(timezone=True),
            comment="after a 202: no progress extends beyond",
        ),
    )
    op.add_column(
        "bodies", sa.Column("key_id", sa.Text(), comment="of the key that derives the token of its callback")
    )
    op.alter_column(
        "bodies",
        "body",
        existing_type=sa.LargeBinary(),
        comment="what each delivery sends, but for the token",
        existing_comment="what each delivery of the call sends",
    )
    op.create_table(
        "callbacks",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False, comment="the result as the tool reported it"),
        sa.Column("content_type", sa.Text(), nullable=False),
        sa.Column("received_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "session_id", "call_id", name="pk_callbacks"),
    )


def downgrade() -> None:
    op.drop_table("callbacks")
    op.drop_column("bodies", "key_id")
    op.drop_column("deliveries", "deadline_max_at")
    op.drop_column("deliveries", "callback_s")
