"""Sends spans to an OTLP collector with OpenTelemetry's SDK, in a thread of its own.

Nothing waits for the collector: what it does not take in time is dropped and counted. Beside the collector's
address, which is ours to give, the SDK reads its own variables: `OTEL_EXPORTER_OTLP_HEADERS`,
`OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`, `OTEL_BSP_SCHEDULE_DELAY` and so on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision

from app import __version__, metrics
from app.core.traces import span_id, trace_id
from app.logs import logger
from app.traces import ROOT, Span

SPANS_WAITING_MAX: Final = 8_192
"""How many spans wait for the collector; what comes beside them is dropped."""
FLUSH_LIMIT_S: Final = 5.0
"""How long a stop waits for the collector to take the last spans."""
SERVICE: Final = "bascule"

log = logger(__name__)


class Traces:
    """Records spans for the collector at `url`. One event loop uses it; `close` it at the end.

    `wall_ns` is nanoseconds since 1970.
    """

    def __init__(self, url: str, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        # The SDK's own lines quote the collector's answers; ours below say that and how much is lost.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._wall_ns = wall_ns
        self._ids = _Ids()
        self._exporter = _Counting(OTLPSpanExporter(url))
        self._recorded = 0
        ours = Resource({SERVICE_NAME: SERVICE, SERVICE_VERSION: __version__})
        self._provider = TracerProvider(
            resource=ours.merge(OTELResourceDetector().detect()),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        processor = BatchSpanProcessor(self._exporter, max_queue_size=SPANS_WAITING_MAX)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE, __version__)

    def is_sampled(self, webhook_id: str) -> bool:
        """Whether the call is traced. Its id decides, so that every replica says the same."""
        sampled = self._provider.sampler.should_sample(None, trace_id(webhook_id), ROOT)
        return sampled.decision is Decision.RECORD_AND_SAMPLE

    def record(self, span: Span) -> None:
        """Hand over a span that ends now. It never raises: a trace is worth no call."""
        try:
            if not self.is_sampled(span.webhook_id):
                return
            if self._recorded - self._exporter.taken >= SPANS_WAITING_MAX:
                metrics.SPANS.labels(outcome="dropped").inc()
                return
            self._record(span)
            self._recorded += 1
        except Exception as error:
            metrics.SPANS.labels(outcome="failed").inc()
            log.warning("span_not_recorded", error=type(error).__name__)

    async def close(self) -> None:
        """Let the collector take what waits, for `FLUSH_LIMIT_S` at most."""
        loop, is_closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop may be over by now
                loop.call_soon_threadsafe(is_closed.set)

        # Not one of the loop's own threads: the loop would wait for it at its end.
        threading.Thread(target=close, name="traces-close", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_closed.wait(), FLUSH_LIMIT_S)

    def _record(self, span: Span) -> None:
        end_ns = self._wall_ns()
        self._ids.next_trace_id = trace_id(span.webhook_id)
        self._ids.next_span_id = None if span.part is None else span_id(span.webhook_id, span.part)
        parent = trace.INVALID_SPAN_CONTEXT if span.part == ROOT else _context(span.webhook_id, ROOT)
        recorded = self._tracer.start_span(
            span.name,
            trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            kind=trace.SpanKind.CLIENT if span.is_request else trace.SpanKind.INTERNAL,
            attributes={name: value for name, value in span.attributes.items() if value is not None},
            links=() if span.link is None else (trace.Link(_context(span.webhook_id, span.link)),),
            start_time=end_ns - int(max(0.0, span.took_s) * 1e9),
        )
        if span.error is not None:
            recorded.set_attribute("error.type", span.error)
            recorded.set_status(trace.StatusCode.ERROR)
        recorded.end(end_ns)


class _Ids(IdGenerator):
    """Gives the ids that were set, so that a trace goes on after a restart."""

    def __init__(self) -> None:
        self.next_trace_id = 0
        self.next_span_id: int | None = None
        self._random = RandomIdGenerator()

    def generate_trace_id(self) -> int:
        return self.next_trace_id

    def generate_span_id(self) -> int:
        return self._random.generate_span_id() if self.next_span_id is None else self.next_span_id

    def is_trace_id_random(self) -> bool:
        return True  # a digest is as evenly spread, which is what samplers want to know


class _Counting(SpanExporter):
    """Counts what becomes of the spans. `taken` is how many were; it runs in the SDK's thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.taken = 0
        self._exporter = exporter
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = self._exporter.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        metrics.SPANS.labels(outcome="failed" if is_failing else "exported").inc(len(spans))
        if is_failing and not self._is_failing:
            log.warning(
                "spans_not_exported", remedy="see that the OTLP collector runs and takes our requests"
            )
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _context(webhook_id: str, part: str) -> trace.SpanContext:
    return trace.SpanContext(
        trace_id(webhook_id),
        span_id(webhook_id, part),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
