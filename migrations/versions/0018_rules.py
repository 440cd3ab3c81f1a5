"""Standing rules

Code of the version before runs on this schema: it follows no rule, so that it holds what a rule would allow,
and tells nobody anew of a call that was to be answered by one.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.create_table(
        "rules",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("effect", sa.Text(), nullable=False, comment="allow, ask or deny"),
        sa.Column("tool", sa.Text(), nullable=True, comment="null in this and the next two: any"),
        sa.Column("kind", sa.Text(), nullable=True),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("tests", sa.Text(), nullable=False, comment="JSON: what its arguments must pass"),
        sa.Column(
            "only",
            postgresql.ARRAY(sa.Text()),
            nullable=True,
            comment="the arguments that there may be; null: any",
        ),
        sa.Column("deny_message", sa.Text(), nullable=True),
        sa.Column("note", sa.Text(), nullable=True, comment="for people"),
        sa.Column("created_by", sa.Text(), nullable=False, comment="a key's id"),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_by", sa.Text(), nullable=True),
        sa.Column("uses", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("tenant", "id", name=op.f("pk_rules")),
    )
    op.create_index(
        "ix_rules_live",
        "rules",
        ["tenant", "position"],
        unique=False,
        postgresql_where=sa.text("revoked_at is null"),
    )
    op.add_column(
        "calls",
        sa.Column(
            "gate_rule", sa.Text(), nullable=True, comment="the rule that holds it, or is about to answer"
        ),
    )


def downgrade() -> None:
    op.drop_column("calls", "gate_rule")
    op.drop_index("ix_rules_live", table_name="rules")
    op.drop_table("rules")
