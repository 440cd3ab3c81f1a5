"""Credentials

Code of the version before runs on this schema: it knows the one of its environment only, and leaves sessions
of others waiting.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.create_table(
        "credentials",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False, comment="api_key or bearer"),
        sa.Column("secret", sa.LargeBinary(), nullable=False, comment="encrypted"),
        sa.Column("upstream_url", sa.Text(), nullable=True, comment="null: that of the service"),
        sa.Column(
            "version",
            sa.BigInteger(),
            server_default=sa.text("1"),
            nullable=False,
            comment="rises with each change",
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name=op.f("pk_credentials")),
    )


def downgrade() -> None:
    op.drop_table("credentials")
