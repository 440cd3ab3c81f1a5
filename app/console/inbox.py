"""The inbox: what waits for a person, oldest first, and the decision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from app.api.bridge import Bridge, Given
from app.api.confirmations import REFUSALS, cleaned
from app.api.lists import EventId, SessionId
from app.api.problems import CODES, NOT_FOUND_DETAILS, Problem, not_found
from app.api.rules import too_many
from app.console import cards
from app.console.access import ConsoleRoute, Form, Signed, Viewer, shown_to
from app.console.pages import LIVE_HEADER, etag, page, unchanged
from app.console.text import INLINE_CHARS_MAX, PAGE_CHARS, read_input
from app.console.wording import DENY_REASONS
from app.store import calls, decisions, deliveries
from app.store.calls import CallView
from app.store.decisions import DENY_MESSAGE_CHARS_MAX, SHOWN_MS_MAX, Refused, Remember
from app.store.rules import TooManyRulesError

CARDS_MAX: Final = 100
"""So many of the oldest are shown; the page says when more wait."""
PAGE_MAX: Final = 1_000_000

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_NUMBER: Final = re.compile(r"[0-9]{1,12}")
_EDITED: Final = "allow_edited"
"""What the button of the edited input sends as the form's result."""
_LIKE: Final = "allow_like"
"""What the button sends that makes a rule as well."""
_SAME: Final = "same."
"""Before the number of an argument, from 0, that must be the same."""
_REMEMBERED_S: Final = {"3600": "an hour", "28800": "8 hours", "86400": "a day"}
"""How long such a rule may live, by the choice in the form."""

router = APIRouter(route_class=ConsoleRoute)


@router.get("/console", **shown_to("confirm"))
async def inbox(request: Request, bridge: Given, viewer: Signed) -> Response:
    async with bridge.engine.connect() as connection:
        marks = await calls.waiting_marks(connection, viewer.caller.tenant, limit=CARDS_MAX + 1)
        # By the marks alone: the inputs, which may be large, are read only when something changed.
        tag = etag(repr((marks, viewer.form_token)).encode())
        if (same := unchanged(request, tag)) is not None:
            return same
        found = await calls.waiting(connection, viewer.caller.tenant, after=0, limit=CARDS_MAX)
        shown = await cards.make(connection, viewer.caller.tenant, found.items)
    response = page(request, "inbox.html", viewer=viewer, cards=shown, has_more=found.has_more, **_CARD)
    response.headers["etag"] = tag
    return response


@router.get("/console/sessions/{session_id}/calls/{call_id}", **shown_to("confirm"))
async def call_page(
    request: Request,
    bridge: Given,
    viewer: Signed,
    session_id: SessionId,
    call_id: EventId,
    part: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 1,
) -> Response:
    return await _call_page(request, bridge, viewer, session_id, call_id, part=part)


@router.post("/console/decisions", **shown_to("confirm"))
async def decide(request: Request, bridge: Given, viewer: Signed, form: Form) -> Response:
    session_id, call_id = (str(cleaned(form.get(name, ""))) for name in ("session_id", "call_id"))
    tenant, decision = viewer.caller.tenant, _decision(form)
    try:
        async with bridge.engine.begin() as connection:
            if form.get("result") == _LIKE:
                found = await calls.get(connection, tenant, session_id, call_id)
                decision["remember"] = None if found is None else _remember(form, found)
            done = await decisions.decide(
                connection, tenant, session_id, call_id, by=viewer.caller.id, via="console", **decision
            )
    except TooManyRulesError as error:
        raise too_many() from error
    if isinstance(done, Refused) and done.code in NOT_FOUND_DETAILS:
        raise not_found(done.code)
    if not isinstance(done, Refused) and LIVE_HEADER not in request.headers:
        where = request.url_for("call_page", session_id=session_id, call_id=call_id).path
        return RedirectResponse(where, status_code=303)
    typed = form.get("edited_input") if form.get("result") == _EDITED else None
    return await _call_page(request, bridge, viewer, session_id, call_id, refused=done, typed=typed)


def _decision(form: Mapping[str, str]) -> dict[str, Any]:
    """Read what was decided, on which input, and after how long (absent without script)."""
    given = form.get("result")
    result: Literal["allow", "deny"] = "deny" if given == "deny" else "allow"
    message = str(cleaned(form.get("deny_message", ""))).strip()
    input_digest = form.get("input_digest", "")
    version = form.get("tool_version", "")
    is_bound = _DIGEST.fullmatch(input_digest) and _NUMBER.fullmatch(version)
    if given not in ("allow", "deny", _EDITED, _LIKE) or not is_bound:
        raise Problem("invalid_request", "The form names no decision, or not what it is about.")
    if len(message) > DENY_MESSAGE_CHARS_MAX:
        raise Problem(
            "invalid_request", f"The reason is over {DENY_MESSAGE_CHARS_MAX} characters; shorten it."
        )
    deny_message = message or None if result == "deny" else None
    edited_input = str(cleaned(form.get("edited_input", ""))) if given == _EDITED else None
    shown = form.get("shown_ms", "")
    shown_ms = min(int(shown), SHOWN_MS_MAX) if _NUMBER.fullmatch(shown) else None
    return {
        "result": result, "deny_message": deny_message, "input_digest": input_digest,
        "edited_input": edited_input, "shown_ms": shown_ms, "tool_version": int(version),
    }  # fmt: skip


def _remember(form: Mapping[str, str], call: CallView) -> Remember:
    """Read which arguments must be the same: their numbers are those in the input that the digest names."""
    names = [field.name for field in read_input(call.input).fields or ()]
    same = [name for place, name in enumerate(names) if f"{_SAME}{place}" in form]
    chosen = form.get("expires_in_s", "")
    if chosen not in _REMEMBERED_S:
        raise Problem("invalid_request", "The form does not say how long the rule shall live.")
    return Remember(tuple(same), float(chosen))


async def _call_page(
    request: Request,
    bridge: Bridge,
    viewer: Viewer,
    session_id: str,
    call_id: str,
    *,
    part: int = 1,
    refused: object = None,
    typed: str | None = None,
) -> Response:
    tenant = viewer.caller.tenant
    async with bridge.engine.connect() as connection:
        found = await calls.get(connection, tenant, session_id, call_id)
        if found is None:
            raise not_found("call_not_found")
        (card,) = await cards.make(connection, tenant, [found])
        attempts = await deliveries.of_call(connection, tenant, session_id, call_id)
    if part > card.input.pages:
        raise Problem("not_found", f"The input has {card.input.pages} parts.")
    notice = why = None
    if isinstance(refused, Refused):
        notice, why = REFUSALS[refused.code], refused.why
        if refused.code == "input_unfit" and why is not None:
            notice = "The edited input cannot run; correct it and allow again."
    return page(
        request,
        "call.html",
        status=CODES[refused.code][0] if isinstance(refused, Refused) else 200,
        viewer=viewer,
        card=card,
        part=part,
        attempts=attempts,
        notice=notice,
        why=why,
        typed=typed,
        **_CARD,
    )


_CARD: Final[Mapping[str, Any]] = {
    "deny_reasons": DENY_REASONS,
    "deny_chars_max": DENY_MESSAGE_CHARS_MAX,
    "inline_chars": INLINE_CHARS_MAX,
    "part_chars": PAGE_CHARS,
    "message_chars": cards.MESSAGE_CHARS_MAX,
    "remembered": _REMEMBERED_S,
}
"""What every card's template is given besides."""
