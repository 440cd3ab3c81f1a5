"""Browser passes"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "browser_passes",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column(
            "hash",
            sa.LargeBinary(),
            nullable=False,
            comment="SHA-256 of its text, which has 256 random bits",
        ),
        sa.Column(
            "kind", sa.Text(), nullable=False, comment="link: signs in once; session: a browser's cookie"
        ),
        sa.Column("key_id", sa.Text(), nullable=False, comment="whose rights it has"),
        sa.Column(
            "proof",
            sa.Text(),
            nullable=True,
            comment="of BASCULE_ADMIN_KEY, which is stored nowhere: it ends with that key",
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "hash", name=op.f("pk_browser_passes")),
    )
    op.create_index(op.f("ix_browser_passes_hash"), "browser_passes", ["hash"], unique=True)
    op.create_index(op.f("ix_browser_passes_expires_at"), "browser_passes", ["expires_at"], unique=False)


def downgrade() -> None:
    op.drop_table("browser_passes")
