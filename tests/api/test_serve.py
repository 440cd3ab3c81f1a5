from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.simulator.script import names
from tests import postgres

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 40.0
ENVIRON = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONWARNINGS": "error"}


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        env=ENVIRON | environ,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with postgres.server() as url:
        yield url


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        assert process.poll() is None, "the service ended"
        try:
            if httpx.get(f"{url}/readyz", trust_env=False).json()["wakeups"] == "working":
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the service is not ready")


def test_an_old_schema_is_refused_until_it_is_migrated(server_url: str) -> None:
    with postgres.database(server_url) as url:
        environ = {
            "BASCULE_DATABASE_URL": url,
            "BASCULE_SECRET_KEY": "A" * 43 + "=",
            "BASCULE_ADMIN_KEY": "0123456789abcdef",
            "BASCULE_PORT": str(free_port()),
        }
        refused = command("serve", **environ)
        assert refused.returncode == 1
        assert "bascule migrate" in refused.stderr
        assert "BASCULE_MIGRATE=1" in refused.stderr
        assert command("migrate", **environ).returncode == 0
        address = f"http://127.0.0.1:{environ['BASCULE_PORT']}"
        with subprocess.Popen(
            [sys.executable, "-m", "app", "serve"],
            cwd=ROOT,
            env=ENVIRON | environ | {"BASCULE_LOG_FORMAT": "json"},
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                wait_until_ready(address, process)
                options = {"BASCULE_URL": address, "BASCULE_ADMIN_KEY": environ["BASCULE_ADMIN_KEY"]}
                created = command(
                    "keys", "create", "bot", "--scope", "read", "--tenant", "t", "--json", **options
                )
                key = json.loads(created.stdout)
                listed = command("keys", "list", "--tenant", "t", **options).stdout.splitlines()[1]
                assert [key["id"], "valid", "t", "read", "-", "bot"] == listed.split()
                bearer = {"authorization": f"Bearer {key['key']}"}
                answer = httpx.get(f"{address}/sessions", headers=bearer, trust_env=False)
                assert answer.status_code == 200
                assert command("keys", "delete", key["id"], "--tenant", "t", **options).returncode == 0
                assert "revoked" in command("keys", "list", "--tenant", "t", **options).stdout
                wrong = command("keys", "create", "bot", "--scope", "root", **options)
                assert wrong.returncode == 1
                assert "scopes" in wrong.stderr
            finally:
                process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            lines = process.stderr.read().splitlines()
        assert process.returncode == 0
        assert all(json.loads(line)["time"] for line in lines)
        assert key["key"] not in "\n".join(lines)


def test_a_port_that_is_taken_is_a_sentence_and_no_traceback(server_url: str) -> None:
    with postgres.database(server_url) as url, socket.create_server(("127.0.0.1", 0)) as taken:
        environ = {
            "BASCULE_DATABASE_URL": url,
            "BASCULE_SECRET_KEY": "A" * 43 + "=",
            "BASCULE_ADMIN_KEY": "0123456789abcdef",
            "BASCULE_PORT": str(taken.getsockname()[1]),
            "BASCULE_MIGRATE": "1",
        }
        refused = command("serve", **environ)
        assert refused.returncode == 1
        sentence = f"port {environ['BASCULE_PORT']} of 127.0.0.1 is taken; does another Bascule run? "
        assert sentence in refused.stderr
        assert "BASCULE_PORT" in refused.stderr
        assert "(" not in refused.stderr.splitlines()[-1]
        assert "Traceback" not in refused.stderr


def test_a_simulator_that_cannot_start_is_one_line() -> None:
    refused = command("simulate", "nonsense")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("there is no such scenario; take one of cloud, custom, demo,")
    assert len(refused.stderr.splitlines()) == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = command("simulate", "--port", str(port))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"port {port} is taken; ")
    assert len(refused.stderr.splitlines()) == 1


def test_the_simulators_help_names_the_scenarios() -> None:
    shown = " ".join(command("simulate", "--help", COLUMNS="200", NO_COLOR="1").stdout.split())
    assert ", ".join(names()) in shown


def test_a_wrong_setting_is_a_sentence_and_no_traceback() -> None:
    refused = command("serve", BASCULE_PORT="x")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("BASCULE_PORT: ")
    assert "Traceback" not in refused.stderr


def test_a_database_that_is_away_is_a_sentence_and_no_traceback() -> None:
    environ = {
        "BASCULE_DATABASE_URL": "postgresql://x:hidden@127.0.0.1:1/x",
        "BASCULE_SECRET_KEY": "A" * 43 + "=",
        "BASCULE_ADMIN_KEY": "0123456789abcdef",
    }
    for arguments in (["serve"], ["migrate"]):
        refused = command(*arguments, **environ)
        assert refused.returncode == 1
        assert "BASCULE_DATABASE_URL" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert "hidden" not in refused.stderr
