"""Expiry of held calls

Code of the version before runs on this schema: calls that it holds never expire.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column(
        "calls",
        sa.Column(
            "gate_on_expiry",
            sa.Text(),
            nullable=True,
            comment="deny or keep, as registered when the call came to be held",
        ),
    )
    op.create_index(
        "ix_calls_expiring",
        "calls",
        ["gate_expires_at"],
        unique=False,
        postgresql_where=sa.text("state = 'held' and gate_on_expiry = 'deny'"),
    )


def downgrade() -> None:
    op.drop_index("ix_calls_expiring", table_name="calls")
    op.drop_column("calls", "gate_on_expiry")
