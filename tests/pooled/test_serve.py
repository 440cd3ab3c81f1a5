"""`bascule serve` as an operator starts it behind a pooler."""

from __future__ import annotations

import signal
import subprocess
import sys
from urllib.parse import urlsplit

from tests import postgres
from tests.api.test_serve import ENVIRON, ROOT, command, free_port, wait_until_ready


def test_serve_migrates_past_the_pooler_and_serves_through_it(pooled_url: str, migrated_url: str) -> None:
    with postgres.database(migrated_url) as direct_url:
        through = urlsplit(pooled_url)._replace(path=urlsplit(direct_url).path).geturl()
        environ = {
            "BASCULE_DATABASE_URL": through,
            "BASCULE_DATABASE_DIRECT_URL": direct_url,
            "BASCULE_SECRET_KEY": "A" * 43 + "=",
            "BASCULE_ADMIN_KEY": "0123456789abcdef",
            "BASCULE_PORT": str(free_port()),
            "BASCULE_MIGRATE": "1",
        }
        with subprocess.Popen(
            [sys.executable, "-m", "app", "serve"],
            cwd=ROOT,
            env=ENVIRON | environ,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            try:
                wait_until_ready(f"http://127.0.0.1:{environ['BASCULE_PORT']}", process)
            finally:
                process.send_signal(signal.SIGTERM)
        assert process.returncode == 0


def test_a_pooler_without_a_direct_url_is_a_sentence_and_no_traceback(pooled_url: str) -> None:
    environ = {
        "BASCULE_DATABASE_URL": pooled_url,
        "BASCULE_SECRET_KEY": "A" * 43 + "=",
        "BASCULE_ADMIN_KEY": "0123456789abcdef",
    }
    refused = command("serve", **environ)
    assert refused.returncode == 1
    assert "BASCULE_DATABASE_URL" in refused.stderr
    assert "Traceback" not in refused.stderr
    print(refused.stderr)
