"""R-339: a session whose calls do not move says so, however healthy the process is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.store.overdue import DECISION_S, LATE_S, SHOWN_MAX
from tests.api.service import Service
from tests.store.rows import add_attachment, add_call, add_delivery

pytestmark = pytest.mark.anyio


def ago(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


async def shown(service: Service, **call: Any) -> list[dict[str, Any]]:
    """What the session says of one call that is like this; its times are so many seconds ago."""
    call = {name: ago(value) if name.endswith("_at") else value for name, value in call.items()}
    deadline_at = call.pop("deadline_at", None)
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu_1", **call)
        if deadline_at is not None:
            await add_delivery(connection, "tu_1", deadline_at=deadline_at)
    found: list[dict[str, Any]] = (await service.http.get("/sessions/sesn_1")).json()["overdue"]
    return found


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"state": "held", "created_at": DECISION_S + 9}, "awaiting_decision"),
        ({"state": "unowned", "created_at": DECISION_S + 9}, "unowned"),
        ({"state": "dispatched", "deadline_at": LATE_S + 9}, "past_deadline"),
        ({"state": "queued", "updated_at": LATE_S + 9}, "not_moving"),
        ({"state": "posting", "updated_at": LATE_S + 9}, "not_moving"),
    ],
)
async def test_a_call_that_should_have_moved_is_named(
    service: Service, call: dict[str, Any], reason: str
) -> None:
    (one,) = await shown(service, **call)
    assert (one["call_id"], one["tool"], one["state"], one["reason"]) == (
        "tu_1",
        "bash",
        call["state"],
        reason,
    )
    age_s = call.get("deadline_at") or call.get("updated_at") or call["created_at"]
    assert abs((ago(age_s) - datetime.fromisoformat(one["since"])).total_seconds()) < 10


@pytest.mark.parametrize(
    "call",
    [
        {"state": "held", "created_at": DECISION_S - 60},
        {"state": "dispatched", "deadline_at": LATE_S - 60, "updated_at": DECISION_S},
        {"state": "queued", "updated_at": LATE_S - 60},
        {"state": "posted", "created_at": 9 * DECISION_S, "updated_at": 9 * DECISION_S},
    ],
)
async def test_a_call_that_has_time_left_or_is_over_is_not(service: Service, call: dict[str, Any]) -> None:
    assert [] == await shown(service, **call)


async def test_the_oldest_are_named_and_not_all(service: Service) -> None:
    async with service.engine.begin() as connection:
        await add_attachment(connection)
        for number in range(SHOWN_MAX + 1):
            await add_call(connection, f"tu_{number}", created_at=ago(2 * DECISION_S))
    (session,) = (await service.http.get("/sessions")).json()["data"]
    assert [f"tu_{number}" for number in range(SHOWN_MAX)] == [one["call_id"] for one in session["overdue"]]
