"""The version of the tool that a decision is about

Code of the version before runs on this schema: of a decision that it makes no version is known, and such a
one counts whatever becomes of the tool, as it did.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.add_column(
        "decisions",
        sa.Column(
            "tool_version",
            sa.BigInteger(),
            nullable=True,
            comment="of the registration that an allow leads to; 0: none",
        ),
    )


def downgrade() -> None:
    op.drop_column("decisions", "tool_version")
