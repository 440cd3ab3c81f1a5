"""Numbers of changes, which a session's stream resumes by

Rows that are there get numbers in no order that matters. Code of the version before runs on this schema: what
it changes keeps the number that it has, so a stream misses that change; what it adds has a new one.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"

TABLES = ("attachments", "calls", "messages")


def upgrade() -> None:
    op.execute(sa.schema.CreateSequence(sa.Sequence("changes")))
    for table in TABLES:
        op.add_column(
            table,
            sa.Column(
                "change",
                sa.BigInteger(),
                server_default=sa.text("nextval('changes')"),
                nullable=False,
                comment="the last one",
            ),
        )
    op.create_index(
        op.f("ix_calls_tenant_session_id_change"), "calls", ["tenant", "session_id", "change"], unique=False
    )
    op.create_index(
        op.f("ix_messages_tenant_session_id_change"),
        "messages",
        ["tenant", "session_id", "change"],
        unique=False,
        postgresql_where=sa.text("state = 'final'"),
    )


def downgrade() -> None:
    op.drop_index(op.f("ix_messages_tenant_session_id_change"), table_name="messages")
    op.drop_index(op.f("ix_calls_tenant_session_id_change"), table_name="calls")
    for table in reversed(TABLES):
        op.drop_column(table, "change")
    op.execute(sa.schema.DropSequence(sa.Sequence("changes")))
