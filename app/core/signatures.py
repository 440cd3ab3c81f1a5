"""Standard Webhooks signatures: made for what we send, checked on what upstream sends us.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping, Sequence
from typing import Final

PREFIX: Final = "whsec_"
TOLERANCE_S: Final = 300
"""A message whose time is further off is refused: it may be an old one, sent once more."""
ENTRIES_MAX: Final = 20
"""So many entries of one `webhook-signature` are looked at."""
ID_CHARS_MAX: Final = 256
KEY_BYTES_MIN: Final = 16


def key_of(text: str) -> bytes:
    """Return the key that `whsec_…` stands for.

    Raises:
        ValueError: it is no such text, or the key is shorter than `KEY_BYTES_MIN`.
    """
    try:
        key = base64.b64decode(text.removeprefix(PREFIX), validate=True) if text.startswith(PREFIX) else b""
    except binascii.Error:
        key = b""
    if len(key) < KEY_BYTES_MIN:
        raise ValueError(f"must be {PREFIX} and base64 of at least {KEY_BYTES_MIN} bytes")
    return key


def signature(key: bytes, webhook_id: str, timestamp_s: int, body: bytes) -> str:
    """One entry of `webhook-signature`: `v1,` and the HMAC-SHA256 of id, time and body, in base64."""
    signed = f"{webhook_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def signer(keys: Sequence[bytes], headers: Mapping[str, str], body: bytes, *, now: float) -> int | None:
    """Return the place of the key that signed a message, or None if none did, or its time is too far off.

    `headers` have lower-case names; `now` is in seconds since 1970.
    """
    webhook_id, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not (0 < len(webhook_id) <= ID_CHARS_MAX and webhook_id.isascii() and webhook_id.isprintable()):
        return None
    if not (0 < len(stamp) <= 12 and stamp.isascii() and stamp.isdigit()):
        return None
    if abs(now - int(stamp)) > TOLERANCE_S:
        return None
    given = [entry.encode() for entry in headers.get("webhook-signature", "").split(" ")[:ENTRIES_MAX]]
    for place, key in enumerate(keys):
        wanted = signature(key, webhook_id, int(stamp), body).encode()
        if any(hmac.compare_digest(wanted, entry) for entry in given):
            return place
    return None
