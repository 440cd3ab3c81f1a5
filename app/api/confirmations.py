"""Confirmations: what waits for a person, and what that person decides."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.api import streams
from app.api.access import Authenticated, Caller, requires
from app.api.bridge import Bridge, Given
from app.api.calls import CallObject, call_list, call_object, decision_object, gate_object
from app.api.lists import (
    ID_CHARS_MAX,
    LIMIT_DEFAULT,
    POSITION_MAX,
    TOOL_NAME_CHARS_MAX,
    Cursor,
    Limit,
    ListOf,
    SessionId,
    json_response,
    position_after,
    printable,
)
from app.api.mutations import Mutating, Mutation
from app.api.polls import LOOK_EVERY_S, PolledRoute, polls
from app.api.problems import NOT_FOUND_DETAILS, Problem, documented, invalid, not_found
from app.api.rules import ARGUMENTS_MAX, ArgumentName, RuleObject, rule_object, too_many
from app.api.streams import Looked
from app.core.calls import END_STATES, Reason
from app.store import attachments, calls, decisions
from app.store.calls import CallView, Filter, Mark
from app.store.decisions import (
    DENY_MESSAGE_CHARS_MAX,
    REMEMBERED_S,
    REMEMBERED_S_MAX,
    SHOWN_MS_MAX,
    Approved,
    Recorded,
    Refused,
    Remember,
)
from app.store.paging import Page
from app.store.rules import TooManyRulesError
from app.store.wakeups import Signal, session_key

LOOK_LIMIT_S: Final = 2.0
"""How long a call that is not stored may take to be found in history."""
OUTCOME_LIMIT_S: Final = 2.0
"""How long upstream may take to accept a decision before the answer is 202."""
POLL_S: Final = 0.25
"""How often the store is looked at meanwhile, should no wake-up come."""
OLDER_THAN_S_MAX: Final = 366 * 86_400

FOLLOWED_MAX: Final = 1_000
"""So many of the oldest calls that wait a stream follows."""
AT_ONCE_MAX: Final = 20
"""So many calls are read at once, which may have large inputs."""
STREAM_PAUSE_S: Final = 0.2
"""A stream hears of every session, and looks at most so often."""

_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")

router = APIRouter(tags=["confirmations"], route_class=PolledRoute)


def cleaned(value: object) -> object:
    """Replace what Postgres and UTF-8 cannot carry, so that a pasted text is never a reason to refuse."""
    if not isinstance(value, str):
        return value
    return _UNSTORABLE.sub("\ufffd", value)


class RememberBody(BaseModel):
    """Allow calls like this one for its session: of the same tool, with no other arguments than it has."""

    model_config = ConfigDict(strict=True, extra="forbid")

    same: list[ArgumentName] | None = Field(
        None,
        max_length=ARGUMENTS_MAX,
        description="The top-level arguments whose values must be this call's; null: all of them.",
    )
    expires_in_s: float = Field(REMEMBERED_S, gt=0, le=REMEMBERED_S_MAX, allow_inf_nan=False)


class ConfirmBody(BaseModel):
    """A decision on one call."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tool_use_id: str = Field(min_length=1, max_length=ID_CHARS_MAX, description="The call's id.")
    result: Literal["allow", "deny"]
    deny_message: Annotated[
        Annotated[str, Field(max_length=DENY_MESSAGE_CHARS_MAX)] | None, BeforeValidator(cleaned)
    ] = Field(None, description="Told to the agent; blank means a default sentence. Only with `deny`.")
    input_digest: str | None = Field(
        None,
        pattern="^sha256:[0-9a-f]{64}$",
        description="Of the input that the person saw: the call's, or the edited one that another approved.",
    )
    input: dict[str, Any] | None = Field(
        None,
        description="Runs in the place of the agent's input, which stays on record; the agent is told."
        " Only with `allow`, and only for custom calls.",
    )
    tool_version: int | None = Field(
        None,
        ge=0,
        le=POSITION_MAX,
        description="Of the tool that the person saw, as `gate` shows it: an allow leads nowhere else.",
    )
    rule: RememberBody | None = Field(
        None,
        description="Make a rule as well that allows calls like this one for the rest. Only with `allow`.",
    )
    shown_ms: int | None = Field(
        None, ge=0, le=SHOWN_MS_MAX, description="For how long the person saw the call; kept in the audit."
    )

    @field_validator("tool_use_id")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("must hold printable characters only")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> ConfirmBody:
        if self.result == "allow" and self.deny_message is not None:
            raise ValueError("deny_message goes with deny only; leave it out or deny")
        if self.rule is not None and (self.result == "deny" or self.input is not None):
            raise ValueError("rule goes with an allow of the agent's own input; leave it out")
        if self.result == "deny" and self.input is not None:
            raise ValueError(
                "input goes with allow only; leave it out, or say in deny_message what to change"
            )
        return self


