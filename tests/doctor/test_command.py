"""`bascule doctor` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.api.test_serve import command

AWAY = {
    "BASCULE_DATABASE_URL": "postgresql://x:hidden@127.0.0.1:1/orders",
    "BASCULE_SECRET_KEY": "A" * 43 + "=",
    "BASCULE_ADMIN_KEY": "0123456789abcdef",
    "BASCULE_UPSTREAM_URL": "http://127.0.0.1:1",
}


def test_a_failure_is_a_line_with_its_remedy_and_ends_with_1() -> None:
    said = command("doctor", **AWAY)
    assert (said.returncode, said.stderr) == (1, "")
    lines = [line.split(maxsplit=2) for line in said.stdout.splitlines()]
    place = "PostgreSQL at 127.0.0.1:1/orders: it cannot be reached: Connection refused."
    at = lines.index(["failed", "database", place])
    assert lines[at + 1][:2] == ["→", "Start"]
    assert said.stdout.splitlines()[-1].startswith("2 failed, 1 warning, ")
    assert "hidden" not in said.stdout


def test_json_holds_every_finding(tmp_path: Path) -> None:
    said = command("doctor", "--json", BASCULE_PORT="x", BASCULE_DATA_DIR=str(tmp_path))
    body = json.loads(said.stdout)
    assert (said.returncode, body["status"]) == (1, "failed")
    assert set(body["checks"][0]) == {"check", "status", "detail", "remedy"}
    assert body["checks"][0]["detail"].startswith("BASCULE_PORT: ")
    assert [one["status"] for one in body["checks"]].count("unchecked") == 8
