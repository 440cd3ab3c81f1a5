"""Which addresses may be called, by text and by look-up; C-009."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from app.webhooks.egress import AddressBlocked, Egress, Resolver, UrlRefused
from tests.webhooks.conftest import LOOPBACK, Log, Time, a_request, a_tool, delivering, receiving, reply

PUBLIC = Egress()

FORBIDDEN = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200",
    "100.127.255.255", "127.0.0.1", "127.255.255.254", "168.63.129.16", "169.254.169.254",
    "169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1",
    "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9",
    "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "::", "::1", "::2", "::127.0.0.1",
    "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "64:ff9b:1::8.8.8.8", "100::1",
    "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:10::1", "2001:20::1",
    "2001:db8::1", "2002:7f00:1::", "2002:0808:0808::", "3fff::1", "3fff:fff::1", "4000::1", "5f00::1",
    "fc00::1", "fd00:ec2::254", "fdff::1", "fe80::1", "fe80::1%eth0", "2606:4700::1111%1", "fec0::1",
    "ff00::1", "ff02::1", "not-an-address", "1.2.3", "08.8.8.8",
]  # fmt: skip
ALLOWED = [
    "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0",
    "126.255.255.255", "128.0.0.0", "169.253.0.1", "172.15.255.255", "172.32.0.0", "192.167.255.255",
    "198.17.255.255", "198.20.0.0", "223.255.255.255", "2606:4700::1111", "2a00:1450:4001::200e",
    "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8",
]  # fmt: skip


@pytest.mark.parametrize("address", FORBIDDEN)
def test_an_address_that_is_not_public_is_forbidden(address: str) -> None:
    assert not PUBLIC.allowed(address)


@pytest.mark.parametrize("address", ALLOWED)
def test_a_public_address_is_allowed(address: str) -> None:
    assert PUBLIC.allowed(address)


def test_a_listed_range_is_allowed_in_every_form_and_no_other_is() -> None:
    egress = Egress(allow=["10.1.0.0/16", "fd00:1::/32"])
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd00:1::9", "8.8.8.8"):
        assert egress.allowed(address)
    for address in ("10.2.0.1", "::ffff:10.2.0.1", "fd00:2::1", "fd00:1::9%1", "127.0.0.1"):
        assert not egress.allowed(address)


REFUSED_URLS = [
    ("http://tool.example/", "scheme"),
    ("ftp://tool.example/", "scheme"),
    ("file:///etc/passwd", "scheme"),
    ("//tool.example/", "scheme"),
    ("tool.example", "scheme"),
    ("", "scheme"),
    ("unix:///var/run/docker.sock", "scheme"),
    ("http://8.8.8.8/", "scheme"),
    ("https://user:pass@tool.example/", "credentials"),
    ("https://user@tool.example/", "credentials"),
    ("https://@tool.example/", "credentials"),
    ("https://tool.example@127.0.0.1/", "credentials"),
    ("https://tool.example/#part", "fragment"),
    ("https://tool.example/#", "fragment"),
    ("https://127.0.0.1#@tool.example/", "fragment"),
    ("https://tool.example:0/", "port"),
    ("https://tool.example:65536/", "port"),
    ("https://tool.example:99999999999/", "port"),
    ("https://tool.example:http/", "port"),
    ("https://tool.example:٣/", "port"),
    ("https://tool.example:-1/", "port"),
    ("https://tool.example/" + "a" * 2048, "too_long"),
    ("https://", "malformed"),
    ("https:///path", "malformed"),
    ("https://[::1", "malformed"),
    ("https://to ol.example/", "malformed"),
    ("https://tool.example/a b", "malformed"),
    ("https://tool.example\\@127.0.0.1/", "malformed"),
    ("https://tool.example/\r\nhost: evil", "malformed"),
    ("https://tool..example/", "malformed"),
    ("https://.tool.example/", "malformed"),
    ("https://tool.example../", "malformed"),
    ("https://-tool.example/", "malformed"),
    ("https://" + "a" * 64 + ".example/", "malformed"),
    ("https://" + "a." * 130 + "example/", "malformed"),
    ("https://%31%32%37.0.0.1/", "address"),
    ("https://127.0.0.1%00.tool.example/", "malformed"),
    ("https://127.0.0.1%2e/", "malformed"),
    ("https://127.0.0.1/", "address"),
    ("https://127.0.0.1./", "address"),
    ("https://127.1/", "address"),
    ("https://127.0.1/", "address"),
    ("https://2130706433/", "address"),
    ("https://0x7f000001/", "address"),
    ("https://0X7F.1/", "address"),
    ("https://0x7f.0x0.0x0.0x1/", "address"),
    ("https://0177.0.0.1/", "address"),
    ("https://017700000001/", "address"),
    ("https://0/", "address"),
    ("https://0.0.0.0/", "address"),
    ("https://0x/", "address"),
    ("https://127.0.0.1.1/", "address"),
    ("https://999.1.1.1/", "address"),
    ("https://tool.example.1/", "address"),
    ("https://①②⑦.⓪.⓪.①/", "address"),
    ("https://１２７.0.0.1/", "address"),
    ("https://127。0。0。1/", "address"),
    ("https://localhost/", "address"),
    ("https://localhost./", "address"),
    ("https://LOCALHOST/", "address"),
    ("https://a.localhost/", "address"),
    ("https://ⓛocalhost/", "address"),
    ("https://169.254.169.254/latest/meta-data/", "address"),
    ("https://10.0.0.1:8443/", "address"),
    ("https://[::1]/", "address"),
    ("https://[::]/", "address"),
    ("https://[::ffff:127.0.0.1]/", "address"),
    ("https://[::ffff:7f00:1]/", "address"),
    ("https://[0:0:0:0:0:ffff:169.254.169.254]/", "address"),
    ("https://[::127.0.0.1]/", "address"),
    ("https://[64:ff9b::127.0.0.1]/", "address"),
    ("https://[2002:7f00:1::]/", "address"),
    ("https://[fe80::1%25eth0]/", "address"),
    ("https://[fd00:ec2::254]/", "address"),
    ("https://[fec0::1]/", "address"),
    ("https://[3fff::1]/", "address"),
]


@pytest.mark.parametrize(("url", "code"), REFUSED_URLS)
def test_a_url_that_is_wrong_by_its_text_is_refused(url: str, code: str) -> None:
    with pytest.raises(UrlRefused) as refused:
        PUBLIC.check_url(url)
    assert code == refused.value.code
    assert refused.value.sentence.endswith(".")
    assert len(url) < 9 or url not in refused.value.sentence
    assert "127.0.0.1" not in refused.value.sentence


TEN = Egress(["10.0.0.0/8"])
HTTP = "http is taken only for hosts in BASCULE_WEBHOOK_ALLOW"
HTTPS_HERE = "https to this machine is taken only if BASCULE_WEBHOOK_ALLOW names it"
START = "; for a tool on this machine start the service with BASCULE_WEBHOOK_ALLOW="
NOT_PUBLIC = "This address is not public: add its range to BASCULE_WEBHOOK_ALLOW"
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
        (PUBLIC, "localhost:9000", "The URL has no scheme; write one, such as http://localhost:9000/."),
    ],
)
def test_a_refusal_names_the_limit_and_the_remedy(egress: Egress, url: str, sentence: str) -> None:
    with pytest.raises(UrlRefused) as refused:
        egress.check_url(url)
    assert sentence == refused.value.sentence


@pytest.mark.parametrize(
    "url",
    [
        "https://tool.example/",
        "https://tool.example",
        "HTTPS://Tool.Example.:8443/a?b=c%20d",
        "https://bücher.example/",
        "https://my_tool/",
        "https://8.8.8.8/",
        "https://[2606:4700::1111]/",
        "https://tool.example/@a:b",
        "https://a1.2b/",
    ],
)
def test_a_url_that_may_be_right_passes(url: str) -> None:
    PUBLIC.check_url(url)


def test_http_is_for_allowed_ranges_and_for_names_that_may_lie_in_them() -> None:
    for url in ("http://127.0.0.1:9/", "http://localhost/", "http://tool.example/", "https://127.0.0.1/"):
        LOOPBACK.check_url(url)
    for url in ("http://8.8.8.8/", "http://10.0.0.1/", "http://127.1/", "http://[::1]/"):
        with pytest.raises(UrlRefused):
            LOOPBACK.check_url(url)


class Names:
    """A recording `getaddrinfo`: each look-up gives the next of a name's answers, the last one repeats."""

    def __init__(self, *answers: str | list[str]) -> None:
        self.answers = [answer.split() if isinstance(answer, str) else answer for answer in answers]
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[Any]:
        answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
        self.asked.append(host)
        if not answer:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in text], socket.SOCK_STREAM, 6, "", (text, port)) for text in answer]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer", ["10.0.0.1", "8.8.8.8 10.0.0.1", "10.0.0.1 8.8.8.8", "2606:4700::1111 ::1"]
)
async def test_one_forbidden_address_condemns_a_name(answer: str) -> None:
    resolver = Resolver(PUBLIC, is_plain=False, lookup=Names(answer))
    with pytest.raises(AddressBlocked):
        await resolver.resolve("tool.example", 443)
    await resolver.close()


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
async def test_a_plain_http_name_needs_an_allowed_range_for_every_address() -> None:
    for answer, is_fine in (("127.0.0.1 127.0.0.2", True), ("127.0.0.1 8.8.8.8", False), ("8.8.8.8", False)):
        resolver = Resolver(LOOPBACK, is_plain=True, lookup=Names(answer))
        if is_fine:
            assert len(await resolver.resolve("tool.example", 80)) == 2
        else:
            with pytest.raises(AddressBlocked):
                await resolver.resolve("tool.example", 80)
        await resolver.close()


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


