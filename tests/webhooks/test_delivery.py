"""Deliveries against a receiver on loopback: attempts, policies, limits, and what is left unknown."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from standardwebhooks import Webhook

from app.core.calls import webhook_id
from app.core.tools import SigningSecret, Tool
from app.webhooks.attempt import HEADERS_MAX
from app.webhooks.delivery import DeliveryOutcome, retry_after_s
from app.webhooks.egress import Egress
from app.webhooks.wire import sign
from tests.webhooks.conftest import (
    SECRET,
    Log,
    Step,
    Time,
    a_call,
    a_request,
    a_tool,
    delivering,
    hang_up,
    receiving,
    reply,
    saying,
    silence,
)
from tests.webhooks.test_wire import ODD_INPUTS

pytestmark = pytest.mark.anyio

OK = reply(body=b'{"content":"done"}')


def text_of(outcome: DeliveryOutcome) -> str:
    text: str = json.loads(outcome.result.content)[0]["text"]
    return text


async def deliver(
    log: Log, *steps: Step, time_: Time | None = None, **tool: Any
) -> tuple[DeliveryOutcome, int]:
    """Deliver one call to a receiver that plays the steps; the outcome, and how many requests arrived."""
    fakes: dict[str, Any] = {}
    if time_ is not None:
        fakes = {"clock": time_.clock, "wall": time_.wall, "sleep": time_.sleep}
    async with receiving(*steps) as receiver, delivering(**fakes) as deliverer:
        outcome = await deliverer.deliver(a_request(a_tool(receiver.url, **tool)), log)
        return outcome, len(receiver.requests)


async def test_a_tool_gets_a_request_that_its_own_library_verifies(log: Log) -> None:
    """R-150: a signed delivery with everything that names the call."""
    call = a_call('{"a":[1,{"b":null}],"ключ":"é"}'.encode(), id="ctu1", thread_id="th1")
    async with receiving(OK) as receiver, delivering() as deliverer:
        tool = a_tool(receiver.url + "?k=v", headers=(("X-Api-Key", "abc"), ("webhook-id", "theirs")))
        await deliverer.deliver(a_request(tool, call), log)
    request = receiver.requests[0]
    assert request.line == "POST /hook?k=v HTTP/1.1"
    assert Webhook(SECRET).verify(request.body.decode(), request.headers)["data"]["thread_id"] == "th1"
    assert request.headers["webhook-id"] == webhook_id("default", "sesn_1", "ctu1")
    assert request.headers["bascule-attempt"] == "1"
    assert abs(int(request.headers["bascule-deadline"]) - time.time() - 5) < 2
    assert request.headers["user-agent"] == "bascule/1.2.3"
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["x-api-key"] == "abc"
    assert request.headers["traceparent"].startswith("00-")


@pytest.mark.parametrize("input_", ODD_INPUTS)
async def test_every_attempt_carries_the_same_bytes_and_id(log: Log, input_: bytes) -> None:
    """R-182: and the input is in them as it came."""
    time_ = Time()
    async with (
        receiving(reply(503), reply(500), OK) as receiver,
        delivering(clock=time_.clock, wall=time_.wall, sleep=time_.sleep) as deliverer,
    ):
        request = a_request(a_tool(receiver.url, retry="safe", timeout_s=60.0), a_call(input_))
        await deliverer.deliver(request, log)
    assert [each.body for each in receiver.requests] == [request.body] * 3
    assert len({each.headers["webhook-id"] for each in receiver.requests}) == 1
    assert [each.headers["bascule-attempt"] for each in receiver.requests] == ["1", "2", "3"]
    assert len({each.headers["webhook-timestamp"] for each in receiver.requests}) > 1
    assert len({each.headers["webhook-signature"] for each in receiver.requests}) > 1
    assert len({each.headers["bascule-deadline"] for each in receiver.requests}) == 1
    assert input_ in request.body


async def test_an_answer_is_the_result_and_is_reported(log: Log) -> None:
    outcome, _ = await deliver(log, OK)
    assert (text_of(outcome), outcome.result.is_error, outcome.code) == ("done", False, None)
    report = log.reports[0]
    assert (log.begun, report.attempt, report.http_status, report.code) == ([1], 1, 200, None)
    assert report.reply_excerpt == '{"content":"done"}'
    assert report.started_ms <= report.finished_ms


async def test_a_resumed_call_goes_on_counting(log: Log) -> None:
    async with receiving(OK) as receiver, delivering() as deliverer:
        outcome = await deliverer.deliver(a_request(a_tool(receiver.url), attempt=4), log)
    assert (log.begun, outcome.attempts) == ([4], 4)
    assert receiver.requests[0].headers["bascule-attempt"] == "4"


async def test_nothing_leaves_before_the_start_is_stored(log: Log) -> None:
    class Failing(Log):
        async def started(self, attempt: int) -> None:
            raise RuntimeError("the lease is lost")

    async with receiving(OK) as receiver, delivering() as deliverer:
        with pytest.raises(RuntimeError, match="lease"):
            await deliverer.deliver(a_request(a_tool(receiver.url)), Failing())
    assert (receiver.connections, len(receiver.requests)) == (0, 0)


TRICKLE = b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(TRICKLE)
    while not reader.at_eof() and not writer.is_closing():
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "step",
    [silence, saying(b"HTTP/1.1 200 X\r\nx-head"), saying(TRICKLE, b'{"content"'), _drip],
    ids=["R-151 silence", "R-152 cut in the head", "R-152 cut in the body", "R-152 one byte at a time"],
)
async def test_a_tool_that_does_not_finish_in_time_times_out(log: Log, step: Step) -> None:
    """R-151, R-152: the wall clock decides, and the agent hears that the tool may have run."""
    outcome, requests = await deliver(log, step, timeout_s=0.5)
    assert outcome.result.is_error
    assert "timed out" in text_of(outcome)
    assert '"echo"' in text_of(outcome)
    assert "0.5 s" in text_of(outcome)
    assert "may have run" in text_of(outcome)
    assert (outcome.outcome_unknown, outcome.code, requests) == (True, "timeout", 1)


async def test_an_answer_after_the_timeout_changes_nothing(log: Log) -> None:
    """R-153: it is not read, and the next call gets its own answer."""
    let_go = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await let_go.wait()
        writer.write(reply(body=b'"late"'))

    async with receiving(late, OK) as receiver, delivering() as deliverer:
        first = await deliverer.deliver(a_request(a_tool(receiver.url, timeout_s=0.1, retry="never")), log)
        let_go.set()
        second = await deliverer.deliver(a_request(a_tool(receiver.url)), log)
    assert "timed out" in text_of(first)
    assert text_of(second) == "done"


async def test_a_delivery_is_repeated_until_the_tool_answers(log: Log) -> None:
    """R-156: 503, connection refused, 429 with Retry-After, then 200: four attempts, one result."""
    time_ = Time()
    first = reply(503, b"", "connection: close")
    async with receiving(first, reply(429, b"", "retry-after: 2"), OK) as receiver:

        async def sleep(seconds: float) -> None:
            await time_.sleep(seconds)
            if len(time_.waits) == 1:
                await receiver.shut()
            elif len(time_.waits) == 2:
                await receiver.open()

        async with delivering(clock=time_.clock, wall=time_.wall, sleep=sleep) as deliverer:
            tool = a_tool(receiver.url, retry="safe", timeout_s=60.0)
            outcome = await deliverer.deliver(a_request(tool), log)
    assert text_of(outcome) == "done"
    assert (outcome.attempts, log.begun) == (4, [1, 2, 3, 4])
    assert log.codes == ["http_status", "connect_failed", "http_status", None]
    assert time_.waits == [0.5, 1.0, 2.0]
    assert len({each.headers["webhook-id"] for each in receiver.requests}) == 1


async def test_failures_until_the_deadline_end_in_an_error_with_the_last_status(log: Log) -> None:
    """R-157: 500 until the time is up."""
    time_ = Time()
    outcome, requests = await deliver(log, reply(500, b"db down"), time_=time_, retry="safe", timeout_s=120.0)
    assert time_.waits[:7] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert 1000 < time_.now < 1120
    assert outcome.result.is_error
    assert "failed with HTTP status 500" in text_of(outcome)
    assert (outcome.attempts, outcome.outcome_unknown, outcome.code) == (requests, False, "http_status")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(log: Log, status: int) -> None:
    """R-158: whatever its kind and target."""
    async with receiving(OK) as other, receiving(reply(status, b"", f"location: {other.url}")) as first:
        async with delivering() as deliverer:
            outcome = await deliverer.deliver(a_request(a_tool(first.url, retry="safe")), log)
        assert (outcome.code, len(first.requests), other.connections) == ("redirect", 1, 0)
    assert outcome.result.is_error


async def test_an_oversize_reply_is_read_to_its_limit_and_not_asked_for_again(log: Log) -> None:
    """R-176: one byte over the limit, and one at it."""
    limit = 1000
    over = reply(body=b'"' + b"a" * (limit - 1) + b'"')
    outcome, requests = await deliver(log, over, retry="safe", reply_bytes_max=limit)
    assert (outcome.code, requests) == ("reply_too_large", 1)
    assert "1000 bytes" in text_of(outcome)
    exact, _ = await deliver(log, reply(body=b'"' + b"a" * (limit - 2) + b'"'), reply_bytes_max=limit)
    assert text_of(exact) == "a" * (limit - 2)


async def test_a_reply_without_end_is_cut_at_its_limit(log: Log) -> None:
    """R-176: with no length announced, and a reader that would wait for the end."""

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        while not writer.is_closing():
            writer.write(b"1000\r\n" + b"a" * 4096 + b"\r\n")
            await writer.drain()

    outcome, _ = await deliver(log, endless, reply_bytes_max=10_000)
    assert outcome.code == "reply_too_large"


KNOWN = {
    "422": (reply(422, b"nope", kind="text/plain"), "http_status"),
    "410": (reply(410), "gone"),
    "202": (reply(202, b"{}"), "callbacks_not_enabled"),
    "200 empty": (reply(200), "reply_empty"),
    "gzip": (reply(200, b"\x1f\x8b", "content-encoding: gzip"), "reply_compressed"),
    "cut JSON": (reply(200, b'{"a":'), "reply_unreadable"),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("retry", ["never", "connect_only", "safe"])
async def test_a_reply_that_settles_the_call_is_never_repeated(log: Log, name: str, retry: str) -> None:
    """R-155, R-159: whatever the policy; the outcome is known."""
    step, code = KNOWN[name]
    outcome, requests = await deliver(log, step, retry=retry)
    assert (code, False, 1) == (outcome.code, outcome.outcome_unknown, requests)
    assert outcome.result.is_error


Policy = Literal["never", "connect_only", "safe"]
REPEATED: dict[str, tuple[Step, set[Policy]]] = {
    "429 with Retry-After": (reply(429, b"", "retry-after: 0"), {"connect_only", "safe"}),
    "503 with Retry-After": (reply(503, b"", "retry-after: 1"), {"connect_only", "safe"}),
    "429": (reply(429), {"safe"}),
    "503": (reply(503), {"safe"}),
    "503 with nonsense": (reply(503, b"", "retry-after: soon"), {"safe"}),
    "500 with Retry-After": (reply(500, b"", "retry-after: 1"), {"safe"}),
    "408": (reply(408), {"safe"}),
    "425": (reply(425), {"safe"}),
    "502": (reply(502), {"safe"}),
    "504": (reply(504), {"safe"}),
    "hang-up": (hang_up, {"safe"}),
    "cut body": (saying(TRICKLE, then=hang_up), {"safe"}),
    "no HTTP": (saying(b"SSH-2.0-x\r\n\r\n", then=hang_up), {"safe"}),
    "huge header": (saying(b"HTTP/1.1 200 X\r\nx: " + b"a" * 9000 + b"\r\n\r\n", then=hang_up), {"safe"}),
    "many headers": (reply(200, b"{}", *(f"x-{n}: 1" for n in range(HEADERS_MAX + 1))), {"safe"}),
    "attempt timeout": (silence, {"safe"}),
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("retry", ["never", "connect_only", "safe"])
async def test_a_policy_repeats_what_it_allows_and_no_more(log: Log, name: str, retry: Policy) -> None:
    step, policies = REPEATED[name]
    tool = {
        "retry": retry,
        "timeout_s": 60.0,
        "attempt_timeout_s": 0.1 if name == "attempt timeout" else None,
    }
    outcome, requests = await deliver(log, step, OK, time_=Time(), **tool)
    assert requests == (2 if retry in policies else 1)
    if retry in policies:
        assert text_of(outcome) == "done"


CUT = ["hang-up", "cut body", "no HTTP", "huge header", "attempt timeout"]


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("retry", ["never", "connect_only"])
async def test_a_delivery_cut_after_it_was_sent_is_unknown(log: Log, name: str, retry: str) -> None:
    outcome, _ = await deliver(log, REPEATED[name][0], retry=retry, attempt_timeout_s=0.1)
    assert outcome.outcome_unknown
    assert outcome.result.is_error
    assert "may have run" in text_of(outcome)
    assert log.reports[0].was_written


@pytest.mark.parametrize("name", sorted(set(REPEATED) - set(CUT) - {"many headers"}))
async def test_a_status_is_a_known_outcome(log: Log, name: str) -> None:
    outcome, _ = await deliver(log, REPEATED[name][0], retry="never")
    assert (outcome.outcome_unknown, outcome.code) == (False, "http_status")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [(422, "http_status", "422: bad order"), (202, "callbacks_not_enabled", "202"), (302, "redirect", "302")],
)
async def test_a_status_counts_even_if_its_page_never_ends(
    log: Log, status: int, code: str, said: str
) -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-length: 100\r\n\r\nbad order".encode()
    outcome, _ = await deliver(log, saying(head), timeout_s=0.15)
    assert (outcome.code, outcome.outcome_unknown) == (code, False)
    assert said in text_of(outcome)


async def test_a_safe_tool_that_times_out_may_be_called_again(log: Log) -> None:
    """R-151: the agent hears that it may have run, but its outcome is no question for a person."""
    outcome, _ = await deliver(log, silence, retry="safe", timeout_s=0.1)
    assert (outcome.code, outcome.outcome_unknown) == ("timeout", False)
    assert "may have run" in text_of(outcome)


async def test_a_resumed_call_is_not_said_never_to_have_run(log: Log) -> None:
    async with delivering() as deliverer:
        tool = a_tool("http://127.0.0.1:1/", retry="safe", timeout_s=0.1)
        outcome = await deliverer.deliver(a_request(tool, attempt=2), log)
    assert outcome.code == "connect_failed"
    assert "earlier attempt was sent" in text_of(outcome)


async def test_a_wait_that_overran_the_deadline_starts_nothing(log: Log) -> None:
    time_ = Time()

    async def sleep(seconds: float) -> None:
        await time_.sleep(seconds + 100)

    async with receiving(reply(500), OK) as receiver, delivering(clock=time_.clock, sleep=sleep) as deliverer:
        outcome = await deliverer.deliver(a_request(a_tool(receiver.url, retry="safe")), log)
    assert (log.begun, outcome.code, len(receiver.requests)) == ([1], "http_status", 1)


@pytest.mark.parametrize(("retry", "attempts"), [("never", 1), ("connect_only", 3), ("safe", 3)])
async def test_a_connection_that_fails_is_repeated_since_nothing_was_sent(
    log: Log, retry: str, attempts: int
) -> None:
    """R-156: not under `never`. What is left at the deadline is known: the tool has not run."""
    time_ = Time()
    async with delivering(clock=time_.clock, wall=time_.wall, sleep=time_.sleep) as deliverer:
        tool = a_tool("http://127.0.0.1:1/?token=S3CR3T", retry=retry, timeout_s=2.0)
        outcome = await deliverer.deliver(a_request(tool), log)
    assert (outcome.code, outcome.outcome_unknown) == ("connect_failed", False)
    assert "has not run" in text_of(outcome)
    assert (len(log.reports), any(report.was_written for report in log.reports)) == (attempts, False)


async def test_after_an_attempt_that_was_sent_nobody_is_told_that_nothing_ran(log: Log) -> None:
    async with receiving(hang_up) as receiver:

        async def sleep(_seconds: float) -> None:
            await receiver.shut()

        async with delivering(sleep=sleep) as deliverer:
            tool = a_tool(receiver.url, retry="safe", timeout_s=2.0)
            outcome = await deliverer.deliver(a_request(tool), log)
    assert log.codes[:2] == ["disconnected", "connect_failed"]
    assert "may have run" in text_of(outcome)
    assert "has not run" not in text_of(outcome)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("", None), ("0", 0.0), ("2", 2.0), ("-1", None), ("soon", None), ("1e3", None),
     ("9" * 400, None), ("Thu, 29 Oct 2026 14:00:10 GMT", 6.0), ("Thu, 29 Oct 2020 14:00:10 GMT", 0.0),
     ("Thu, 99 Oct 2026 14:00:10 GMT", None)],
)  # fmt: skip
async def test_retry_after_is_read_as_seconds_or_as_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value, now_s=1_793_282_404.0) == seconds


async def test_a_long_retry_after_is_cut_to_a_minute(log: Log) -> None:
    time_ = Time()
    step = reply(429, b"", "retry-after: 3600")
    outcome, requests = await deliver(log, step, OK, time_=time_, timeout_s=120.0)
    assert (time_.waits, requests, text_of(outcome)) == ([60.0], 2, "done")


async def test_a_wait_past_the_deadline_is_not_begun(log: Log) -> None:
    time_ = Time()
    outcome, requests = await deliver(
        log, reply(429, b"", "retry-after: 30"), OK, time_=time_, timeout_s=20.0
    )
    assert (time_.waits, requests, outcome.code) == ([], 1, "http_status")


async def test_the_jitter_takes_off_up_to_half(log: Log) -> None:
    time_ = Time()
    async with (
        receiving(reply(500), OK) as receiver,
        delivering(clock=time_.clock, wall=time_.wall, sleep=time_.sleep, draw=lambda: 0.0) as deliverer,
    ):
        await deliverer.deliver(a_request(a_tool(receiver.url, retry="safe")), log)
    assert time_.waits == [0.25]


@pytest.mark.parametrize(
    "step", [REPEATED[name][0] for name in REPEATED] + [KNOWN[name][0] for name in KNOWN]
)
@pytest.mark.parametrize("retry", ["never", "safe"])
async def test_no_failure_tells_the_url_or_the_headers(log: Log, step: Step, retry: str) -> None:
    time_ = Time()
    async with (
        receiving(step) as receiver,
        delivering(clock=time_.clock, wall=time_.wall, sleep=time_.sleep) as deliverer,
    ):
        tool = a_tool(
            receiver.url + "?token=S3CR3T",
            headers=(("Authorization", "Bearer HEADERKEY"),),
            retry=retry,
            timeout_s=3.0,
            attempt_timeout_s=0.05,
        )
        outcome = await deliverer.deliver(a_request(tool), log)
    told = text_of(outcome) + repr(log.reports)
    for secret in ("S3CR3T", "HEADERKEY", "127.0.0.1", "/hook"):
        assert secret not in told


async def test_what_the_log_keeps_of_a_reply_is_short_storable_and_clean(log: Log) -> None:
    body = b"key HEADERKEY \0 " + b"x" * 9000
    await deliver(log, reply(500, body, kind="text/plain"), headers=(("X-Key", "HEADERKEY"),), retry="never")
    excerpt = log.reports[0].reply_excerpt
    assert excerpt.startswith("key [redacted] xxx")
    assert len(excerpt) <= 2048
    assert log.reports[0].reply_body.startswith(b"key [redacted] \0 xxx")


async def test_a_secret_at_the_end_of_an_excerpt_is_not_cut_in_two_and_shown(log: Log) -> None:
    body = b"x" * 2043 + b"HEADERKEY"
    await deliver(log, reply(500, body, kind="text/plain"), headers=(("X-Key", "HEADERKEY"),), retry="never")
    assert "HEAD" not in log.reports[0].reply_excerpt


async def test_a_compressed_reply_is_not_inflated(log: Log) -> None:
    packed = gzip.compress(b'"' + b"a" * 1_000_000 + b'"')
    outcome, _ = await deliver(log, reply(200, packed, "content-encoding: gzip"), reply_bytes_max=5000)
    assert (outcome.code, log.reports[0].reply_body) == ("reply_compressed", packed)


async def test_cookies_of_one_tool_reach_no_other_call(log: Log) -> None:
    step = reply(200, b"{}", "set-cookie: a=b; path=/")
    async with receiving(step, OK) as receiver, delivering() as deliverer:
        for _ in range(2):
            await deliverer.deliver(a_request(a_tool(receiver.url)), log)
    assert "cookie" not in receiver.requests[1].headers


async def test_proxies_and_passwords_of_the_environment_are_ignored(
    log: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password S3CR3T\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    async with receiving(reply(500)) as proxy, receiving(OK) as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        async with delivering() as deliverer:
            outcome = await deliverer.deliver(a_request(a_tool(receiver.url)), log)
    assert (text_of(outcome), proxy.connections) == ("done", 0)
    assert "authorization" not in receiver.requests[0].headers


async def test_only_a_safe_tool_gets_a_connection_that_was_used_before(log: Log) -> None:
    async with receiving(OK) as receiver, delivering() as deliverer:
        for retry in ("never", "connect_only", "safe", "safe", "safe"):
            await deliverer.deliver(a_request(a_tool(receiver.url, retry=retry)), log)
    assert receiver.connections == 3
    assert [each.headers.get("connection") for each in receiver.requests] == [
        "close",
        "close",
        None,
        None,
        None,
    ]


async def test_a_tool_serves_no_more_calls_at_once_than_it_wants(log: Log) -> None:
    """The wait for a slot takes nothing from the call's own time."""
    running = most = 0

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        writer.write(OK)

    async with receiving(work) as receiver, delivering() as deliverer:
        tool = a_tool(receiver.url, concurrency=2, timeout_s=0.2)
        outcomes = await asyncio.gather(*(deliverer.deliver(a_request(tool), log) for _ in range(12)))
    assert [text_of(outcome) for outcome in outcomes] == ["done"] * 12
    assert most == 2


