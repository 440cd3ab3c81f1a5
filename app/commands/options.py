"""The options that commands share, and what they mean."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
import typer

from app.commands.client import LIST_ITEMS_MAX, Client, Exit, stop
from app.settings import ADMIN_KEY_FILE, Settings, variable

HERE: Final = "http://127.0.0.1:8080"
LIST_ITEMS: Final = 1_000

Url = Annotated[str, typer.Option("--url", envvar="BASCULE_URL", help="Where the service listens.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar=["BASCULE_KEY", "BASCULE_ADMIN_KEY"],
        help="By default the one that `bascule serve` left in BASCULE_DATA_DIR.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print what the API answers.")]
ListLimit = Annotated[
    int, typer.Option("--limit", min=1, max=LIST_ITEMS_MAX, help="The most items to print.")
]
Members = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="MEMBER=VALUE",
        help="A member of the body, as /docs of the service lists them; VALUE is JSON, @FILE with"
        " JSON, or else text. Repeatable.",
        show_default=False,
    ),
]
Session = Annotated[str, typer.Argument(help="The session's id, sesn_…", show_default=False)]
Call = Annotated[str, typer.Argument(help="The call's id, sevt_…", show_default=False)]
Tenant = Annotated[str | None, typer.Option(help="Another tenant than the key's own.", show_default=False)]


def connect(url: str, key: str | None) -> Client:
    """Return the service as those options name it."""
    return Client(url, key or _stored_key())


def segment(text: str) -> str:
    """Return a name or id as one segment of a path."""
    if not text.strip("."):
        stop(f"{text!r} is no name and no id.", Exit.USAGE)
    return quote(text, safe="")


def members(given: Sequence[str] | None) -> dict[str, Any]:
    """Return the members that `--set` gives; JSON stays as it was written."""
    found: dict[str, Any] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not (name and equals):
            stop(f"--set {one}: write MEMBER=VALUE, such as timeout_s=30.", Exit.USAGE)
        if value.startswith("@"):
            found[name] = json_of(value, "--set")
            continue
        try:
            msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError):
            found[name] = value
        else:
            found[name] = msgspec.Raw(value)
    return found


def json_of(text: str, option: str) -> msgspec.Raw:
    """Return the JSON that an option holds, or a file that it names as @FILE, as it was written."""
    try:
        raw = Path(text[1:]).read_bytes() if text.startswith("@") else text.encode()
        msgspec.json.decode(raw)
    except OSError as error:
        stop(f"{option} {text}: {error.strerror}.", Exit.USAGE)
    except (msgspec.DecodeError, UnicodeError) as error:
        stop(f"{option} is not JSON: {error}.", Exit.USAGE)
    return msgspec.Raw(raw)


def _stored_key() -> str:
    folder = os.environ.get(variable("data_dir")) or Settings.model_fields["data_dir"].default
    path = Path(folder) / ADMIN_KEY_FILE
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        stop(
            f"There is no key: set BASCULE_KEY, pass --key, or run where {path} can be read.", Exit.FORBIDDEN
        )
