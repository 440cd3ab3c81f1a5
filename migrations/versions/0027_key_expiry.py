"""When a key was used last, and when it expires

Code of the version before runs on this schema: it takes a key that has expired, and notes no use.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    op.add_column("keys", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column(
        "keys",
        sa.Column(
            "last_used_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="to about a minute: replicas gather uses",
        ),
    )


def downgrade() -> None:
    op.drop_column("keys", "last_used_at")
    op.drop_column("keys", "expires_at")
