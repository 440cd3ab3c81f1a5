"""An index of open previews"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.create_index(
        "ix_messages_partial",
        "messages",
        ["tenant", "session_id"],
        unique=False,
        postgresql_where=sa.text("state = 'partial'"),
    )


def downgrade() -> None:
    op.drop_index("ix_messages_partial", table_name="messages")
