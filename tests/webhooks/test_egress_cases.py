"""Whatever the URL and whatever its name resolves to, no forbidden address is dialled; C-009.

The cases are data (`cases.py`); what is dialled is seen at the socket (`dialling.py`).
"""

from __future__ import annotations

import asyncio
from ipaddress import IPv6Address, ip_address, ip_network

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.webhooks.delivery import DeliveryOutcome
from app.webhooks.egress import AddressBlocked, Egress, Resolver, UrlRefused
from tests.webhooks.cases import CASES, Case, Names
from tests.webhooks.conftest import Log, Time, a_request, a_tool, delivering
from tests.webhooks.dialling import dialling

CASES_MIN = 200
FORBIDDEN = ["169.254.169.254", "10.0.0.1", "::1", "fd12::7"]
"""What a name turns to once it was judged; the first of them that a case does not allow."""


async def deliver(egress: Egress, url: str, names: Names, log: Log, *, retry: str) -> DeliveryOutcome:
    time_ = Time()
    fakes = {"lookup": names, "clock": time_.clock, "wall": time_.wall, "sleep": time_.sleep}
    async with delivering(egress, **fakes) as deliverer:
        return await deliverer.deliver(a_request(a_tool(url, retry=retry, timeout_s=2.0)), log)


def test_the_cases_are_many_and_of_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {
        "refused by their text": sum(case.refused is not None for case in CASES),
        "blocked after the look-up": sum(case.blocked is not None for case in CASES),
        "connected": sum(bool(case.connects) for case in CASES),
    }
    with capsys.disabled():
        print(f"\negress: {len(CASES)} cases:", ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    assert len(CASES) == len(set(CASES)) == sum(kinds.values()) >= CASES_MIN
    assert min(kinds.values()) > CASES_MIN / 4
    codes = {"too_long", "malformed", "scheme", "credentials", "address", "port", "fragment", None}
    assert codes == {case.refused for case in CASES}


@pytest.mark.anyio
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_case_is_judged_as_written_and_nothing_else_is_dialled(case: Case, log: Log) -> None:
    names = Names("8.8.8.8" if case.answer is None else case.answer)
    with dialling(is_refused=True) as dialled:
        outcome = await deliver(case.egress, case.url, names, log, retry="never")
    assert set(case.connects) == set(dialled)
    if case.refused is not None:
        assert outcome.code == ("blocked_address" if case.refused == "address" else "blocked_url")
        assert names.asked == []
    elif case.blocked is not None:
        assert (outcome.code, len(names.asked)) == (case.blocked, 1)
    else:
        assert outcome.code == "connect_failed"
    assert (outcome.result.is_error, outcome.outcome_unknown, log.reports[0].was_written) == (
        True,
        False,
        False,
    )
    assert b"has not run" in outcome.result.content
    assert not any(address.encode() in outcome.result.content for address in case.answer or ())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_text_alone_is_judged_at_registration(case: Case) -> None:
    try:
        case.egress.check_url(case.url)
    except UrlRefused as refused:
        assert refused.code == case.refused
        assert refused.sentence.endswith(".")
        assert len(case.url) < 9 or case.url not in refused.sentence
    else:
        assert case.refused is None


@pytest.mark.anyio
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_resolver_that_flips_gains_nothing(case: Case, log: Log) -> None:
    """The first answer is fine, every later one is forbidden; only what the first one named is dialled."""
    allow = [ip_network(range_) for range_ in case.allow]
    forbidden = next(a for a in FORBIDDEN if not any(ip_address(a) in range_ for range_ in allow))
    first = tuple(address.split()[0] for address in case.connects) or ("8.8.8.8",)
    names = Names(first, (forbidden,), ("8.8.8.8", forbidden))
    with dialling(is_refused=True) as dialled:
        outcome = await deliver(case.egress, case.url, names, log, retry="safe")
    assert {address.split()[0] for address in dialled} <= set(first)
    if len(names.asked) > 1:
        assert (log.codes, outcome.code) == (["connect_failed", "blocked_address"], "blocked_address")


@pytest.mark.anyio
async def test_an_address_is_judged_once_more_at_the_socket(log: Log) -> None:
    """Should a literal ever pass by its text, it is still not connected to."""

    class Blind(Egress):
        def check_url(self, url: str) -> None:
            """Pass everything."""

    for url in ("https://127.0.0.1/", "https://[::ffff:169.254.169.254]/", "http://8.8.8.8/"):
        with dialling(is_refused=True) as dialled:
            outcome = await deliver(Blind(), url, Names(("8.8.8.8",)), log, retry="never")
        assert (outcome.code, dialled) == ("blocked_address", [])


def may_be_dialled(address: str) -> bool:
    """Judged by the standard library's tables, which are not ours."""
    known = ip_address(address)
    if isinstance(known, IPv6Address):
        carried = [ip_network("::ffff:0:0/96"), ip_network("64:ff9b::/96")]
        if any(known in range_ for range_ in carried):
            return may_be_dialled(str(ip_address(int(known) & 0xFFFF_FFFF)))
    return known.is_global and not known.is_multicast


ADDRESSES = sorted({a for case in CASES for a in case.answer or ()})
HOSTS = sorted({case.url.partition("://")[2].partition("/")[0] for case in CASES if len(case.url) < 100})
PIECES = st.one_of(
    st.sampled_from(HOSTS),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=4).map(lambda a: str(int(a))),
    st.ip_addresses(v=4).map(lambda a: f"[::ffff:{a}]"),
    st.ip_addresses(v=6).map(lambda a: f"[{a}]"),
    st.sampled_from(
        [*"@:/\\#?[]%.0x\t\n\0", "%00", "%2e", "//", "localhost", "．", "。", "１", "①", "\u200b"]
    ),
    st.text(max_size=4),
)
URLS = st.one_of(
    st.text(max_size=40),
    st.builds(
        lambda scheme, host, port, rest: f"{scheme}{host}{port}{rest}",
        st.sampled_from(["https://", "https://", "https://", "http://", "HTTPS://", "https:", "//", ""]),
        st.lists(PIECES, min_size=1, max_size=3).map("".join),
        st.one_of(st.just(""), st.integers(-1, 70_000).map(lambda port: f":{port}")),
        st.one_of(st.just("/"), st.text(max_size=8).map(lambda rest: "/" + rest), PIECES),
    ),
)
ANSWERS = st.lists(st.lists(st.sampled_from(ADDRESSES), max_size=3).map(tuple), min_size=1, max_size=3)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(url=URLS, answers=ANSWERS)
@example(url="https://[v1.127.0.0.1]/", answers=[("8.8.8.8",)])
@example(url="https://tool.example/\ud800", answers=[("8.8.8.8",)])
def test_no_url_whatsoever_reaches_a_forbidden_address(url: str, answers: list[tuple[str, ...]]) -> None:
    """And what is wrong by its text, at registration, is just what a delivery refuses before any look-up."""
    log, names, egress = Log(), Names(*answers), Egress()
    is_refused = False
    try:
        egress.check_url(url)
    except UrlRefused:
        is_refused = True
    with dialling(is_refused=True) as dialled:
        outcome = asyncio.run(deliver(egress, url, names, log, retry="safe"))
    assert all(may_be_dialled(address.split()[0]) for address in dialled)
    assert is_refused == (not names.asked and not dialled)
    assert is_refused or outcome.code != "blocked_url"
    assert outcome.code in ("blocked_url", "blocked_address", "dns_failed", "connect_failed")


@settings(max_examples=200, deadline=None)
@given(host=st.text(max_size=40), answers=ANSWERS, is_plain=st.booleans())
def test_no_name_and_no_answer_raises_anything_but_the_guards_own_error(
    host: str, answers: list[tuple[str, ...]], is_plain: bool
) -> None:
    async def resolve() -> list[str]:
        resolver = Resolver(Egress(), is_plain=is_plain, lookup=Names(*answers))
        try:
            return [each["host"] for each in await resolver.resolve(host, 443)]
        except (AddressBlocked, OSError):
            return []
        finally:
            await resolver.close()

    assert all(may_be_dialled(address) for address in asyncio.run(resolve()))
