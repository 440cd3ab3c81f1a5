"""One `kill -9` in the middle of everything, and what the next replica makes of it.

Five sessions are served by a process of their own. When it is killed their calls stand at every point of
their lives, for every `retry`; its commits wait for a lock, so that what had come in last is not recorded.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.routing import EPISODES_MAX
from app.simulator.server import Server, running
from app.simulator.switches import Fault
from app.simulator.world import World
from tests.runner.process import serving_child
from tests.runner.proxy import Proxy, proxying
from tests.runner.receiver import Delivery, Receiver, receiving
from tests.runner.scripts import Gate, asked, custom, ended, in_state, live, results, turn
from tests.runner.service import Service, replicating
from tests.store.rows import emptied, until

pytestmark = pytest.mark.anyio

RETRIES = ("never", "connect_only", "safe")
STAGES = {"posted": 1, "sending": 2, "unsent": 1, "working": 3, "answering": 1, "queued": 4}
"""How many calls of each `retry` are at this point when the process is killed."""
TIMEOUT_S = 120


def names(*stages: str) -> list[str]:
    return [f"{stage}-{retry}" for stage in stages for _ in range(STAGES.get(stage, 1)) for retry in RETRIES]


@dataclass
class Wreck:
    """What was there when the process had been killed, and what there was in the end."""

    many: str = ""
    held: dict[str, str] = field(default_factory=dict)
    """Held calls and since when, before the kill."""
    rows: dict[str, Any] = field(default_factory=dict)
    """The attachments right after the kill, by session."""
    stored: dict[str, int] = field(default_factory=dict)
    """How many calls of each session were stored then."""
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    shown: dict[str, Any] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    lists: list[Any] = field(default_factory=list)
    """The queries of the lists of the session whose history was being read."""
    recovered_at: float = 0.0

    def of(self, stage: str, retry: str) -> list[tuple[dict[str, Any], list[Delivery]]]:
        """The calls of one stage, each with the deliveries that reached the tool."""
        named = [call for call in self.calls.values() if call["tool"] == f"{stage}-{retry}"]
        assert len(named) == STAGES.get(stage, 1)
        return [(call, [one for one in self.deliveries if one.call_id == call["id"]]) for call in named]


@contextlib.asynccontextmanager
async def locked(engine: AsyncEngine) -> AsyncIterator[None]:
    """Hold every attachment, so that no run can commit."""
    async with engine.connect() as connection:
        await connection.execute(text("select from attachments for update"))
        yield


async def is_blocked(engine: AsyncEngine) -> bool:
    """Whether a commit waits for the lock."""
    async with engine.connect() as connection:
        query = "select count(*) from pg_stat_activity where datname = current_database()"
        return bool(await connection.scalar(text(f"{query} and wait_event_type = 'Lock'")))


async def is_idle_time_up(engine: AsyncEngine) -> bool:
    async with engine.connect() as connection:
        query = "select idle_deadline + interval '0.3 s' < clock_timestamp() from attachments"
        return bool(await connection.scalar(text(f"{query} where idle_deadline is not null")))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def wreck(migrated_url: str) -> Wreck:
    async with (
        emptied(migrated_url) as engine,
        receiving() as tool,
        proxying(tool.url) as proxy,
        running(World(pace=0)) as upstream,
    ):
        wreck, gates = Wreck(), {stage: Gate() for stage in ("working", "answering")}
        echo = tool.reply

        async def reply(delivery: Delivery) -> Any:
            gate = gates.get(delivery.data["tool"].partition("-")[0])
            return await (gate or echo)(delivery)

        tool.reply = reply
        sessions = await _run_and_kill(wreck, engine, migrated_url, upstream, tool, proxy, gates)
        gates.clear()
        await _recover(wreck, engine, migrated_url, upstream, tool, sessions)
        return wreck


async def _run_and_kill(
    wreck: Wreck,
    engine: AsyncEngine,
    url: str,
    upstream: Server,
    tool: Receiver,
    proxy: Proxy,
    gates: Mapping[str, Gate],
) -> dict[str, str]:
    asks = {"tool": "builtin", "name": "bash", "input": {"command": "ls"}, "permission": "ask"}
    crowd = custom(*names("sending", "unsent", "working", "answering", "queued"))
    scripts = {
        "many": turn(
            custom(*names("posted")), {**crowd, "wait": False}, {"do": "call", "calls": [asks] * len(RETRIES)}
        ),
        "late": turn(custom(*names("late"))),
        "reading": turn(custom(*names("listed"))),
        "quiet": turn(),
    }
    sessions = {name: upstream.create(script).id for name, script in scripts.items()}
    wreck.many = sessions["many"]
    async with serving_child(url, upstream.url) as child:
        service = Service(child.http, upstream, tool, engine)
        for stage in (*STAGES, "late", "listed"):
            for retry in RETRIES:
                place = {"url": proxy.url} if stage == "unsent" else {}
                await service.register(f"{stage}-{retry}", retry=retry, timeout_s=TIMEOUT_S, **place)
        proxy.mode = "hold"
        await _bring_to_every_point(wreck, service, sessions, proxy, gates)
        await child.kill()
    proxy.mode = "pass"
    async with engine.connect() as connection:
        rows = await connection.execute(text("select * from attachments"))
        wreck.rows = {row.session_id: row for row in rows}
        counts = await connection.execute(text("select session_id, count(*) as n from calls group by 1"))
        wreck.stored = {row.session_id: row.n for row in counts}
    return sessions


async def _bring_to_every_point(
    wreck: Wreck, service: Service, sessions: dict[str, str], proxy: Proxy, gates: Mapping[str, Gate]
) -> None:
    upstream, engine, many, reading = service.upstream, service.engine, wreck.many, sessions["reading"]
    await live(service, sessions["late"])
    await live(service, sessions["quiet"], max_idle_s=2)
    upstream.world.switch(reading, page_size_max=1)
    upstream.say(reading)
    upstream.world.strike(Fault("delay", endpoint="list", session_id=reading, page=2, delay_s=60))
    await service.attach(reading)
    each = len(RETRIES)
    at_once = {stage: STAGES[stage] * each for stage in ("unsent", "working", "answering")}
    # Sends that never get their answer: half of them were accepted, half were not.
    for kind in ("delay_after", "delay"):
        upstream.world.strike(Fault(kind, "send", many, skip=each, count=each, delay_s=30))  # type: ignore[arg-type]
    await live(service, many, concurrency=sum(at_once.values()))
    upstream.say(many)
    counts = {"posted": each, "posting": 2 * each, "dispatched": sum(at_once.values())}
    counts |= {"queued": STAGES["queued"] * each, "held": each}
    await service.until(f"/sessions/{many}", lambda shown: shown["calls"] == counts)
    wreck.held = await held(service)

    async def is_all_there() -> bool:
        waiting = {"unsent": proxy.waiting, **{stage: gate.inside for stage, gate in gates.items()}}
        return waiting == at_once and len(asked(upstream, reading, "list")) == 3

    await until(is_all_there)
    upstream.say(sessions["quiet"])
    await service.until(f"/sessions/{sessions['quiet']}", lambda shown: shown["idle_deadline"])
    async with locked(engine):
        upstream.say(sessions["late"])
        await until(lambda: is_blocked(engine))
        gates["answering"].open()

        async def is_answered() -> bool:
            return gates["answering"].inside == 0 and await is_idle_time_up(engine)

        await until(is_answered)


async def held(service: Service) -> dict[str, str]:
    shown = await service.get("/confirmations")
    return {call["id"]: call["created_at"] for call in shown["data"]}


async def _recover(
    wreck: Wreck, engine: AsyncEngine, url: str, upstream: Server, tool: Receiver, sessions: dict[str, str]
) -> None:
    async with engine.begin() as connection:
        # Ten minutes pass before anybody takes over.
        await connection.execute(text("update replicas set expires_at = now() - interval '10 min'"))
        await connection.execute(
            text("update deliveries set deadline_at = deadline_at - interval '10 min',"
                 " started_at = started_at - interval '10 min'")
        )  # fmt: skip
    wreck.recovered_at = time.time()
    async with replicating(engine, url, upstream.url) as http:
        service = Service(http, upstream, tool, engine)
        posted = sum(STAGES.values()) * len(RETRIES)
        counts = {"posted": posted, "held": len(RETRIES)}
        await service.until(f"/sessions/{wreck.many}", lambda shown: shown["calls"] == counts, limit_s=30)
        for name in ("late", "reading"):
            await in_state(service, sessions[name], *["posted"] * len(RETRIES))
        wreck.shown = {"quiet_end": await ended(service, sessions["quiet"]), "held": await held(service)}
        for name in ("many", "late", "reading"):
            wreck.calls |= await service.calls(sessions[name])
            wreck.results |= results(upstream, sessions[name])
    wreck.deliveries = tool.deliveries
    wreck.lists = [request.query for request in asked(upstream, sessions["reading"], "list")]
    wreck.shown |= sessions


# ---- what holds


def is_told(call: dict[str, Any]) -> bool:
    """Whether the agent was told that the tool may have run."""
    is_error = call["result"]["is_error"]
    assert is_error == call["outcome_unknown"] == ("may have run" in json.dumps(call["result"]))
    return bool(is_error)


async def test_upstream_has_one_result_of_every_call(wreck: Wreck) -> None:
    """D-001 to D-009, D-017: 42 calls at every point of their lives."""
    everything = {call_id for call_id, call in wreck.calls.items() if call["kind"] == "custom"}
    assert (42, everything) == (len(everything), set(wreck.results))
    assert {1} == {len(each) for each in wreck.results.values()}


async def test_every_delivery_of_a_call_has_the_same_id_and_bytes(wreck: Wreck) -> None:
    """Promise 4, over the kill."""
    sent: dict[str, set[tuple[str, bytes]]] = {}
    for delivery in wreck.deliveries:
        sent.setdefault(delivery.call_id, set()).add((delivery.id, delivery.body))
    assert {1} == {len(each) for each in sent.values()}
    assert len(sent) == len({id_ for each in sent.values() for id_, _ in each})


@pytest.mark.parametrize("retry", RETRIES)
@pytest.mark.parametrize("stage", ["late", "queued", "sending", "posted"])
async def test_a_call_whose_delivery_is_beyond_doubt_is_delivered_once(
    wreck: Wreck, stage: str, retry: str
) -> None:
    """D-001 not recorded, D-002 queued, D-007 and D-008 posting, D-009 posted: for each `retry`."""
    for call, deliveries in wreck.of(stage, retry):
        assert ([1], False) == ([delivery.attempt for delivery in deliveries], is_told(call))


@pytest.mark.parametrize("stage", ["working", "answering"])
async def test_a_tool_that_recognises_its_calls_is_called_again(wreck: Wreck, stage: str) -> None:
    """D-004 at work, D-005 answered and not committed: attempt 2, and its answer counts."""
    for call, deliveries in wreck.of(stage, "safe"):
        assert ([1, 2], False) == ([delivery.attempt for delivery in deliveries], is_told(call))


@pytest.mark.parametrize("retry", ["never", "connect_only"])
@pytest.mark.parametrize("stage", ["working", "answering"])
async def test_a_tool_that_does_not_recognise_its_calls_is_called_once(
    wreck: Wreck, stage: str, retry: str
) -> None:
    """D-004, D-005: the outcome is unknown, and the agent is told."""
    for call, deliveries in wreck.of(stage, retry):
        assert ([1], True) == ([delivery.attempt for delivery in deliveries], is_told(call))


@pytest.mark.parametrize("retry", RETRIES)
async def test_a_request_that_had_not_left_counts_as_one_that_may_have(wreck: Wreck, retry: str) -> None:
    """D-003: `dispatched` is committed, the tool has seen nothing, and nobody can know."""
    for call, deliveries in wreck.of("unsent", retry):
        is_safe = retry == "safe"
        assert ([2] if is_safe else [], not is_safe) == ([one.attempt for one in deliveries], is_told(call))


async def test_a_new_episode_has_the_tools_whole_time(wreck: Wreck) -> None:
    """D-015: ten minutes after the first delivery's deadline the repeat gets its 120 s."""
    repeats = [one for one in wreck.deliveries if one.attempt == 2]
    left_s = [int(one.headers["bascule-deadline"]) - wreck.recovered_at for one in repeats]
    assert 5 == len(repeats)
    assert TIMEOUT_S - 1 <= min(left_s)


