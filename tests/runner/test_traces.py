"""Traces: one per call, over deliveries, people and restarts, at a collector that is on the wire."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from app import metrics
from app.otel import Traces
from app.serve import CannotServeError, serve
from app.settings import Settings
from app.simulator.server import Server, running
from app.simulator.world import World
from app.store.database import create_engine
from app.traces import ROOT, Span
from tests.runner.collector import Collector, collecting
from tests.runner.receiver import Delivery, Receiver, echo, receiving
from tests.runner.scripts import custom, in_state, turn
from tests.runner.service import Service, replicating

pytestmark = pytest.mark.anyio


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with collecting() as collector:
        yield collector


@pytest.fixture
async def tool() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def upstream() -> AsyncIterator[Server]:
    async with running(World(pace=0)) as server:
        yield server


Start = Callable[[], contextlib.AbstractAsyncContextManager[Service]]


@pytest.fixture
def traced(
    engine: AsyncEngine, migrated_url: str, upstream: Server, tool: Receiver, collector: Collector
) -> Start:
    """Starts a replica that is traced; what it recorded is at the collector once it has stopped."""

    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Service]:
        own = create_engine(migrated_url, connections_max=6)
        async with replicating(own, migrated_url, upstream.url, collector_url=collector.url) as http:
            yield Service(http, upstream, tool, engine)

    return start


async def _one_call(service: Service, **policy: object) -> str:
    """Let an agent make one call; return the call's id once it is posted."""
    session = service.upstream.create(turn(custom("lookup")))
    await service.register("lookup", **policy)
    await service.attach(session.id)
    service.upstream.say(session.id)
    [call] = await in_state(service, session.id, "posted")
    return str(call["id"])


async def test_a_call_is_one_trace_and_its_tool_continues_the_span_of_the_attempt(
    traced: Start, tool: Receiver, collector: Collector
) -> None:
    async def fail_once(delivery: Delivery) -> web.StreamResponse:
        if delivery.attempt == 1:
            return web.Response(status=503, headers={"retry-after": "0"})
        return await echo(delivery)

    tool.reply = fail_once
    async with traced() as service:
        call_id = await _one_call(service, retry="safe")
    spans = collector.spans
    assert ["received", "delivery", "delivery", "post", "over"] == [span.name for span in spans]
    assert {call_id} == {span.attributes["bascule.call_id"] for span in spans}
    root, *others = spans
    assert "" == root.parent
    assert {(root.trace, root.id)} == {(span.trace, span.parent) for span in others}
    attempts = [span for span in spans if span.name == "delivery"]
    sent = [delivery.headers["traceparent"] for delivery in tool.deliveries]
    assert sent == [f"00-{span.trace}-{span.id}-01" for span in attempts]
    assert [(True, 503, 1), (False, 200, 2)] == [
        (span.is_error, span.attributes["http.response.status_code"], span.attributes["bascule.attempt"])
        for span in attempts
    ]


async def test_the_wait_for_a_person_is_a_link_and_the_next_replica_goes_on_with_the_trace(
    traced: Start, collector: Collector
) -> None:
    async with traced() as service:
        session = service.upstream.create("gated")
        await service.register("bash")
        await service.attach(session.id)
        service.upstream.say(session.id)
        [call] = await in_state(service, session.id, "held")
    assert ["received", "held"] == [span.name for span in collector.spans]
    async with traced() as service:
        decision = {"tool_use_id": call["id"], "result": "allow"}
        await service.http.post(f"/sessions/{session.id}/confirm", json=decision)
        await in_state(service, session.id, "posted")
    spans = collector.spans
    assert 1 == len({span.trace for span in spans})
    assert 1 == [span.name for span in spans].count("received")
    held, decided = (next(span for span in spans if span.name == name) for name in ("held", "decided"))
    assert [(held.trace, held.id)] == decided.links
    assert "allow" == decided.attributes["bascule.decision"]
    assert held.end_ns < decided.start_ns, "the wait itself is in no span"


async def test_a_call_without_a_thread_is_of_the_first_that_a_whole_history_names(
    traced: Start, collector: Collector
) -> None:
    """R-338: as the attachment knows it; until a complete read has named one, it is left out."""
    async with traced() as service:
        session = service.upstream.create(turn(custom("lookup")))
        service.upstream.say(session.id)
        await service.register("lookup")
        await service.attach(session.id)
        await in_state(service, session.id, "posted")
        primary = (await service.get(f"/sessions/{session.id}"))["primary_thread_id"]
    assert primary is not None
    of_call = [span for span in collector.spans if span.name != "post"]
    assert {primary} == {span.attributes["bascule.thread_id"] for span in of_call}


async def test_a_collector_that_refuses_costs_spans_and_no_call(
    traced: Start, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """What it answers is in no log line; that it refused is in one."""
    collector.status, collector.body = 401, b"your key was otlp-canary"
    failed = _spans("failed")
    with capture_logs() as lines:
        async with traced() as service:
            await _one_call(service)
    assert len(collector.spans) == _spans("failed") - failed > 0
    assert 1 == [line["event"] for line in lines].count("spans_not_exported")
    assert "otlp-canary" not in caplog.text + repr(lines)


async def test_spans_that_the_collector_is_too_slow_for_are_dropped_and_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.otel.SPANS_WAITING_MAX", 600)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "600")
    dropped = _spans("dropped")
    traces = Traces(f"{collector.url}/v1/traces")
    for number in range(3_000):
        traces.record(Span(f"call_{number}", "received", {}, ROOT))
    await traces.close()
    assert 3_000 == len(collector.spans) + _spans("dropped") - dropped
    assert _spans("dropped") > dropped


@pytest.mark.parametrize(("ratio", "recorded"), [("0", 0), ("1", 2)])
async def test_the_standard_sampler_decides_for_the_whole_trace(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, ratio: str, recorded: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
    traces = Traces(f"{collector.url}/v1/traces")
    traces.record(Span("call_x", "received", {}, ROOT))
    traces.record(Span("call_x", "over", {}))
    assert bool(recorded) == traces.is_sampled("call_x")
    await traces.close()
    assert recorded == len(collector.spans)


def test_traces_without_their_packages_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(CannotServeError, match=r"bascule\[otel\]"):
        serve(Settings(otel_exporter_otlp_endpoint="http://127.0.0.1:4318"), {})


def _spans(outcome: str) -> float:
    value: float = metrics.SPANS.labels(outcome=outcome)._value.get()
    return value
