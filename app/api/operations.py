"""Figures for an operator, in the text format of Prometheus."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy.ext.asyncio import AsyncEngine

from app import metrics
from app.api.bridge import STREAMS_MAX, Given
from app.logs import logger
from app.store import figures
from app.store.database import is_unavailable
from app.store.figures import Figures

FIGURES_EVERY_S: Final = 5.0
"""However often somebody asks, the database is asked as often as this."""
FIGURES_LIMIT_S: Final = 2.0

router = APIRouter(tags=["operations"])
log = logger(__name__)


class DatabaseFigures:
    """The figures of the database, as they were lately."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._read_at = -FIGURES_EVERY_S

    async def refresh(self) -> None:
        """Read them again if they are old; those of a database that is away stay."""
        now = asyncio.get_running_loop().time
        async with self._lock:
            if now() < self._read_at + FIGURES_EVERY_S:
                return
            try:
                async with asyncio.timeout(FIGURES_LIMIT_S), self._engine.connect() as connection:
                    show(await figures.read(connection))
            except Exception as error:
                if not (isinstance(error, TimeoutError) or is_unavailable(error)):
                    raise
                log.warning("figures_away", error=type(error).__name__)
            self._read_at = now()


def show(read: Figures) -> None:
    """Put the figures of the database where they are told from."""
    for gauge, label, counts in (
        (metrics.SESSIONS, "status", read.sessions),
        (metrics.CALLS, "state", read.calls),
        (metrics.STUCK, "flag", read.flags),
    ):
        gauge.clear()
        for name, count in counts.items():
            gauge.labels(**{label: name}).set(count)
    metrics.WAITING.set(read.waiting)
    metrics.WAITING_AGE.set(read.waiting_age_s)
    metrics.EVENT_AGE.set(read.event_age_s)
    metrics.NOTIFICATIONS.set(read.notifications)
    metrics.BUDGET.set(read.budget_left)


@router.get(
    "/metrics",
    response_class=Response,
    summary="What this replica measures, and figures of the whole database",
    responses={
        200: {
            "content": {
                "text/plain": {"schema": {"type": "string"}, "example": "bascule_calls_waiting 1.0\n"}
            },
            "description": "Prometheus",
        }
    },
)
async def get_metrics(request: Request, bridge: Given) -> Response:
    await request.app.state.figures.refresh()
    pool: Any = bridge.engine.pool  # a queue's, which can be counted
    metrics.STREAMS.set(STREAMS_MAX - bridge.streams._value)
    metrics.WAKEUPS.set(bridge.wakeups.works)
    metrics.POOL.labels(which="used").set(pool.checkedout())
    metrics.POOL.labels(which="max").set(pool.size())
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