async def test_a_held_call_is_held_since_the_same_moment(wreck: Wreck) -> None:
    """D-010 a."""
    assert len(RETRIES) == len(wreck.held)
    assert wreck.held == wreck.shown["held"]


async def test_the_position_is_not_ahead_of_what_is_recorded(wreck: Wreck) -> None:
    """D-011: calls came in and were not committed, and neither was the cursor that covers them."""
    late = wreck.shown["late"]
    assert 0 == wreck.stored.get(late, 0)
    assert wreck.rows[late].cursor_at is None


async def test_a_read_of_history_that_was_cut_left_nothing(wreck: Wreck) -> None:
    """D-012: killed in its third page; the next run began where that one did."""
    reading = wreck.shown["reading"]
    assert (0, None) == (wreck.stored.get(reading, 0), wreck.rows[reading].cursor_at)
    assert wreck.lists[0] == wreck.lists[3]
    assert [1] * 3 == [len(deliveries) for retry in RETRIES for _, deliveries in wreck.of("listed", retry)]


async def test_an_idle_end_that_was_not_committed_comes_by_the_same_deadline(wreck: Wreck) -> None:
    """D-013: the attachment was live when the process was killed, its time being up."""
    row = wreck.rows[wreck.shown["quiet"]]
    assert ("live", True) == (row.status, row.idle_deadline is not None)
    assert ("ended", "idle") == wreck.shown["quiet_end"]


