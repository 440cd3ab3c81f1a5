"""How a log is read page by page."""

import json
from typing import Any

import pytest

from app.simulator.log import Query
from app.simulator.refusal import Refused
from app.simulator.session import Session
from app.simulator.timeline import parse_stamp_us, stamp_text
from app.simulator.world import World
from tests.simulator.client import T0, custom_result, message, send, started


def page(world: World, session: Session, **query: Any) -> dict[str, Any]:
    return json.loads(world.list_events(session.id, Query(**query)))


def walk(world: World, session: Session, pages_max: int = 100, **query: Any) -> tuple[list[str], int]:
    """Return the ids of a whole walk and how many pages it took."""
    ids: list[str] = []
    cursor = None
    for number in range(pages_max):
        got = page(world, session, page=cursor, **query)
        ids += [event["id"] for event in got["data"]]
        cursor = got.get("next_page")
        if cursor is None:
            return ids, number + 1
    return ids, pages_max


@pytest.fixture
def session(world: World) -> Session:
    session = started(world, "custom")
    send(world, session, custom_result(session.waiting_ids()[0]), now=T0 + 1)
    return session


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 7, 19, 1000])
def test_a_walk_sees_every_event_once(world: World, session: Session, order: str, limit: int) -> None:
    ids = [entry.id for entry in session.primary.log.entries]
    expected = ids if order == "asc" else ids[::-1]
    assert (expected, -(-len(ids) // limit)) == walk(world, session, order=order, limit=limit)


def test_the_server_may_give_smaller_pages_than_asked(world: World, session: Session) -> None:
    world.switch(page_size_max=3)
    assert len(page(world, session, limit=1000)["data"]) == 3


def test_a_walk_with_empty_pages_still_sees_everything(world: World, session: Session) -> None:
    world.switch(empty_pages=True)
    ids, pages = walk(world, session, limit=4)
    assert [entry.id for entry in session.primary.log.entries] == ids
    assert pages > 5


def test_a_cursor_can_be_made_to_repeat(world: World, session: Session) -> None:
    world.switch(stuck_cursor=True)
    first = page(world, session, limit=4)["next_page"]
    assert first == page(world, session, limit=4, page=first)["next_page"]


def test_a_cursor_of_the_other_order_is_refused(world: World, session: Session) -> None:
    cursor = page(world, session, limit=4)["next_page"]
    with pytest.raises(Refused, match="order"):
        page(world, session, limit=4, order="desc", page=cursor)


@pytest.mark.parametrize(
    "cursor", ["", "page_", "page_!!", "page_e30", "page_WzFd", "x" * 5000, "page_WyJhc2MiLDEsMl0"]
)
def test_a_made_up_cursor_is_refused(world: World, session: Session, cursor: str) -> None:
    with pytest.raises(Refused, match="cursor"):
        page(world, session, page=cursor)


def test_types_are_filtered(world: World, session: Session) -> None:
    wanted = frozenset({"agent.custom_tool_use", "user.custom_tool_result"})
    assert [event["type"] for event in page(world, session, types=wanted)["data"]] == [
        "agent.custom_tool_use",
        "user.custom_tool_result",
    ]


def test_ranges_compare_with_processed_at(world: World, session: Session) -> None:
    stamps = [entry.key[0] for entry in session.primary.log.entries]
    middle = stamps[6]
    counts = [
        len(page(world, session, **{name: middle})["data"]) for name in ("gt_us", "gte_us", "lt_us", "lte_us")
    ]
    assert [len(stamps) - 7, len(stamps) - 6, 6, 7] == counts


def test_queued_events_come_last_and_match_no_range(world: World) -> None:
    world = World(pace=1)
    world.advance(T0)
    session = started(world, {"turns": [{"steps": [{"do": "pause", "s": 5}]}]})
    send(world, session, message("second"))
    assert page(world, session)["data"][-1]["processed_at"] is None
    assert page(world, session, order="desc")["data"][0]["processed_at"] is None
    assert None not in [event["processed_at"] for event in page(world, session, gte_us=0)["data"]]
    world.switch(list_queued=False)
    assert None not in [event["processed_at"] for event in page(world, session)["data"]]


def test_events_can_share_a_timestamp(world: World) -> None:
    world.switch(stamp_step_s=1.0)
    session = started(world, "custom")
    assert len({event["processed_at"] for event in page(world, session)["data"]}) == 1
    ids, _pages = walk(world, session, limit=2)
    assert len(ids) == len(set(ids)) == len(session.primary.log.entries)


def test_lists_can_lag_behind_the_stream(world: World) -> None:
    world.switch(list_lag_s=2.0)
    session = started(world, "custom")
    assert page(world, session)["data"] == []
    world.advance(T0 + 3)
    assert len(session.primary.log.entries) == len(page(world, session)["data"])


def test_an_event_can_appear_late_with_an_older_stamp(world: World, session: Session) -> None:
    world.emit(session.id, {"type": "agent.thinking", "id": "sevt_old", "processed_at": stamp_text(0)})
    assert page(world, session)["data"][0]["id"] == "sevt_old"


@pytest.mark.parametrize(
    ("nulls", "expected"), [("null", {True}), ("absent", {False}), ("mixed", {True, False})]
)
def test_nulls_are_written_or_left_out(world: World, nulls: str, expected: set[bool]) -> None:
    world.switch(nulls=nulls)
    session = started(world, {"turns": [{"steps": [{"do": "call", "calls": [CALL] * 4}]}]})
    calls = page(world, session, types=frozenset({"agent.custom_tool_use"}))
    assert expected == {"session_thread_id" in event for event in calls["data"]}
    assert (nulls == "absent") == ("next_page" not in calls)


CALL = {"tool": "custom", "name": "lookup_order", "input": {}}


def test_evaluated_permission_can_be_left_out(world: World) -> None:
    world.switch(omit_evaluated_permission=True)
    session = started(world, "gated")
    [used] = page(world, session, types=frozenset({"agent.tool_use"}))["data"]
    assert not {"evaluated_permission", "evaluation"} & used.keys()
    assert [used["id"]] == session.waiting_ids()


def test_pages_are_made_of_the_bytes_that_were_sent(world: World, session: Session) -> None:
    stream = world.subscribe(session.id)
    world.emit_raw(session.id, b'{"type":"x.y",  "n":1.10}', name="x.y", in_list=True)
    assert b'{"type":"x.y",  "n":1.10}' in world.list_events(session.id, Query())
    assert stream.drain()[0].data == b'{"type":"x.y",  "n":1.10}'


@pytest.mark.parametrize(
    "text", ["2026-10-29T14:00:04.377000Z", "2026-10-29T14:00:04.377Z", "2026-10-29T15:00:04.377+01:00"]
)
def test_timestamps_of_any_form_are_read(text: str) -> None:
    assert stamp_text(parse_stamp_us(text)) == "2026-10-29T14:00:04.377000Z"


def test_a_timestamp_without_an_offset_is_refused() -> None:
    with pytest.raises(ValueError, match="offset"):
        parse_stamp_us("2026-10-29T14:00:04")
