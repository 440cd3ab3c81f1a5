"""The events of a session as a stream: its calls, its text, and how it stands, resumable on any replica."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import streams
from app.api.access import Authenticated, GuardedRoute, requires
from app.api.bridge import Bridge, Given
from app.api.calls import call_object
from app.api.lists import POSITION_MAX, SessionId
from app.api.messages import message_object
from app.api.polls import look_s
from app.api.problems import documented, not_found
from app.api.sessions import view
from app.api.sharing import Shared
from app.api.streams import Looked
from app.core.rules import ASKING
from app.store import feed, observers
from app.store.calls import CallView
from app.store.feed import Change
from app.store.messages import MessageView
from app.store.wakeups import session_key

router = APIRouter(tags=["messages"], route_class=GuardedRoute)

WATCH_AGAIN_S: Final = 10.0
"""How often a stream that follows upstream's events renews its wish for them."""
BEHIND_S_MAX: Final = 45.0
"""A reader who is further behind misses some, and is told so instead."""

_DESCRIPTION: Final = (
    "Server-sent events, each with the object that GET shows: `status` (the attachment), `call`,"
    " `confirmation` (a call that waits for a person), `message.final`, `message.partial`,"
    " `message.discarded` (the `id` of a preview that came to nothing), and `end` with a `code` before the"
    " service closes the stream. Ids rise; `last-event-id` resumes after one on any replica, with each thing"
    " as it is by then. Previews have no id: those that are open are sent again on each connection, and"
    " earlier ones are to be forgotten. Without an id the stream begins now, with `after=0` at the beginning."
    " With `include=upstream`: `observing` once upstream's events are passed on, and each as `upstream`."
)
_EXAMPLE: Final = (
    'event: message.discarded\ndata: {"id": "sevt_011CZkZ1a"}\n\n'
    'event: end\ndata: {"code": "renew", "detail": "A stream lives for an hour; open another one."}\n\n'
)


@dataclass(frozen=True, slots=True)
class _Read:
    """What a read found, as bytes that go to every stream. `partials` are (id, time, frame)."""

    frames: Sequence[bytes]
    position: int
    has_more: bool
    finals: frozenset[str]
    partials: Sequence[tuple[str, datetime, bytes]]


class Feeds:
    """Reads for the streams of one replica; those at the same place share one read and its bytes."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._shared: Shared[tuple[str, str, int], _Read] = Shared()

    async def read(self, tenant: str, session_id: str, after: int) -> _Read:
        """Return what has changed after the number.

        Raises:
            Problem: there is no such session any more.
        """
        key = (tenant, session_id, after)
        return await self._shared.get(key, partial(self._read, *key))

    async def _read(self, tenant: str, session_id: str, after: int) -> _Read:
        async with self._engine.connect() as connection:
            await connection.execution_options(isolation_level="REPEATABLE READ")
            found = await feed.read(connection, tenant, session_id, after)
        if found is None:
            raise not_found("session_not_found")
        finals = frozenset(one.id for one in found.changes if isinstance(one, MessageView))
        return _Read(
            [_frame(one) for one in found.changes],
            found.position,
            found.has_more,
            finals,
            [
                (one.id, one.updated_at, streams.object_frame("message.partial", message_object(one)))
                for one in found.partials
            ],
        )


@dataclass(slots=True)
class _Follower:
    """One stream: how far it has told, and which previews."""

    bridge: Bridge
    feeds: Feeds
    tenant: str
    session_id: str
    position: int
    told: dict[str, datetime] = field(default_factory=dict)

    async def look(self) -> Looked:
        found = await self.feeds.read(self.tenant, self.session_id, self.position)
        frames = list(found.frames)
        self.position = found.position
        for id_ in found.finals & self.told.keys():
            del self.told[id_]
        if found.has_more:
            return Looked(frames, 0.0)
        open_ = {id_ for id_, _, _ in found.partials}
        for id_ in [id_ for id_ in self.told if id_ not in open_]:
            del self.told[id_]
            frames.append(streams.object_frame("message.discarded", {"id": id_}))
        for id_, at, one in found.partials:
            if self.told.get(id_) != at:
                self.told[id_] = at
                frames.append(one)
        return Looked(frames, look_s(self.bridge, self.session_id))


@dataclass(slots=True)
class _Observer:
    """One stream that upstream's events go to as well, as they came: from now on, once each."""

    follower: _Follower
    number: int | None = None
    watch_at: float = 0.0
    is_seen: bool = False

    async def look(self) -> Looked:
        clock = asyncio.get_running_loop().time
        of = self.follower
        if clock() >= self.watch_at:
            async with of.bridge.engine.begin() as connection:
                await observers.watch(connection, of.tenant, of.session_id)
                if self.number is None:
                    self.number = await observers.newest(connection, of.tenant, of.session_id)
            self.watch_at = clock() + WATCH_AGAIN_S
        async with of.bridge.engine.connect() as connection:
            found = await observers.read(connection, of.tenant, of.session_id, self.number or 0)
            was_seen, self.is_seen = (
                self.is_seen,
                self.is_seen or await observers.is_seen(connection, of.tenant, of.session_id),
            )
        if found and found[0].age_s > BEHIND_S_MAX:
            raise streams.StreamOver(
                "too_slow",
                f"The reader is over {BEHIND_S_MAX:g} s behind upstream's events, which are not kept longer.",
            )
        frames = [] if was_seen or not self.is_seen else [streams.object_frame("observing", {})]
        frames += [streams.frame("upstream", one.event.encode()) for one in found]
        self.number = found[-1].number if found else self.number
        looked = await of.look()
        again_s = 0.0 if len(found) == observers.ROWS_MAX else min(looked.again_s, WATCH_AGAIN_S)
        return Looked([*frames, *looked.frames], again_s)


