"""Subscriptions: signed notifications of a tenant's events to a URL of its own."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.api.access import Authenticated, GuardedRoute, requires
from app.api.bridge import Given
from app.api.lists import LIMIT_DEFAULT, NAME, Cursor, Limit, ListOf, decode_cursor, encode_cursor
from app.api.mutations import Mutating
from app.api.problems import Problem, documented, invalid, not_found
from app.api.tools import URL_CHARS_MAX, checked_headers
from app.core.headers import is_refused_webhook
from app.core.notifications import EVENTS, Event
from app.store import subscriptions
from app.store.subscriptions import Subscription

router = APIRouter(tags=["subscriptions"], route_class=GuardedRoute)

SubscriptionName = Annotated[str, Path(pattern=NAME, description="Of your choice.")]


class SubscriptionBody(BaseModel):
    """A subscription. What is left out has its default, also when it replaces an earlier one."""

    model_config = ConfigDict(strict=True, extra="forbid")

    url: str = Field(min_length=1, max_length=URL_CHARS_MAX)
    events: list[Event] = Field(min_length=1, max_length=len(EVENTS), json_schema_extra={"uniqueItems": True})
    headers: dict[str, str] = Field(
        default_factory=dict, description="Sent with every notification. Write-only: reads show the names."
    )
    enabled: bool = True

    @field_validator("url")
    @classmethod
    def _storable(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("must not hold NUL")
        return value

    @field_validator("events")
    @classmethod
    def _distinct(cls, value: list[Event]) -> list[Event]:
        if len(set(value)) < len(value):
            raise ValueError("must not name an event twice")
        return value

    @field_validator("headers")
    @classmethod
    def _sendable(cls, value: dict[str, str]) -> dict[str, str]:
        return checked_headers(value, is_refused_webhook)


class SubscriptionView(BaseModel):
    """A subscription as stored, and how its notifications fare."""

    name: str
    url: str
    events: list[str]
    header_names: list[str]
    enabled: bool
    disabled_reason: str | None = Field(
        description="Why the service set `enabled` to false: `gone`, the endpoint answered 410. PUT enables."
    )
    disabled_at: datetime | None
    pending: int = Field(description="Notifications that wait or are under way.")
    dropped: int = Field(description="Never delivered: too many waited, a day had passed, or it was `gone`.")
    failures: int = Field(description="In a row.")
    retry_at: datetime | None = Field(description="Nothing is sent before.")
    last_success_at: datetime | None
    last_error: str | None = Field(description="A delivery's code, with the HTTP status if there was one.")
    last_error_at: datetime | None
    created_at: datetime
    updated_at: datetime


class NewSubscriptionView(SubscriptionView):
    """A subscription just made, with the secret that signs its notifications: it is shown this once."""

    signing_secret: str = Field(description="`whsec_` and base64 of 32 bytes.")


@router.put(
    "/subscriptions/{subscription}",
    summary="Subscribe to events, or replace a subscription",
    responses={
        200: {"model": SubscriptionView, "description": "It was there; its signing secret stays"},
        201: {"model": NewSubscriptionView, "description": "The subscription is new"},
        **documented("invalid_request", "too_many_subscriptions"),
    },
    **requires("admin"),
)
async def put_subscription(
    subscription: SubscriptionName,
    body: SubscriptionBody,
    bridge: Given,
    mutation: Mutating,
    caller: Authenticated,
) -> Response:
    if (sentence := bridge.check_url(body.url)) is not None:
        raise invalid("url", sentence)
    async with mutation.begin() as connection:
        try:
            done = await subscriptions.put(
                connection, bridge.secrets, caller.tenant, subscription,
                url=body.url, events=body.events, headers=body.headers, enabled=body.enabled,
            )  # fmt: skip
        except subscriptions.TooManySubscriptionsError as error:
            raise Problem(
                "too_many_subscriptions",
                f"The tenant has {subscriptions.SUBSCRIPTIONS_MAX} subscriptions; delete one first.",
            ) from error
    view = _view(done.subscription)
    if done.signing_secret is None:
        return Response(view.model_dump_json(), media_type="application/json")
    new = NewSubscriptionView(**view.model_dump(), signing_secret=done.signing_secret)
    return Response(new.model_dump_json(), status_code=201, media_type="application/json")


@router.get(
    "/subscriptions",
    summary="List the subscriptions by name",
    responses=documented("invalid_request"),
    **requires("admin"),
)
async def list_subscriptions(
    bridge: Given, caller: Authenticated, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None
) -> ListOf[SubscriptionView]:
    place = decode_cursor(cursor, tuple[str])
    if place is not None and "\0" in place[0]:
        raise invalid("cursor", "must be the next_cursor of this list's page before, unchanged")
    after = None if place is None else place[0]
    async with bridge.engine.connect() as connection:
        found = await subscriptions.page(
            connection, bridge.secrets, caller.tenant, after=after, limit=limit + 1
        )
    shown = [_view(one) for one in found[:limit]]
    return ListOf(data=shown, next_cursor=encode_cursor([shown[-1].name]) if len(found) > limit else None)


@router.get(
    "/subscriptions/{subscription}",
    summary="Show a subscription and how it fares",
    responses=documented("subscription_not_found"),
    **requires("admin"),
)
async def get_subscription(
    subscription: SubscriptionName, bridge: Given, caller: Authenticated
) -> SubscriptionView:
    async with bridge.engine.connect() as connection:
        found = await subscriptions.get(connection, bridge.secrets, caller.tenant, subscription)
    if found is None:
        raise not_found("subscription_not_found")
    return _view(found)


@router.delete(
    "/subscriptions/{subscription}",
    status_code=204,
    summary="End a subscription; what waits for it is not sent",
    responses=documented("subscription_not_found"),
    **requires("admin"),
)
async def delete_subscription(
    subscription: SubscriptionName, mutation: Mutating, caller: Authenticated
) -> Response:
    async with mutation.begin() as connection:
        if not await subscriptions.remove(connection, caller.tenant, subscription):
            raise not_found("subscription_not_found")
    return Response(status_code=204)


def _view(found: Subscription) -> SubscriptionView:
    return SubscriptionView.model_validate(found, from_attributes=True)