_dialled: list[Any] | None = None


def _note_dial(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.connect" and _dialled is not None:
        _dialled.append(args[1])


sys.addaudithook(_note_dial)


@pytest.fixture
def dialled() -> Iterator[list[Any]]:
    """Every address that any socket of this process is connected to meanwhile."""
    global _dialled  # noqa: PLW0603 - an audit hook cannot be removed, only told to stop listening
    _dialled = []
    yield _dialled
    _dialled = None


@pytest.mark.anyio
@pytest.mark.parametrize("url", sorted({url for url, _ in REFUSED_URLS}))
async def test_a_refused_url_is_neither_looked_up_nor_dialled(url: str, log: Log, dialled: list[Any]) -> None:
    names = Names("8.8.8.8")
    async with delivering(PUBLIC, lookup=names) as deliverer:
        outcome = await deliverer.deliver(a_request(a_tool(url, retry="safe")), log)
    assert (names.asked, dialled) == ([], [])
    assert outcome.code in ("blocked_url", "blocked_address")
    assert b"may not" in outcome.result.content
    assert b"registration" not in outcome.result.content
    assert (outcome.result.is_error, outcome.outcome_unknown, len(log.reports)) == (True, False, 1)


@pytest.mark.anyio
@pytest.mark.parametrize("address", [each for each in FORBIDDEN if "%" not in each and each[0] != "n"])
async def test_a_name_with_a_forbidden_address_is_not_dialled(
    address: str, log: Log, dialled: list[Any]
) -> None:
    names = Names([address])
    async with delivering(PUBLIC, lookup=names) as deliverer:
        tool = a_tool("https://tool.example/", retry="safe")
        outcome = await deliverer.deliver(a_request(tool), log)
    assert (names.asked, dialled, outcome.code) == (["tool.example"], [], "blocked_address")
    assert b"may not be called" in outcome.result.content
    assert address.encode() not in outcome.result.content


@pytest.mark.anyio
async def test_plain_http_does_not_leave_the_allowed_ranges(log: Log, dialled: list[Any]) -> None:
    async with delivering(LOOPBACK, lookup=Names("8.8.8.8")) as deliverer:
        outcome = await deliverer.deliver(a_request(a_tool("http://tool.example/")), log)
    assert (dialled, outcome.code) == ([], "blocked_address")


@pytest.mark.anyio
async def test_a_name_is_looked_up_and_judged_at_each_attempt(log: Log, dialled: list[Any]) -> None:
    """A name that turns to a forbidden address between two attempts is not followed there."""
    time_ = Time()
    names = Names("127.0.0.1", "127.0.0.1 10.0.0.1")
    step = reply(503, b"", "connection: close")
    async with (
        receiving(step) as receiver,
        delivering(LOOPBACK, lookup=names, clock=time_.clock, sleep=time_.sleep) as deliverer,
    ):
        tool = a_tool(f"http://tool.example:{receiver.port}/", retry="safe")
        outcome = await deliverer.deliver(a_request(tool), log)
        assert dialled == [("127.0.0.1", receiver.port)]
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
