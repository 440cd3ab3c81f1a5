"""Checks the way upstream: whether the API answers there, and whether it takes each credential."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

import aiohttp

from app.doctor.findings import Finding
from app.upstream.exchange import Exchange
from app.upstream.failures import Failures, UpstreamError
from app.upstream.headers import Credential, request_headers
from app.upstream.transport import Timeouts, open_session

ASK_LIMIT_S: Final = 8.0
REPLY_BYTES_MAX: Final = 1024 * 1024
_PATH: Final = "/v1/sessions"
_QUERY: Final = (("limit", "1"),)


@dataclass(frozen=True, slots=True)
class Way:
    """A credential and where it goes. Without one, only the way is tried."""

    name: str
    url: str
    credential: Credential | None


@dataclass(frozen=True, slots=True)
class Asked:
    """What asking came to; `clock_offset_s` is how far this machine's clock is ahead of upstream's."""

    finding: Finding
    clock_offset_s: float | None = None


async def ask(ways: Sequence[Way], clock: Callable[[], float]) -> Sequence[Asked]:
    """List one session by each way, all at once: nothing is changed and little is spent."""
    async with open_session(len(ways)) as http:
        return await asyncio.gather(*(_ask(way, http, clock) for way in ways))


async def _ask(way: Way, http: aiohttp.ClientSession, clock: Callable[[], float]) -> Asked:
    credential = way.credential or Credential("api_key", "none")
    headers = request_headers(credential, {})
    if way.credential is None:
        del headers["x-api-key"]
    failures = Failures((credential.secret,), clock)
    timeouts = Timeouts(connect_s=ASK_LIMIT_S)
    exchange = Exchange(way.url, headers, streams=http, requests=http, timeouts=timeouts, failures=failures)
    before = clock()
    try:
        answer = await exchange.request(
            "GET", _PATH, query=_QUERY, total_s=ASK_LIMIT_S, bytes_max=REPLY_BYTES_MAX
        )
    except UpstreamError as error:
        return Asked(_unreached(way, error.failure.message or "no answer"))
    offset_s = _offset_s(answer.headers.get("date"), (before + clock()) / 2)
    if answer.is_ok:
        return Asked(Finding("upstream", "ok", f"{way.url} takes {way.name}."), offset_s)
    message = failures.of_answer(answer.status, answer.headers, answer.body).message or "nothing"
    said = f"{way.url} answers {answer.status} to {way.name}: {message.rstrip('.')}."
    match answer.status:
        case 401 if way.credential is None:
            return Asked(Finding("upstream", "ok", f"{way.url} answers; no credential was tried."), offset_s)
        case 401:
            remedy = "The key is wrong, revoked, or for another address: put a valid one in its place."
            return Asked(Finding("upstream", "failed", said, remedy), offset_s)
        case 403:
            remedy = "Give the key's workspace access to Managed Agents, or use a key that has it."
            return Asked(Finding("upstream", "failed", said, remedy), offset_s)
        case 404:
            remedy = "Correct BASCULE_UPSTREAM_URL: it is scheme and host, without /v1."
            return Asked(Finding("upstream", "failed", said, remedy), offset_s)
        case 429:
            remedy = "Lower BASCULE_UPSTREAM_REQUESTS_PER_MIN, or ask for a higher limit."
            return Asked(Finding("upstream", "warning", said, remedy), offset_s)
        case status if status >= 500:
            remedy = "Upstream has trouble of its own: try again later. The service waits it out."
            return Asked(Finding("upstream", "warning", said, remedy), offset_s)
        case _:
            remedy = "Correct BASCULE_UPSTREAM_URL, if this is not the Managed Agents API."
            return Asked(Finding("upstream", "failed", said, remedy), offset_s)


def _unreached(way: Way, message: str) -> Finding:
    remedy = "Let this machine reach it (name server, firewall; proxy variables are not read), or correct"
    remedy += " BASCULE_UPSTREAM_URL."
    if "SSL:" in message:
        remedy = "The certificate is not trusted here: install ca-certificates, or the authority of a proxy."
    return Finding("upstream", "failed", f"{way.url} cannot be reached: {message}.", remedy)


def _offset_s(date: str | None, now: float) -> float | None:
    try:
        moment = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError):
        return None
    return now - moment - 0.5  # a date is cut to the second
