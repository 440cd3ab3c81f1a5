"""Delivering one call: attempts, waits between them, and what the whole came to.

One wall clock bounds a call from the first look-up to the last byte. Whether a delivery may be repeated is
the tool's own declaration; when in doubt a request counts as sent.
"""

from __future__ import annotations

import asyncio
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, Literal, Protocol

from app.core.calls import Call, Result, webhook_id
from app.core.retry import backoff_s, wait_s
from app.core.tools import Tool
from app.webhooks import wire
from app.webhooks.attempt import (
    FRAMING_BYTES_MAX,
    HEADER_LINE_BYTES_MAX,
    HEADERS_MAX,
    Answer,
    Door,
    Failure,
    FailureCode,
)
from app.webhooks.egress import Egress, Lookup
from app.webhooks.health import Endpoints, Health
from app.webhooks.reply import (
    ReplyCode,
    cleaned,
    error_result,
    is_endpoint_failure,
    read_reply,
    redacted,
    the_tool,
)
from app.webhooks.slots import Slots

NotTried = Literal["unhealthy"]
DeliveryCode = FailureCode | ReplyCode | NotTried

RETRY_START_S: Final = 0.5
RETRY_CAP_S: Final = 10.0
TENANT_DELIVERIES_MAX: Final = 100
ATTEMPTS_MAX: Final = 100
"""A bound of the loop; the deadline ends it long before."""
EXCERPT_CHARS_MAX: Final = 2048
HEALTH_LOOK_S: Final = 1.0
"""How often a call that waits for its endpoint sees whether the tool has moved meanwhile."""

_SECONDS: Final = re.compile(r"\d{1,9}(\.\d{1,9})?")
_PERMANENT: Final = frozenset(
    {"blocked_url", "blocked_address", "tls_expired", "tls_untrusted", "tls_wrong_host", "tls_too_old"}
)
FAIR_SHARE: Final = 0.9
"""An attempt that had less of its time than this says nothing of its endpoint by timing out."""
_SAYS_NOTHING: Final = frozenset({"blocked_url", "blocked_address"})
"""It is we who do not call: that tells nothing of the endpoint."""
_REPEATED: Final[Mapping[str, frozenset[str | None]]] = {
    "never": frozenset(),
    "connect_only": frozenset({"unsent", "asked"}),
    "safe": frozenset({"unsent", "asked", "sent"}),
}
_HAPPENED: Final[Mapping[FailureCode, str]] = {
    "blocked_url": "has a URL that this service may not call; its operator can tell why",
    "blocked_address": "has an address that may not be called; only public and allowed addresses are",
    "dns_failed": "could not be reached: its host name could not be looked up",
    "connect_failed": "could not be reached: no connection to its endpoint",
    "tls_expired": "could not be reached: its TLS certificate has expired or is not yet valid",
    "tls_untrusted": "could not be reached: its TLS certificate is not signed by a trusted authority",
    "tls_wrong_host": "could not be reached: its TLS certificate is for another host",
    "tls_too_old": "could not be reached: it offers no TLS version from 1.2 on",
    "tls_failed": "could not be reached: the TLS handshake failed",
    "disconnected": "closed the connection before it had answered",
    "headers_too_large": (
        f"sent too large headers: the limits are {HEADERS_MAX} lines and {HEADER_LINE_BYTES_MAX} bytes a line"
    ),
    "framing_too_large": (
        f"sent more than {FRAMING_BYTES_MAX} bytes of headers, interim answers or chunk framing,"
        " which is the limit"
    ),
    "bad_http": "sent an answer that is broken off or not valid HTTP",
}
_MAY_HAVE_RUN: Final = "The request was sent, so the tool may have run: do not assume that it did not."
_SENT_BEFORE: Final = "An earlier attempt was sent, so the tool may have run: do not assume that it did not."
_NOT_SENT: Final = "Nothing was sent to the tool; it has not run."


