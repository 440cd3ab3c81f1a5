"""Idempotency keys

Code of the version before runs on this schema: it ignores the header.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("caller", sa.Text(), nullable=False, comment="the API key whose requests they are"),
        sa.Column("key", sa.Text(), nullable=False, comment="Idempotency-Key, as the client chose it"),
        sa.Column(
            "answer",
            sa.LargeBinary(),
            nullable=False,
            comment="encrypted JSON: a digest of the request; the answer's status, headers and body",
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "caller", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(op.f("ix_idempotency_keys_created_at"), "idempotency_keys", ["created_at"], unique=False)


def downgrade() -> None:
    op.drop_table("idempotency_keys")
