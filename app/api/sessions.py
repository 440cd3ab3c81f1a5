"""Sessions: attach, change and detach, and how each one stands."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Body, Response
from pydantic import BaseModel, ConfigDict, Field, field_validator
from sqlalchemy.ext.asyncio import AsyncConnection

from app.api.access import Authenticated, requires
from app.api.bridge import Given
from app.api.lists import (
    LIMIT_DEFAULT,
    NAME,
    TOOL_NAME_CHARS_MAX,
    Cursor,
    Limit,
    ListOf,
    SessionId,
    encode_cursor,
    moment_after,
)
from app.api.mutations import Mutating
from app.api.polls import PolledRoute, polls
from app.api.problems import Problem, documented, invalid, not_found
from app.api.tools import checked_headers
from app.core.headers import is_refused_upstream
from app.store import attachments, credentials
from app.store.attachments import Attachment, Settings
from app.store.credentials import DEFAULT
from app.store.tools import TOOLS_MAX

IDLE_S_MAX: Final = 30 * 86_400
LABELS_MAX: Final = 32
LABEL_NAME_CHARS_MAX: Final = 64
LABEL_CHARS_MAX: Final = 256

router = APIRouter(tags=["sessions"], route_class=PolledRoute)

MaxIdle = Annotated[
    float | None,
    Field(gt=0, le=IDLE_S_MAX, allow_inf_nan=False, description="Seconds of idleness; null never ends it."),
]
ToolNames = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=TOOL_NAME_CHARS_MAX)]] | None,
    Field(
        max_length=TOOLS_MAX,
        description="Names of the tools that it may call, whether their own registration or `*` serves them;"
        " `*` in the list stands for every name without a registration of its own. null means all.",
    ),
]
Concurrency = Annotated[int, Field(ge=1, le=32, description="Deliveries at once; 1 keeps strict order.")]
Labels = Annotated[dict[str, str], Field(description="Yours; shown and never interpreted.")]


class SessionSettings(BaseModel):
    """How a session is served."""

    model_config = ConfigDict(strict=True, extra="forbid")

    max_idle_s: MaxIdle = 60.0
    max_reconnects: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    tools: ToolNames = None
    concurrency: Concurrency = 8
    credential: Annotated[
        str, Field(pattern=NAME, description="Of the tenant, as PUT /credentials/{name} stored it.")
    ] = DEFAULT
    environment: Annotated[
        Literal["cloud", "self_hosted"] | None, Field(description="null asks upstream.")
    ] = None
    labels: Labels = Field(default_factory=dict)

    @field_validator("tools")
    @classmethod
    def _as_set(cls, value: list[str] | None) -> list[str] | None:
        return _tool_names(value)

    @field_validator("labels")
    @classmethod
    def _plain(cls, value: dict[str, str]) -> dict[str, str]:
        return _labels(value)


class AttachBody(SessionSettings):
    """How to serve a session; every member is optional."""

    extra_headers: dict[str, str] = Field(
        default_factory=dict, description="Sent with every request to upstream. Write-only."
    )

    @field_validator("extra_headers")
    @classmethod
    def _sendable(cls, value: dict[str, str]) -> dict[str, str]:
        return checked_headers(value, is_refused_upstream)


class ChangeBody(BaseModel):
    """Settings to change; those left out stay."""

    model_config = ConfigDict(strict=True, extra="forbid")

    max_idle_s: MaxIdle = None
    tools: ToolNames = None
    concurrency: Concurrency = 8
    labels: Labels = Field(default_factory=dict)

    @field_validator("tools")
    @classmethod
    def _as_set(cls, value: list[str] | None) -> list[str] | None:
        return _tool_names(value)

    @field_validator("labels")
    @classmethod
    def _plain(cls, value: dict[str, str]) -> dict[str, str]:
        return _labels(value)


class OverdueView(BaseModel):
    """A call that has not moved for longer than it should."""

    call_id: str
    tool: str
    state: str
    reason: str = Field(
        description="`awaiting_decision` or `unowned` for an hour; `past_deadline` of its tool, or"
        " `not_moving`, for five minutes."
    )
    since: datetime


class SessionView(BaseModel):
    """An attachment: the wish that a session is served, and how it stands."""

    session_id: str
    status: str = Field(
        description="`attaching`, `live`, `reconnecting`, `detaching`, `detached` or `ended`; later versions"
        " may add others."
    )
    end_reason: str | None = Field(description="Why it ended, when `status` is `ended` or `detached`.")
    end_detail: str | None
    settings: SessionSettings
    cursor: datetime | None = Field(description="History up to here has been handled and stored.")
    last_event_at: datetime | None
    last_event_age_s: float | None = Field(description="By the database's clock.")
    idle_deadline: datetime | None = Field(description="When it ends by idleness, unless something happens.")
    calls: dict[str, int] = Field(description="The number of its calls in each state.")
    overdue: list[OverdueView] = Field(description="Its calls that should have moved on; at most 20.")
    flags: list[str] = Field(
        description="`history_degraded`, `posting_degraded`, `upstream_contradiction`; later versions may add"
        " others."
    )
    missing: list[str] = Field(description="Calls that upstream waits for and that history does not show.")
    environment: str | None = Field(description="Where the platform runs built-in tools, once it is known.")
    primary_thread_id: str | None
    reconnects: int
    replica: str | None = Field(description="Which replica serves it now.")
    term: int = Field(description="Rises whenever another replica takes over.")
    created_at: datetime
    updated_at: datetime


@router.post(
    "/sessions/{session_id}/attach",
    status_code=202,
    response_model=SessionView,
    summary="Wish that a session is served",
    responses={
        200: {"model": SessionView, "description": "It is attached already, with the same settings"},
        **documented("session_not_found", "settings_differ", "detaching", "session_ended", "invalid_request"),
    },
    **requires("sessions"),
)
async def attach_session(
    session_id: SessionId,
    bridge: Given,
    mutation: Mutating,
    caller: Authenticated,
    body: Annotated[AttachBody | None, Body()] = None,
) -> Response:
    body = body or AttachBody()
    wanted = Settings(**body.model_dump(exclude={"extra_headers", "tools"}), tools=_tuple(body.tools))
    async with mutation.begin() as connection:
        await check_credential(connection, caller.tenant, wanted.credential)
        done = await attachments.attach(
            connection, bridge.secrets, caller.tenant, session_id, wanted, body.extra_headers
        )
    accepted = _accepted(done)
    return _answer(accepted.attachment, 202 if accepted.is_new else 200)


@router.patch(
    "/sessions/{session_id}",
    summary="Change how an attached session is served",
    responses=documented(
        "session_not_found", "detaching", "session_ended", "not_attached", "invalid_request"
    ),
    **requires("sessions"),
)
async def change_session(
    session_id: SessionId, body: ChangeBody, mutation: Mutating, caller: Authenticated
) -> SessionView:
    changes: dict[str, Any] = {name: getattr(body, name) for name in body.model_fields_set}
    if "tools" in changes:
        changes["tools"] = _tuple(changes["tools"])
    async with mutation.begin() as connection:
        done = await attachments.change(connection, caller.tenant, session_id, changes)
    return view(_accepted(done).attachment)


@router.post(
    "/sessions/{session_id}/detach",
    status_code=202,
    response_model=SessionView,
    summary="Wish that a session is no longer served; what is under way drains",
    responses={
        200: {"model": SessionView, "description": "It is not attached any more"},
        **documented("session_not_found"),
    },
    **requires("sessions"),
)
async def detach_session(session_id: SessionId, mutation: Mutating, caller: Authenticated) -> Response:
    async with mutation.begin() as connection:
        done = await attachments.detach(connection, caller.tenant, session_id)
    attachment = _accepted(done).attachment
    return _answer(attachment, 202 if attachment.is_attached else 200)


@router.get(
    "/sessions",
    summary="List the attachments, newest first",
    responses=documented("invalid_request"),
    **requires("read"),
)
async def list_sessions(
    bridge: Given, caller: Authenticated, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None
) -> ListOf[SessionView]:
    place = moment_after(cursor)
    async with bridge.engine.connect() as connection:
        found = await attachments.page(connection, caller.tenant, after=place, limit=limit + 1)
    shown, next_cursor = found[:limit], None
    if len(found) > limit:
        next_cursor = encode_cursor([shown[-1].created_at, shown[-1].session_id])
    return ListOf(data=[view(attachment) for attachment in shown], next_cursor=next_cursor)


@router.get(
    "/sessions/{session_id}",
    summary="Show an attachment",
    responses=documented("session_not_found"),
    **polls("read", ageing="last_event_age_s"),
)
async def get_session(session_id: SessionId, bridge: Given, caller: Authenticated) -> SessionView:
    async with bridge.engine.connect() as connection:
        found = await attachments.get(connection, caller.tenant, session_id)
    if found is None:
        raise not_found("session_not_found")
    return view(found)


async def check_credential(
    connection: AsyncConnection, tenant: str, name: str, *, field: str = "credential"
) -> None:
    """Refuse the name of a credential that the tenant does not have."""
    if name != DEFAULT and await credentials.get(connection, tenant, name) is None:
        raise invalid(field, "must be one that PUT /credentials/{name} stored; GET lists them")


def settings_view(settings: Settings) -> SessionSettings:
    """Return settings as the api shows them."""
    return SessionSettings.model_construct(
        max_idle_s=settings.max_idle_s,
        max_reconnects=settings.max_reconnects,
        tools=None if settings.tools is None else list(settings.tools),
        concurrency=settings.concurrency,
        credential=settings.credential,
        environment=settings.environment,
        labels=settings.labels,
    )


def view(attachment: Attachment) -> SessionView:
    """Return the object that the api shows for an attachment."""
    is_detaching = attachment.detach_requested and attachment.is_attached
    return SessionView(
        session_id=attachment.session_id,
        status="detaching" if is_detaching else attachment.status,
        end_reason=attachment.end_reason,
        end_detail=attachment.end_detail,
        settings=settings_view(attachment.settings),
        cursor=None if attachment.cursor_at is None else datetime.fromtimestamp(attachment.cursor_at, UTC),
        last_event_at=attachment.last_event_at,
        last_event_age_s=attachment.last_event_age_s,
        idle_deadline=attachment.idle_deadline,
        calls=dict(attachment.calls),
        overdue=[OverdueView.model_validate(one, from_attributes=True) for one in attachment.overdue],
        flags=list(attachment.flags),
        missing=list(attachment.missing),
        environment=attachment.environment,
        primary_thread_id=attachment.primary_thread_id,
        reconnects=attachment.reconnects,
        replica=attachment.replica_id,
        term=attachment.term,
        created_at=attachment.created_at,
        updated_at=attachment.updated_at,
    )


_REFUSALS: Final = {
    "settings_differ": "The session is attached with other settings, shown in `attachment`; change them with"
    " PATCH /sessions/{id}, or detach first.",
    "detaching": "The session is being detached; try again when GET /sessions/{id} shows `detached`.",
    "session_ended": "Upstream terminated or deleted the session, so nothing can be attached to it any more.",
    "not_attached": "The session is not attached now; POST /sessions/{id}/attach attaches it again.",
}


def _accepted(done: attachments.Accepted | attachments.Refused) -> attachments.Accepted:
    if isinstance(done, attachments.Accepted):
        return done
    raise refused(done)


def refused(wish: attachments.Refused) -> Problem:
    """Return the problem of a wish that was not taken."""
    if wish.attachment is None:
        return not_found(wish.code)
    shown = view(wish.attachment).model_dump(mode="json")
    return Problem(wish.code, _REFUSALS[wish.code], members={"attachment": shown})


def _answer(attachment: Attachment, status: int) -> Response:
    return Response(view(attachment).model_dump_json(), status_code=status, media_type="application/json")


def _tuple(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def _tool_names(names: list[str] | None) -> list[str] | None:
    if names is None:
        return None
    if not all(name.isprintable() and "/" not in name for name in names):
        raise ValueError("must hold names of tools: printable characters, no slash")
    return sorted(set(names))


def _labels(labels: dict[str, str]) -> dict[str, str]:
    if len(labels) > LABELS_MAX:
        raise ValueError(f"must hold at most {LABELS_MAX} labels")
    for name, text in labels.items():
        is_plain = name.isprintable() and text.isprintable()
        if not (is_plain and 0 < len(name) <= LABEL_NAME_CHARS_MAX and len(text) <= LABEL_CHARS_MAX):
            raise ValueError(
                f"must hold printable names of 1 to {LABEL_NAME_CHARS_MAX} characters"
                f" and texts of at most {LABEL_CHARS_MAX}"
            )
    return labels
