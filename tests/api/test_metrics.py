"""What an operator's monitoring reads: figures that are right, and no name of anybody or anything."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from app.api.operations import FIGURES_EVERY_S, DatabaseFigures
from tests.api.service import Service
from tests.store.rows import add_attachment, add_call

pytestmark = pytest.mark.anyio


async def scrape(service: Service) -> dict[tuple[str, str], float]:
    """The samples by name and label, asked without a key."""
    answer = await service.http.get("/metrics", headers={"authorization": ""})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def fill(service: Service) -> None:
    async with service.engine.begin() as connection:
        await add_attachment(connection, flags=["unowned_calls"])
        await add_attachment(connection, "hidden_tenant", "sesn_hidden", status="reconnecting")
        await add_attachment(connection, session_id="sesn_over", status="ended")
        await add_call(connection, "tu_1")
        await add_call(connection, "tu_2", state="queued", tool="hidden_tool")
        await add_call(connection, "tu_3", state="posted")
        await add_call(connection, "tu_4", session_id="sesn_over")
        await connection.execute(text("update calls set created_at = now() - interval '90 seconds'"))
        await connection.execute(text("update attachments set last_event_at = now() - interval '40 seconds'"))


async def test_the_figures_are_those_of_the_whole_database(service: Service) -> None:
    await fill(service)
    shown = await scrape(service)
    assert {"live": 1, "reconnecting": 1} == {
        label: value for (name, label), value in shown.items() if name == "bascule_sessions"
    }
    assert {"held": 2, "queued": 1} == {
        label: value for (name, label), value in shown.items() if name == "bascule_calls_open"
    }
    assert (1, 1) == (
        shown["bascule_confirmations_waiting", ""], shown["bascule_sessions_flagged", "unowned_calls"]
    )  # fmt: skip
    assert 90 <= shown["bascule_confirmation_oldest_seconds", ""] < 120
    assert 40 <= shown["bascule_event_oldest_seconds", ""] < 70
    assert (0, 1) == (shown["bascule_notifications_pending", ""], shown["bascule_budget_left_ratio", ""])


async def test_a_tight_budget_shows(service: Service) -> None:
    async with service.engine.begin() as connection:
        for credential, tokens in (("default", 60.0), ("team", 15.0)):
            await connection.execute(
                text(
                    "insert into budgets (tenant, credential, tokens, rate_per_min) values ('t', :c, :n, 600)"
                ),
                {"c": credential, "n": tokens},
            )
    assert 0.25 == pytest.approx((await scrape(service))["bascule_budget_left_ratio", ""], abs=0.1)


async def test_no_name_is_told(service: Service) -> None:
    await fill(service)
    text_ = (await service.http.get("/metrics")).text
    for hidden in ("hidden", "sesn_", "default", "tu_1", "bash"):
        assert hidden not in text_


async def test_what_is_counted_is_told(service: Service) -> None:
    shown = await scrape(service)
    for name, label in (
        ("bascule_runs", ""), ("bascule_streams", ""), ("bascule_wakeups_working", ""),
        ("bascule_leases_claimed_total", ""), ("bascule_pool_connections", "used"),
        ("bascule_pool_connections", "max"),
    ):  # fmt: skip
        assert (name, label) in shown


async def test_the_database_is_asked_now_and_then_only(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def read(_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise TimeoutError

    monkeypatch.setattr("app.store.figures.read", read)
    figures = DatabaseFigures(service.engine)
    for _ in range(5):
        await figures.refresh()
    assert (1, True) == (asked, FIGURES_EVERY_S > 1)
