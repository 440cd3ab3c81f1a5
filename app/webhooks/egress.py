"""Which addresses a webhook may have.

A URL is judged twice: by its text when it is registered, and by the addresses of its host at every
connection. The addresses that were judged are the ones connected to, so a name that changes its answer
between two look-ups gains nothing. One forbidden address condemns the whole answer.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
UrlCode = Literal["too_long", "malformed", "scheme", "credentials", "address", "port", "fragment"]
Lookup = Callable[[str, int], Sequence[Any]]
"""What `socket.getaddrinfo` does for a host and a port; runs in a thread."""

URL_CHARS_MAX: Final = 2048
DNS_TIMEOUT_S: Final = 5.0
DNS_THREADS_MAX: Final = 8
DNS_WAITING_MAX: Final = 512
"""Look-ups under way or waiting for a thread; one more fails at once."""
ADDRESSES_MAX: Final = 8
"""All addresses of a name are judged; at most this many are tried."""

_V4_LOOPBACK: Final = IPv4Network("127.0.0.0/8")
_V4_FORBIDDEN: Final = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's host service, on a public address but private by purpose
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
# The standard library's own tables differ between Python versions, so they are not asked.
_V6_PUBLIC: Final = IPv6Network("2000::/3")
_V6_FORBIDDEN: Final = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments: Teredo, benchmarking, ORCHID
        "2001:db8::/32",
        "2002::/16",  # 6to4: carries an IPv4 address
        "3fff::/20",
    )
)
_CARRIERS: Final = (IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))
"""Mapped and NAT64: what is sent to such an address reaches the IPv4 address in its last 32 bits."""
_ISATAP: Final = frozenset({0x0000_5EFE, 0x0200_5EFE})
"""The third 32 bits of addresses that tunnel to an IPv4 address, under any prefix."""
_METADATA: Final = frozenset(
    ip_address(text)
    for text in (
        "100.100.100.200",
        "168.63.129.16",
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "192.0.0.192",
        "fd00:42::42",
        "fd00:ec2::23",
        "fd00:ec2::254",
        "fd20:ce::254",
    )
)
"""Where clouds hand out the credentials of a machine. A range that an operator allows does not include them
by accident: each needs a range of its own."""

_NUMERIC_LABEL: Final = re.compile(r"0x[0-9a-f]*|[0-9]+")
_LABEL: Final = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
_EXAMPLE: Final = "https://tools.example/hook"
_UNWRITABLE: Final = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")


class UrlRefused(Exception):
    """A URL is wrong by its text. `sentence` says why without repeating the URL, which may hold a secret."""

    def __init__(self, code: UrlCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


class AddressBlocked(Exception):
    """A host name has an address that may not be called."""


class Egress:
    """The addresses that may be called: every public one, and the ranges that the operator allows."""

    def __init__(self, allow: Sequence[Network | str] = ()) -> None:
        self.allow: Final = tuple(_range(range_) for range_ in allow)

    def allowed(self, address: Address | str) -> bool:
        """Whether the address is public or in an allowed range.

        IPv6 forms that carry an IPv4 address are judged by it (mapped, NAT64) or refused (6to4, Teredo,
        ISATAP, compatible); an address with a scope id is refused, and so is text that is no address.
        """
        reached = _reached(address)
        return reached is not None and (self._is_listed(reached) or _is_public(reached))

    def listed(self, address: Address | str) -> bool:
        """Whether the address lies in a range that the operator allows.

        The metadata services of clouds do so only if a range names the one address.
        """
        reached = _reached(address)
        return reached is not None and self._is_listed(reached)

    def check_url(self, url: str) -> None:
        """Judge a URL by its text. A host name passes; its addresses are judged at each call.

        Raises:
            UrlRefused: the scheme is not https (http only where an allowed range may answer), it has
                credentials, a fragment, a bad port or a forbidden address in any spelling, or is over
                2,048 characters.
        """
        scheme, host = _parts(url)
        literal = _literal(host)
        if literal is None:
            is_here, is_allowed = _is_localhost(host), True
            is_listed = self.listed("127.0.0.1") or self.listed("::1") if is_here else bool(self.allow)
        else:
            reached = _reached(literal)
            is_here = isinstance(reached, IPv4Address) and reached in _V4_LOOPBACK
            is_allowed, is_listed = self.allowed(literal), self.listed(literal)
        if is_here and not is_listed:
            raise UrlRefused("address", self._for_this_machine(scheme))
        if not is_allowed:
            is_metadata = literal is not None and _reached(literal) in _METADATA
            raise UrlRefused("address", self._for_metadata() if is_metadata else self._not_public())
        if scheme == "http" and not is_listed:
            raise UrlRefused("scheme", self._for_public_ones(is_name=literal is None))

    def judge(self, addresses: Sequence[str], *, is_plain: bool) -> None:
        """Judge all addresses of a host name; `is_plain` for http, which only allowed ranges may answer.

        Raises:
            AddressBlocked: at least one of them may not be called.
        """
        permitted = self.listed if is_plain else self.allowed
        if not addresses or not all(permitted(address) for address in addresses):
            raise AddressBlocked("the host name has an address that may not be called")

    def _for_this_machine(self, scheme: str) -> str:
        limit = f"{scheme} to this machine is taken only if BASCULE_WEBHOOK_ALLOW names it"
        if scheme == "http":
            limit = "http is taken only for hosts in BASCULE_WEBHOOK_ALLOW"
        ranges = ",".join(str(range_) for range_ in (*self.allow, _V4_LOOPBACK))
        return f"{limit}; for a tool on this machine start the service with BASCULE_WEBHOOK_ALLOW={ranges}."

    def _not_public(self) -> str:
        return (
            "This address is not public: add its range to BASCULE_WEBHOOK_ALLOW"
            f" (now: {self._ranges()}) and restart the service."
        )

    def _for_metadata(self) -> str:
        return (
            "This address hands out a cloud's credentials: it is called only if BASCULE_WEBHOOK_ALLOW"
            f" (now: {self._ranges()}) names it alone, as a range of one address."
        )

    def _for_public_ones(self, *, is_name: bool) -> str:
        remedy = "write https://, or add the range of this host and restart the service"
        return (
            f"http is taken only for hosts in BASCULE_WEBHOOK_ALLOW (now: {self._ranges()});"
            f" {remedy if is_name else 'write https:// for a public address'}."
        )

    def _ranges(self) -> str:
        return ",".join(map(str, self.allow)) or "none"

    def _is_listed(self, address: Address) -> bool:
        ranges = (range_ for range_ in self.allow if range_.version == address.version and address in range_)
        return any(address not in _METADATA or range_.num_addresses == 1 for range_ in ranges)


class Resolver(AbstractResolver):
    """Resolves a host once per connection and hands on only judged addresses.

    aiohttp asks it for names only: address literals in URLs are judged by `Egress.check_url`.
    Look-ups run in threads of their own, so that a slow name server delays nothing else; `lookup` is
    blocking. `is_plain` says that the connections carry http.
    """

    def __init__(
        self,
        egress: Egress,
        *,
        is_plain: bool,
        lookup: Lookup | None = None,
        timeout_s: float = DNS_TIMEOUT_S,
    ) -> None:
        self._egress = egress
        self._is_plain = is_plain
        self._lookup = lookup or _getaddrinfo
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(DNS_THREADS_MAX, thread_name_prefix="bascule-dns")
        self._waiting = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the judged addresses of a name.

        Raises:
            AddressBlocked: one of them may not be called.
            OSError: the name has none, or the look-up failed or took over `timeout_s`.
        """
        infos = [info for info in await self._infos(host, port) if family in (socket.AF_UNSPEC, info[0])]
        by_address = {str(info[4][0]): info for info in infos}
        if not by_address:
            raise OSError(errno.EADDRNOTAVAIL, "the host name has no address")
        if _is_localhost(host):
            # 127.0.0.1 and ::1 are one machine: where only one of them is allowed, that one is called.
            allowed = {address: info for address, info in by_address.items() if self._egress.listed(address)}
            by_address = allowed or by_address
        self._egress.judge(tuple(by_address), is_plain=self._is_plain)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=info[0],
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address, info in list(by_address.items())[:ADDRESSES_MAX]
        ]

    async def close(self) -> None:
        """Release the threads; a look-up that is under way ends on its own."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _infos(self, host: str, port: int) -> Sequence[Any]:
        if self._waiting >= DNS_WAITING_MAX:
            raise OSError(errno.EAGAIN, "too many look-ups are waiting")
        self._waiting += 1
        lookup = asyncio.get_running_loop().run_in_executor(self._threads, self._lookup, host, port)
        lookup.add_done_callback(self._looked_up)
        try:
            return await asyncio.wait_for(asyncio.shield(lookup), self._timeout_s)
        except TimeoutError as error:
            raise OSError(errno.ETIMEDOUT, "the look-up of the host name took too long") from error
        except UnicodeError as error:
            raise OSError(errno.EINVAL, "the host name cannot be looked up") from error

    def _looked_up(self, lookup: asyncio.Future[Sequence[Any]]) -> None:
        self._waiting -= 1
        if not lookup.cancelled():
            lookup.exception()  # a late failure has nobody left to read it


def _getaddrinfo(host: str, port: int) -> Sequence[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)


def _parts(url: str) -> tuple[str, str]:
    """The scheme and the host of a URL as the HTTP client will read them."""
    if len(url) > URL_CHARS_MAX:
        raise UrlRefused("too_long", f"The URL is over {URL_CHARS_MAX} characters; shorten it.")
    if _UNWRITABLE.search(url):
        raise UrlRefused(
            "malformed", "The URL has spaces, control characters or backslashes; write them as %20 and so on."
        )
    if "#" in url:
        raise UrlRefused("fragment", "A webhook's URL has no fragment (#…); leave it out.")
    try:
        split = urlsplit(url)
        netloc = split.netloc
    except ValueError as error:
        raise UrlRefused("malformed", f"This is not a URL; write one such as {_EXAMPLE}.") from error
    if split.scheme not in ("http", "https"):
        if "://" not in url:
            raise UrlRefused("scheme", "The URL has no scheme; write one, such as http://localhost:9000/.")
        raise UrlRefused(
            "scheme", "A webhook's URL begins with https://, or http:// for hosts in BASCULE_WEBHOOK_ALLOW."
        )
    if "@" in netloc:
        raise UrlRefused("credentials", "The URL holds credentials; put them into the tool's headers.")
    try:
        is_bad_port = split.port == 0
    except ValueError:
        is_bad_port = True
    if is_bad_port:
        raise UrlRefused("port", "The URL's port must be a number from 1 to 65535.")
    try:
        host = URL(url).raw_host
    except ValueError as error:
        raise UrlRefused("malformed", f"This is not a URL; write one such as {_EXAMPLE}.") from error
    if not host or ("[" in netloc and ":" not in host):
        raise UrlRefused(
            "malformed", f"The URL has no host that can be called; write one such as {_EXAMPLE}."
        )
    return split.scheme, host


def _literal(host: str) -> Address | None:
    """The address that the host spells, or None if it is a name.

    Raises:
        UrlRefused: it is an address in a spelling that clients read differently, or neither.
    """
    if ":" in host:
        address = _address(host)
        if not isinstance(address, IPv6Address) or address.scope_id:
            raise UrlRefused("address", "Write an IPv6 address by RFC 4291, without a zone (%…).")
        return address
    name = host.rstrip(".")
    # Resolvers read a last label that is a number as an IPv4 address, octal, hexadecimal or short.
    if _NUMERIC_LABEL.fullmatch(name.rpartition(".")[2]):
        address = _address(host)
        if address is None:
            raise UrlRefused(
                "address", "Write an IPv4 address as four decimal numbers with dots between them."
            )
        return address
    if not _NAME.fullmatch(name) or host.endswith(".."):
        raise UrlRefused(
            "malformed", f"The URL's host is neither a name nor an address; write one such as {_EXAMPLE}."
        )
    return None


def _address(text: str) -> Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _range(range_: Network | str) -> Network:
    """The range in the form in which addresses are judged: IPv4 also if it was written as carried by IPv6."""
    network = ip_network(range_) if isinstance(range_, str) else range_
    if isinstance(network, IPv6Network) and any(network.subnet_of(carrier) for carrier in _CARRIERS):
        return IPv4Network((int(network.network_address) & 0xFFFF_FFFF, network.prefixlen - 96))
    return network


def _reached(address: Address | str) -> Address | None:
    """The address that a connection would reach, or None for what is no address or has a scope id."""
    known = _address(address) if isinstance(address, str) else address
    if known is None or isinstance(known, IPv4Address):
        return known
    if known.scope_id:
        return None
    is_carrier = any(known in carrier for carrier in _CARRIERS)
    return IPv4Address(int(known) & 0xFFFF_FFFF) if is_carrier else known


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in range_ for range_ in _V4_FORBIDDEN)
    if (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP:
        return False
    return address in _V6_PUBLIC and not any(address in range_ for range_ in _V6_FORBIDDEN)


def _is_localhost(host: str) -> bool:
    name = host.rstrip(".")
    return name == "localhost" or name.endswith(".localhost")
