"""Whether the process lives, and whether it can serve."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from app.api.bridge import Bridge, Given
from app.store.database import is_unavailable
from app.store.migrate import is_current

READY_LIMIT_S: Final = 2.0

router = APIRouter(tags=["operations"])


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """What serving depends on. Without wake-ups the service polls, and stays ready."""

    status: Literal["ready", "not_ready"]
    database: Literal["ok", "unavailable"]
    schema_: Literal["current", "old", "unknown"] = Field(serialization_alias="schema")
    wakeups: Literal["working", "polling"]


@router.get("/healthz", summary="Whether the process lives")
async def healthz() -> Health:
    return Health()


@router.get(
    "/readyz",
    response_model=Readiness,
    summary="Whether it can serve",
    responses={503: {"model": Readiness, "description": "It cannot serve now"}},
)
async def readyz(request: Request, bridge: Given) -> Response:
    database, schema = await _database(request, bridge)
    is_ready = database == "ok" and schema == "current"
    shown = Readiness(
        status="ready" if is_ready else "not_ready",
        database=database,
        schema_=schema,
        wakeups="working" if bridge.wakeups.works else "polling",
    )
    return Response(
        shown.model_dump_json(by_alias=True),
        status_code=200 if is_ready else 503,
        media_type="application/json",
    )


async def _database(
    request: Request, bridge: Bridge
) -> tuple[Literal["ok", "unavailable"], Literal["current", "old", "unknown"]]:
    state = request.app.state
    try:
        async with asyncio.timeout(READY_LIMIT_S):
            async with bridge.engine.connect() as connection:
                await connection.execute(text("select 1"))
            # A schema never goes back, and reading the migrations' files takes a while.
            if not getattr(state, "is_schema_current", False):
                state.is_schema_current = await is_current(bridge.engine)
    except (SQLAlchemyError, OSError) as error:
        if not is_unavailable(error):
            raise
        return "unavailable", "unknown"
    return "ok", "current" if state.is_schema_current else "old"