async def test_a_full_tool_delays_no_other_tenant(log: Log) -> None:
    async with receiving(silence, OK) as receiver, delivering() as deliverer:
        tool = a_tool(receiver.url, concurrency=1)
        hung = asyncio.create_task(deliverer.deliver(a_request(tool), log))
        await receiver.wait_for(1)
        other = await deliverer.deliver(a_request(tool, tenant="other"), log)
        hung.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung
    assert text_of(other) == "done"


async def test_a_cancelled_delivery_gives_its_slot_back(log: Log) -> None:
    async with receiving(silence, OK) as receiver, delivering() as deliverer:
        tool = a_tool(receiver.url, concurrency=1)
        hung = asyncio.create_task(deliverer.deliver(a_request(tool), log))
        await receiver.wait_for(1)
        hung.cancel()
        outcome = await deliverer.deliver(a_request(tool), log)
    assert text_of(outcome) == "done"


async def test_an_odd_header_cannot_break_a_delivery(log: Log) -> None:
    outcome, requests = await deliver(log, OK, headers=(("x", "a\r\nhost: evil"), ("ü", "1"), ("ok", "é")))
    assert (text_of(outcome), requests) == ("done", 1)


async def test_each_attempt_is_signed_with_what_is_live_when_it_leaves(log: Log) -> None:
    """C-060, D-046: the old secret ends between two attempts; the body stays the same."""
    old = SigningSecret(b"o" * 32, expires_at=Time().wall() + 0.2)
    async with receiving(reply(503), OK) as receiver:
        time = Time()
        async with delivering(clock=time.clock, wall=time.wall, sleep=time.sleep) as deliverer:
            tool = a_tool(receiver.url, retry="safe", secrets=(SigningSecret(SECRET), old))
            await deliverer.deliver(a_request(tool), log)
        first, second = receiver.requests
    assert [2, 1] == [len(one.headers["webhook-signature"].split()) for one in (first, second)]
    assert (first.body, first.headers["webhook-id"]) == (second.body, second.headers["webhook-id"])


async def test_an_attempt_is_signed_with_the_secrets_that_the_log_returns(log: Log) -> None:
    """The tool may have changed while the call waited for a slot."""

    class Newer(Log):
        def current(self) -> Tool:  # type: ignore[override]
            return a_tool(receiver.url, secrets=(SigningSecret(b"n" * 32),))

    async with receiving(OK) as receiver, delivering() as deliverer:
        await deliverer.deliver(a_request(a_tool("https://gone.example/")), Newer())
        (request,) = receiver.requests
    fields = request.headers
    expected = sign([b"n" * 32], fields["webhook-id"], int(fields["webhook-timestamp"]), request.body)
    assert expected == fields["webhook-signature"]


async def test_an_unsigned_delivery_is_a_defect_of_ours(log: Log) -> None:
    async with delivering(Egress()) as deliverer:
        with pytest.raises(ValueError, match="secret"):
            await deliverer.deliver(a_request(a_tool("https://h.example/", secrets=())), log)
