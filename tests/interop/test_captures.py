"""Whole turns recorded from servers that we did not write, replayed to the whole service."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from app.core.calls import END_STATES
from tests.interop.replay import Environment, Replay, Way, recordings, replaying, target
from tests.runner.receiver import Delivery, Receiver, receiving
from tests.runner.service import Service, replicating
from tests.store.conftest import engine, migrated_url

__all__ = ["engine", "migrated_url"]

pytestmark = pytest.mark.anyio

RECORDINGS = {f"{recording.folder}/{recording.name}": recording for recording in recordings()}
GATED = [name for name, recording in RECORDINGS.items() if recording.gated]
HAZARDS = [name for name in GATED if "hazard" in name]
ENDLESS = [name for name, recording in RECORDINGS.items() if recording.server.is_paging_endless]
ENDING = [name for name, recording in RECORDINGS.items() if recording.is_turn_over]
WAYS: tuple[Way, ...] = ("ours", "waiting", "theirs", "late")
ENVIRONMENTS: tuple[Environment | None, ...] = ("cloud", "self_hosted", None)
TURNS = [
    (name, way, environment)
    for name in RECORDINGS
    for way in WAYS
    for environment in (ENVIRONMENTS if name in GATED else ENVIRONMENTS[:1])
    # A history that cannot be read to its end does not tell whether a call still waits.
    if way != "waiting" or (RECORDINGS[name].answers and name not in ENDLESS)
]
SENDS_MAX = 2
"""A send that met a conflict is repeated once."""
LISTS_PER_CONNECTION_MAX = 3
LISTS_PER_REFUSAL_MAX = 2
"""A send that met a conflict is looked for in two lists."""


@dataclass
class Stage:
    """The service in front of a replay; `early` are deliveries that came before a verdict allowed them."""

    http: httpx.AsyncClient
    replay: Replay
    tool: Receiver
    service: Service
    logs: list[Any]
    early: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"/sessions/{self.replay.recording.session_id}"

    async def answer(self, delivery: Delivery) -> web.StreamResponse:
        """Answer as the client of the recording did."""
        recording, call_id = self.replay.recording, delivery.call_id
        if call_id in recording.gated and self.replay.verdicts.get(call_id) != "allow":
            self.early.append(call_id)
        contents = [
            event["content"] for event in recording.answers if target(event) == call_id and "content" in event
        ]
        return web.json_response({"content": contents[0] if contents else "done"})

    async def attach(self, **settings: Any) -> None:
        recording = self.replay.recording
        await self.service.register(*{event["name"] for event in recording.uses.values()})
        await self.service.attach(recording.session_id, **settings)

    async def confirm(self) -> None:
        """Decide each gated call as the recording says; without a verdict in it, allow."""
        recording = self.replay.recording
        await self.service.until(
            f"{self.path}/confirmations",
            lambda shown: {call["id"] for call in shown["data"]} == recording.gated,
        )
        assert self.tool.called == []
        for call_id in recording.gated:
            verdicts = [
                event for event in recording.answers if target(event) == call_id and "result" in event
            ]
            [verdict] = verdicts or [{"result": "allow"}]
            decision = {"tool_use_id": call_id, "result": verdict["result"]}
            if verdict.get("deny_message") is not None:
                decision["deny_message"] = verdict["deny_message"]
            answer = await self.http.post(f"{self.path}/confirm", json=decision)
            assert answer.status_code in (200, 202), answer.text

    async def finish(self) -> dict[str, dict[str, Any]]:
        """Wait until all that was played is handled and no call is on its way; return the calls."""
        number = 1 if self.replay.way == "late" else 0
        fence = self.replay.fence(number)
        await self.service.until(f"{self.path}/messages/{fence}", lambda message: message["state"] == "final")
        settled = {*END_STATES, "unowned"}
        shown = await self.service.until(
            f"{self.path}/calls",
            lambda shown: all(call["state"] in settled for call in shown["data"]),
            limit_s=25,
        )
        return {call["id"]: call for call in shown["data"]}


@contextlib.asynccontextmanager
async def staged(engine: AsyncEngine, url: str, replay: Replay) -> AsyncIterator[Stage]:
    with capture_logs() as logs:
        async with (
            receiving() as tool,
            replaying(replay),
            replicating(engine, url, replay.url) as http,
        ):
            stage = Stage(http, replay, tool, Service(http, None, tool, engine), logs)  # type: ignore[arg-type]
            tool.reply = stage.answer
            try:
                yield stage
            finally:
                replay.closing.set()


async def played(stage: Stage) -> dict[str, dict[str, Any]]:
    await stage.attach()
    if stage.replay.way in ("ours", "waiting"):
        await stage.confirm()
    return await stage.finish()


@pytest.mark.parametrize(("name", "way", "environment"), TURNS)
async def test_a_recorded_turn_is_served(
    engine: AsyncEngine,
    migrated_url: str,
    caplog: pytest.LogCaptureFixture,
    name: str,
    way: Way,
    environment: Environment | None,
) -> None:
    recording = RECORDINGS[name]
    replay = Replay(recording, way, environment=environment)
    async with staged(engine, migrated_url, replay) as stage:
        calls = await played(stage)
        await check(stage, calls)
        if way in ("ours", "waiting"):
            check_our_answers(replay, calls)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("bytes_max", [1, 7, 100_000])
@pytest.mark.parametrize("name", RECORDINGS)
async def test_a_recorded_turn_is_served_in_pieces_of_any_size(
    engine: AsyncEngine, migrated_url: str, name: str, bytes_max: int
) -> None:
    replay = Replay(RECORDINGS[name], "theirs", bytes_max=bytes_max)
    async with staged(engine, migrated_url, replay) as stage:
        calls = await played(stage)
        await check(stage, calls)


@pytest.mark.parametrize("name", GATED)
async def test_a_gated_call_is_held_until_somebody_decides(
    engine: AsyncEngine, migrated_url: str, name: str
) -> None:
    """Whether the event says so, or only RETRIEVE does."""
    recording = RECORDINGS[name]
    replay = Replay(recording, "ours")
    async with staged(engine, migrated_url, replay) as stage:
        await stage.attach()
        for call_id in recording.gated:
            shown = await stage.service.until(
                f"{stage.path}/calls/{call_id}", lambda call: call["gate"]["reason"] != "unread_policy"
            )
            assert (shown["state"], shown["gate"]["by"], shown["gate"]["reason"]) == (
                "held",
                "upstream",
                "ask",
            )
        await stage.confirm()
        await stage.finish()
        assert stage.early == []


@pytest.mark.parametrize("name", HAZARDS)
async def test_a_call_that_another_client_ran_ungated_is_not_run_again(
    engine: AsyncEngine, migrated_url: str, name: str
) -> None:
    replay = Replay(RECORDINGS[name], "theirs")
    async with staged(engine, migrated_url, replay) as stage:
        calls = await played(stage)
        assert stage.tool.called == []
        assert replay.posts == []
        assert {call["state"] for call in calls.values()} <= {"answered_elsewhere", "denied"}


@pytest.mark.parametrize("name", ["oma-pypi/confirm", "oma-pypi/interrupt"])
async def test_a_result_that_met_a_conflict_is_sent_again_only_after_two_lists_without_an_answer(
    engine: AsyncEngine, migrated_url: str, name: str
) -> None:
    """Also if the lists hold a verdict on the call: that is no answer to it."""
    replay = Replay(RECORDINGS[name], "ours")
    async with staged(engine, migrated_url, replay) as stage:
        await played(stage)
        lists = [post.lists for post in replay.posts if post.event["type"] != "user.tool_confirmation"]
        assert len(lists) == SENDS_MAX
        assert lists[1] - lists[0] >= 2


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("way", ["ours", "theirs", "late"])
async def test_paging_that_never_advances_is_cut_off_and_flagged(
    engine: AsyncEngine, migrated_url: str, name: str, way: Way
) -> None:
    replay = Replay(RECORDINGS[name], way)
    async with staged(engine, migrated_url, replay) as stage:
        await played(stage)
        shown = await stage.service.get(stage.path)
        assert shown["flags"] == ["history_degraded"]
        assert replay.lists == 2 * replay.connections


@pytest.mark.parametrize("name", ENDLESS)
async def test_what_waits_in_a_history_without_an_end_is_not_run_and_the_session_is_flagged(
    engine: AsyncEngine, migrated_url: str, name: str
) -> None:
    """Its answer may be on a page that nobody can read; so it is named, and left alone."""
    replay = Replay(RECORDINGS[name], "waiting")
    async with staged(engine, migrated_url, replay) as stage:
        await stage.attach()
        shown = await stage.service.until(stage.path, lambda shown: shown["flags"])
        assert (shown["status"], shown["flags"]) == ("live", ["history_degraded", "upstream_contradiction"])
        assert len(shown["missing"]) == 1
        assert stage.tool.called == []
        assert replay.posts == []


@pytest.mark.parametrize("name", ENDING)
async def test_a_session_whose_turn_is_over_ends_by_idleness(
    engine: AsyncEngine, migrated_url: str, name: str
) -> None:
    """Also after an idle without a stop reason, or with one that nobody documents."""
    replay = Replay(RECORDINGS[name], "theirs", is_fenced=False)
    async with staged(engine, migrated_url, replay) as stage:
        await stage.attach(max_idle_s=1)
        shown = await stage.service.until(stage.path, lambda shown: shown["status"] == "ended")
        assert shown["end_reason"] == "idle"
        assert stage.early == []


async def check(stage: Stage, calls: dict[str, dict[str, Any]]) -> None:
    """What holds of every recording, whoever answered its calls."""
    replay, recording = stage.replay, stage.replay.recording
    shown = await stage.service.get(stage.path)
    assert (shown["status"], shown["end_reason"]) == ("live", None)
    assert ("history_degraded" in shown["flags"]) == recording.server.is_paging_endless
    refused = sum(not post.is_accepted for post in replay.posts)
    assert replay.lists <= LISTS_PER_CONNECTION_MAX * replay.connections + LISTS_PER_REFUSAL_MAX * refused

    assert stage.early == []
    assert max(Counter(stage.tool.called).values(), default=1) == 1
    denied = {event["tool_use_id"] for event in recording.answers if event.get("result") == "deny"}
    assert denied.isdisjoint(stage.tool.called)
    assert {calls[id_]["state"] for id_ in denied & set(calls)} <= {"denied"}

    if replay.way == "late":
        settled = {target(event) for event in recording.answers if "content" in event}
        assert settled.isdisjoint(stage.tool.called)

    sends = Counter((target(post.event), post.event["type"]) for post in replay.posts)
    accepted = Counter((target(post.event), post.event["type"]) for post in replay.posts if post.is_accepted)
    assert max(accepted.values(), default=1) == 1
    assert max(sends.values(), default=1) <= SENDS_MAX

    text = await stage.service.get(f"{stage.path}/text?limit=200")
    fences = {replay.fence(number) for number in range(replay.connections)}
    texts = {message["id"]: message["text"] for message in text["data"] if message["id"] not in fences}
    assert texts == recording.texts
    assert {message["state"] for message in text["data"]} == {"final"}
    defects = [entry for entry in stage.logs if entry["log_level"] in ("error", "critical")]
    malformed = [entry for entry in stage.logs if entry["event"] == "event_malformed"]
    assert (defects, malformed) == ([], [])


def check_our_answers(replay: Replay, calls: dict[str, dict[str, Any]]) -> None:
    """Every call of the recording is known, and what its client answered, we did."""
    recording = replay.recording
    assert set(calls) == set(recording.uses)
    for event in recording.answers:
        sent = [_answer(one) for one in replay.accepted(target(event) or "")]
        if event["type"] != "user.tool_result":  # that client ran a gated call without asking
            assert any(_answer(event).items() <= one.items() for one in sent), json.dumps(sent)


def _answer(event: dict[str, Any]) -> dict[str, Any]:
    names = ("type", "tool_use_id", "custom_tool_use_id", "result", "deny_message", "content")
    return {name: event[name] for name in names if event.get(name) is not None}
