"""Tokens of callbacks, and reports that come at the wrong moment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import callbacks
from app.store.callbacks import Refused, Taken, tenant_of, token_of
from app.store.secrets import Secrets
from tests.store.rows import SECRETS, add_attachment, add_call
from tests.store.test_runs import add_delivery, add_replicas

KEYS = (b"1" * 32, b"2" * 32)


def token(secrets: Secrets = SECRETS, tenant: str = "t", session: str = "s", call: str = "c") -> str:
    made = token_of(secrets, secrets.key_id, tenant, session, call)
    assert made is not None
    return made


def test_a_token_names_its_tenant_and_fits_one_call() -> None:
    assert "t" == tenant_of(SECRETS, token(), "s", "c")
    for session, call in (("s", "d"), ("x", "c"), ("sc", ""), ("", "sc")):
        assert tenant_of(SECRETS, token(), session, call) is None


def test_a_token_outlives_the_rotation_of_its_key_and_dies_with_it() -> None:
    made = token(Secrets(KEYS[:1]))
    assert "t" == tenant_of(Secrets((KEYS[1], KEYS[0])), made, "s", "c")
    assert tenant_of(Secrets(KEYS[1:]), made, "s", "c") is None
    assert token_of(Secrets(KEYS[1:]), Secrets(KEYS[:1]).key_id, "t", "s", "c") is None


@given(st.text(max_size=600))
def test_nothing_else_is_a_token(guess: str) -> None:
    assert tenant_of(SECRETS, guess, "s", "c") is None


@given(st.integers(0, 200), st.characters())
def test_a_token_that_was_changed_is_none(place: int, character: str) -> None:
    made = token()
    changed = made[: place % len(made)] + character + made[place % len(made) + 1 :]
    assert (changed == made) == (tenant_of(SECRETS, changed, "s", "c") is not None)


CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "under way": ("dispatched", {}, None),
    "promised": ("dispatched", {"callback_s": 60}, None),
    "promised by a dead replica": ("dispatched", {"callback_s": 60, "replica_id": "dead"}, None),
    "out of time": ("dispatched", {"callback_s": 60, "left_s": -1}, "callback_late"),
    "told to the agent": ("posted", {"callback_s": 60, "left_s": -1}, "callback_late"),
    "before a person": ("held", {"callback_s": 60, "left_s": -1}, "callback_late"),
    "answered by the webhook": ("posted", {}, "already_answered"),
    "being posted": ("posting", {}, "already_answered"),
    "denied": ("denied", {}, "call_over"),
    "interrupted": ("interrupted", {"callback_s": 60}, "call_over"),
    "ended": ("session_ended", {"callback_s": 60}, "call_over"),
    "back in the queue": ("queued", {}, "not_awaiting_callback"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", CASES)
async def test_a_report_is_taken_while_its_call_waits_for_it(engine: AsyncEngine, name: str) -> None:
    state, delivery, code = CASES[name]
    async with engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "c1", state=state, attempts=1)
    await add_replicas(engine)
    await add_delivery(engine, "c1", **delivery)
    async with engine.begin() as connection:
        done = await callbacks.report(connection, "default", "sesn_1", "c1", b'"x"', "application/json")
    assert (code or True) == (done.code if isinstance(done, Refused) else isinstance(done, Taken))
    async with engine.connect() as connection:
        rows = (await connection.execute(text("select wish from attachments"))).scalars().all()
        stored = await connection.scalar(text("select count(*) from callbacks"))
    assert ([2], 1) == (rows, stored) if code is None else ([1], 0) == (rows, stored)
