"""Where deliveries went"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column(
        "deliveries",
        sa.Column("url", sa.Text(), nullable=True, comment="where it goes; null before this was noted"),
    )


def downgrade() -> None:
    op.drop_column("deliveries", "url")
