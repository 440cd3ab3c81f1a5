"""Upstream budgets"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "budgets",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("credential", sa.Text(), nullable=False),
        sa.Column(
            "tokens",
            sa.Double(),
            nullable=False,
            comment="as of updated_at; below zero when requests went unpaid",
        ),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "rate_per_min", sa.Double(), nullable=False, comment="what the last refusal left of the limit"
        ),
        sa.Column(
            "refused_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="since when the rate recovers",
        ),
        sa.Column("paused_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "paused_priority",
            sa.Integer(),
            nullable=True,
            comment="the highest priority that the pause holds, 0 first",
        ),
        sa.PrimaryKeyConstraint("tenant", "credential", name=op.f("pk_budgets")),
    )


def downgrade() -> None:
    op.drop_table("budgets")
