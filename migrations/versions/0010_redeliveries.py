"""Calls to deliver again"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column(
        "attachments",
        sa.Column(
            "again",
            postgresql.ARRAY(sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="calls to deliver again",
        ),
    )


def downgrade() -> None:
    op.drop_column("attachments", "again")
