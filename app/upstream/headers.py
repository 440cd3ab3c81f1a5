"""Which headers a request to upstream carries, and which nobody else may set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from app import __version__
from app.core.headers import is_refused_upstream, is_well_formed

API_VERSION: Final = "2023-06-01"
BETA: Final = "managed-agents-2026-04-01"
HELPER_HEADER: Final = "x-stainless-helper"
"""The header by which upstream's own clients say which helper made a request; we name our runner in it."""
HELPER: Final = "bascule-runner"
_SECRET: Final = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Credential:
    """What proves to upstream who asks. The secret is in no repr.

    Raises:
        ValueError: the secret is empty, or holds what no header may carry.
    """

    type: Literal["api_key", "bearer"]
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if not _SECRET.fullmatch(self.secret):
            raise ValueError("a credential's secret is one or more visible ASCII characters")


def request_headers(credential: Credential, extra: Mapping[str, str]) -> dict[str, str]:
    """The headers that every request of one attachment carries.

    Raises:
        ValueError: `extra` holds a refused name, or a value that no header may carry. It names the header
            and never the value.
    """
    headers: dict[str, str] = {}
    for name, value in extra.items():
        if is_refused_upstream(name) or not is_well_formed(name, ""):
            raise ValueError(f"header {name!r} may not be passed through")
        if not is_well_formed(name, value):
            raise ValueError(f"the value of header {name!r} is no header value")
        headers[name] = value
    if credential.type == "api_key":
        headers["x-api-key"] = credential.secret
    else:
        headers["authorization"] = f"Bearer {credential.secret}"
    return headers | {
        "anthropic-version": API_VERSION,
        "anthropic-beta": BETA,
        HELPER_HEADER: HELPER,
        "user-agent": f"bascule/{__version__}",
        "accept-encoding": "identity",
    }
