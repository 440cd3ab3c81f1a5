from __future__ import annotations

import os

import pytest

from tests.pooled import pgbouncer

LEFT_OUT = (
    "left out: the suites behind a pooler, as pgbouncer is not installed (Debian: apt install pgbouncer)"
)


def test_pgbouncer_is_there_or_its_suites_are_left_out_loudly() -> None:
    """C-050: CI leaves nothing out."""
    if pgbouncer.program() is None:
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            pytest.fail(f"{LEFT_OUT}, and CI=true forbids that")
        pytest.skip(LEFT_OUT)
