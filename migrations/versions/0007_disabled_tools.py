"""Why and since when the service keeps a tool disabled"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column(
        "tools",
        sa.Column(
            "disabled_reason",
            sa.Text(),
            nullable=True,
            comment="a code, when the service disabled it; the policy says enabled",
        ),
    )
    op.add_column("tools", sa.Column("disabled_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("tools", "disabled_at")
    op.drop_column("tools", "disabled_reason")
