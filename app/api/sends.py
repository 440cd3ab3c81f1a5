"""Steering: messages, interrupts and outcomes for a session from clients that hold only our key.

The send is stored as a wish; the run of the session makes it. Upstream's refusals come back as problems.
"""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from app.api.access import Authenticated, GuardedRoute, requires
from app.api.bridge import Bridge, Given
from app.api.lists import ID_CHARS_MAX, SendId, SessionId, json_response
from app.api.mutations import Mutating
from app.api.problems import Problem, documented, invalid, not_found
from app.api.sessions import refused
from app.store import sends
from app.store.attachments import Refused
from app.store.sends import Send
from app.store.wakeups import session_key

EVENTS_MAX: Final = 50
BLOCKS_MAX: Final = 1_000
OUTCOME_LIMIT_S: Final = 2.0
"""How long a client waits for the outcome before it is told where to look."""
POLL_S: Final = 0.25
"""How often the store is looked at meanwhile, should no wake-up come."""

router = APIRouter(tags=["sessions"], route_class=GuardedRoute)


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Block(BaseModel):
    """A block of content, as upstream documents it: `text`, and for a message `image` and `document` too."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(min_length=1, max_length=64)


Blocks = Annotated[
    list[Block],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
    Field(min_length=1, max_length=BLOCKS_MAX, description="Text, or an array of blocks."),
]


class _Event(BaseModel):
    model_config = ConfigDict(extra="forbid")


class UserMessage(_Event):
    """What a user says; begins a turn, or waits for the end of the one that runs."""

    type: Literal["user.message"]
    content: Blocks


class UserInterrupt(_Event):
    """Stops the turn that runs, and closes the calls that are open."""

    type: Literal["user.interrupt"]
    session_thread_id: Annotated[
        str | None,
        Field(min_length=1, max_length=ID_CHARS_MAX, description="Only this thread; null: every thread."),
    ] = None


class SystemMessage(_Event):
    """An instruction; upstream wants it last, after a message of the same request."""

    type: Literal["system.message"]
    content: Blocks


class DefineOutcome(_Event):
    """What the agent shall work towards, and how that is judged."""

    type: Literal["user.define_outcome"]
    description: Annotated[str, Field(min_length=1)]
    rubric: Annotated[
        dict[str, Any], Field(description='`{"type": "text", "content"}` or `{"type": "file", "file_id"}`.')
    ]
    max_iterations: Annotated[int | None, Field(ge=1, le=20)] = None


class EventsBody(BaseModel):
    """Events to send as one request: upstream takes all of them, or none."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"events": [{"type": "user.message", "content": "Where is order A-1042?"}]}]
        },
    )

    events: Annotated[
        list[
            Annotated[
                UserMessage | UserInterrupt | SystemMessage | DefineOutcome, Field(discriminator="type")
            ]
        ],
        Field(min_length=1, max_length=EVENTS_MAX),
    ]


class SentEvent(BaseModel):
    """An event as upstream took it."""

    id: str
    type: str
    processed_at: datetime | None = Field(description="Null while it is queued.")


class SendView(BaseModel):
    """A send and what came of it."""

    id: str
    session_id: str
    status: str = Field(
        description="`waiting`, `sending`, `sent`, `refused` or `unknown`; later versions may add others."
    )
    events: list[SentEvent] = Field(description="As upstream took them; empty until then.")
    code: str | None = Field(description="Why it was refused: the code of the problem.")
    message: str | None = Field(description="What upstream said.")
    calls: list[str] = Field(description="The calls that upstream wants answered first.")
    created_at: datetime
    finished_at: datetime | None


