"""What the doctor says of set-ups that are right, and of those that are broken in one way each."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.doctor.findings import Check, Finding
from app.store import credentials, tools
from app.store.embedded import EmbeddedPostgres
from app.store.secrets import Secrets
from tests import postgres
from tests.doctor.conftest import Examine, Findings
from tests.store.rows import SECRETS
from tests.store.test_embedded import data_dir, folder, stopped

__all__ = ["data_dir", "folder", "stopped"]

pytestmark = pytest.mark.anyio


def only(found: Findings, check: str) -> Finding:
    """The one finding of a check; every other check found nothing to do."""
    (one,) = found[check]
    others = [each for name in found if name != check for each in found[name]]
    assert not [each for each in others if each.status in ("warning", "failed")]
    return one


async def register(engine: AsyncEngine, name: str, url: str, secrets: Secrets = SECRETS) -> None:
    async with engine.begin() as connection:
        await tools.put(
            connection, secrets, "default", name, url=url, description=None, policy={}, headers={}
        )


async def test_a_set_up_that_is_right_passes_every_check(examined: Examine, engine: AsyncEngine) -> None:
    await register(engine, "lookup_order", "http://127.0.0.1:9000/")
    found = await examined(BASCULE_WEBHOOK_ALLOW="127.0.0.0/8")
    assert set(get_args(Check)) == set(found)
    assert {one.status for findings in found.values() for one in findings} == {"ok"}
    assert found["webhooks"][0].detail == "1 of 1 webhooks may be called."
    assert found["secrets"][0].detail == "BASCULE_SECRET_KEY opens all of 2 stored secrets."


async def test_each_refused_setting_is_named_and_nothing_else_is_tried(examined: Examine) -> None:
    found = await examined(BASCULE_PORT="x", BASCULE_WEBHOOK_ALLOW="10.0.0.0/40")
    assert [one.status for one in found["settings"]] == ["failed", "failed"]
    assert [one.detail.partition(":")[0] for one in found["settings"]] == [
        "BASCULE_PORT",
        "BASCULE_WEBHOOK_ALLOW",
    ]
    assert {one.status for name in found if name != "settings" for one in found[name]} == {"unchecked"}


@pytest.mark.parametrize("port", ["8080", "x"])
async def test_a_slip_in_a_variables_name_is_a_warning(examined: Examine, port: str) -> None:
    slip = {"BASCULE_WEBHOOKS_ALLOW": "10.0.0.0/8", "BASCULE_KEY": "of the command line"}
    found = await examined(BASCULE_PORT=port, **slip)
    assert [one.detail for one in found["settings"] if one.status == "warning"] == [
        "BASCULE_WEBHOOKS_ALLOW is no setting and has no effect."
    ]


async def test_a_database_that_is_away_fails_and_upstream_is_looked_at_all_the_same(
    examined: Examine,
) -> None:
    found = await examined(BASCULE_DATABASE_URL="postgresql://x:hidden@127.0.0.1:1/orders")
    one = only(found, "database")
    assert (one.status, one.detail) == (
        "failed",
        "PostgreSQL at 127.0.0.1:1/orders: it cannot be reached: Connection refused.",
    )
    assert "BASCULE_DATABASE_URL" in str(one.remedy)
    assert found["upstream"][0].status == "ok"
    assert found["schema"][0].status == found["webhooks"][0].status == "unchecked"
    assert "hidden" not in str(found)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": "/nowhere"}, "there is no such database."),
        ({"netloc": "bascule:wrong@"}, "the user or the password is refused."),
        ({"netloc": "bascule:x@no-such-host.invalid", "query": ""}, "the host name cannot be looked up."),
    ],
)
async def test_the_reason_why_a_database_is_not_reached_is_told(
    examined: Examine, migrated_url: str, change: dict[str, str], says: str
) -> None:
    url = urlsplit(migrated_url)._replace(**change).geturl()
    one = only(await examined(BASCULE_DATABASE_URL=url), "database")
    assert one.status == "failed"
    assert one.detail.endswith(says)


async def test_a_schema_that_is_missing_names_the_command(examined: Examine, migrated_url: str) -> None:
    with postgres.database(migrated_url) as empty:
        one = only(await examined(BASCULE_DATABASE_URL=empty), "schema")
        assert one.status == "failed"
        assert one.detail.startswith("The database is empty; this version needs ")
        assert "bascule migrate" in str(one.remedy)
        one = only(await examined(BASCULE_DATABASE_URL=empty, BASCULE_MIGRATE="1"), "schema")
        assert one.status == "warning"


async def test_wake_ups_that_go_elsewhere_are_a_warning(examined: Examine, migrated_url: str) -> None:
    with postgres.database(migrated_url) as other:
        one = only(await examined(BASCULE_DATABASE_DIRECT_URL=other), "wakeups")
    assert one.status == "warning"
    assert "BASCULE_DATABASE_DIRECT_URL" in str(one.remedy)


async def test_a_key_that_opens_nothing_of_what_is_stored_fails(
    examined: Examine, engine: AsyncEngine
) -> None:
    other = Secrets([bytes(32)])
    await register(engine, "lookup_order", "https://127.0.0.1:9000/", secrets=other)
    found = await examined(BASCULE_WEBHOOK_ALLOW="127.0.0.0/8")
    one = only(found, "secrets")
    assert one.status == "failed"
    assert f"key {other.key_id}" in one.detail
    assert "tools.secrets 1" in one.detail


async def test_a_credential_that_upstream_refuses_fails_and_is_not_shown(
    examined: Examine, engine: AsyncEngine
) -> None:
    one = only(await examined(ANTHROPIC_API_KEY="sk-ant-revoked"), "upstream")
    assert one.status == "failed"
    assert "answers 401 to ANTHROPIC_API_KEY: invalid credentials." in one.detail
    async with engine.begin() as connection:
        await credentials.put(
            connection, SECRETS, "acme", "team", kind="bearer", secret="sk-planted", upstream_url=None
        )
    found = await examined()
    assert [(one.status, "credential team of acme" in one.detail) for one in found["upstream"]] == [
        ("ok", False),
        ("failed", True),
    ]
    assert "sk-planted" not in str(found)


async def test_an_upstream_that_is_away_or_another_fails(examined: Examine) -> None:
    away = only(await examined(BASCULE_UPSTREAM_URL="http://127.0.0.1:1"), "upstream")
    assert away.status == "failed"
    assert away.detail.startswith("http://127.0.0.1:1 cannot be reached: ")
    found = await examined(ANTHROPIC_API_KEY="")
    assert [one.status for one in found["upstream"]] == ["warning", "ok"]


async def test_a_path_in_the_address_of_upstream_is_told(examined: Examine, upstream: object) -> None:
    url = f"{upstream.url}/v1"  # type: ignore[attr-defined]
    one = only(await examined(BASCULE_UPSTREAM_URL=url), "upstream")
    assert one.status == "failed"
    assert "without /v1" in str(one.remedy)


@pytest.mark.parametrize(
    ("off_s", "status"), [(0, "ok"), (30, "warning"), (-30, "warning"), (600, "failed"), (-600, "failed")]
)
async def test_a_clock_that_is_off_is_told(examined: Examine, off_s: float, status: str) -> None:
    one = only(await examined(lambda: time.time() + off_s), "clock")
    assert one.status == status
    if off_s:
        way = "ahead of" if off_s > 0 else "behind"
        assert f"{way} " in one.detail


async def test_a_webhook_on_this_machine_names_the_setting_that_permits_it(
    examined: Examine, engine: AsyncEngine
) -> None:
    await register(engine, "lookup_order", "http://127.0.0.1:9000/")
    one = only(await examined(), "webhooks")
    assert one.status == "failed"
    assert one.detail == "tool lookup_order: the URL is refused."
    assert "BASCULE_WEBHOOK_ALLOW=127.0.0.0/8" in str(one.remedy)


async def test_tools_elsewhere_need_an_address_to_report_to(examined: Examine, engine: AsyncEngine) -> None:
    await register(engine, "refund", "https://10.1.2.3/hook")
    one = only(await examined(BASCULE_WEBHOOK_ALLOW="10.0.0.0/8"), "callbacks")
    assert one.status == "warning"
    assert "BASCULE_PUBLIC_URL" in str(one.remedy)
    public = "https://bridge.example"
    found = await examined(BASCULE_WEBHOOK_ALLOW="10.0.0.0/8", BASCULE_PUBLIC_URL=public)
    assert found["callbacks"][0].status == "ok"


async def test_an_embedded_database_is_looked_at_whether_or_not_it_runs(
    examined: Examine, data_dir: Path
) -> None:
    environ = {"BASCULE_DATABASE_URL": "", "BASCULE_SECRET_KEY": "", "BASCULE_DATA_DIR": str(data_dir)}
    running = data_dir / "postgres" / "pgdata" / "postmaster.pid"
    found = await examined(**environ)
    assert found["database"][0].status == "ok"
    assert found["schema"][0].status == "warning"
    assert found["secrets"][0].status == "unchecked"
    assert not running.exists(), "it was not running, so it does not run now"
    own = EmbeddedPostgres(data_dir, environ={})
    await asyncio.to_thread(own.start)
    try:
        found = await examined(**environ)
        assert found["database"][0].status == "ok"
        assert running.exists(), "somebody else uses it"
    finally:
        await asyncio.to_thread(own.stop)


async def test_an_embedded_database_that_was_never_made_is_not_made(
    examined: Examine, tmp_path: Path
) -> None:
    environ = {"BASCULE_DATABASE_URL": "", "BASCULE_DATA_DIR": str(tmp_path / "new")}
    one = only(await examined(**environ), "database")
    assert one.status == "unchecked"
    assert "bascule serve" in one.detail
    assert not (tmp_path / "new").exists()
