"""Events that clients send to sessions

Code of the version before runs on this schema: it sends none of them, and they wait for a run that does.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.create_table(
        "sends",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column(
            "position",
            sa.BigInteger(),
            sa.Identity(always=True),
            nullable=False,
            comment="order of the wishes",
        ),
        sa.Column(
            "events", sa.Text(), nullable=False, comment="JSON, comma-separated; empty once it is over"
        ),
        sa.Column("status", sa.Text(), server_default=sa.text("'waiting'"), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=True, comment="of the run that took it up"),
        sa.Column("sending_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("sent", sa.Text(), nullable=True, comment="JSON: the events as upstream took them"),
        sa.Column("code", sa.Text(), nullable=True, comment="why it was refused"),
        sa.Column("message", sa.Text(), nullable=True, comment="upstream's own"),
        sa.Column(
            "waiting_on",
            postgresql.ARRAY(sa.Text()),
            nullable=True,
            comment="calls that upstream wants answered first",
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("tenant", "session_id", "id", name=op.f("pk_sends")),
    )
    op.create_index(op.f("ix_sends_created_at"), "sends", ["created_at"])
    op.create_index(
        "ix_sends_open",
        "sends",
        ["tenant", "session_id", "position"],
        postgresql_where=sa.text("finished_at is null"),
    )


def downgrade() -> None:
    op.drop_table("sends")
