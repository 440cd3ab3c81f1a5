"""How connections to upstream are made: limits, timeouts, and what aiohttp must not do by itself."""

from __future__ import annotations

import math
import ssl
from dataclasses import dataclass
from typing import Final

import aiohttp

from app.upstream.failures import CutBeforeAnswerError

CONNECT_S: Final = 5.0
SEND_S: Final = 6.0
"""A SEND ends after this, from first to last byte: it has to fit in what is left of a lease."""
PAGE_S: Final = 30.0
RETRIEVE_S: Final = 10.0
STREAM_OPEN_S: Final = 30.0
"""How long a stream may take to answer with its headers."""
SILENCE_PINGED_S: Final = 90.0
"""A stream that has shown a ping is broken after this long without a byte."""
SILENCE_S: Final = 300.0
"""A stream that never showed a ping is broken after this long without a byte."""
KEEP_ALIVE_S: Final = 15.0
"""Idle connections are given up before servers usually do, so that few sends meet a dead one."""
DNS_CACHE_S: Final = 30


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long each kind of request may take, in seconds, connecting included."""

    connect_s: float = CONNECT_S
    send_s: float = SEND_S
    page_s: float = PAGE_S
    retrieve_s: float = RETRIEVE_S
    stream_open_s: float = STREAM_OPEN_S
    silence_pinged_s: float = SILENCE_PINGED_S
    silence_s: float = SILENCE_S


def connector(
    limit: int, *, for_streams: bool = False, tls: ssl.SSLContext | None = None
) -> aiohttp.TCPConnector:
    """A pool of at most `limit` connections; made in a running loop. `tls` None trusts the system's roots.

    One pool holds streams or requests, never both: open streams would take the places of sends. A pool
    `for_streams` uses each connection once, so that no stream opens on one that upstream is just closing.
    """
    return aiohttp.TCPConnector(
        limit=limit,
        ttl_dns_cache=DNS_CACHE_S,
        force_close=for_streams,
        keepalive_timeout=None if for_streams else KEEP_ALIVE_S,
        ssl=True if tls is None else tls,
    )


def open_session(
    limit: int, *, for_streams: bool = False, tls: ssl.SSLContext | None = None
) -> aiohttp.ClientSession:
    """A session fit for `UpstreamClient`, shared by any number of credentials; the caller closes it.

    It keeps no cookies, since they would pass from one tenant to another, and reads nothing from the
    environment. The arguments are those of `connector`.
    """
    return aiohttp.ClientSession(
        connector=connector(limit, for_streams=for_streams, tls=tls),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


def timeout(total_s: float | None, connect_s: float) -> aiohttp.ClientTimeout:
    """A timeout that ends when it says: by default aiohttp rounds all over 5 s up to a whole second."""
    return aiohttp.ClientTimeout(total=total_s, connect=connect_s, ceil_threshold=math.inf)


async def once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Middleware that keeps aiohttp from asking twice.

    It repeats a GET whose connection was lost before an answer, on new connections too; each attempt is
    ours to decide and to count.

    Raises:
        CutBeforeAnswerError: in place of the errors at which aiohttp would ask again.
    """
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise CutBeforeAnswerError(str(error) or type(error).__name__) from error