class Remembered(CallObject):
    """The call, with the rule that was made of it."""

    rule: RuleObject


class HalfApproved(CallObject):
    """A call that is held until another key allows it too; `gate.approvals` shows who did."""

    code: Literal["second_approval_needed"]


@router.post(
    "/sessions/{session_id}/confirm",
    response_model=CallObject | Remembered,
    summary="Allow or deny a held call",
    responses={
        202: {
            "model": CallObject | Remembered | HalfApproved,
            "description": "Decided, and upstream has not accepted it yet; or approved, and another must too",
        },
        **documented(
            "session_not_found",
            "call_not_found",
            "session_ended",
            "not_attached",
            "already_decided",
            "call_over",
            "not_awaiting_confirmation",
            "expired",
            "not_an_approver",
            "input_changed",
            "tool_changed",
            "refused_by_upstream",
            "approved_otherwise",
            "invalid_request",
            "not_editable",
            "input_unfit",
            "rule_unfit",
            "too_many_rules",
        ),
    },
    **requires("confirm"),
)
async def confirm(
    request: Request,
    session_id: SessionId,
    body: ConfirmBody,
    bridge: Given,
    mutation: Mutating,
    caller: Authenticated,
) -> Response:
    edited_input = None if body.input is None else await _as_written(request)
    with bridge.wakeups.listen(session_key(caller.tenant, session_id)) as signal:
        try:
            done = await _decide(mutation, caller, session_id, body, edited_input, signal)
        except TooManyRulesError as error:
            raise too_many() from error
        if isinstance(done, Refused):
            raise await _refused(bridge, caller.tenant, session_id, done)
        if isinstance(done, Approved):
            async with bridge.engine.connect() as connection:
                return await _decided(connection, caller.tenant, session_id, body.tool_use_id, done)
        return await _outcome(bridge, caller.tenant, session_id, body, done, signal)


def filtered(
    caller: Authenticated,
    tool: Annotated[
        str | None,
        Query(min_length=1, max_length=TOOL_NAME_CHARS_MAX, description="Only calls of this exact name."),
        printable,
    ] = None,
    reason: Annotated[
        Reason | None, Query(description="Only those that are held for it, as `gate.reason` says.")
    ] = None,
    older_than_s: Annotated[
        float | None,
        Query(
            ge=0, le=OLDER_THAN_S_MAX, allow_inf_nan=False, description="Only those first seen so long ago."
        ),
    ] = None,
    mine: Annotated[
        bool, Query(description="Only those whose tool lets this key decide, by its `approvers`.")
    ] = False,
) -> Filter:
    return Filter(tool=tool, reason=reason, older_than_s=older_than_s, decider=caller.id if mine else None)


Filtered = Annotated[Filter, Depends(filtered)]


