"""The outbox and its queue: what is told once, who sends it, and what is dropped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.calls import Call, Decision, Gate, Result
from app.core.notifications import EVENTS
from app.core.protocol import End, Progress
from app.store import decisions, health, notifications, outbox, runs, subscriptions, tables, tools
from app.store.batches import AttemptEnd, Batch, ContradictionError, write
from app.store.leases import Lease, renew
from app.store.notifications import Claimed, Ended
from app.store.wakeups import Wakeups, session_key
from tests.store.batches import MINE, OTHER, a_call, column, final, held_by_r1, partial
from tests.store.rows import SECRETS

pytestmark = pytest.mark.anyio

GATE = Gate("upstream", "ask", "ask")
DENY = Decision("deny", "accepted", "upstream", "stream", deny_message="no")
FAILED = Result(b'[{"type":"text","text":"broken"}]', is_error=True)


async def subscribe(
    engine: AsyncEngine, name: str = "all", events: Collection[str] = EVENTS, **values: Any
) -> None:
    row = {"url": "https://hooks.example/", "headers": {}, "enabled": True} | values
    tenant = row.pop("tenant", "default")
    async with engine.begin() as connection:
        await subscriptions.put(connection, SECRETS, tenant, name, events=events, **row)


async def save(engine: AsyncEngine, *batches: Batch) -> None:
    async with engine.begin() as connection:
        assert not await write(connection, "r1", batches)


async def told(engine: AsyncEngine) -> list[tuple[str, dict[str, Any]]]:
    async with engine.connect() as connection:
        rows = await connection.execute(text("select type, data from notifications order by position"))
        return [(row.type, json.loads(row.data)) for row in rows]


async def types(engine: AsyncEngine) -> list[str]:
    return [type_ for type_, _ in await told(engine)]


def held(call_id: str = "c1", **values: Any) -> Call:
    return a_call(call_id, **({"state": "held", "gate": GATE, "permission": "ask"} | values))


# ---- what is told


ONCE: dict[str, tuple[Sequence[Batch], dict[str, Any]]] = {
    "confirmation.requested": ([Batch(MINE, calls=[held()])], {"call_id": "c1", "state": "held"}),
    "confirmation.decided": (
        [
            Batch(MINE, calls=[held()]),
            Batch(MINE, calls=[a_call("c1", decision=DENY)], decided=[a_call("c1", decision=DENY)]),
        ],
        {
            "decision": {
                "id": "seen/sesn_1/c1", "result": "deny", "status": "accepted", "by": "upstream",
                "via": "stream",
            }
        },
    ),
    "call.failed": (
        [
            Batch(
                MINE,
                calls=[a_call("c1", state="posting", attempts=1, result=FAILED)],
                ended=[AttemptEnd("c1", 1, 500, "http_status", b"", at=0.0)],
            ),
            Batch(MINE, calls=[a_call("c1", state="posted", attempts=1, result=FAILED, posted=True)]),
        ],
        {"call_id": "c1", "state": "posting", "code": "http_status"},
    ),
    "call.outcome_unknown": (
        [
            Batch(MINE, calls=[a_call("c1", state="posting", outcome_unknown=True)]),
            Batch(MINE, calls=[a_call("c1", state="posted", outcome_unknown=True)]),
        ],
        {"call_id": "c1", "outcome_unknown": True},
    ),
    "call.unowned": ([Batch(MINE, calls=[a_call("c1", state="unowned")])], {"tool": "lookup"}),
    "session.stuck": (
        [Batch(MINE, progress=Progress("live", flags=frozenset({"posting_degraded", "unowned_calls"})))],
        {"session_id": "sesn_1", "flag": "posting_degraded"},
    ),
    "message.final": (
        [Batch(MINE, messages=[partial("m1")]), Batch(MINE, messages=[final("m1", "hidden")])],
        {"session_id": "sesn_1", "message_id": "m1", "thread_id": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("event", sorted(ONCE))
async def test_a_turning_point_is_told_once_however_often_it_is_written(
    engine: AsyncEngine, event: str
) -> None:
    """A commit whose outcome is unknown is run again, and calls are saved again and again."""
    batches, expected = ONCE[event]
    await held_by_r1(engine, MINE)
    await subscribe(engine, events=[event])
    for batch in batches:
        for _ in range(3):
            await save(engine, batch)
    ((type_, data),) = await told(engine)
    assert event == type_
    assert expected.items() <= data.items()
    assert [True] == [id_.startswith("ntf_") for id_ in await column(engine, "notifications", "id")]


async def test_the_end_of_a_session_is_told_with_its_reason(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE, OTHER)
    await subscribe(engine)
    await save(engine, Batch(MINE, end=End("terminated", "a detail")), Batch(OTHER, end=End("detached")))
    assert [
        ("session.ended", {"session_id": "sesn_1", "status": "ended", "end_reason": "terminated"}),
        ("session.ended", {"session_id": "sesn_2", "status": "detached", "end_reason": "detached"}),
    ] == await told(engine)


async def test_nothing_is_told_of_inputs_results_messages_and_words_to_the_agent(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    await subscribe(engine)
    hidden = b'{"password":"hidden"}'
    deny = Decision("deny", "accepted", "upstream", "stream", deny_message="hidden")
    result = Result(b'[{"type":"text","text":"hidden"}]', is_error=True)
    await save(engine, Batch(MINE, calls=[held(input=hidden)]))
    await save(engine, Batch(MINE, decided=[held(input=hidden, decision=deny)], calls=[held(decision=deny)]))
    unknown = a_call(
        "c2", state="posting", input=hidden, result=result, outcome_unknown=True, detail="hidden"
    )
    await save(
        engine, Batch(MINE, calls=[unknown], messages=[final("m1", "hidden")], end=End("idle", "hidden"))
    )
    assert 6 == len(await told(engine))
    assert not any("hidden" in data for data in await column(engine, "notifications", "data"))


async def test_without_a_subscription_nothing_is_written(engine: AsyncEngine) -> None:
    """None, another tenant's, a disabled one, and one of other events."""
    await held_by_r1(engine, MINE)
    await subscribe(engine, tenant="other")
    await subscribe(engine, "off", enabled=False)
    await subscribe(engine, "ended", events=["session.ended"])
    await save(engine, Batch(MINE, calls=[held()], messages=[final("m1")]))
    assert [] == await told(engine)


