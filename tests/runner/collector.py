"""An OTLP collector on loopback: takes spans over HTTP, and keeps them as the wire has them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """One span. Ids are hexadecimal, `parent` is empty at a root, `links` are (trace, span)."""

    name: str
    trace: str
    id: str
    parent: str
    links: list[tuple[str, str]]
    attributes: dict[str, Any]
    is_error: bool
    start_ns: int
    end_ns: int


@dataclass
class Collector:
    """`status` and `body` are what it answers, `requests` the bodies that came."""

    url: str = ""
    status: int = 200
    body: bytes = b""
    requests: list[bytes] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.read())
        return web.Response(status=self.status, body=self.body)

    @property
    def spans(self) -> list[Seen]:
        """Every span that came, in the order of their ends."""
        spans = [
            Seen(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes},
                span.status.code == span.status.STATUS_CODE_ERROR,
                span.start_time_unix_nano,
                span.end_time_unix_nano,
            )
            for body in self.requests
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return sorted(spans, key=lambda span: span.end_ns)


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    collector.url = f"http://{host}:{port}"
    try:
        yield collector
    finally:
        await runner.cleanup()
