"""Rotation of the key that encrypts stored secrets, beside whoever writes meanwhile."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import LargeBinary, insert, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import (
    attachments,
    credentials,
    idempotency,
    reencryption,
    sightings,
    subscriptions,
    tables,
    tools,
)
from app.store.idempotency import Answer, Place
from app.store.reencryption import Protected, Rewritten, protected, reencrypt
from app.store.secrets import Secrets
from app.store.tools import load_registry
from tests.store.rows import add_attachment, add_call, until

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
OLD, NEW, LOST = b"o" * 32, b"n" * 32, b"l" * 32
BOTH = Secrets([NEW, OLD])
HEADERS = {"authorization": "Bearer of-the-tool"}
PLACE = Place("default", "key_1", "a")
ANSWER = Answer("digest", 201, {"content-type": "application/json"}, b'{"key":"bsk_"}')
PLAIN = {
    "keys.hash", "browser_passes.hash", "deliveries.reply", "bodies.body", "callbacks.body",
    "audit.previous", "audit.hash", "audit_heads.hash",
}  # fmt: skip
"""Columns of bytes that are no secret, or are one no longer."""


async def register(engine: AsyncEngine, keys: Secrets, name: str, tenant: str = "default") -> None:
    async with engine.begin() as connection:
        url = "https://tools.example/hook"
        await tools.put(connection, keys, tenant, name, url=url, description=None, policy={}, headers=HEADERS)


async def attach(engine: AsyncEngine, keys: Secrets, session_id: str = "sesn_1") -> None:
    async with engine.begin() as connection:
        await attachments.attach(
            connection, keys, "default", session_id, attachments.Settings(), {"x-extra": "1"}
        )


async def subscribe(engine: AsyncEngine, keys: Secrets) -> None:
    async with engine.begin() as connection:
        await subscriptions.put(
            connection, keys, "default", "all",
            url="https://hooks.example", events=["call.failed"], headers=HEADERS, enabled=True,
        )  # fmt: skip


async def registry(engine: AsyncEngine, keys: Secrets, tenant: str = "default") -> dict[str, Any]:
    async with engine.connect() as connection:
        return (await load_registry(connection, keys, tenant))[1]


def counted(done: list[Rewritten]) -> dict[str, tuple[int, int, int]]:
    return {one.column: (one.rewritten, one.current, one.unreadable_total) for one in done}


def test_every_column_of_bytes_is_encrypted_or_known_to_be_plain() -> None:
    """A column that is sealed and not in the list would be lost with the old key."""
    stored = {
        f"{table.name}.{column.name}"
        for table in tables.metadata.sorted_tables
        for column in table.columns
        if isinstance(column.type, LargeBinary)
    }
    listed = {f"{column.table.name}.{column.name}" for column in tables.ENCRYPTED}
    assert (stored, set()) == (listed | PLAIN, listed & PLAIN)
    said = {
        f"{table.name}.{column.name}"
        for table in tables.metadata.sorted_tables
        for column in table.columns
        if (column.comment or "").startswith("encrypted")
    }
    assert listed == said


async def test_everything_is_rewritten_under_the_first_key_and_still_read(engine: AsyncEngine) -> None:
    """More rows than a batch holds, of two tenants; the second run finds all current."""
    count = reencryption.BATCH_ROWS + 1
    for number in range(count):
        await register(engine, Secrets([OLD]), f"tool {number}")
    await register(engine, Secrets([OLD]), "echo", tenant="other")
    await attach(engine, Secrets([OLD]))
    await subscribe(engine, Secrets([OLD]))
    async with engine.begin() as connection:
        given: dict[str, Any] = {"kind": "api_key", "secret": "sk-team", "upstream_url": None}
        await credentials.put(connection, Secrets([OLD]), "default", "team", **given)
        await sightings.put_key(connection, Secrets([OLD]), "default", "team", b"k" * 32)
        await idempotency.keep(connection, Secrets([OLD]), PLACE, ANSWER)
    before = await registry(engine, Secrets([OLD]))
    done = counted(await reencrypt(engine, BOTH))
    assert {
        "tools.secrets": (count + 1, 0, 0),
        "tools.headers": (count + 1, 0, 0),
        "attachments.extra_headers": (1, 0, 0),
        "credentials.secret": (1, 0, 0),
        "hook_keys.key": (1, 0, 0),
        "idempotency_keys.answer": (1, 0, 0),
        "subscriptions.secret": (1, 0, 0),
        "subscriptions.headers": (1, 0, 0),
    } == done
    new = Secrets([NEW])
    assert before == await registry(engine, new)
    assert None is (await registry(engine, new, "other"))["echo"].fault
    async with engine.connect() as connection:
        extra = await attachments.load_extra_headers(connection, new, "default", "sesn_1")
        team = await credentials.load(connection, new, "default", "team")
        assert ANSWER == await idempotency.claim(connection, new, PLACE)
        (hook,) = await sightings.keys(connection, new)
    assert ({"x-extra": "1"}, "sk-team", b"k" * 32) == (extra, team and team.secret, hook.key)
    again = counted(await reencrypt(engine, BOTH))
    assert {column: (0, rewritten, 0) for column, (rewritten, _, _) in done.items()} == again


async def test_replicas_are_told_to_read_their_tools_again(engine: AsyncEngine) -> None:
    """One that had no key for a tool finds it mended."""
    await register(engine, Secrets([OLD]), "echo")
    async with engine.connect() as connection:
        before = await tools.registry_version(connection, "default")
    await reencrypt(engine, BOTH)
    async with engine.connect() as connection:
        assert before < await tools.registry_version(connection, "default")


async def test_what_cannot_be_read_is_named_and_stays_as_it_is(engine: AsyncEngine) -> None:
    lost = Secrets([LOST])
    await register(engine, lost, "lost")
    await register(engine, Secrets([OLD]), "echo")
    done = {one.column: one for one in await reencrypt(engine, BOTH)}
    secrets, headers = done["tools.secrets"], done["tools.headers"]
    assert [(1, 0, 1)] * 2 == list(counted([secrets, headers]).values())
    (sentence,) = secrets.unreadable
    assert "tools.secrets of default/lost" in sentence
    assert lost.key_ids[0] in sentence
    assert None is (await registry(engine, lost))["lost"].fault


async def test_so_many_unreadable_values_are_named_and_all_are_counted(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reencryption, "UNREADABLE_MAX", 1)
    for name in ("a", "b", "c"):
        await register(engine, Secrets([LOST]), name)
    done = {one.column: one for one in await reencrypt(engine, BOTH)}
    assert (3, 1) == (done["tools.secrets"].unreadable_total, len(done["tools.secrets"].unreadable))


async def test_a_row_that_somebody_writes_is_waited_for_and_rewritten_as_it_is_then(
    engine: AsyncEngine,
) -> None:
    """A rotation under way in a replica is not undone."""
    old = Secrets([OLD])
    await register(engine, old, "echo")
    async with engine.begin() as connection:
        made = await tools.rotate(connection, old, "default", "echo", overlap_s=60)
        running = asyncio.create_task(reencrypt(engine, BOTH))
        await until(lambda: _is_waiting(engine))
    assert made is not None
    assert (1, 0, 0) == counted(await running)["tools.secrets"]
    tool = (await registry(engine, Secrets([NEW])))["echo"]
    assert made.signing_secret == "whsec_" + base64.b64encode(tool.secrets[0].key).decode()
    assert 2 == len(tool.secrets)


async def _is_waiting(engine: AsyncEngine) -> bool:
    async with engine.connect() as connection:
        return bool(await connection.scalar(text("select count(*) from pg_locks where not granted")))


async def test_rotations_and_a_rewrite_at_once_lose_nothing(engine: AsyncEngine) -> None:
    old, names = Secrets([OLD]), [f"tool {number}" for number in range(20)]
    for name in names:
        await register(engine, old, name)

    async def rotate(name: str) -> str:
        async with engine.begin() as connection:
            made = await tools.rotate(connection, BOTH, "default", name, overlap_s=60)
        assert made is not None
        return made.signing_secret

    made, _ = await asyncio.gather(asyncio.gather(*(rotate(name) for name in names)), reencrypt(engine, BOTH))
    loaded = await registry(engine, Secrets([NEW]))
    newest = [base64.b64encode(loaded[name].secrets[0].key).decode() for name in names]
    assert [secret.removeprefix("whsec_") for secret in made] == newest
    assert {2} == {len(loaded[name].secrets) for name in names}


async def test_the_status_says_what_each_key_protects(engine: AsyncEngine) -> None:
    await register(engine, Secrets([OLD]), "a")
    await register(engine, Secrets([LOST]), "b")
    await attach(engine, Secrets([NEW]))
    async with engine.begin() as connection:
        await connection.execute(update(tables.tools).where(tables.tools.c.name == "a").values(headers=b"?"))
    new, old = BOTH.key_ids
    (lost,) = Secrets([LOST]).key_ids
    found = {one.key_id: one for one in await protected(engine, BOTH)}
    assert [new, old] == list(found)[:2]
    assert Protected(new, "writes", {"attachments.extra_headers": 1}) == found[new]
    assert Protected(old, "reads", {"tools.secrets": 1}) == found[old]
    assert Protected(lost, "missing", {"tools.secrets": 1, "tools.headers": 1}) == found[lost]
    assert Protected(None, "missing", {"tools.headers": 1}) == found[None]


async def test_a_key_that_is_not_needed_any_more_shows_nothing(engine: AsyncEngine) -> None:
    await register(engine, Secrets([OLD]), "a")
    await reencrypt(engine, BOTH)
    assert [{"tools.secrets": 1, "tools.headers": 1}, {}] == [
        dict(one.values) for one in await protected(engine, BOTH)
    ]


async def test_a_key_stays_while_an_open_call_has_a_token_of_it(engine: AsyncEngine) -> None:
    """The tool has it already, and reports its result with it."""
    new, old = BOTH.key_ids
    async with engine.begin() as connection:
        await add_attachment(connection)
        for call_id, state in (("open", "dispatched"), ("over", "posted"), ("new", "dispatched")):
            await add_call(connection, call_id, state=state)
            key_id = new if call_id == "new" else old
            place = {"tenant": "default", "session_id": "sesn_1", "call_id": call_id}
            await connection.execute(insert(tables.bodies).values(**place, body=b"{}", key_id=key_id))
    await reencrypt(engine, Secrets([NEW, OLD, bytes(range(32))]))
    shown = {one.key_id: one.values for one in await protected(engine, BOTH)}
    assert {reencryption.TOKENS: 1} == shown[old]
    assert 1 == shown[new][reencryption.TOKENS]


# ---- the command line


def run(url: str, *keys: bytes, command: str) -> subprocess.CompletedProcess[str]:
    environ: Mapping[str, str] = {
        "PATH": os.environ["PATH"],
        "PYTHONWARNINGS": "error",
        "BASCULE_DATABASE_URL": url,
        "BASCULE_SECRET_KEY": ",".join(base64.b64encode(key).decode() for key in keys),
        "BASCULE_ADMIN_KEY": "0123456789abcdef",
    }
    return subprocess.run(
        [sys.executable, "-m", "app", "secrets", command],
        cwd=ROOT,
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )


async def test_the_commands_lead_through_a_rotation(engine: AsyncEngine, migrated_url: str) -> None:
    await register(engine, Secrets([OLD]), "echo")
    new, old = BOTH.key_ids
    status = await asyncio.to_thread(run, migrated_url, NEW, OLD, command="status")
    assert f"{new}\twrites\t0\tnothing\n" in status.stdout
    assert f"{old}\treads\t2\ttools.headers 1, tools.secrets 1\n" in _sorted(status.stdout)
    done = await asyncio.to_thread(run, migrated_url, NEW, OLD, command="reencrypt")
    assert (0, "") == (done.returncode, done.stderr)
    assert "tools.secrets\t1 rewritten\t0 current\t0 unreadable\n" in done.stdout
    status = await asyncio.to_thread(run, migrated_url, NEW, OLD, command="status")
    assert f"{old}\treads\t0\tnothing\n" in status.stdout
    done = await asyncio.to_thread(run, migrated_url, OLD, command="reencrypt")
    assert 1 == done.returncode
    assert f"tools.secrets of default/echo was encrypted with key {new}" in done.stderr


def _sorted(shown: str) -> str:
    """The table of `status` with the columns of each line in order."""
    lines = [line.split("\t") for line in shown.splitlines()]
    return "".join("\t".join([*first, ", ".join(sorted(last.split(", ")))]) + "\n" for *first, last in lines)


async def test_nothing_is_rewritten_without_a_database(tmp_path: Path) -> None:
    url = f"postgresql:///none?host={tmp_path}"
    done = await asyncio.to_thread(run, url, NEW, command="reencrypt")
    assert 1 == done.returncode
    assert "check BASCULE_DATABASE_URL" in done.stderr
