"""The audit: a row for whatever was decided or tried, chained by hashes and never changed.

Each tenant has a chain of its own. Its head is locked last in a transaction and held until the commit, so
appends of one tenant take turns, those of others do not wait, and nobody waits in a circle. A row says what
was decided about an input by its digest; inputs, results, messages and secrets are not in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import Row, select, text, union
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables
from app.store.statements import Bulk

FORMAT: Final = "bascule-audit-1"
"""The first member of what is hashed; it changes when the members do."""
FIRST: Final = bytes(32)
"""What the first row of a chain names as the hash before it."""
VERIFY_ROWS: Final = 1_000
"""How many rows verification reads at once."""

Kind = Literal[
    # Attempts through the service.
    "decision.recorded",
    "decision.approved",
    "decision.repeated",
    "decision.contrary",
    "decision.rejected",
    # What nobody asked us for.
    "decision.seen",
    "decision.expired",
    "decision.ruled",
    # What became of a decision.
    "decision.refused",
    "decision.spent",
    "key.created",
    "key.revoked",
    "tool.registered",
    "tool.changed",
    "tool.deleted",
    "tool.secret_rotated",
    "credential.stored",
    "credential.deleted",
    "rule.created",
    "rule.revoked",
]

_audit = tables.audit
_heads = tables.audit_heads


@dataclass(frozen=True, slots=True)
class Entry:
    """What a row says. `actor` did it or it was done to that one's decision; `via` is how that is known.

    `via` is `api` (the key that `actor` names), `console` (a key that signed in there), `stream` (seen
    upstream), `policy` (of upstream), `expiry`, `rule` (the standing one that `actor` names), or `service`.
    `detail` is a code; of an allow with an edited input `edited ` and that one's digest, of a rule its id.
    For a call, `subject` (its tool) and `input_digest` are filled in from its row when they are left out.
    `shown_ms` is for how long the person looked, as the client says.
    """

    tenant: str
    kind: Kind
    actor: str
    via: str
    session_id: str | None = None
    call_id: str | None = None
    subject: str | None = None
    input_digest: str | None = None
    decision_id: str | None = None
    result: str | None = None
    detail: str | None = None
    shown_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Chained:
    """A row of a tenant's chain."""

    entry: Entry
    sequence: int
    at: datetime
    previous: bytes
    hash: bytes

    def computed(self) -> bytes:
        """The hash that the row must have: of a JSON array of its members, without spaces, in UTF-8."""
        e = self.entry
        members = [
            FORMAT, e.tenant, self.sequence, self.at.astimezone(UTC).isoformat(timespec="microseconds"),
            e.kind, e.actor, e.via, e.session_id, e.call_id, e.subject, e.input_digest, e.decision_id,
            e.result, e.detail, e.shown_ms, self.previous.hex(),
        ]  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(members)).digest()


@dataclass(frozen=True, slots=True)
class Verified:
    """How the chain of a tenant was found. `fault` says in a sentence where it breaks first, if it does."""

    tenant: str
    rows: int
    head: bytes
    fault: str | None = None


_LOCK: Final = text(
    """
    insert into audit_heads (tenant, sequence, hash)
    select t, 0, cast(:first as bytea) from unnest(cast(:tenants as text[])) t order by t
    on conflict (tenant) do update set sequence = audit_heads.sequence
    returning tenant, sequence, hash, clock_timestamp() as at
    """
)
_MOVE: Final = text(
    """
    update audit_heads h set sequence = w.sequence, hash = w.hash
    from unnest(cast(:tenants as text[]), cast(:sequences as bigint[]), cast(:hashes as bytea[]))
        as w(tenant, sequence, hash)
    where h.tenant = w.tenant
    """
)
_CALLS: Final = text(
    """
    select c.tenant, c.session_id, c.id, c.tool,
        'sha256:' || encode(sha256(convert_to(c.input, 'UTF8')), 'hex') as input_digest
    from unnest(cast(:tenants as text[]), cast(:session_ids as text[]), cast(:ids as text[]))
        as w(tenant, session_id, id)
    join calls c on c.tenant = w.tenant and c.session_id = w.session_id and c.id = w.id
    """
)
_TYPES: Final = {"sequence": "bigint", "at": "timestamptz", "shown_ms": "integer", "previous": "bytea"}
_TYPES_OF: Final = {one.name: _TYPES.get(one.name, "text") for one in _audit.columns} | {"hash": "bytea"}
_KEEP: Final = Bulk.of("insert into audit ({names}) select {names} from {rows}", **_TYPES_OF)