@dataclass(frozen=True, slots=True)
class DeliveryRequest:
    """What is to be delivered. `body` is the stored bytes; `attempt` numbers the first attempt from here.

    `is_sampled` is what the tool is told of the trace. A test is sent also while the endpoint is down, and
    counts for its health.
    """

    tenant: str
    session_id: str
    call: Call
    tool: Tool
    body: bytes
    attempt: int = 1
    is_sampled: bool = True
    is_test: bool = False


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """How one attempt went, for the log.

    Times are in milliseconds of the monotonic clock. `code` is None if a reply kept the contract.
    `reply_excerpt` is the beginning of the reply, at most 2,048 characters, as one line without secrets;
    `reply_body` is what was read of it, and may hold anything. `is_promise`: a 202.
    """

    attempt: int
    started_ms: int
    finished_ms: int
    http_status: int | None
    code: DeliveryCode | None
    was_written: bool
    reply_excerpt: str
    is_promise: bool = False
    reply_body: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """What a delivery came to.

    `result` is None if the tool answered 202 and reports it later. `attempts` is the number of the last
    attempt. `outcome_unknown` says that the tool may have run and
    must not be called again unasked. `code` is None if the tool answered by the contract.
    """

    result: Result | None
    attempts: int
    outcome_unknown: bool = False
    code: DeliveryCode | None = None


