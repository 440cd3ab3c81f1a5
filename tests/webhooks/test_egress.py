"""What the guard says, and when it looks; which addresses it lets through is in `egress_cases.json`."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from app.webhooks.egress import AddressBlocked, Egress, Resolver, UrlRefused
from tests.webhooks.cases import Names
from tests.webhooks.conftest import LOOPBACK, Log, Time, a_request, a_tool, delivering, receiving, reply
from tests.webhooks.dialling import dialling

PUBLIC = Egress()


def test_a_listed_range_is_allowed_in_every_form_and_no_other_is() -> None:
    egress = Egress(allow=["10.1.0.0/16", "fd00:1::/32"])
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd00:1::9", "8.8.8.8"):
        assert egress.allowed(address)
    for address in ("10.2.0.1", "::ffff:10.2.0.1", "fd00:2::1", "fd00:1::9%1", "127.0.0.1"):
        assert not egress.allowed(address)


TEN = Egress(["10.0.0.0/8"])
HTTP = "http is taken only for hosts in BASCULE_WEBHOOK_ALLOW"
HTTPS_HERE = "https to this machine is taken only if BASCULE_WEBHOOK_ALLOW names it"
START = "; for a tool on this machine start the service with BASCULE_WEBHOOK_ALLOW="
NOT_PUBLIC = "This address is not public: add its range to BASCULE_WEBHOOK_ALLOW"
LINK_LOCAL = Egress(["169.254.0.0/16"])
METADATA = "This address hands out a cloud's credentials: it is called only if BASCULE_WEBHOOK_ALLOW"
ALONE = "names it alone, as a range of one address."
NAME = "write https://, or add the range of this host and restart the service."


@pytest.mark.parametrize(
    ("egress", "url", "sentence"),
    [
        (PUBLIC, "http://localhost:9000", f"{HTTP}{START}127.0.0.0/8."),
        (PUBLIC, "http://127.0.0.1:9000/", f"{HTTP}{START}127.0.0.0/8."),
        (PUBLIC, "https://localhost/", f"{HTTPS_HERE}{START}127.0.0.0/8."),
        (TEN, "http://localhost/", f"{HTTP}{START}10.0.0.0/8,127.0.0.0/8."),
        (PUBLIC, "https://10.0.0.1/", f"{NOT_PUBLIC} (now: none) and restart the service."),
        (PUBLIC, "http://10.0.0.1/", f"{NOT_PUBLIC} (now: none) and restart the service."),
        (TEN, "http://[::1]:9/", f"{NOT_PUBLIC} (now: 10.0.0.0/8) and restart the service."),
        (PUBLIC, "http://tool.example/", f"{HTTP} (now: none); {NAME}"),
        (TEN, "http://8.8.8.8/", f"{HTTP} (now: 10.0.0.0/8); write https:// for a public address."),
        (LINK_LOCAL, "https://169.254.169.254/", f"{METADATA} (now: 169.254.0.0/16) {ALONE}"),
        (PUBLIC, "localhost:9000", "The URL has no scheme; write one, such as http://localhost:9000/."),
    ],
)
def test_a_refusal_names_the_limit_and_the_remedy(egress: Egress, url: str, sentence: str) -> None:
    with pytest.raises(UrlRefused) as refused:
        egress.check_url(url)
    assert sentence == refused.value.sentence


@pytest.mark.anyio
async def test_only_judged_addresses_are_handed_on() -> None:
    names = Names("8.8.8.8 2606:4700::1111 8.8.8.8")
    resolver = Resolver(PUBLIC, is_plain=False, lookup=names)
    results = await resolver.resolve("tool.example", 443)
    await resolver.close()
    assert [each["host"] for each in results] == ["8.8.8.8", "2606:4700::1111"]
    assert {each["hostname"] for each in results} == {"tool.example"}
    assert names.asked == ["tool.example"]


@pytest.mark.anyio
async def test_of_this_machines_addresses_an_allowed_one_is_enough() -> None:
    """`localhost` is often both 127.0.0.1 and ::1, and an operator who allows one means the machine."""
    resolver = Resolver(LOOPBACK, is_plain=True, lookup=Names("::1 127.0.0.1"))
    assert [each["host"] for each in await resolver.resolve("localhost", 80)] == ["127.0.0.1"]
    with pytest.raises(AddressBlocked):
        await resolver.resolve("tool.example", 80)
    await resolver.close()


@pytest.mark.anyio
async def test_a_look_up_that_hangs_ends_in_time_and_delays_no_other() -> None:
    let_go = threading.Event()

    def lookup(host: str, port: int) -> list[Any]:
        if host == "slow.example":
            let_go.wait(10)
        return Names("8.8.8.8")(host, port)

    resolver = Resolver(PUBLIC, is_plain=False, lookup=lookup, timeout_s=0.05)
    with pytest.raises(OSError, match="too long"):
        await resolver.resolve("slow.example", 443)
    assert await resolver.resolve("tool.example", 443)
    let_go.set()
    await resolver.close()


@pytest.mark.anyio
async def test_a_name_is_looked_up_and_judged_at_each_attempt(log: Log) -> None:
    """A name that turns to a forbidden address between two attempts is not followed there."""
    time_ = Time()
    names = Names("127.0.0.1", "127.0.0.1 10.0.0.1")
    step = reply(503, b"", "connection: close")
    with dialling(is_refused=False) as dialled:
        async with (
            receiving(step) as receiver,
            delivering(LOOPBACK, lookup=names, clock=time_.clock, sleep=time_.sleep) as deliverer,
        ):
            tool = a_tool(f"http://tool.example:{receiver.port}/", retry="safe")
            outcome = await deliverer.deliver(a_request(tool), log)
    assert dialled == [f"127.0.0.1 {receiver.port}"]
    assert log.codes == ["http_status", "blocked_address"]
    assert (outcome.code, names.asked) == ("blocked_address", ["tool.example"] * 2)


@pytest.mark.anyio
async def test_an_unknown_name_is_tried_again(log: Log) -> None:
    """R-156: nothing was sent, so even the careful policy repeats it."""
    time_ = Time()
    names = Names([], [], "127.0.0.1")
    async with (
        receiving(reply(body=b'"done"')) as receiver,
        delivering(LOOPBACK, lookup=names, clock=time_.clock, sleep=time_.sleep) as deliverer,
    ):
        tool = a_tool(f"http://tool.example:{receiver.port}/", timeout_s=60.0)
        outcome = await deliverer.deliver(a_request(tool), log)
    assert log.codes == ["dns_failed", "dns_failed", None]
    assert b"done" in outcome.result.content
