"""Which header names people may add to the requests that the service sends, and which are its own.

One list for the api, which refuses a name when it is set, and for the clients, which refuse it again when
they send: a tenant must not replace the credential, the version or the framing of a request.
"""

from __future__ import annotations

import re
from typing import Final

HEADERS_MAX: Final = 32
HEADER_CHARS_MAX: Final = 4096
"""The longest name or value."""

# RFC 9110: a token, and visible ASCII with spaces and tabs inside.
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e\t]*[\x21-\x7e])?|")

_FRAMING: Final = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

UPSTREAM_REFUSED: Final = _FRAMING | {
    "accept",
    "authorization",
    "cookie",
    "idempotency-key",
    "last-event-id",
    "user-agent",
    "x-api-key",
    "x-stainless-helper",
}
"""Names that requests to upstream never take from an attachment, beside other `anthropic-…` ones."""

WEBHOOK_REFUSED: Final = _FRAMING | {"accept", "traceparent", "tracestate", "user-agent"}
"""Names that deliveries never take from a tool, beside every `webhook-…` and `bascule-…` one."""


def is_refused_upstream(name: str) -> bool:
    """Whether an attachment must not add this header: authentication, beta, version, framing."""
    name = _folded(name)
    is_reserved = name.startswith("anthropic-") and name != "anthropic-workspace-id"
    return is_reserved or name in UPSTREAM_REFUSED


def is_refused_webhook(name: str) -> bool:
    """Whether a tool must not add this header: signature, identity, framing."""
    name = _folded(name)
    return name in WEBHOOK_REFUSED or name.startswith(("webhook-", "bascule-"))


def is_well_formed(name: str, value: str) -> bool:
    """Whether the pair can be sent as it is: no line ends, no other control characters, bounded."""
    return (
        len(name) <= HEADER_CHARS_MAX
        and len(value) <= HEADER_CHARS_MAX
        and _NAME.fullmatch(name) is not None
        and _VALUE.fullmatch(value) is not None
    )


def _folded(name: str) -> str:
    # Servers behind a gateway read `_` as `-`.
    return name.lower().replace("_", "-")
