"""Who looks at a page, by a pass in a cookie, and what a request must bring before it may change anything.

A change needs all of: the pass, a form that names its token, and an `Origin` of ours. Only POST changes
anything.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final
from urllib.parse import parse_qsl, quote, urlsplit

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute

from app.api.access import ADMIN, OPERATOR, Caller
from app.api.bridge import Bridge
from app.api.problems import CODES, Problem
from app.console.pages import LIVE_HEADER, page
from app.settings import Settings
from app.store import passes
from app.store.keys import Scope
from app.store.passes import TOKEN_CHARS_MAX, Pass

FIELDS_MAX: Final = 100
SIGN_IN: Final = "/console/sign-in"

# Not no-referrer: with it browsers send `Origin: null` also to ourselves. No other site learns an address.
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none';"
    " require-trusted-types-for 'script'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Viewer:
    """A person at a page, with the rights of a key. `token` is the cookie's, `name` the key's."""

    caller: Caller
    name: str
    token: str = field(repr=False)

    @property
    def form_token(self) -> str:
        """What a form of this browser must bring back. The cookie does not follow from it."""
        return hashlib.sha256(b"bascule form\0" + self.token.encode()).hexdigest()

    def may(self, scope: Scope) -> bool:
        return scope in self.caller.scopes


def shown_to(scope: Scope) -> dict[str, Any]:
    """Return the arguments of a route of `ConsoleRoute` that is for viewers with this scope."""
    return {"openapi_extra": {"scope": scope}, "include_in_schema": False}


PUBLIC: Final[dict[str, Any]] = {"include_in_schema": False}
"""The arguments of a route for whoever comes."""


class ConsoleRoute(APIRoute):
    """A route that looks at the browser before anything else, and answers failures as pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        scope: Scope | None = (self.openapi_extra or {}).get("scope")

        async def guarded(request: Request) -> Response:
            try:
                response = await _guarded(request, scope, handler)
            except Problem as problem:
                response = _failure(request, problem)
            except RequestValidationError:
                response = _failure(request, Problem("not_found", "There is no such page."))
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return guarded


async def _guarded(
    request: Request, scope: Scope | None, handler: Callable[[Request], Coroutine[Any, Any, Response]]
) -> Response:
    bridge: Bridge = request.app.state.bridge
    if request.method == "POST":
        if not _is_ours(request, bridge.settings):
            raise Problem("forbidden", "The request comes from another site, so nothing was done.")
        request.state.form = await _form(request)
    if scope is None:
        return await handler(request)
    viewer = await viewer_of(request)
    if viewer is None:
        if LIVE_HEADER in request.headers:
            raise Problem("unauthenticated", "You are signed out; sign in again.")
        here = request.url.path if request.method == "GET" else "/console"
        return RedirectResponse(f"{SIGN_IN}?next={quote(here)}", status_code=303)
    request.state.viewer = viewer
    if not viewer.may(scope):
        raise Problem("forbidden", f"Your key lacks the scope {scope}, which this page needs.")
    if request.method == "POST":
        given = request.state.form.get("form_token", "")
        if not hmac.compare_digest(given.encode(), viewer.form_token.encode()):
            raise Problem(
                "forbidden", "The form is of another sign-in, so nothing was done; load the page again."
            )
    return await handler(request)


async def viewer_of(request: Request) -> Viewer | None:
    """Return who is signed in, None if nobody is or the pass has ended."""
    bridge: Bridge = request.app.state.bridge
    token = request.cookies.get(cookie_name(bridge.settings), "")
    if not 0 < len(token) <= TOKEN_CHARS_MAX:
        return None
    async with bridge.engine.connect() as connection:
        found = await passes.find(connection, "session", token)
    caller = None if found is None else caller_of(bridge, found)
    if found is None or caller is None:
        return None
    if found.proof is None:
        bridge.uses.note(found.tenant, found.key_id)
    return Viewer(caller, found.name or ADMIN, token)


def caller_of(bridge: Bridge, found: Pass) -> Caller | None:
    """Return whose rights a pass has, None if its key is not what it was."""
    if found.proof is None:
        return Caller(found.tenant, found.key_id, frozenset(found.scopes or ()))
    return OPERATOR if found.proof == operator_proof(bridge) else None


def operator_proof(bridge: Bridge) -> str:
    """Return what a pass of the operator's key carries: it ends when that key or the secret changes."""
    key = bridge.settings.admin_key
    proof = bridge.secrets.mac(f"console {key and key.get_secret_value()}", bridge.secrets.key_id)
    assert proof is not None, "the key that writes is there"
    return proof


def set_cookie(response: Response, settings: Settings, token: str | None) -> None:
    """Let the browser keep the token until it is closed, or forget the one that it has."""
    secure, name = is_secure(settings), cookie_name(settings)
    if token is None:
        response.delete_cookie(name, secure=secure, httponly=True, samesite="strict")
    else:
        response.set_cookie(name, token, secure=secure, httponly=True, samesite="strict")


def cookie_name(settings: Settings) -> str:
    # Browsers take a name with this prefix from the host itself only, and over TLS.
    return "__Host-bascule" if is_secure(settings) else "bascule"


def is_secure(settings: Settings) -> bool:
    return (settings.public_url or "").startswith("https://")


def _is_ours(request: Request, settings: Settings) -> bool:
    origin = urlsplit(request.headers.get("origin", ""))
    if settings.public_url is not None:
        public = urlsplit(settings.public_url)
        if (origin.scheme, origin.netloc) == (public.scheme, public.netloc):
            return True
    return origin.scheme in ("http", "https") and origin.netloc == request.headers.get("host")


async def _form(request: Request) -> Mapping[str, str]:
    body = (await request.body()).decode("ascii", "replace")
    try:
        return dict(parse_qsl(body, keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except ValueError as error:
        raise Problem("invalid_request", "The form is malformed.") from error


def _failure(request: Request, problem: Problem) -> Response:
    status, title = CODES[problem.code]
    viewer = getattr(request.state, "viewer", None)
    return page(request, "problem.html", status=status, viewer=viewer, title=title, detail=problem.detail)


def _viewer(request: Request) -> Viewer:
    viewer: Viewer = request.state.viewer
    return viewer


def _given_form(request: Request) -> Mapping[str, str]:
    form: Mapping[str, str] = request.state.form
    return form


Signed = Annotated[Viewer, Depends(_viewer)]
"""An endpoint's parameter of this type receives the viewer."""
Form = Annotated[Mapping[str, str], Depends(_given_form)]
"""An endpoint's parameter of this type receives the fields of a POST."""
