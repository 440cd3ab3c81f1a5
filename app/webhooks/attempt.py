"""One HTTP request to a webhook: how far it got, and what came back.

`Door` owns the connections. Nothing here retries, follows, decompresses or remembers cookies. What a server
may send beside a body is bounded here, its body by whoever asks.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, Literal

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from app.webhooks.egress import AddressBlocked, Egress, Lookup, Resolver, UrlRefused

FailureCode = Literal[
    "timeout",
    "blocked_url",
    "blocked_address",
    "dns_failed",
    "connect_failed",
    "tls_expired",
    "tls_untrusted",
    "tls_wrong_host",
    "tls_too_old",
    "tls_failed",
    "disconnected",
    "headers_too_large",
    "framing_too_large",
    "bad_http",
]

KEEPALIVE_S: Final = 4.0
"""How long an idle connection is kept, for tools to which a lost one does no harm."""
HEADER_LINE_BYTES_MAX: Final = 8190
HEADERS_MAX: Final = 100
FRAMING_BYTES_MAX: Final = 1_048_576
"""What one reply may send that is no body: headers, interim answers (1xx), blank lines, chunk sizes."""
FRAMING_PER_BODY_BYTE_MAX: Final = 8
"""And as much again for each byte of its body: a server may send its chunks byte by byte."""
READ_BUFFER_BYTES: Final = 65_536
STATUS_REPLY_BYTES_MAX: Final = 4096
"""How much of a reply that is no success is read."""

_NOT_YET_OR_NO_LONGER_VALID: Final = frozenset({9, 10})
_WRONG_HOST: Final = frozenset({62, 64})
_TOO_OLD: Final = frozenset({"UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"})
_TOO_MANY_HEADERS: Final = "Too many headers received"
"""How aiohttp words it; it has no class for it."""
_NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply. The body is whole or cut past the limit; where the status says it all it may lack its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """No reply. `was_written` is False only if it is certain that nothing of the request was sent."""

    code: FailureCode
    was_written: bool


class _FramingTooLarge(aiohttp.ClientPayloadError):
    """A reply sends on and on without coming to its body, or to the end of it."""


class _Wire(ResponseHandler):
    """One connection. It bounds what is no body, and is closed by what arrives when nothing was asked.

    A second answer to one request, or the farewell of a server that gives up waiting, would otherwise be
    read as the answer to the next request.
    """

    _received = 0
    _is_answered = False
    _body: StreamReader = EMPTY_PAYLOAD

    def set_response_params(self, **params: Any) -> None:
        """Expect an answer: aiohttp calls this before each request."""
        self._received, self._is_answered, self._body = 0, False, EMPTY_PAYLOAD
        super().set_response_params(**params)

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Take note of a head that was read; those before the last (1xx) answer nothing."""
        message, self._body = data
        self._is_answered = message.code >= 200 or message.code == 101
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        """Read what arrived, within the limits."""
        if data and self._is_answered and self._body.is_eof():
            self.abort()
            return
        self._received += len(data)
        super().data_received(data)
        body_bytes = self._body.total_bytes
        framing_bytes = self._received - body_bytes
        if framing_bytes > FRAMING_BYTES_MAX + FRAMING_PER_BODY_BYTE_MAX * body_bytes:
            error = _FramingTooLarge()
            self.set_exception(error)
            self._body.set_exception(error)
            if self.transport is not None:
                self.transport.abort()


def _wire(loop: asyncio.AbstractEventLoop) -> ResponseHandler:
    return _Wire(loop)


@dataclass(slots=True)
class _Progress:
    was_written: bool = False
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