@router.get(
    "/confirmations",
    response_model=ListOf[CallObject],
    summary="List what waits for a person, oldest first, or follow it as a stream",
    description="With `accept: text/event-stream` it is a stream: `confirmation` with a call that waits, at"
    " first for each of the oldest 1,000 and then when one is new or has changed; `settled` with a call that"
    " waits no more; `ready` once all that waits has been told; `end` with a `code` before the service closes"
    " it. A stream that is opened again begins anew.",
    responses={
        200: {"content": {streams.MEDIA_TYPE: {"example": 'event: ready\ndata: {"waiting": 0}\n\n'}}},
        **documented("invalid_request", "too_many_streams"),
    },
    **polls("confirm"),
)
async def list_confirmations(
    request: Request,
    bridge: Given,
    caller: Authenticated,
    only: Filtered,
    session: Annotated[
        str | None, Query(pattern="^[A-Za-z0-9_-]{1,128}$", description="Only this session's.")
    ] = None,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Response:
    after = position_after(cursor)
    if streams.is_asked_for(request):
        inbox = Inbox(bridge.engine, caller.tenant, session, only)
        return streams.follow(request, None, inbox.look, pause_s=STREAM_PAUSE_S)
    async with bridge.engine.connect() as connection:
        page = await _waiting(connection, caller.tenant, session, only, after, limit)
    return call_list(page)


class Inbox:
    """What a stream of what waits has told its reader, and what has changed since.

    It follows the oldest `FOLLOWED_MAX`, by marks: a call is read when it is new or another one than before.
    """

    def __init__(self, engine: AsyncEngine, tenant: str, session_id: str | None, only: Filter) -> None:
        self._engine, self._tenant, self._session_id, self._only = engine, tenant, session_id, only
        self._told: dict[tuple[str, str], Mark] = {}
        self._is_whole = False

    async def look(self) -> Looked:
        """Tell of calls that wait or have changed, then of those that wait no more, some at a time."""
        frames = []
        async with self._engine.connect() as connection:
            await connection.execution_options(isolation_level="REPEATABLE READ")
            marks = await calls.waiting_marks(
                connection, self._tenant, session_id=self._session_id, limit=FOLLOWED_MAX, only=self._only
            )
            now = {mark[:2]: mark for mark in marks}
            changed = [key for key in now if self._told.get(key) != now[key]]
            over = [key for key in self._told if key not in now]
            for key in [*changed, *over][:AT_ONCE_MAX]:
                call = await calls.get(connection, self._tenant, *key)
                if key in now:
                    self._told[key] = now[key]
                else:
                    del self._told[key]
                if call is not None:
                    event = "confirmation" if key in now else "settled"
                    frames.append(streams.object_frame(event, call_object(call)))
        has_more = len(changed) + len(over) > AT_ONCE_MAX
        if not has_more and not self._is_whole:
            self._is_whole = True
            frames.append(streams.object_frame("ready", {"waiting": len(now)}))
        return Looked(frames, 0.0 if has_more else LOOK_EVERY_S)


@router.get(
    "/sessions/{session_id}/confirmations",
    response_model=ListOf[CallObject],
    summary="List what waits for a person in one session, oldest first",
    responses=documented("session_not_found", "invalid_request"),
    **polls("confirm"),
)
async def list_session_confirmations(
    session_id: SessionId,
    bridge: Given,
    caller: Authenticated,
    only: Filtered,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Response:
    after = position_after(cursor)
    async with bridge.engine.connect() as connection:
        page = await _waiting(connection, caller.tenant, session_id, only, after, limit)
        if not page.items and not await attachments.exists(connection, caller.tenant, session_id):
            raise not_found("session_not_found")
    return call_list(page)


async def _waiting(
    connection: AsyncConnection, tenant: str, session_id: str | None, only: Filter, after: int, limit: int
) -> Page[CallView]:
    """Read a page; one snapshot shows the calls and the rules of their tools."""
    await connection.execution_options(isolation_level="REPEATABLE READ")
    return await calls.waiting(connection, tenant, session_id=session_id, after=after, limit=limit, only=only)


async def _decide(
    mutation: Mutation,
    caller: Caller,
    session_id: str,
    body: ConfirmBody,
    edited_input: str | None,
    signal: Signal,
) -> Recorded | Approved | Refused:
    """Record the decision; a call that is not stored is looked for in history first."""
    deadline = _now() + LOOK_LIMIT_S
    is_wanted = False
    while True:
        async with mutation.begin_step() as connection:
            done = await decisions.decide(
                connection,
                caller.tenant,
                session_id,
                body.tool_use_id,
                result=body.result,
                deny_message=None if not (body.deny_message or "").strip() else body.deny_message,
                by=caller.id,
                via="api",
                input_digest=body.input_digest,
                edited_input=edited_input,
                shown_ms=body.shown_ms,
                remember=_remember(body.rule),
                tool_version=body.tool_version,
            )
            is_unknown = isinstance(done, Refused) and done.code == "call_not_found"
            if is_unknown and not is_wanted:
                await decisions.want(connection, caller.tenant, session_id, body.tool_use_id)
                is_wanted = True
            if mutation.is_keyed and not isinstance(done, Refused):
                decided = await _decided(connection, caller.tenant, session_id, body.tool_use_id, done)
                await mutation.keep(connection, decided)
        if not is_unknown or _now() >= deadline:
            return done
        await _changed(signal, deadline)


def _remember(body: RememberBody | None) -> Remember | None:
    if body is None:
        return None
    return Remember(None if body.same is None else tuple(body.same), body.expires_in_s)


class _Written(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw(b"null")


async def _as_written(request: Request) -> str:
    """The edited input as the client wrote it: numbers keep their digits."""
    try:
        return bytes(msgspec.json.decode(await request.body(), type=_Written).input).decode()
    except (ValueError, RecursionError) as error:
        # What read the body before is more lenient than JSON.
        raise invalid("input", "must be JSON in UTF-8, without NaN or Infinity, not nested deeply") from error


async def _outcome(
    bridge: Bridge, tenant: str, session_id: str, body: ConfirmBody, recorded: Recorded, signal: Signal
) -> Response:
    """Answer once the decision has been accepted or refused, or 202 when that takes too long."""
    deadline = _now() + OUTCOME_LIMIT_S
    made = _made(recorded)
    while True:
        async with bridge.engine.connect() as connection:
            # One snapshot: a call read just before its decision was refused would still show it as good.
            await connection.execution_options(isolation_level="REPEATABLE READ")
            call = await calls.get(connection, tenant, session_id, body.tool_use_id)
            decision = await decisions.status(connection, tenant, recorded.decision_id)
        assert call is not None, "calls are never deleted while their session is attached"
        status, refusal = decision or ("refused", None)
        if status == "refused":
            return _after_refusal(call, body.result, refusal)
        if status != "sending" or call.state != "held":
            return json_response(call_object(call) | made)
        if _now() >= deadline:
            return json_response(call_object(call) | made, status=202)
        await _changed(signal, deadline)


async def _decided(
    connection: AsyncConnection, tenant: str, session_id: str, call_id: str, done: Recorded | Approved
) -> Response:
    """Answer for a decision that something is still to come of: upstream's word, or another approval."""
    call = await calls.get(connection, tenant, session_id, call_id)
    assert call is not None, "calls are never deleted while their session is attached"
    if isinstance(done, Approved):
        return json_response(call_object(call) | {"code": "second_approval_needed"}, status=202)
    return json_response(call_object(call) | _made(done), status=202)


def _made(recorded: Recorded) -> dict[str, Any]:
    return {} if recorded.rule is None else {"rule": rule_object(recorded.rule)}


async def _changed(signal: Signal, deadline: float) -> None:
    await signal.wait(max(0.0, min(POLL_S, deadline - _now())))
    signal.take()


def _now() -> float:
    return asyncio.get_running_loop().time()


REFUSALS: Final[Mapping[str, str]] = {
    "session_ended": "Upstream terminated or deleted the session, so its calls wait for nobody any more.",
    "not_attached": "The session is not attached now (`end_reason` says why), so nobody would act on it;"
    " attach it first.",
    "input_changed": "The call's input is not the one that `input_digest` names; look at it again.",
    "tool_changed": "The tool was registered anew since it was shown, so that an allow would lead elsewhere:"
    " its version is `gate.tool_version` now. Look at the tool, and decide on that.",
    "already_decided": "Somebody decided otherwise before, as `decision` shows; the first decision counts.",
    "call_over": "The call is over, in the state that `state` names; there is nothing left to decide.",
    "expired": "Nobody decided in time, so the call is denied; `gate` and `decision` say when.",
    "not_an_approver": "The tool names in `approvers` who may decide on its calls, and this key is not among"
    " them; use one that is.",
    "not_editable": "Only a custom call that a gate of ours holds can run with another input, and only"
    " before its first delivery: for any other the platform takes no such verdict. Allow it as it is, or deny"
    " it with a message that says what to change.",
    "input_unfit": "The edited input cannot run, as `errors` says; correct it there and allow again.",
    "approved_otherwise": "Another person approved this call with another input, as `gate.approvals` shows,"
    " and both must approve the same one. Allow what that person approved (`edited_input` of the call; if"
    " null, the agent's own), or deny.",
    "rule_unfit": "No rule can be made of this call, as `errors` says; allow it without `rule`.",
    "not_awaiting_confirmation": "The call does not wait for a person; its `state` says where it is.",
}


_SESSION_GONE: Final = (
    "Upstream knows no session of this id, so its calls wait for nobody; check the id, and the workspace of"
    " the service's upstream key."
)


async def _refused(bridge: Bridge, tenant: str, session_id: str, refused: Refused) -> Problem:
    """Return the problem of a decision that was not recorded; where the session is at fault, say why."""
    problem = _refusal(refused)
    if refused.code not in ("session_ended", "not_attached"):
        return problem
    async with bridge.engine.connect() as connection:
        found = await attachments.get(connection, tenant, session_id)
    if found is None:
        return problem
    is_gone = refused.code == "not_attached" and found.end_reason == "session_gone"
    ending = {"end_reason": found.end_reason, "end_detail": found.end_detail}
    return Problem(refused.code, _SESSION_GONE if is_gone else problem.detail, members=ending)


def _refusal(refused: Refused) -> Problem:
    if refused.code in NOT_FOUND_DETAILS:
        return not_found(refused.code)
    members: dict[str, Any] = {}
    if refused.call is not None:
        members["state"] = refused.call.state
        if (
            refused.code in ("expired", "not_an_approver", "approved_otherwise", "tool_changed")
            and refused.call.gate is not None
        ):
            members["gate"] = gate_object(refused.call.gate)
        if refused.call.decision is not None:
            members["decision"] = decision_object(refused.call.decision)
    place = "rule" if refused.code == "rule_unfit" else "input"
    errors = [] if refused.why is None else [(place, refused.why)]
    return Problem(refused.code, REFUSALS[refused.code], errors=errors, members=members)


def _after_refusal(call: CallView, result: str, refusal: str | None) -> Response:
    """Answer for a decision that upstream refused: someone else's may stand in its place by now."""
    standing = call.decision
    if standing is not None and standing.status != "refused":
        if standing.result == result:
            return json_response(call_object(call))
        raise _refusal(Refused("already_decided", call))
    if call.state in END_STATES:
        raise _refusal(Refused("call_over", call))
    words = f' ("{refusal}")' if refusal else ""
    raise Problem(
        "refused_by_upstream",
        f"Upstream refused the decision{words}, so the call is held again.",
        members={"state": call.state, "call": call_object(call)},
    )
