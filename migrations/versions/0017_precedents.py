"""Indexes for how earlier calls of a tool were decided"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"

DECIDED = "kind in ('decision.recorded', 'decision.seen') and via <> 'policy'"


def upgrade() -> None:
    op.create_index(
        "ix_audit_decided",
        "audit",
        ["tenant", "subject", "sequence"],
        unique=False,
        postgresql_where=sa.text(DECIDED),
    )
    op.create_index(
        "ix_audit_decided_inputs",
        "audit",
        ["tenant", "subject", "input_digest", "sequence"],
        unique=False,
        postgresql_where=sa.text(DECIDED),
    )


def downgrade() -> None:
    op.drop_index("ix_audit_decided_inputs", table_name="audit")
    op.drop_index("ix_audit_decided", table_name="audit")
