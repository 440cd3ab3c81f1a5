"""Rate limits of single keys

Code of the version before runs on this schema: it limits no key.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    op.add_column(
        "keys",
        sa.Column("requests_per_min", sa.Integer(), nullable=True, comment="null: as the settings say"),
    )


def downgrade() -> None:
    op.drop_column("keys", "requests_per_min")
