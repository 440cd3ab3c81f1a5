"""Which hosts the doctor says may not be called, and what it says would permit them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_network
from typing import Any

import pytest

from app.doctor.egress import check_webhooks
from app.doctor.findings import Finding
from app.settings import Settings
from app.store.inventory import Webhook

pytestmark = pytest.mark.anyio

ADDRESSES = {
    "public.example": ["93.184.216.34"],
    "inside.example": ["10.1.2.3", "93.184.216.34", "fd00::7"],
    "localhost": ["127.0.0.1"],
}


def lookup(host: str, port: int) -> Sequence[Any]:
    if host not in ADDRESSES:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [
        (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port))
        for one in ADDRESSES[host]
    ]


async def judged(*urls: str, allow: Sequence[str] = ()) -> Sequence[Finding]:
    settings = Settings(webhook_allow=tuple(ip_network(one) for one in allow))
    webhooks = [
        Webhook("tool", "default", f"tool_{n}", url, takes_callbacks=True) for n, url in enumerate(urls)
    ]
    return await check_webhooks(settings, webhooks, lookup)


async def test_a_public_host_may_be_called() -> None:
    (one,) = await judged("https://public.example/a", "https://public.example/b")
    assert (one.status, one.detail) == ("ok", "2 of 2 webhooks may be called.")


async def test_a_host_inside_is_named_with_the_ranges_that_would_permit_it() -> None:
    (one,) = await judged("https://inside.example/a", "https://inside.example/b", allow=["172.16.0.0/12"])
    assert one.status == "failed"
    assert one.detail == (
        "tool tool_0, tool tool_1: inside.example has the address 10.1.2.3, fd00::7, which may not be called."
    )
    permission = "BASCULE_WEBHOOK_ALLOW=172.16.0.0/12,10.1.2.3/32,fd00::7/128"
    assert permission in str(one.remedy)
    (one,) = await judged("https://inside.example/a", allow=permission.partition("=")[2].split(","))
    assert one.status == "ok", "what the remedy says is a remedy"


async def test_a_name_that_nobody_knows_is_a_warning() -> None:
    (one,) = await judged("https://gone.example/")
    assert one.status == "warning"
    assert "gone.example cannot be looked up from here (Name or service not known)." in one.detail


async def test_many_tools_with_one_trouble_are_one_finding() -> None:
    (one,) = await judged(*["http://localhost/"] * 12)
    assert one.detail.endswith("tool tool_9 and 2 more: the URL is refused.")
