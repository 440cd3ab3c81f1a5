"""Which headers a request to upstream carries, and which nobody else may set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal

API_VERSION: Final = "2023-06-01"
BETA: Final = "managed-agents-2026-04-01"
HELPER_HEADER: Final = "x-stainless-helper"
"""The header by which upstream's own clients say which helper made a request; we name our runner in it."""
HELPER: Final = "bascule-runner"
HEADER_CHARS_MAX: Final = 8192
"""A pass-through header's name and value together may not be longer."""

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_SECRET: Final = re.compile(r"[\x21-\x7e]+")
_OURS: Final = frozenset(
    {
        "authorization",
        "x-api-key",
        "cookie",
        "proxy-authorization",
        "anthropic-beta",
        "anthropic-version",
        HELPER_HEADER,
        "user-agent",
        "accept",
        "accept-encoding",
        "content-encoding",
        "content-length",
        "content-type",
        "host",
        "last-event-id",
        "connection",
        "expect",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


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


def refused_header(name: str) -> bool:
    """Whether a pass-through header may not have this name.

    Refused are the names that authenticate, choose the API's version or beta, frame the message or say who
    asks, and what is no header name at all. `_` counts as `-`, as it does to servers behind a gateway.
    """
    return not _TOKEN.fullmatch(name) or name.lower().replace("_", "-") in _OURS


def user_agent() -> str:
    """The `user-agent` of all that we send: `bascule/<version>`."""
    try:
        return f"bascule/{version('bascule')}"
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "bascule/0"


def request_headers(credential: Credential, extra: Mapping[str, str]) -> dict[str, str]:
    """The headers that every request of one attachment carries.

    Raises:
        ValueError: `extra` holds a refused name, or a value that no header may carry. It names the header
            and never the value.
    """
    headers: dict[str, str] = {}
    for name, value in extra.items():
        if refused_header(name):
            raise ValueError(f"header {name!r} may not be passed through")
        if not _VALUE.fullmatch(value) or len(name) + len(value) > HEADER_CHARS_MAX:
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
        "user-agent": user_agent(),
        "accept-encoding": "identity",
    }
