"""Upstream's events for those who follow them

Code of the version before runs on this schema: its sessions show none of their events.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.create_table(
        "upstream_events",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("event", sa.Text(), nullable=False, comment="JSON as upstream sent it; kept for a minute"),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "session_id", "number", name=op.f("pk_upstream_events")),
        prefixes=["UNLOGGED"],
    )
    op.create_table(
        "watches",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("until_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=True, comment="of the run that saw it"),
        sa.PrimaryKeyConstraint("tenant", "session_id", name=op.f("pk_watches")),
    )


def downgrade() -> None:
    op.drop_table("watches")
    op.drop_table("upstream_events")