class Door:
    """The way out to webhooks: judged addresses, verified TLS, no proxies, no redirects, no cookies.

    Connections are reused only for requests that say so. A server may close an idle connection in the
    moment in which it is used again, and then nobody knows whether the request was read.
    `tls` replaces the default trust store; `lookup` replaces `socket.getaddrinfo`.
    """

    def __init__(
        self, egress: Egress, *, tls: ssl.SSLContext | None = None, lookup: Lookup | None = None
    ) -> None:
        self._egress = egress
        self._tls = tls or ssl.create_default_context()
        self._resolvers = {
            is_plain: Resolver(egress, is_plain=is_plain, lookup=lookup) for is_plain in (False, True)
        }
        self._sessions: dict[tuple[bool, bool], aiohttp.ClientSession] = {}

    async def post(
        self,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        timeout_s: float,
        reply_bytes_max: int,
        reuse: bool,
    ) -> Answer | Failure:
        """Send one request and read its reply, all within `timeout_s` from the look-up to the last byte.

        Up to `reply_bytes_max` + 1 bytes are read of a body that may hold a result, otherwise 4,096. A
        status that says it all counts as the reply even if its body does not arrive.
        """
        progress = _Progress()
        failure = await self._exchange(
            progress, url, headers, body, timeout_s=timeout_s, reply_bytes_max=reply_bytes_max, reuse=reuse
        )
        status = progress.status
        if status is not None and (failure is None or not _has_result(status)):
            return Answer(status, progress.headers, bytes(progress.body))
        assert failure is not None
        return Failure(failure, progress.was_written)

    async def close(self) -> None:
        """Close every connection."""
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()
        for resolver in self._resolvers.values():
            await resolver.close()

    async def _exchange(
        self,
        progress: _Progress,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        timeout_s: float,
        reply_bytes_max: int,
        reuse: bool,
    ) -> FailureCode | None:
        if timeout_s <= 0:
            return "timeout"
        try:
            self._egress.check_url(url)
            async with asyncio.timeout(timeout_s):
                await self._request(
                    progress, url, headers, body, reply_bytes_max=reply_bytes_max, reuse=reuse
                )
        except UrlRefused as refusal:
            return "blocked_address" if refusal.code == "address" else "blocked_url"
        except (AddressBlocked, TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            return _code(error, was_written=progress.was_written, is_tls=url[:6].lower() == "https:")
        return None

    async def _request(
        self,
        progress: _Progress,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        reply_bytes_max: int,
        reuse: bool,
    ) -> None:
        session = self._session(is_plain=url[:5].lower() == "http:", reuse=reuse)
        async with session.post(
            url, data=body, headers=headers, allow_redirects=False, trace_request_ctx=progress
        ) as response:
            progress.headers = response.headers
            progress.status = response.status
            room = reply_bytes_max + 1 if _has_result(response.status) else STATUS_REPLY_BYTES_MAX
            async for chunk in response.content.iter_any():
                progress.body += chunk[: room - len(progress.body)]
                if len(progress.body) >= room:
                    # What is left of the reply would be read into memory if the connection were kept.
                    response.close()
                    return

    def _session(self, *, is_plain: bool, reuse: bool) -> aiohttp.ClientSession:
        session = self._sessions.get((is_plain, reuse))
        if session is None:
            session = self._sessions[is_plain, reuse] = self._opened(is_plain=is_plain, reuse=reuse)
        return session

    def _opened(self, *, is_plain: bool, reuse: bool) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=self._resolvers[is_plain],
            use_dns_cache=False,
            ssl=self._tls,
            limit=0,  # a wait for a connection would come out of the call's own time
            force_close=not reuse,
            keepalive_timeout=KEEPALIVE_S if reuse else None,
            socket_factory=functools.partial(_judged_socket, self._egress, is_plain),
        )
        # aiohttp has no name for this in its interface; tests show that the class is in use.
        connector._factory = functools.partial(_wire, asyncio.get_running_loop())
        trace = aiohttp.TraceConfig()
        # aiohttp announces the headers before it writes them: what fails earlier was certainly not sent.
        trace.on_request_headers_sent.append(_mark_written)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=_NO_TIMEOUT,
            trust_env=False,
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=HEADER_LINE_BYTES_MAX,
            max_field_size=HEADER_LINE_BYTES_MAX,
            max_headers=HEADERS_MAX,
            trace_configs=[trace],
        )


def _judged_socket(egress: Egress, is_plain: bool, info: aiohttp.AddrInfoType) -> socket.socket:
    """The last look at an address, where it is connected to, whichever way it came."""
    family, kind, protocol, _, address = info
    egress.judge((str(address[0]),), is_plain=is_plain)
    return socket.socket(family, kind, protocol)


async def _mark_written(_session: aiohttp.ClientSession, trace: SimpleNamespace, _params: Any) -> None:
    progress: _Progress = trace.trace_request_ctx
    progress.was_written = True


def _has_result(status: int) -> bool:
    return 200 <= status < 300 and status not in (202, 204)


def _code(error: Exception, *, was_written: bool, is_tls: bool) -> FailureCode:
    match error:
        case AddressBlocked():
            return "blocked_address"
        case aiohttp.ClientConnectorCertificateError():
            return _certificate_code(error.certificate_error)
        case aiohttp.ClientConnectorSSLError():
            return "tls_too_old" if getattr(error.os_error, "reason", None) in _TOO_OLD else "tls_failed"
        case aiohttp.ClientConnectorDNSError():
            return "dns_failed"
        case aiohttp.ClientConnectorError():
            # A peer that takes the connection and drops it does so within the handshake.
            is_dropped = isinstance(error.os_error, ConnectionResetError | ConnectionAbortedError)
            return "tls_failed" if is_tls and is_dropped else "connect_failed"
        case TimeoutError():
            return "timeout"
        case aiohttp.InvalidURL():
            return "blocked_url"
        case _FramingTooLarge():
            return "framing_too_large"
        case aiohttp.ClientResponseError() | aiohttp.ClientPayloadError() if _is_about_headers(error):
            return "headers_too_large"
        case aiohttp.ClientResponseError() | aiohttp.ClientPayloadError() | ValueError():
            return "bad_http" if was_written else "blocked_url"
        case _:
            return "disconnected" if was_written else "connect_failed"


def _is_about_headers(error: BaseException) -> bool:
    """Whether the reason behind the error is the length or the number of lines in a head or a trailer."""
    cause = error.__cause__
    while cause is not None:
        if isinstance(cause, LineTooLong):
            return True
        if isinstance(cause, BadHttpMessage) and cause.message == _TOO_MANY_HEADERS:
            return True
        cause = cause.__cause__
    return False


def _certificate_code(error: Exception) -> FailureCode:
    reason = getattr(error, "verify_code", None)
    if reason in _NOT_YET_OR_NO_LONGER_VALID:
        return "tls_expired"
    return "tls_wrong_host" if reason in _WRONG_HOST else "tls_untrusted"
