"""The documentation becomes a site without a warning: no dead link or anchor, no page out of reach."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds, somewhere else."""
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    command = re.search(r"^docs: .*\n\t(.*)$", makefile, re.MULTILINE)
    assert command is not None
    typed = command[1].replace("$(BIN)/python", sys.executable).replace("build/site", str(folder))
    assert " -W " in typed
    built = subprocess.run(typed.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert (0, "") == (built.returncode, built.stderr)
    return folder


def test_no_page_takes_anything_from_another_host(site: Path) -> None:
    fetched = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^>]*>")
    pages = [*site.rglob("*.html")]
    assert len(pages) > 20
    assert [] == [found for page in pages for found in fetched.findall(page.read_text(encoding="utf-8"))]
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


def test_every_operation_is_on_the_page_of_the_api(site: Path) -> None:
    page = re.sub("<[^>]+>", "", (site / "docs" / "api.html").read_text(encoding="utf-8"))
    document = (ROOT / "openapi.yaml").read_text(encoding="utf-8")
    paths = re.findall(r"^  \"?(/[^\s:\"]*)\"?:$", document, re.MULTILINE)
    assert len(paths) > 30
    assert [] == [
        path for path in paths if not re.search(rf"(GET|PUT|POST|PATCH|DELETE) {re.escape(path)}", page)
    ]
