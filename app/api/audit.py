"""The audit of a tenant, as it was chained."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, get_args

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from app.api.access import Authenticated, GuardedRoute, requires
from app.api.bridge import Given
from app.api.lists import (
    ID_CHARS_MAX,
    LIMIT_DEFAULT,
    Cursor,
    Limit,
    ListOf,
    encode_cursor,
    position_after,
    printable,
)
from app.api.problems import documented, invalid
from app.store import audit
from app.store.audit import Chained, Kind

router = APIRouter(tags=["audit"], route_class=GuardedRoute)


class AuditRow(BaseModel):
    """One row of the chain; `docs/audit.md` says how its hash is made."""

    sequence: int = Field(description="1, 2, 3, … without a gap.")
    at: datetime
    kind: str = Field(description=", ".join(f"`{kind}`" for kind in get_args(Kind)) + ".")
    actor: str = Field(description="A key's id, `admin`, `upstream`, `expiry` or `service`.")
    via: str = Field(description="How that is known: `api`, `console`, `stream`, `policy`, `expiry`, …")
    session_id: str | None
    call_id: str | None
    subject: str | None = Field(description="The tool's name, or the key's id.")
    input_digest: str | None = Field(description="Of the call's input, as in the call object.")
    decision_id: str | None = Field(description="The decision that the row is about, or that counts.")
    result: str | None = Field(description="`allow` or `deny`.")
    detail: str | None = Field(description="A code, such as why an attempt was rejected.")
    shown_ms: int | None = Field(description="For how long the person saw the call, as the client says.")
    previous: str = Field(description="`hash` of the row before; zeros in the first.")
    hash: str = Field(description="SHA-256 in hex.")


@router.get(
    "/audit",
    summary="List the audit, oldest first",
    responses=documented("invalid_request"),
    **requires("admin"),
)
async def list_audit(
    bridge: Given,
    caller: Authenticated,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
    session: Annotated[
        str | None, Query(pattern="^[A-Za-z0-9_-]{1,128}$", description="Only this session's.")
    ] = None,
    call: Annotated[
        str | None,
        Query(min_length=1, max_length=ID_CHARS_MAX, description="Only this call's; with session."),
        printable,
    ] = None,
    newest_first: Annotated[bool, Query(description="Turn the order round.")] = False,
) -> ListOf[AuditRow]:
    if call is not None and session is None:
        raise invalid("call", "goes with session, of which it is a call")
    after = position_after(cursor) or None
    async with bridge.engine.connect() as connection:
        found = await audit.page(
            connection,
            caller.tenant,
            after=after,
            limit=limit + 1,
            is_newest_first=newest_first,
            session_id=session,
            call_id=call,
        )
    shown, has_more = found[:limit], len(found) > limit
    next_cursor = encode_cursor([shown[-1].sequence]) if has_more else None
    return ListOf(data=[_view(row) for row in shown], next_cursor=next_cursor)


def _view(row: Chained) -> AuditRow:
    entry = row.entry
    return AuditRow(
        sequence=row.sequence,
        at=row.at,
        kind=entry.kind,
        actor=entry.actor,
        via=entry.via,
        session_id=entry.session_id,
        call_id=entry.call_id,
        subject=entry.subject,
        input_digest=entry.input_digest,
        decision_id=entry.decision_id,
        result=entry.result,
        detail=entry.detail,
        shown_ms=entry.shown_ms,
        previous=row.previous.hex(),
        hash=row.hash.hex(),
    )