@pytest.mark.parametrize("lost", [EPISODES_MAX - 1, EPISODES_MAX])
async def test_a_call_that_took_three_processes_down_is_given_up(
    engine: AsyncEngine, migrated_url: str, lost: int
) -> None:
    """D-014: three deliveries without an outcome, among others that have one; the session goes on."""
    async with (
        receiving() as tool,
        running(World(pace=0)) as upstream,
        replicating(engine, migrated_url, upstream.url) as http,
    ):
        service = Service(http, upstream, tool, engine)
        session = upstream.create(turn(custom("poison"), custom("fine")))
        await service.register("poison", "fine", retry="safe")
        upstream.say(session.id)
        (call_id,) = upstream.world.session(session.id).open_calls
        async with engine.begin() as connection:
            await store_episodes(connection, session.id, call_id, lost=lost)
        await service.attach(session.id)
        poison, _ = await in_state(service, session.id, "posted", "posted")
    is_given_up = lost == EPISODES_MAX
    assert (["poison"] * (not is_given_up)) + ["fine"] == [one.data["tool"] for one in tool.deliveries]
    assert is_given_up == ("could not be completed" in json.dumps(poison["result"])) == is_told(poison)


async def store_episodes(connection: Any, session_id: str, call_id: str, *, lost: int) -> None:
    """What processes leave that die before an answer is stored; each had tried a few times in vain."""
    await connection.execute(
        text("insert into calls (tenant, session_id, id, kind, tool, input, state, attempts)"
             " values ('default', :session, :id, 'custom', 'poison', '{}', 'dispatched', 1)"),
        {"session": session_id, "id": call_id},
    )  # fmt: skip
    ends = ("now(), 'connect_failed'", "now(), 'abandoned'", "null, null")
    for attempt in range(1, 3 * lost + 1):
        end = ends[attempt % 3]
        await connection.execute(
            text("insert into deliveries (tenant, session_id, call_id, attempt, replica_id, tool,"
                 " deadline_at, finished_at, code)"
                 f" values ('default', :session, :id, :attempt, 'dead', 'poison', now(), {end})"),
            {"session": session_id, "id": call_id, "attempt": attempt},
        )  # fmt: skip
