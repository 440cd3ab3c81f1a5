"""One more delivery of a call, for an operator who knows that its tool has lost it."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Response

from app.api.access import Authenticated, GuardedRoute, requires
from app.api.calls import CallObject, call_object
from app.api.lists import EventId, SessionId, json_response
from app.api.mutations import Mutating
from app.api.problems import NOT_FOUND_DETAILS, Problem, documented, not_found
from app.store import calls, deliveries

router = APIRouter(tags=["calls"], route_class=GuardedRoute)

_REFUSALS: Final = {
    "session_ended": "Upstream terminated or deleted the session, so nobody waits for its calls any more.",
    "not_attached": "The session is not attached now, so nobody would deliver; attach it first.",
    "not_redeliverable": "Only a call whose tool has answered 202 can be delivered again; `state` says where"
    " this one is.",
    "too_many_wishes": f"{deliveries.AGAIN_MAX} calls of the session wait to be delivered again; try later.",
}


@router.post(
    "/sessions/{session_id}/calls/{call_id}/redeliver",
    response_model=CallObject,
    status_code=202,
    summary="Deliver a call once more whose tool has promised a result",
    description="For a tool that answered 202 and lost its job. The delivery has the same `webhook-id`, body"
    " and token; whichever result is reported first counts. A call in any other state is refused: it is at"
    " its webhook now, gets there by itself, or must not.",
    responses=documented(
        "session_not_found", "call_not_found", "session_ended", "not_attached", "not_redeliverable",
        "too_many_wishes",
    ),
    **requires("tools"),
)  # fmt: skip
async def redeliver_call(
    session_id: SessionId, call_id: EventId, mutation: Mutating, caller: Authenticated
) -> Response:
    async with mutation.begin() as connection:
        refused = await deliveries.redeliver(connection, caller.tenant, session_id, call_id)
        call = await calls.get(connection, caller.tenant, session_id, call_id)
    if refused is None and call is not None:
        return json_response(call_object(call), status=202)
    assert refused is not None, "a call that was found is not deleted while its session is locked"
    if refused.code in NOT_FOUND_DETAILS:
        raise not_found(refused.code)
    members = {} if refused.state is None else {"state": refused.state}
    raise Problem(refused.code, _REFUSALS[refused.code], members=members)