@router.get(
    "/sessions/{session_id}/events",
    response_class=Response,
    summary="Follow a session as a stream of events",
    description=_DESCRIPTION,
    responses={
        200: {"content": {streams.MEDIA_TYPE: {"example": _EXAMPLE}}, "description": "The stream"},
        **documented("session_not_found", "invalid_request", "too_many_streams"),
    },
    **requires("read"),
)
async def follow_session(
    request: Request,
    session_id: SessionId,
    bridge: Given,
    caller: Authenticated,
    after: Annotated[
        int | None, Query(ge=0, le=POSITION_MAX, description="An event's id, where no header can be sent.")
    ] = None,
    include: Annotated[
        Literal["upstream"] | None,
        Query(description="`upstream` adds its events as they come, as `upstream`: live only, once each."),
    ] = None,
    last_event_id: Annotated[
        int | None,
        Header(ge=0, le=POSITION_MAX, description="The last id that was received; wins over after."),
    ] = None,
) -> Response:
    async with bridge.engine.connect() as connection:
        await connection.execution_options(isolation_level="REPEATABLE READ")
        newest = await feed.position(connection, caller.tenant, session_id)
    if newest is None:
        raise not_found("session_not_found")
    begin = after if last_event_id is None else last_event_id
    feeds: Feeds = request.app.state.feeds
    follower = _Follower(
        bridge, feeds, caller.tenant, session_id, newest if begin is None else min(begin, newest)
    )
    key = session_key(caller.tenant, session_id)
    look = _Observer(follower).look if include == "upstream" else follower.look
    return streams.follow(request, key, look)


def _frame(change: Change) -> bytes:
    match change:
        case CallView():
            return streams.object_frame(
                "confirmation" if _waits(change) else "call", call_object(change), change.change
            )
        case MessageView():
            return streams.object_frame("message.final", message_object(change), change.change)
        case _:
            return streams.frame("status", view(change).model_dump_json().encode(), change.change)


def _waits(call: CallView) -> bool:
    """Whether the call waits for a person, as far as the call says."""
    is_decided = call.decision is not None and call.decision.status != "refused"
    gate = call.gate
    is_promised = gate is not None and gate.rule is not None and gate.reason not in ASKING
    return call.state == "held" and not is_decided and not is_promised
