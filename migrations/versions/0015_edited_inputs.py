"""Edited inputs

Code of the version before runs on this schema. It would deliver a call with the agent's own input, so nobody
should allow an edited one while it still serves.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column(
        "calls",
        sa.Column(
            "edited_input",
            sa.Text(),
            nullable=True,
            comment="JSON that a person put in its place: what runs",
        ),
    )
    op.add_column(
        "decisions",
        sa.Column(
            "edited_input",
            sa.Text(),
            nullable=True,
            comment="JSON that an allow puts in the place of the call's input",
        ),
    )


def downgrade() -> None:
    op.drop_column("decisions", "edited_input")
    op.drop_column("calls", "edited_input")
