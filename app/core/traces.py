"""The ids of a call's trace, derived from its `webhook-id`: any replica goes on with the same trace."""

from __future__ import annotations

import hashlib


def trace_id(webhook_id: str) -> int:
    """The trace of a call: 128 bits, never 0."""
    return _bits(webhook_id, 16)


def span_id(webhook_id: str, part: str | int) -> int:
    """One span of that trace: 64 bits, never 0. `part` tells them apart; a number is a delivery attempt's."""
    return _bits(f"{webhook_id} {part}", 8)


def traceparent(webhook_id: str, attempt: int, *, is_sampled: bool = True) -> str:
    """The W3C `traceparent` of an attempt: one trace per call, a span each.

    `is_sampled` is also true where nothing is exported: a receiver that follows its caller would record
    nothing otherwise.
    """
    return f"00-{trace_id(webhook_id):032x}-{span_id(webhook_id, attempt):016x}-0{int(is_sampled)}"


def _bits(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1