async def test_each_subscription_is_told_under_an_id_of_its_own(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    for name in ("a", "b"):
        await subscribe(engine, name)
    await save(engine, Batch(MINE, calls=[held()]))
    assert ["a", "b"] == await column(engine, "notifications", "subscription")
    assert 2 == len(set(await column(engine, "notifications", "id")))


async def test_what_is_not_committed_is_not_told(engine: AsyncEngine) -> None:
    """The term is over, or the store contradicts."""
    await held_by_r1(engine, MINE)
    await subscribe(engine)
    async with engine.begin() as connection:
        stale = Batch(Lease("default", "sesn_1", 0), calls=[held()])
        assert await write(connection, "r1", [stale])
    await save(engine, Batch(MINE, calls=[a_call("c1", state="posted")]))
    with pytest.raises(ContradictionError):
        await save(engine, Batch(MINE, calls=[held()]))
    assert [] == await told(engine)


async def test_a_call_is_asked_for_again_when_upstream_refused_the_decision_or_its_outcome_is_unknown(
    engine: AsyncEngine,
) -> None:
    await held_by_r1(engine, MINE)
    await subscribe(engine, events=["confirmation.requested", "confirmation.decided"])
    await save(engine, Batch(MINE, calls=[held()]))
    async with engine.begin() as connection:
        key = ("default", "sesn_1", "c1")
        decided = {"result": "allow", "deny_message": None, "by": "key_1", "via": "api"}
        recorded = await decisions.decide(connection, *key, **decided)  # type: ignore[arg-type]
        assert isinstance(recorded, decisions.Recorded)
        await decisions.decide(connection, *key, **decided)  # type: ignore[arg-type]
    refused = Decision("allow", "refused", "key_1", "api", id=recorded.decision_id, refusal="no")
    for _ in range(2):
        await save(engine, Batch(MINE, calls=[held(decision=refused)], decided=[held(decision=refused)]))
    await save(engine, Batch(MINE, calls=[a_call("c1", state="dispatched", attempts=1)]))
    unknown = Gate("tool", None, "outcome_unknown")
    await save(engine, Batch(MINE, calls=[held(gate=unknown, attempts=1, outcome_unknown=True)]))
    assert [
        ("confirmation.requested", "ask"),
        ("confirmation.decided", "ask"),
        ("confirmation.requested", "ask"),
        ("confirmation.requested", "outcome_unknown"),
    ] == [(type_, data["gate"]["reason"]) for type_, data in await told(engine)]
    assert recorded.decision_id == (await told(engine))[1][1]["decision"]["id"]


async def test_a_decided_call_asks_nobody_and_a_denied_one_has_not_failed(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    await subscribe(engine)
    sending = Decision("allow", "sending", "key_1", "api", id="dec_1")
    deny = Decision("deny", "accepted", "key_1", "api", id="dec_2")
    denied = a_call("c2", state="posting", decision=deny, result=FAILED)
    await save(engine, Batch(MINE, calls=[held(decision=sending), denied]))
    assert [] == await types(engine)


async def test_calls_that_the_platform_runs_are_not_unowned(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    await subscribe(engine, events=["call.unowned"])
    cloud = Progress("live", environment="cloud")
    await save(engine, Batch(MINE, calls=[a_call("c1", state="unowned", kind="builtin")], progress=cloud))
    await save(engine, Batch(MINE, calls=[a_call("c2", state="unowned", kind="builtin")]))
    await save(engine, Batch(MINE, calls=[a_call("c3", state="unowned")]))
    assert ["c3"] == [data["call_id"] for _, data in await told(engine)]


async def test_a_result_that_outlives_its_run_is_told_when_it_is_left(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    await subscribe(engine)
    await save(engine, Batch(MINE, calls=[a_call("c1", state="dispatched", attempts=1)]))
    for _ in range(2):
        async with engine.begin() as connection:
            await runs.leave_result(connection, MINE, "c1", 1, FAILED, dispatched=1, unknown=True)
    left = a_call("c1", state="posting", attempts=1, result=FAILED, outcome_unknown=True)
    await save(engine, Batch(MINE, calls=[left]))
    assert ["call.outcome_unknown", "call.failed"] == await types(engine)


async def test_a_tool_is_told_down_by_the_first_replica_and_well_by_the_last(engine: AsyncEngine) -> None:
    await subscribe(engine)
    url = "https://tools.example/hook"
    async with engine.begin() as connection:
        for replica_id in ("r1", "r2"):
            await renew(connection, replica_id)
        await tools.put(
            connection, SECRETS, "default", "lookup", url=url, description=None, policy={}, headers={}
        )
    for replica_id, state in (
        ("r1", "open"), ("r2", "open"), ("r1", "half_open"), ("r1", "open"), ("r1", "closed"),
        ("r1", "closed"), ("r2", "half_open"), ("r2", "closed"),
    ):  # fmt: skip
        since, error = (None, None) if state == "closed" else (7.0, "timeout")
        async with engine.begin() as connection:
            await health.note(
                connection, replica_id, "default", "lookup", url,
                state=state, since=since, last_error=error, failures=10 if error else 0,
            )  # fmt: skip
    down, well = (data for _, data in await told(engine))
    assert {
        "tool": "lookup", "state": "open", "since": "1970-01-01T00:00:07.000Z", "last_error": "timeout",
        "failures": 10,
    } == down  # fmt: skip
    assert ("closed", 0) == (well["state"], well["failures"])


async def test_the_age_of_a_call_goes_with_it(engine: AsyncEngine) -> None:
    await held_by_r1(engine, MINE)
    await subscribe(engine)
    await save(engine, Batch(MINE, calls=[a_call("c1", state="queued")]))
    async with engine.begin() as connection:
        await connection.execute(text("update calls set created_at = now() - interval '1 h'"))
    await save(engine, Batch(MINE, calls=[held()], messages=[final("m1")]))
    requested, message = await column(engine, "notifications", "age_s", "position")
    assert 3600 <= requested < 3660
    assert message is None


# ---- who sends it


async def fill(engine: AsyncEngine, count: int, subscription: str = "all", **values: Any) -> list[str]:
    ids = [f"ntf_{subscription}{number:04}" for number in range(count)]
    row = {"tenant": "default", "subscription": subscription, "type": "session.ended", "data": "{}"} | values
    async with engine.begin() as connection:
        await connection.execute(insert(tables.notifications), [row | {"id": id_} for id_ in ids])
    return ids


async def claim(engine: AsyncEngine, replica_id: str = "r1", limit: int = 100) -> list[Claimed]:
    async with engine.begin() as connection:
        return await notifications.claim(connection, SECRETS, replica_id, limit)


async def finish(engine: AsyncEngine, *ended: Ended, replica_id: str = "r1", pause_s: float = 60.0) -> None:
    async with engine.begin() as connection:
        await notifications.finish(connection, replica_id, ended, lambda failures: pause_s * failures)


async def tend(engine: AsyncEngine) -> int:
    async with engine.begin() as connection:
        return await notifications.tend(connection)


async def shown(engine: AsyncEngine, name: str = "all") -> subscriptions.Subscription:
    async with engine.connect() as connection:
        found = await subscriptions.get(connection, SECRETS, "default", name)
    assert found is not None
    return found


def ids(claimed: Sequence[Claimed]) -> list[str]:
    return [one.id for one in claimed]


async def test_a_notification_is_taken_by_one_replica_and_by_another_once_its_time_is_over(
    engine: AsyncEngine,
) -> None:
    await subscribe(engine, headers={"x": "y"})
    stored = await fill(engine, 2)
    first = await claim(engine)
    assert stored == ids(first)
    assert [1, 1] == [one.attempt for one in first]
    assert ({"x": "y"}, 32) == (first[0].headers, len(first[0].key or b""))
    assert [] == await claim(engine, "r2")
    async with engine.begin() as connection:
        await connection.execute(text("update notifications set due_at = now()"))
    second = await claim(engine, "r2")
    assert stored == ids(second)
    assert [2, 2] == [one.attempt for one in second]
    await finish(engine, Ended(first[0], "timeout", wait_s=0.0))  # which is another's to send now
    assert [] == await claim(engine)
    await finish(engine, *(Ended(one) for one in second), replica_id="r2")
    assert 0 == (await shown(engine)).pending


async def test_a_subscription_has_few_under_way_over_all_replicas(engine: AsyncEngine) -> None:
    for name in ("a", "b"):
        await subscribe(engine, name)
        await fill(engine, 10, name)
    first = await claim(engine, "r1")
    assert ["a"] * notifications.CONCURRENCY + ["b"] * notifications.CONCURRENCY == sorted(
        one.subscription for one in first
    )
    assert [] == await claim(engine, "r2")
    await finish(engine, Ended(first[0]))
    (more,) = await claim(engine, "r2")
    assert first[0].subscription == more.subscription


async def test_a_subscription_that_has_all_it_may_keeps_no_other_waiting(engine: AsyncEngine) -> None:
    """A replica that has room for one more gives it to who has least."""
    for name in ("a", "b", "c"):
        await subscribe(engine, name)
    await fill(engine, 10, "a")
    await claim(engine)
    await fill(engine, 1, "b")
    await fill(engine, 10, "c")
    found = [one.subscription for _ in range(3) for one in await claim(engine, "r2", 1)]
    assert 3 == len(found)
    assert {"b", "c"} == set(found)


async def test_two_replicas_that_look_at_once_take_no_more(engine: AsyncEngine) -> None:
    await subscribe(engine)
    await fill(engine, 10)
    async with engine.begin() as one, engine.begin() as other:
        mine = await notifications.claim(one, SECRETS, "r1", 100)
        assert [] == await notifications.claim(other, SECRETS, "r2", 100)
    assert notifications.CONCURRENCY == len(mine)


async def test_an_endpoint_that_fails_is_left_alone_and_then_tried_by_one(engine: AsyncEngine) -> None:
    await subscribe(engine)
    await fill(engine, 10)
    under_way = await claim(engine)
    await finish(engine, Ended(under_way[0], "http_status 500", wait_s=0.0))
    await finish(engine, *(Ended(one, "timeout", wait_s=0.0) for one in under_way[1:]))
    found = await shown(engine)
    assert (1, "timeout", None, 10) == (
        found.failures,
        found.last_error,
        found.last_success_at,
        found.pending,
    )
    assert found.retry_at is not None and found.last_error_at is not None
    assert 59 <= (found.retry_at - found.last_error_at).total_seconds() <= 61
    assert [] == await claim(engine)
    await _pass(engine)
    (probe,) = await claim(engine)
    await finish(engine, Ended(probe, "timeout", wait_s=0.0))
    assert 2 == (await shown(engine)).failures
    await _pass(engine)
    (probe,) = await claim(engine)
    await finish(engine, Ended(probe))
    found = await shown(engine)
    assert (0, None, "timeout") == (found.failures, found.retry_at, found.last_error)
    assert found.last_success_at is not None
    assert notifications.CONCURRENCY == len(await claim(engine))


async def _pass(engine: AsyncEngine) -> None:
    """What the passing of time does."""
    async with engine.begin() as connection:
        await connection.execute(text("update subscriptions set retry_at = now()"))


async def test_one_that_is_refused_goes_behind_the_others(engine: AsyncEngine) -> None:
    await subscribe(engine)
    stored = await fill(engine, 6)
    under_way = await claim(engine)
    await finish(
        engine, *(Ended(one) for one in under_way[1:]), Ended(under_way[0], "http_status 400", wait_s=60)
    )
    assert stored[4:] == ids(await claim(engine))


async def test_a_410_disables_the_subscription_until_it_is_put_again(engine: AsyncEngine) -> None:
    await subscribe(engine)
    await fill(engine, 10)
    first, *rest = await claim(engine)
    await finish(engine, Ended(first, "http_status 410", is_gone=True))
    found = await shown(engine)
    assert (False, "gone", 0, 10) == (found.enabled, found.disabled_reason, found.pending, found.dropped)
    await finish(engine, *(Ended(one, "timeout") for one in rest))
    await subscribe(engine)
    found = await shown(engine)
    assert (True, None, None, 0, None) == (
        found.enabled, found.disabled_reason, found.disabled_at, found.failures, found.retry_at,
    )  # fmt: skip


async def test_a_410_of_the_url_before_disables_nothing(engine: AsyncEngine) -> None:
    await subscribe(engine)
    await fill(engine, 1)
    (one,) = await claim(engine)
    await subscribe(engine, url="https://hooks.example/elsewhere")
    await finish(engine, Ended(one, "http_status 410", is_gone=True))
    assert (await shown(engine)).enabled


async def test_putting_a_subscription_again_sends_at_once_what_waits(engine: AsyncEngine) -> None:
    await subscribe(engine)
    await fill(engine, 1)
    (one,) = await claim(engine)
    await finish(engine, Ended(one, "timeout", wait_s=3600))
    await subscribe(engine, url="https://hooks.example/elsewhere")
    (again,) = await claim(engine)
    assert (one.id, "https://hooks.example/elsewhere") == (again.id, again.url)


async def test_secrets_that_cannot_be_read_stop_no_other(engine: AsyncEngine) -> None:
    for name in ("a", "b"):
        await subscribe(engine, name)
        await fill(engine, 1, name)
    async with engine.begin() as connection:
        await connection.execute(text("update subscriptions set secret = 'x' where name = 'a'"))
    found = {one.subscription: one.key for one in await claim(engine)}
    assert found["a"] is None
    assert found["b"] is not None


# ---- what is dropped


async def test_the_oldest_are_dropped_when_too_many_wait(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "PENDING_MAX", 3)
    for name in ("a", "b"):
        await subscribe(engine, name)
    stored = await fill(engine, 10, "a")
    await fill(engine, 3, "b")
    assert 7 == await tend(engine)
    assert stored[7:] == sorted(id_ for id_ in await column(engine, "notifications", "id") if id_ in stored)
    assert [(3, 7), (3, 0)] == [((one := await shown(engine, n)).pending, one.dropped) for n in ("a", "b")]
    assert 0 == await tend(engine)


async def test_what_is_older_than_a_day_is_dropped(engine: AsyncEngine) -> None:
    await subscribe(engine)
    await fill(engine, 5)
    async with engine.begin() as connection:
        await connection.execute(
            text("update notifications set created_at = now() - interval '24 h 1 s' where position % 2 = 0")
        )
    dropped = await tend(engine)
    found = await shown(engine)
    assert dropped == found.dropped == 5 - found.pending
    assert dropped in (2, 3)


async def test_what_waits_for_no_subscription_is_removed(engine: AsyncEngine) -> None:
    """One may be committed just after its subscription went."""
    await subscribe(engine, "b")
    await fill(engine, 2, "a")
    await fill(engine, 2, "b")
    assert [] == [one for one in await claim(engine) if one.subscription == "a"]
    assert 2 == await tend(engine)
    async with engine.begin() as connection:
        assert await subscriptions.remove(connection, "default", "b")
    assert [] == await column(engine, "notifications", "id")


async def test_the_wake_up_comes_with_what_is_told_and_not_otherwise(
    engine: AsyncEngine, migrated_url: str
) -> None:
    await held_by_r1(engine, MINE)
    wakeups = Wakeups(migrated_url, engine)
    with (
        wakeups.listen(outbox.KEY) as told_,
        wakeups.listen(session_key(MINE.tenant, MINE.session_id)) as changed,
    ):
        async with wakeups.running():
            while not wakeups.works:  # noqa: ASYNC110 - it has no event for this
                await asyncio.sleep(0.01)
            for signal in (told_, changed):
                signal.take()
            await save(engine, Batch(MINE, calls=[held()]))
            assert await changed.wait(5)
            assert frozenset() == told_.take()
            await subscribe(engine)
            await save(engine, Batch(MINE, calls=[held("c2")]))
            assert await told_.wait(5)
