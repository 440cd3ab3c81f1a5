"""Programs that some tests run, and that a developer's machine may lack."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str, package: str) -> str:
    """Return the path of a program. Where it is missing the test is left out loudly; in CI it fails."""
    found = shutil.which(name)
    if found is None:
        sentence = f"left out: {name} is not installed (Debian: apt install {package})"
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            pytest.fail(f"{sentence}, and CI=true forbids that")
        pytest.skip(sentence)
    return found