@router.post(
    "/sessions/{session_id}/events",
    response_model=SendView,
    summary="Send events to the session: messages, interrupts, outcomes",
    responses={
        202: {"model": SendView, "description": "Not taken by upstream yet; `location` shows it later"},
        **documented(
            "session_not_found", "detaching", "session_ended", "not_attached", "waiting_on_calls",
            "refused_by_upstream", "upstream_unreachable", "send_unknown", "too_many_sends",
            "invalid_request",
        ),
    },
    **requires("sessions"),
)  # fmt: skip
async def send_events(
    session_id: SessionId, body: EventsBody, bridge: Given, mutation: Mutating, caller: Authenticated
) -> Response:
    try:
        written = [json.dumps(event.model_dump(exclude_unset=True), allow_nan=False) for event in body.events]
    except ValueError as error:
        raise invalid("events", "must hold no NaN and no infinity") from error
    with bridge.wakeups.listen(session_key(caller.tenant, session_id)) as signal:
        async with mutation.begin_step() as connection:
            try:
                id_ = await sends.wish(connection, caller.tenant, session_id, ",".join(written).encode())
            except sends.TooManySendsError as error:
                raise Problem(
                    "too_many_sends",
                    f"The session has {sends.OPEN_MAX} sends that upstream has not taken yet; wait for one of"
                    " them, as GET /sessions/{id}/sends/{send_id} shows it.",
                ) from error
            if isinstance(id_, Refused):
                raise refused(id_)
            if mutation.is_keyed and (wished := await sends.get(connection, caller.tenant, session_id, id_)):
                await mutation.keep(connection, _answer(wished))
        deadline = _now() + OUTCOME_LIMIT_S
        while True:
            found = await _get(bridge, caller.tenant, session_id, id_)
            if found.finished_at is not None or found.status == "unknown" or _now() >= deadline:
                return _answer(found)
            await signal.wait(max(0.0, min(POLL_S, deadline - _now())))
            signal.take()


@router.get(
    "/sessions/{session_id}/sends/{send_id}",
    summary="Show a send",
    responses=documented("session_not_found", "send_not_found"),
    **requires("sessions"),
)
async def get_send(session_id: SessionId, send_id: SendId, bridge: Given, caller: Authenticated) -> SendView:
    return _view(await _get(bridge, caller.tenant, session_id, send_id))


async def _get(bridge: Bridge, tenant: str, session_id: str, send_id: str) -> Send:
    async with bridge.engine.connect() as connection:
        found = await sends.get(connection, tenant, session_id, send_id)
    if found is None:
        raise not_found("send_not_found")
    return found


def _answer(send: Send) -> Response:
    if send.status in ("refused", "unknown"):
        raise _problem(send)
    body = _view(send).model_dump(mode="json")
    answer = json_response(body, 200 if send.status == "sent" else 202)
    answer.headers["location"] = f"/sessions/{send.session_id}/sends/{send.id}"
    return answer


_DETAILS: Final = {
    "waiting_on_calls": "The session waits for the answers to the calls in `calls`, and takes only an"
    " interrupt before it has them: decide on those that are held, wait for the others, or send"
    " user.interrupt, which closes them.",
    "refused_by_upstream": "Upstream refused the events, and took none of them; `message` says why.",
    "upstream_unreachable": "Upstream could not be reached, and the events are not sent any more; send them"
    " again when GET /sessions/{id} shows `live`.",
    "send_unknown": "The send broke off, so that upstream may have taken the events, or not; look at what the"
    " session does before you send them again, as they would count twice.",
    "session_ended": "Upstream terminated or deleted the session before it took the events.",
    "not_attached": "The session came to be served no more before upstream took the events; `message` says"
    " why. POST /sessions/{id}/attach attaches it again.",
}


def _problem(send: Send) -> Problem:
    code = "send_unknown" if send.status == "unknown" else send.code or "refused_by_upstream"
    members = {"send_id": send.id, "message": send.message, "calls": list(send.waiting_on)}
    return Problem(code, _DETAILS[code], members=members)


def _view(send: Send) -> SendView:
    return SendView(
        id=send.id,
        session_id=send.session_id,
        status=send.status,
        events=[
            SentEvent(id=one["id"], type=one["type"], processed_at=one.get("processed_at"))
            for one in send.sent
        ],
        code=send.code,
        message=send.message,
        calls=list(send.waiting_on),
        created_at=send.created_at,
        finished_at=send.finished_at,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
