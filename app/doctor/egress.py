"""Checks the way to webhooks: which of them the egress guard would refuse, and what would permit them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from app.doctor.findings import Finding
from app.settings import Settings
from app.store.inventory import Webhook
from app.webhooks.egress import AddressBlocked, Egress, Lookup, Resolver, UrlRefused

NAMED_MAX: Final = 10
"""So many webhooks with the same trouble are named."""
_HERE: Final = ("127.", "localhost", "[::1]")


def look_up(host: str, port: int) -> Sequence[Any]:
    """Ask the machine's name server, as deliveries do."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)


async def check_webhooks(
    settings: Settings, webhooks: Sequence[Webhook], lookup: Lookup = look_up
) -> Sequence[Finding]:
    """Judge each webhook's URL and addresses, as a delivery would."""
    egress = Egress(settings.webhook_allow)
    troubles: dict[Finding, list[str]] = {}
    by_host: dict[tuple[str, str], list[str]] = {}
    for webhook in webhooks:
        if (trouble := _judge_url(egress, webhook.url)) is not None:
            troubles.setdefault(trouble, []).append(_name(webhook))
        elif (parts := urlsplit(webhook.url)).hostname is not None:
            by_host.setdefault((parts.scheme, parts.hostname), []).append(_name(webhook))
    judged = await asyncio.gather(*(_judge_host(egress, *place, lookup) for place in by_host))
    for found, names in zip(judged, by_host.values(), strict=True):
        if found is not None:
            troubles.setdefault(found, []).extend(names)
    if not troubles:
        count = len(webhooks)
        said = f"{count} of {count} webhooks may be called." if webhooks else "No webhook is registered."
        return [Finding("webhooks", "ok", said)]
    return [
        Finding("webhooks", trouble.status, f"{_listed(names)}: {trouble.detail}", trouble.remedy)
        for trouble, names in troubles.items()
    ]


def check_callbacks(settings: Settings, webhooks: Sequence[Webhook]) -> Finding:
    """See whether tools elsewhere would be told an address that leads here."""
    elsewhere = [one for one in webhooks if one.takes_callbacks and not _is_here(one.url)]
    if settings.public_url is not None:
        return Finding("callbacks", "ok", f"Tools report later results to {settings.public_url}.")
    if not elsewhere:
        return Finding("callbacks", "ok", "No tool elsewhere may report results later.")
    detail = (
        f"{_listed([_name(one) for one in elsewhere])}: may report results later, to {settings.base_url}."
    )
    remedy = (
        "Set BASCULE_PUBLIC_URL to where those tools reach the service, or their callback_timeout_s to 0."
    )
    return Finding("callbacks", "warning", detail, remedy)


def _judge_url(egress: Egress, url: str) -> Finding | None:
    try:
        egress.check_url(url)
    except UrlRefused as refused:
        return Finding("webhooks", "failed", "the URL is refused.", refused.sentence)
    return None


async def _judge_host(egress: Egress, scheme: str, host: str, lookup: Lookup) -> Finding | None:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return None  # an address was judged with its URL
    seen: list[str] = []

    def noted(name: str, port: int) -> Sequence[Any]:
        infos = lookup(name, port)
        seen.extend(str(info[4][0]) for info in infos)
        return infos

    is_plain = scheme == "http"
    resolver = Resolver(egress, is_plain=is_plain, lookup=noted)
    try:
        await resolver.resolve(host)
    except AddressBlocked:
        permitted = egress.listed if is_plain else egress.allowed
        refused = sorted({one for one in seen if not permitted(one)})
        detail = f"{host} has the address {', '.join(refused)}, which may not be called."
        return Finding("webhooks", "failed", detail, _permission(egress, refused, is_plain=is_plain))
    except OSError as error:
        detail = f"{host} cannot be looked up from here ({error.strerror or error})."
        return Finding("webhooks", "warning", detail, "Correct its URL, or the name server.")
    finally:
        await resolver.close()
    return None


def _permission(egress: Egress, addresses: Sequence[str], *, is_plain: bool) -> str:
    ranges = [str(one) for one in egress.allow]
    for address in addresses:
        one = ipaddress.ip_address(address)
        ranges.append(
            "127.0.0.0/8" if one.version == 4 and one.is_loopback else str(ipaddress.ip_network(one))
        )
    setting = f"BASCULE_WEBHOOK_ALLOW={','.join(dict.fromkeys(ranges))}"
    also = ", or write https:// if it is public" if is_plain else ""
    return f"If that is meant, start every replica with {setting}{also}."


def _origin(url: str) -> str:
    """What is judged of a URL: all but its path."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    return f"{parts.scheme}://{parts.netloc}"


def _is_here(url: str) -> bool:
    return _origin(url).partition("://")[2].startswith(_HERE)


def _name(webhook: Webhook) -> str:
    of = "" if webhook.tenant == "default" else f" of {webhook.tenant}"
    return f"{webhook.kind} {webhook.name}{of}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more
