"""The order of the files: those that take longest first, so that no worker ends alone with one."""

from __future__ import annotations

from pathlib import Path

import pytest

LONG = (
    "stories/test_chaos.py",
    "interop/test_captures.py",
    "interop/test_schemathesis.py",
    "stories/test_deploys.py",
    "runner/test_dependencies.py",
    "stories/test_newcomer.py",
)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {HERE / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))
