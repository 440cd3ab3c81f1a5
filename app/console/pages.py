"""How pages are made: templates that escape everything, static files, and answers that say "unchanged"."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from importlib import resources
from typing import Any, Final
from urllib.parse import quote

from fastapi import Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from app.console.text import visible

LIVE_HEADER: Final = "x-console-live"
"""Sent by the page's own script: it wants a status, no redirect."""
STATIC: Final = {"console.css": "text/css", "console.js": "text/javascript"}


def _moment(at: datetime, kind: str = "at") -> Markup:
    """A time; the script writes how long ago it was where `kind` is `age`."""
    at = at.astimezone(UTC)
    shown = at.strftime("%Y-%m-%d %H:%M:%S UTC")
    markup = Markup('<time datetime="{}" title="{}" data-kind="{}">{}</time>')
    return markup.format(at.isoformat(), shown, kind, shown)


def _segment(text: str) -> str:
    return quote(text, safe="")


_environment: Final = Environment(
    loader=PackageLoader("app.console"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
_environment.filters.update(visible=visible, moment=_moment, segment=_segment)


def static(name: str) -> bytes:
    return (resources.files("app.console") / "static" / name).read_bytes()


_environment.globals["version"] = hashlib.sha256(b"".join(map(static, sorted(STATIC)))).hexdigest()[:12]


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    """Render a page, or answer 304 if the browser's script has it already."""
    text = _environment.get_template(template).render(path=request.url.path, **values)
    return tagged(request, text.encode("utf-8", "replace"), "text/html; charset=utf-8", status)


def tagged(request: Request, body: bytes, media_type: str, status: int = 200) -> Response:
    """Answer with a body and its tag."""
    tag = etag(body)
    if status == 200 and (same := unchanged(request, tag)) is not None:
        return same
    return Response(body, status, {"etag": tag}, media_type)


def etag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def unchanged(request: Request, tag: str) -> Response | None:
    """Return the 304 for a browser that has what the tag names."""
    if request.headers.get("if-none-match") != tag:
        return None
    return Response(status_code=304, headers={"etag": tag})
