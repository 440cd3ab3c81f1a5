"""Sessions that attach themselves: rules, webhooks of the platform, sweeps

Code of the version before runs on this schema: it attaches none of them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.create_table(
        "attach_rules",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("agent_id", sa.Text(), nullable=True, comment="null: any"),
        sa.Column("environment_id", sa.Text(), nullable=True, comment="null: any"),
        sa.Column("settings", sa.Text(), nullable=False, comment="JSON, of the attachments that it makes"),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name=op.f("pk_attach_rules")),
    )
    op.create_table(
        "hook_keys",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("credential", sa.Text(), nullable=False),
        sa.Column(
            "key",
            sa.LargeBinary(),
            nullable=False,
            comment="encrypted: signs webhooks about the workspace of the credential",
        ),
        sa.PrimaryKeyConstraint("tenant", "credential", name=op.f("pk_hook_keys")),
    )
    op.create_table(
        "hooks",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False, comment="webhook-id of one that was taken"),
        sa.Column("received_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "id", name=op.f("pk_hooks")),
    )
    op.create_index(op.f("ix_hooks_received_at"), "hooks", ["received_at"], unique=False)
    op.create_table(
        "sightings",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("credential", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "credential", "session_id", name=op.f("pk_sightings")),
    )
    op.create_index(op.f("ix_sightings_next_at"), "sightings", ["next_at"], unique=False)
    op.create_table(
        "sweeps",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("credential", sa.Text(), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "credential", name=op.f("pk_sweeps")),
    )
    op.add_column(
        "attachments",
        sa.Column(
            "upstream_updated_at",
            sa.Text(),
            nullable=True,
            comment="the session's, when the list last woke it",
        ),
    )


def downgrade() -> None:
    op.drop_column("attachments", "upstream_updated_at")
    op.drop_table("sweeps")
    op.drop_index(op.f("ix_sightings_next_at"), table_name="sightings")
    op.drop_table("sightings")
    op.drop_index(op.f("ix_hooks_received_at"), table_name="hooks")
    op.drop_table("hooks")
    op.drop_table("hook_keys")
    op.drop_table("attach_rules")
