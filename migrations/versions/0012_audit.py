"""The audit chain

Code of the version before runs on this schema: it writes no audit.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

# What keeps the rows as they are also against a mistake in a console of the database. Its owner can take the
# triggers away; then the hashes show it.
_FROZEN = """
create function audit_is_append_only() returns trigger language plpgsql as $$
begin
    raise exception 'rows of the audit are never changed or removed' using errcode = 'restrict_violation';
end $$
"""


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column(
            "sequence", sa.BigInteger(), nullable=False, comment="1, 2, 3, … of the tenant, without a gap"
        ),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column(
            "actor", sa.Text(), nullable=False, comment="a key's id, admin, upstream, expiry or service"
        ),
        sa.Column("via", sa.Text(), nullable=False, comment="how the actor was proved"),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("call_id", sa.Text(), nullable=True),
        sa.Column("subject", sa.Text(), nullable=True, comment="the tool's name, or the key's id"),
        sa.Column("input_digest", sa.Text(), nullable=True),
        sa.Column("decision_id", sa.Text(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True, comment="allow or deny"),
        sa.Column("detail", sa.Text(), nullable=True, comment="a code"),
        sa.Column(
            "shown_ms",
            sa.Integer(),
            nullable=True,
            comment="for how long the call was looked at, as the client says",
        ),
        sa.Column("previous", sa.LargeBinary(), nullable=False, comment="hash of the tenant's row before"),
        sa.Column("hash", sa.LargeBinary(), nullable=False, comment="SHA-256 over all of the above"),
        sa.PrimaryKeyConstraint("tenant", "sequence", name=op.f("pk_audit")),
    )
    op.create_index(
        "ix_audit_session",
        "audit",
        ["tenant", "session_id", "sequence"],
        unique=False,
        postgresql_where=sa.text("session_id is not null"),
    )
    op.create_table(
        "audit_heads",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False, comment="of the tenant's last row"),
        sa.Column("hash", sa.LargeBinary(), nullable=False, comment="of that row"),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_audit_heads")),
    )
    op.execute(_FROZEN)
    op.execute(
        "create trigger audit_rows_stay before update or delete on audit"
        " for each row execute function audit_is_append_only()"
    )
    op.execute(
        "create trigger audit_stays before truncate on audit"
        " for each statement execute function audit_is_append_only()"
    )


def downgrade() -> None:
    op.drop_table("audit_heads")
    op.drop_index("ix_audit_session", table_name="audit")
    op.drop_table("audit")
    op.execute("drop function audit_is_append_only()")
