"""Reminders of held calls

Code of the version before runs on this schema: of calls that it holds nobody is reminded.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column(
        "calls",
        sa.Column(
            "gate_remind_after_s",
            sa.Double(),
            nullable=True,
            comment="as registered when the call came to be held",
        ),
    )
    op.add_column(
        "calls",
        sa.Column(
            "gate_remind_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="of the next reminder; null after the last",
        ),
    )
    op.add_column(
        "calls",
        sa.Column(
            "gate_reminders",
            sa.Integer(),
            server_default=sa.text("0"),
            nullable=False,
            comment="sent so far",
        ),
    )
    op.create_index(
        "ix_calls_reminding",
        "calls",
        ["gate_remind_at"],
        unique=False,
        postgresql_where=sa.text("state = 'held' and gate_remind_at is not null"),
    )


def downgrade() -> None:
    op.drop_index("ix_calls_reminding", table_name="calls")
    op.drop_column("calls", "gate_reminders")
    op.drop_column("calls", "gate_remind_at")
    op.drop_column("calls", "gate_remind_after_s")
