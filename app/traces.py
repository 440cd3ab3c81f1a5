"""What spans are, and whether any are made: `tracing` lends what records them, if a collector is named.

OpenTelemetry's SDK is an extra and costs a second of start: `app.otel` imports it, only when traces are on.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from app.otel import Traces

ROOT: Final = "received"
"""The part of a call's trace that all its other spans are children of."""
_NEEDED: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a call's trace that has just ended and took `took_s` seconds.

    `part` tells it apart within the trace, see `core.traces.span_id`; None gives it an id that nobody else
    can know. `error` is a code, `link` the part of a span that it follows without being its child.
    `is_request`: another service was called. Attributes hold ids, codes and counts, like log lines.
    """

    webhook_id: str
    name: str
    attributes: Mapping[str, str | int | None]
    part: str | int | None = None
    took_s: float = 0.0
    error: str | None = None
    link: str | None = None
    is_request: bool = False


def can_trace() -> bool:
    """Whether OpenTelemetry's SDK and its exporter are installed."""
    try:
        return all(find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:
        return False


@contextlib.asynccontextmanager
async def tracing(url: str | None) -> AsyncIterator[Traces | None]:
    """Lend what sends spans to the collector at `url`; None without one."""
    if url is None:
        yield None
        return
    from app.otel import Traces

    traces = Traces(url)
    try:
        yield traces
    finally:
        await traces.close()
