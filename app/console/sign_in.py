"""Signing in and out: with a key that may confirm, or once with a link.

A link's page shows a button and changes nothing; so a mail scanner or a preview cannot use it up.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import Annotated, Final
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from app.api.access import OPERATOR, Caller
from app.api.access import caller_of as owner_of
from app.api.bridge import Bridge, Given
from app.api.limits import Buckets, address_of
from app.api.problems import Problem
from app.console.access import (
    PUBLIC,
    ConsoleRoute,
    Form,
    Signed,
    caller_of,
    operator_proof,
    set_cookie,
    shown_to,
    viewer_of,
)
from app.console.pages import STATIC, page, static, tagged
from app.logs import logger
from app.store import passes
from app.store.passes import TOKEN_CHARS_MAX

FAILURES_PER_MIN: Final = 10
"""Sign-ins of one address that may fail."""
_NEXT: Final = re.compile(r"/console(?:/[A-Za-z0-9_.~%/-]*)?")

log = logger(__name__)
router = APIRouter(route_class=ConsoleRoute)


async def sign_in_link(bridge: Bridge, base_url: str) -> str:
    """Return an address that signs the operator in, once, within `passes.LIFETIME_S["link"]`."""
    async with bridge.engine.begin() as connection:
        token = await passes.issue(
            connection, "link", OPERATOR.tenant, OPERATOR.id, proof=operator_proof(bridge)
        )
    return f"{base_url}/console/sign-in?link={quote(token)}"


@router.get("/console/sign-in", **PUBLIC)
async def sign_in_page(
    request: Request,
    bridge: Given,
    link: Annotated[str | None, Query(max_length=TOKEN_CHARS_MAX)] = None,
    next: Annotated[str, Query(max_length=2000)] = "/console",  # noqa: A002 - the address's own word
) -> Response:
    where = _next(next)
    # A browser holds the cookie back where another site led here, but not when our own page asks again.
    if link is None and await viewer_of(request) is not None:
        return RedirectResponse(where, status_code=303)
    return page(
        request, "sign_in.html", link=link, next=where, refusal=None, is_embedded=bridge.settings.is_embedded
    )


@router.post("/console/sign-in", **PUBLIC)
async def sign_in(request: Request, bridge: Given, form: Form) -> Response:
    failures: Buckets = request.app.state.sign_ins
    address = address_of(request)
    now = asyncio.get_running_loop().time()
    where = _next(form.get("next", ""))
    shown = {"link": None, "next": where, "is_embedded": bridge.settings.is_embedded}
    if (wait_s := failures.wait_s(address, FAILURES_PER_MIN, now)) > 0:
        refusal = f"Too many failed sign-ins. Try again in {math.ceil(wait_s)} seconds."
        response = page(request, "sign_in.html", status=429, refusal=refusal, **shown)
        response.headers["retry-after"] = str(math.ceil(wait_s))
        return response
    caller, refusal = await _who(bridge, form)
    if caller is None:
        failures.take(address, FAILURES_PER_MIN, now)
        log.warning("sign_in_failed", address=address)
        return page(request, "sign_in.html", status=401, refusal=refusal, **shown)
    proof = operator_proof(bridge) if caller.is_operator else None
    async with bridge.engine.begin() as connection:
        token = await passes.issue(connection, "session", caller.tenant, caller.id, proof=proof)
    log.info("signed_in", tenant=caller.tenant, key=caller.id)
    response = RedirectResponse(where, status_code=303)
    set_cookie(response, bridge.settings, token)
    return response


@router.post("/console/sign-out", **shown_to("confirm"))
async def sign_out(bridge: Given, viewer: Signed) -> Response:
    async with bridge.engine.begin() as connection:
        await passes.close(connection, viewer.token)
    response = RedirectResponse("/console/sign-in", status_code=303)
    set_cookie(response, bridge.settings, None)
    return response


@router.get("/console/static/{name}", **PUBLIC)
async def static_file(request: Request, name: str) -> Response:
    if name not in STATIC:
        return page(
            request, "problem.html", status=404, viewer=None, title="Not found", detail="No such file."
        )
    response = tagged(request, static(name), f"{STATIC[name]}; charset=utf-8")
    response.headers["cache-control"] = "no-cache"
    return response


async def _who(bridge: Bridge, form: Form) -> tuple[Caller | None, str]:
    """Return who signs in, or why nobody does."""
    if link := form.get("link", ""):
        async with bridge.engine.begin() as connection:
            found = await passes.spend(connection, link[: TOKEN_CHARS_MAX + 1])
        caller = None if found is None else caller_of(bridge, found)
        return caller, "This link was used before or is too old. Sign in with a key."
    owner = await owner_of(bridge, form.get("key", "").strip())
    if isinstance(owner, Problem):
        is_expired = owner.code == "key_expired"
        return None, "This key has expired." if is_expired else "This key is unknown or revoked."
    if "confirm" not in owner.scopes:
        return None, "This key lacks the scope confirm, which the console needs."
    return owner, ""


def _next(where: str) -> str:
    return where if _NEXT.fullmatch(where) else "/console"
