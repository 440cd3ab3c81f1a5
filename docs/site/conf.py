"""How the documentation becomes a site: `make docs`. Nothing on its pages comes from another host.

The source folder is the repository's, so that links between pages are those that one follows in the files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import api_reference

ROOT = Path(__file__).parents[2]

project = "Bascule"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "examples/*.md"]
exclude_patterns = ["**/node_modules"]
nitpicky = True

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = "Bascule"
html_extra_path = ["index.html"]
html_copy_source = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Append the reference of the API, made of its document, to the page that introduces it."""
    app.connect("source-read", _with_reference)


def _with_reference(_: Sphinx, page: str, source: list[str]) -> None:
    if page == "docs/api":
        document = yaml.safe_load((ROOT / "openapi.yaml").read_text(encoding="utf-8"))
        source[0] += api_reference.rendered(document)