class AttemptLog(Protocol):
    """Who is told of attempts. What these raise ends the delivery."""

    def current(self) -> Tool | None:
        """The tool as it is by now: where the next attempt goes, and what signs it. None: as requested."""

    async def started(self, attempt: int) -> None:
        """Called before anything leaves, right after `current`; the attempt waits for it."""

    async def finished(self, report: AttemptReport) -> None:
        """Called after each attempt, before the next one or the outcome.

        Also, without a start, when none was made because the endpoint is down.
        """

    async def health_changed(self, health: Health) -> bool:
        """Called when the state of the endpoint's health has changed; return whether that is stored."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """One attempt, judged. `retry` is what a policy must allow for another: None means that none helps.

    `error` is how the endpoint failed, `is_well` whether it works.
    """

    outcome: DeliveryOutcome
    retry: Literal["unsent", "asked", "sent"] | None
    was_written: bool
    floor_s: float | None = None
    error: str | None = None
    is_well: bool = False


class Deliverer:
    """Calls webhooks. One per process; `close` it at the end.

    `clock` is monotonic seconds, `wall` seconds since 1970, `draw` a random number in [0, 1); they and
    `sleep` are replaced in tests. `version` goes into the user agent. `tenant_deliveries_max` bounds the
    deliveries of one tenant that run at once here, over all its tools.
    """

    def __init__(
        self,
        egress: Egress,
        *,
        version: str,
        tenant_deliveries_max: int = TENANT_DELIVERIES_MAX,
        tls: ssl.SSLContext | None = None,
        lookup: Lookup | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._door = Door(egress, tls=tls, lookup=lookup)
        self._slots = Slots()
        self._endpoints = Endpoints(clock, wall)
        self._version = version
        self._tenant_max = tenant_deliveries_max
        self._clock = clock
        self._wall = wall
        self._draw = draw
        self._sleep = sleep

    async def deliver(self, request: DeliveryRequest, log: AttemptLog) -> DeliveryOutcome:
        """Deliver a call and return what it came to; a fault of the tool is an outcome, never an exception.

        While the endpoint is down, waits for it for at most `tool.timeout_s`, or answers at once, as the tool
        has it. Then waits for one of the tool's slots, and of the tenant's. None of that takes anything from
        the time of the attempts.
        """
        tool = request.tool
        until = self._clock() + tool.timeout_s
        while await self._is_well(request, log, until):
            async with (
                # In this order, so that who waits for a busy tool keeps no other tool's calls from running.
                self._slots.slot((request.tenant, tool.name), tool.concurrency),
                self._slots.slot((request.tenant, None), self._tenant_max),
            ):
                outcome = await self._attempts(request, log)
            if outcome is not None:
                return outcome
        return await self._not_tried(request, log)

    async def close(self) -> None:
        """Close every connection, once no delivery is under way."""
        await self._door.close()

    async def _attempts(self, request: DeliveryRequest, log: AttemptLog) -> DeliveryOutcome | None:
        """Make the attempts; None if the endpoint went down while the first one waited for its turn."""
        tool = request.tool
        deadline: float | None = None
        was_sent = request.attempt > 1
        tried: _Tried | None = None
        for failures in range(1, ATTEMPTS_MAX + 1):
            number = request.attempt + failures - 1
            tool = log.current() or tool
            endpoint = self._endpoints.of(request.tenant, tool.name, tool.url)
            if endpoint.wait_s() > 0 and not request.is_test:
                return None if tried is None else tried.outcome
            async with endpoint.attempt(log.health_changed) as verdict:
                await log.started(number)
                deadline = deadline or self._clock() + tool.timeout_s
                tried = await self._try(request, number, deadline, log, tool, was_sent=was_sent)
                verdict.error, verdict.is_well = tried.error, tried.is_well
            was_sent = was_sent or tried.was_written
            pause_s = self._pause_s(tool, tried, failures, deadline)
            if pause_s is None:
                return tried.outcome
            await self._sleep(pause_s)
            if not await self._is_well(request, log, deadline) or self._clock() >= deadline:
                return tried.outcome
        raise AssertionError("the deadline did not end the attempts")

    async def _is_well(self, request: DeliveryRequest, log: AttemptLog, until: float) -> bool:
        """Wait for the endpoint, if the tool has it so; return whether an attempt may begin in time."""
        while True:
            tool = log.current() or request.tool
            wait_s = self._endpoints.of(request.tenant, tool.name, tool.url).wait_s()
            left_s = until - self._clock()
            if wait_s <= 0 or request.is_test:
                return True
            if tool.when_unhealthy == "answer" or wait_s >= left_s:
                return False
            await self._sleep(min(wait_s, HEALTH_LOOK_S))

    async def _not_tried(self, request: DeliveryRequest, log: AttemptLog) -> DeliveryOutcome:
        tool, now_ms = log.current() or request.tool, int(self._clock() * 1000)
        health = self._endpoints.of(request.tenant, tool.name, tool.url).health
        await log.finished(AttemptReport(request.attempt, now_ms, now_ms, None, "unhealthy", False, ""))
        sentence = f"{the_tool(tool)} was not called: its endpoint is down"
        if health.since is not None:
            since = datetime.fromtimestamp(health.since, UTC).isoformat(timespec="seconds")
            sentence += f" since {since.replace('+00:00', 'Z')} ({health.last_error})"
        consequence = _SENT_BEFORE if request.attempt > 1 else _NOT_SENT
        return DeliveryOutcome(error_result(f"{sentence}. {consequence}"), request.attempt, code="unhealthy")

    def _pause_s(self, tool: Tool, tried: _Tried, failures: int, deadline: float) -> float | None:
        """How long to wait before the next attempt; None if there is none."""
        allowed = _REPEATED[tool.retry]
        if tried.retry not in allowed or failures == ATTEMPTS_MAX:
            return None
        nominal_s = backoff_s(failures, start_s=RETRY_START_S, cap_s=RETRY_CAP_S)
        pause_s = wait_s(nominal_s, floor_s=tried.floor_s, draw=self._draw())
        return pause_s if self._clock() + pause_s < deadline else None

    async def _try(
        self,
        request: DeliveryRequest,
        number: int,
        deadline: float,
        log: AttemptLog,
        tool: Tool,
        *,
        was_sent: bool,
    ) -> _Tried:
        # The agent knows the tool by the name it called.
        tool = replace(tool, name=request.call.tool)
        started = self._clock()
        left_s = deadline - started
        attempt_s = tool.attempt_timeout_s or tool.timeout_s
        wall = self._wall()
        id_ = webhook_id(request.tenant, request.session_id, request.call.id)
        headers = wire.headers(
            tool,
            webhook_id=id_,
            now=wall,
            body=request.body,
            attempt=number,
            deadline_s=wall + left_s,
            is_sampled=request.is_sampled,
            version=self._version,
        )
        came = await self._door.post(
            tool.url,
            headers,
            request.body,
            timeout_s=min(left_s, attempt_s),
            reply_bytes_max=tool.reply_bytes_max,
            reuse=tool.retry == "safe",
        )
        if isinstance(came, Answer):
            tried = self._answered(came, tool, number)
        else:
            limit_s = tool.timeout_s if left_s <= attempt_s else attempt_s
            is_rest = left_s < FAIR_SHARE * attempt_s
            tried = _failed(came, tool, number, limit_s, was_sent=was_sent, is_rest=is_rest)
        await log.finished(
            AttemptReport(
                attempt=number,
                started_ms=int(started * 1000),
                finished_ms=int(self._clock() * 1000),
                http_status=came.status if isinstance(came, Answer) else None,
                code=tried.outcome.code,
                was_written=tried.was_written,
                reply_excerpt=_excerpt(came, tool),
                is_promise=tried.outcome.result is None,
                reply_body=_kept(came, tried, tool),
            )
        )
        return tried

    def _answered(self, answer: Answer, tool: Tool, number: int) -> _Tried:
        reply = read_reply(answer.status, answer.headers, answer.body, tool)
        outcome = DeliveryOutcome(reply.result, number, code=reply.code)
        if not is_endpoint_failure(answer.status):
            return _Tried(outcome, None, was_written=True, is_well=True)
        floor_s = retry_after_s(answer.headers.get("Retry-After"), now_s=self._wall())
        is_asked = answer.status in (429, 503) and floor_s is not None
        error = f"http_status {answer.status}"
        return _Tried(
            outcome, "asked" if is_asked else "sent", was_written=True, floor_s=floor_s, error=error
        )


def retry_after_s(value: str | None, *, now_s: float) -> float | None:
    """The wait in seconds that a `Retry-After` header asks for; None if it is absent or unreadable."""
    value = (value or "").strip()
    if _SECONDS.fullmatch(value):
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now_s)


def _failed(
    failure: Failure, tool: Tool, number: int, limit_s: float, *, was_sent: bool, is_rest: bool
) -> _Tried:
    if failure.code == "timeout":
        happened = f"timed out: no complete answer within {limit_s:.6g} s"
    else:
        happened = _HAPPENED[failure.code]
    unsent = _SENT_BEFORE if was_sent else _NOT_SENT
    consequence = _MAY_HAVE_RUN if failure.was_written else unsent
    outcome = DeliveryOutcome(
        error_result(f"{the_tool(tool)} {happened}. {consequence}"),
        number,
        outcome_unknown=failure.was_written and tool.retry != "safe",
        code=failure.code,
    )
    retry: Literal["unsent", "sent"] | None = "sent" if failure.was_written else "unsent"
    is_cut = failure.code == "timeout" and is_rest
    error = None if is_cut or failure.code in _SAYS_NOTHING else failure.code
    return _Tried(
        outcome, None if failure.code in _PERMANENT else retry, was_written=failure.was_written, error=error
    )


def _kept(came: Answer | Failure, tried: _Tried, tool: Tool) -> bytes:
    """What is stored of a reply: a result as it came, a failure without the secrets that it may repeat."""
    if isinstance(came, Failure):
        return b""
    if tried.outcome.code is None:
        return came.body
    return redacted(came.body.decode("latin-1"), tool).encode("latin-1")


def _excerpt(came: Answer | Failure, tool: Tool) -> str:
    if isinstance(came, Failure):
        return ""
    # More is cleaned than shown, so that no secret is cut in two and missed at the end.
    return cleaned(came.body[: 2 * EXCERPT_CHARS_MAX], came.headers, tool, chars_max=EXCERPT_CHARS_MAX)
