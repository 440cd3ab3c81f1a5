"""How often a key may ask, and what happens to an address that presents keys that are none."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api.limits import Buckets, Limits
from tests.api.service import SETTINGS, Service, problem, served

pytestmark = pytest.mark.anyio

SLOW = SETTINGS.model_copy(update={"key_requests_per_min": 3, "address_failures_per_min": 2})
WRONG = {"authorization": "Bearer wrong"}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def slow(engine: AsyncEngine, migrated_url: str, clock: Clock) -> AsyncIterator[Service]:
    """A service where a key may ask three times a minute, and an address fail twice."""
    async with served(engine, migrated_url, settings=SLOW) as service:
        service.app.state.limits = Limits(SLOW, clock)
        yield service


def test_a_bucket_holds_a_minutes_tokens_and_refills_evenly() -> None:
    some = Buckets(10)
    for _ in range(60):
        assert 0.0 == some.wait_s("a", 60, 0.0)
        some.take("a", 60, 0.0)
    assert (0.0, 1.0) == (some.left("a", 60, 0.0), some.wait_s("a", 60, 0.0))
    assert (60, 0.5) == (some.left("b", 60, 0.0), some.wait_s("a", 60, 0.5))
    assert 0.0 == some.wait_s("a", 60, 1.0)
    assert 30 == some.left("a", 60, 30.0)
    assert 60 == some.left("a", 60, 1000.0)


def test_only_so_many_buckets_are_kept() -> None:
    some = Buckets(3)
    for name in "abcad":
        some.take(name, 60, 0.0)
    assert [59, 60, 58] == [some.left(name, 60, 0.0) for name in "cba"]


async def test_a_key_that_asks_too_often_is_told_when_to_ask_again(slow: Service, clock: Clock) -> None:
    key = await slow.key("read")
    answers = [await slow.http.get("/sessions", headers=key) for _ in range(4)]
    assert [200, 200, 200, 429] == [answer.status_code for answer in answers]
    assert {'"key";q=3;w=60'} == {answer.headers["ratelimit-policy"] for answer in answers}
    left = [answer.headers["ratelimit"] for answer in answers]
    assert ['"key";r=2', '"key";r=1', '"key";r=0', '"key";r=0;t=20'] == left
    assert (429, "rate_limited") == problem(answers[3])
    assert "20" == answers[3].headers["retry-after"]
    clock.now += 20
    answers = [await slow.http.get("/sessions", headers=key) for _ in range(2)]
    assert [200, 429] == [answer.status_code for answer in answers]


async def test_a_key_has_its_own_limit_and_its_own_count(slow: Service) -> None:
    body = {"name": "busy", "scopes": ["read"], "requests_per_min": 500}
    made = (await slow.http.post("/keys", json=body)).json()
    assert 500 == made["requests_per_min"]
    other = await slow.key("read")
    busy = {"authorization": f"Bearer {made['key']}"}
    for _ in range(5):
        answer = await slow.http.get("/sessions", headers=busy)
        assert 200 == answer.status_code
    assert '"key";r=495' == answer.headers["ratelimit"]
    assert '"key";r=2' == (await slow.http.get("/sessions", headers=other)).headers["ratelimit"]


async def test_refusals_count_and_carry_the_headers_too(slow: Service) -> None:
    key = await slow.key("read")
    unknown = await slow.http.get("/sessions/none", headers=key)
    forbidden = await slow.http.get("/tools", headers=key)
    assert (404, '"key";r=2') == (unknown.status_code, unknown.headers["ratelimit"])
    assert (403, '"key";r=1') == (forbidden.status_code, forbidden.headers["ratelimit"])


async def test_a_poll_that_waits_counts_once(slow: Service) -> None:
    key = await slow.key("confirm")
    empty = await slow.http.get("/confirmations", headers=key)
    tagged = key | {"if-none-match": empty.headers["etag"]}
    waited = await slow.http.get("/confirmations", headers=tagged, params={"wait_s": 2.1})
    assert (304, '"key";r=1') == (waited.status_code, waited.headers["ratelimit"])


async def test_the_operator_and_what_takes_no_key_are_not_limited(slow: Service) -> None:
    for path in ("/sessions", "/healthz", "/readyz", "/metrics"):
        for _ in range(4):
            answer = await slow.http.get(path)
            assert 200 == answer.status_code
        assert "ratelimit" not in answer.headers


async def test_no_limit_shows_no_headers(service: Service) -> None:
    unlimited = SETTINGS.model_copy(update={"key_requests_per_min": 0})
    service.app.state.limits = Limits(unlimited, Clock())
    answer = await service.http.get("/sessions", headers=await service.key("read"))
    assert (200, False) == (answer.status_code, "ratelimit" in answer.headers)


async def test_an_address_that_fails_too_often_is_not_looked_at_for_a_while(
    slow: Service, clock: Clock
) -> None:
    key = await slow.key("read")
    answers = [await slow.http.get("/sessions", headers=who) for who in (WRONG, WRONG, WRONG, key)]
    assert [(401, "unauthenticated")] * 2 == [problem(answer) for answer in answers[:2]]
    assert [(429, "too_many_failures")] * 2 == [problem(answer) for answer in answers[2:]]
    assert "30" == answers[3].headers["retry-after"]
    clock.now += 30
    assert 200 == (await slow.http.get("/sessions", headers=key)).status_code


async def test_what_others_do_at_an_address_holds_no_key_back_that_was_good_lately(slow: Service) -> None:
    """They may share a proxy. One that was revoked since is not good."""
    good, revoked = await slow.key("read"), await slow.key("read")
    for key in (good, revoked):
        assert 200 == (await slow.http.get("/sessions", headers=key)).status_code
    for _ in range(2):
        await slow.http.get("/sessions", headers=WRONG)
    listed = (await slow.http.get("/keys")).json()["data"]
    await slow.http.delete(f"/keys/{listed[1]['id']}")
    assert 200 == (await slow.http.get("/sessions", headers=good)).status_code
    answers = [await slow.http.get("/sessions", headers=revoked) for _ in range(2)]
    assert [(401, "unauthenticated"), (429, "too_many_failures")] == [problem(one) for one in answers]


async def test_no_key_at_all_is_no_failure(slow: Service) -> None:
    for _ in range(4):
        answer = await slow.http.get("/sessions", headers={"authorization": ""})
        assert (401, "unauthenticated") == problem(answer)


@pytest.mark.parametrize(
    ("other", "status"),
    [("2001:db8:1:1::ffff", 429), ("2001:db8:1:2::1", 401), ("203.0.113.7", 401), ("fe80::1%eth0", 401)],
)
async def test_an_address_of_ipv6_is_its_subscribers_network(slow: Service, other: str, status: int) -> None:
    for address, expected in (("2001:db8:1:1::1", 401), ("2001:db8:1:1::2", 401), (other, status)):
        transport = httpx.ASGITransport(app=slow.app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://bascule") as http:
            assert expected == (await http.get("/sessions", headers=WRONG)).status_code
