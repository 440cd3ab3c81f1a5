"""Who may do what: a key in `Authorization: Bearer`, its tenant and its scopes."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute

from app.api.bridge import Bridge
from app.api.limits import Limits, address_of
from app.api.mutations import answered
from app.api.problems import Problem
from app.store import keys
from app.store.keys import DEFAULT_TENANT, SCOPES, Scope

SCHEME: Final = "key"
"""The security scheme's name in the OpenAPI document."""
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
ADMIN: Final = "admin"
"""Who decided, when BASCULE_ADMIN_KEY did."""

_SAFE: Final = frozenset({"GET", "HEAD"})
_CHALLENGE: Final = {"www-authenticate": "Bearer"}
_UNKNOWN: Final = "This key is unknown or revoked; use another one, or create one with POST /keys"
_WRITTEN: Final = (
    "; the first start with the embedded database wrote one to .bascule/admin.key"
    " (the demo's is .bascule/demo/admin.key and works only there)."
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request. `id` is the key's, `requests_per_min` the limit of its own, if it has one.

    `is_operator` marks BASCULE_ADMIN_KEY, which is not limited.
    """

    tenant: str
    id: str
    scopes: frozenset[str]
    is_operator: bool = False
    requests_per_min: int | None = None


OPERATOR: Final = Caller(DEFAULT_TENANT, ADMIN, frozenset(SCOPES), is_operator=True)
"""Who presents BASCULE_ADMIN_KEY."""


def requires(scope: Scope) -> dict[str, Any]:
    """Return the arguments of a route of `GuardedRoute` that takes keys with this scope."""
    assert scope in get_args(Scope)
    return {"openapi_extra": {"security": [{SCHEME: [scope]}]}}


class GuardedRoute(APIRoute):
    """A route that looks at the key before it reads anything else of the request."""

    def get_route_handler(self) -> Handler:
        handler = self.answering(super().get_route_handler())
        scope = (self.openapi_extra or {})["security"][0][SCHEME][0]

        async def guarded(request: Request) -> Response:
            caller = await _caller(request)
            _spend(request, caller)
            if scope not in caller.scopes:
                raise Problem(
                    "forbidden",
                    f"This key lacks the scope `{scope}`; use one that has it, or create it with POST /keys.",
                )
            request.state.caller = caller
            return await (handler(request) if request.method in _SAFE else answered(request, handler))

        return guarded

    def answering(self, handler: Handler) -> Handler:
        """Return what answers once the key has been looked at."""
        return handler


def _current(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


Authenticated = Annotated[Caller, Depends(_current)]
"""An endpoint's parameter of this type receives the caller."""


def _spend(request: Request, caller: Caller) -> None:
    """Count the request; whoever waits for something long has asked once."""
    limits: Limits = request.app.state.limits
    if caller.is_operator or (allowance := limits.spend(caller.id, caller.requests_per_min)) is None:
        return
    request.state.limit_headers = allowance.headers
    if allowance.wait_s:
        raise Problem(
            "rate_limited",
            f"This key may ask each replica {allowance.per_min} times a minute; ask again after the time in"
            " retry-after, and wait for changes with wait_s or a stream.",
            headers={"retry-after": str(math.ceil(allowance.wait_s))},
        )


async def _caller(request: Request) -> Caller:
    bridge: Bridge = request.app.state.bridge
    header = request.headers.get("authorization", "").strip()
    if not header:
        raise _unauthenticated("The request names no key; send the header authorization: Bearer bsk_….")
    kind, _, text = header.partition(" ")
    text = text.strip()
    if kind.lower() != "bearer":
        raise _unauthenticated(
            "The header authorization lacks the word Bearer before the key; send authorization: Bearer bsk_…."
        )
    if not text:
        raise _unauthenticated(
            "The header authorization holds no key after the word Bearer; is a variable of the shell unset?"
        )
    limits: Limits = request.app.state.limits
    address = address_of(request)
    if wait_s := limits.wait_s(address, text):
        raise Problem(
            "too_many_failures",
            "Keys that are none came from this address too often, so this one was not looked at; try again"
            " after the time in retry-after.",
            headers={"retry-after": str(math.ceil(wait_s))},
        )
    found = await caller_of(bridge, text)
    if isinstance(found, Problem):
        limits.failed(address, text)
        raise found
    limits.succeeded(text)
    return found


async def caller_of(bridge: Bridge, text: str) -> Caller | Problem:
    """Return whose key this is, or why it is nobody's."""
    admin_key = bridge.settings.admin_key
    if admin_key is not None and _is_same(text, admin_key.get_secret_value()):
        return OPERATOR
    found = None
    if keys.is_plausible(text):
        async with bridge.engine.connect() as connection:
            found = await keys.find(connection, text)
    if found is None:
        return _unauthenticated(_UNKNOWN + (_WRITTEN if bridge.settings.is_embedded else "."))
    key, is_expired = found
    if is_expired:
        detail = f"This key expired at {key.expires_at:%Y-%m-%dT%H:%M:%SZ}; create another with POST /keys."
        return Problem("key_expired", detail, headers=_CHALLENGE)
    bridge.uses.note(key.tenant, key.id)
    return Caller(key.tenant, key.id, frozenset(key.scopes), requests_per_min=key.requests_per_min)


def _is_same(one: str, other: str) -> bool:
    # Digests, so that not even the length shows in the time.
    return hmac.compare_digest(_digest(one), _digest(other))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _unauthenticated(detail: str) -> Problem:
    return Problem("unauthenticated", detail, headers=_CHALLENGE)