async def append(connection: AsyncConnection, entries: Sequence[Entry]) -> None:
    """Add rows in the caller's transaction, which shall lock nothing more afterwards."""
    if not entries:
        return
    entries = await _described(connection, entries)
    tenants = sorted({entry.tenant for entry in entries})
    locked = await connection.execute(_LOCK, {"tenants": tenants, "first": FIRST})
    heads = {row.tenant: (row.sequence, row.hash, row.at) for row in locked}
    columns: dict[str, list[Any]] = {name: [] for name in _TYPES_OF}
    for entry in entries:
        sequence, previous, at = heads[entry.tenant]
        row = Chained(entry, sequence + 1, at, previous, b"")
        row = replace(row, hash=row.computed())
        heads[entry.tenant] = (row.sequence, row.hash, at)
        for name, values in columns.items():
            values.append(getattr(row if hasattr(row, name) else entry, name))
    await connection.execute(_KEEP.statement, columns)
    moved = {
        "tenants": tenants,
        "sequences": [heads[tenant][0] for tenant in tenants],
        "hashes": [heads[tenant][1] for tenant in tenants],
    }
    await connection.execute(_MOVE, moved)


async def _described(connection: AsyncConnection, entries: Sequence[Entry]) -> list[Entry]:
    """Say of calls what they are: their tool, and the digest of their input."""
    missing = sorted(
        {
            (entry.tenant, entry.session_id, entry.call_id)
            for entry in entries
            if entry.session_id is not None and entry.call_id is not None and entry.input_digest is None
        }
    )
    if not missing:
        return list(entries)
    named = dict(zip(("tenants", "session_ids", "ids"), map(list, zip(*missing, strict=True)), strict=True))
    found = {(row.tenant, row.session_id, row.id): row for row in await connection.execute(_CALLS, named)}
    described = []
    for entry in entries:
        row = found.get((entry.tenant, entry.session_id, entry.call_id))
        if row is not None and entry.input_digest is None:
            entry = replace(entry, subject=row.tool, input_digest=row.input_digest)  # noqa: PLW2901 - the same
        described.append(entry)
    return described


async def page(
    connection: AsyncConnection,
    tenant: str,
    *,
    after: int | None,
    limit: int,
    is_newest_first: bool = False,
    session_id: str | None = None,
    call_id: str | None = None,
) -> list[Chained]:
    """Return rows of the tenant from the one beyond the sequence number `after` on."""
    place = _audit.c.sequence
    query = select(_audit).where(_audit.c.tenant == tenant).limit(limit)
    query = query.order_by(place.desc() if is_newest_first else place)
    if after is not None:
        query = query.where(place < after if is_newest_first else place > after)
    if session_id is not None:
        query = query.where(_audit.c.session_id == session_id)
    if call_id is not None:
        query = query.where(_audit.c.call_id == call_id)
    return [_chained(row) for row in await connection.execute(query)]


async def tenants(connection: AsyncConnection) -> list[str]:
    """Return the tenants that have a chain, or what is left of one."""
    both = union(select(_heads.c.tenant), select(_audit.c.tenant)).subquery()
    return list(await connection.scalars(select(both.c.tenant).order_by(both.c.tenant)))


async def verify(connection: AsyncConnection, tenant: str) -> Verified:
    """Walk the tenant's chain to its first fault.

    The connection must be in a transaction whose reads all see one moment.
    """
    sequence, last = 0, FIRST
    while rows := await page(connection, tenant, after=sequence, limit=VERIFY_ROWS):
        for row in rows:
            fault = None
            if row.sequence != sequence + 1:
                fault = f"row {sequence + 1} is missing"
            elif row.hash != row.computed():
                fault = f"row {row.sequence} was changed"
            elif row.previous != last:
                fault = f"row {row.sequence} does not follow the row before it"
            if fault is not None:
                return Verified(tenant, sequence, last, fault)
            sequence, last = row.sequence, row.hash
    query = select(_heads.c.sequence, _heads.c.hash).where(_heads.c.tenant == tenant)
    head = (await connection.execute(query)).one_or_none()
    fault = None
    if head is None:
        fault = "the record of its last row is missing"
    elif head.sequence > sequence:
        fault = f"row {sequence + 1} is missing"
    elif (head.sequence, head.hash) != (sequence, last):
        fault = f"row {head.sequence} is not the one that was recorded as the last"
    return Verified(tenant, sequence, last, fault)


def _chained(row: Row[Any]) -> Chained:
    entry = Entry(
        row.tenant, row.kind, row.actor, row.via, row.session_id, row.call_id, row.subject,
        row.input_digest, row.decision_id, row.result, row.detail, row.shown_ms,
    )  # fmt: skip
    return Chained(entry, row.sequence, row.at, row.previous, row.hash)
