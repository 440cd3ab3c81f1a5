"""How one request becomes one answer or one failure, and how a stream is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import quote, urlencode

import aiohttp
from yarl import URL

from app.core.protocol import Failure
from app.upstream.failures import FAULTS, Failures, UpstreamError
from app.upstream.transport import Timeouts, once, timeout

ERROR_BYTES_MAX: Final = 64 * 1024
"""So much of an error body is read."""
ERROR_BODY_S: Final = 5.0
"""How long the body of a refused stream may take; its status is known by then."""

Query = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A response. `complaint` says why the body of a 2xx is not whole or not readable."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    complaint: Failure | None = None
    is_too_long: bool = False

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300


class Exchange:
    """Makes requests to one upstream with one set of headers; each exactly once.

    Raises:
        ValueError: `base_url` is unusable, or a session takes its settings from the environment.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        streams: aiohttp.ClientSession,
        requests: aiohttp.ClientSession,
        timeouts: Timeouts,
        failures: Failures,
    ) -> None:
        if streams.trust_env or requests.trust_env:
            raise ValueError("upstream sessions must not trust the environment")
        self._base_url = _checked_base_url(base_url)
        self._streams = streams
        self._requests = requests
        self._timeouts = timeouts
        self._failures = failures
        self._get_headers = {**headers, "accept": "application/json"}
        self._post_headers = {**self._get_headers, "content-type": "application/json"}
        self._stream_headers = {**headers, "accept": "text/event-stream", "cache-control": "no-store"}

    async def request(
        self,
        method: Literal["GET", "POST"],
        path: str,
        *,
        total_s: float,
        bytes_max: int,
        query: Query = (),
        data: bytes | None = None,
    ) -> Answer:
        """Make one request and read at most `bytes_max` bytes of its answer.

        Raises:
            UpstreamError: there was no answer. Once its status is known, the answer is returned.
        """
        try:
            response = await self._requests.request(
                method,
                self._url(path, query),
                data=data,
                headers=self._get_headers if data is None else self._post_headers,
                timeout=timeout(total_s, self._timeouts.connect_s),
                allow_redirects=False,
                auto_decompress=False,
                middlewares=(once,),
            )
        except FAULTS as fault:
            failure = self._failures.of_fault(fault, timeout_s=total_s)
        else:
            try:
                return await self._answer(response, bytes_max, total_s)
            finally:
                response.release()  # closes the connection unless all was written and read
        raise UpstreamError(failure)  # out of reach of the fault, which may show the request's headers

    async def open(self, path: str, query: Query) -> aiohttp.ClientResponse:
        """Open an event stream; the caller closes it.

        Raises:
            UpstreamError: it could not be opened, or the answer is no event stream.
        """
        open_s = self._timeouts.stream_open_s
        try:
            async with asyncio.timeout(open_s):
                response = await self._streams.get(
                    self._url(path, query),
                    headers=self._stream_headers,
                    timeout=timeout(None, self._timeouts.connect_s),
                    allow_redirects=False,
                    auto_decompress=False,
                    middlewares=(once,),
                )
        except FAULTS as fault:
            failure = self._failures.of_fault(fault, timeout_s=open_s)
        else:
            refusal = await self._refusal(response)
            if refusal is None:
                return response
            failure = refusal
        raise UpstreamError(failure)

    async def _answer(self, response: aiohttp.ClientResponse, bytes_max: int, total_s: float) -> Answer:
        status, headers = response.status, response.headers
        if not 200 <= status < 300:
            body, _ = await self._read(response, ERROR_BYTES_MAX)
            return Answer(status, headers, body)
        body, fault = await self._read(response, bytes_max)
        is_too_long = len(body) > bytes_max
        complaint: Failure | None = None
        if fault is not None:
            complaint = self._failures.of_fault(fault, timeout_s=total_s)
        elif is_too_long:
            complaint = self._failures.of_reply(status, f"the answer is over {bytes_max} bytes")
        elif not _is_plain(headers):
            complaint = self._failures.of_reply(status, "the answer is compressed")
        return Answer(status, headers, body, complaint, is_too_long)

    async def _refusal(self, response: aiohttp.ClientResponse) -> Failure | None:
        """Why the response is no event stream, which is then closed; None if it is one."""
        status, headers = response.status, response.headers
        refusal: Failure | None = None
        try:
            if not 200 <= status < 300:
                body, _ = await self._read(response, ERROR_BYTES_MAX, within_s=ERROR_BODY_S)
                refusal = self._failures.of_answer(status, headers, body)
            elif response.content_type in ("text/html", "application/json"):
                what = f"the answer is {response.content_type} instead of an event stream"
                refusal = self._failures.of_reply(status, what)
            elif not _is_plain(headers):
                refusal = self._failures.of_reply(status, "the event stream is compressed")
        except BaseException:
            response.close()
            raise
        if refusal is not None:
            response.close()
        return refusal

    async def _read(
        self, response: aiohttp.ClientResponse, bytes_max: int, *, within_s: float | None = None
    ) -> tuple[bytes, BaseException | None]:
        """Read the body to its end, or just past `bytes_max`; with it the fault that ended the reading."""
        body = bytearray()
        try:
            async with asyncio.timeout(within_s):
                while len(body) <= bytes_max and (chunk := await response.content.readany()):
                    body += chunk
        except FAULTS as fault:
            return bytes(body), fault
        return bytes(body), None

    def _url(self, path: str, query: Query) -> URL:
        question = "?" + urlencode(query, quote_via=quote) if query else ""
        return URL(self._base_url + path + question, encoded=True)


def segment(id_: str) -> str:
    """An id as one segment of a path.

    Raises:
        ValueError: it would be another segment, or none.
    """
    if not id_.strip("."):
        raise ValueError("an id is neither empty nor only dots")
    return quote(id_, safe="")


def _is_plain(headers: Mapping[str, str]) -> bool:
    return headers.get("content-encoding", "identity").strip().lower() in ("", "identity")


def _checked_base_url(base_url: str) -> str:
    url = URL(base_url)
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("the upstream URL is http(s)://host, perhaps with a port and a path")
    if url.user is not None or url.password is not None or url.query_string or url.fragment:
        raise ValueError("the upstream URL has no credentials, query or fragment")
    url.host.encode("idna")  # raises here rather than at each request
    return str(url).rstrip("/")
