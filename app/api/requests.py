"""What surrounds every request: its id, the answer when something breaks, and one log line."""

from __future__ import annotations

import re
import secrets
import time
from typing import Final

import structlog
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import problems
from app.api.problems import BODY_BYTES_MAX
from app.logs import logger
from app.store.database import is_unavailable

HEADER: Final = "x-request-id"
_ACCEPTABLE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

log = logger(__name__)


class Requests:
    """Gives each request an id (the client's own, if it sent a plain one) and contains what breaks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                headers.update(scope["state"].get("limit_headers", {}))
            await send(message)

        started = time.perf_counter()
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, _limited(scope, receive), send_named)
            except Exception as error:
                is_away = is_unavailable(error)
                if is_away:
                    log.warning("database_unavailable", error=type(error).__name__)
                else:
                    log.exception("request_failed", method=scope["method"], route=_route(scope))
                if status:
                    raise  # the answer has begun; only closing the connection tells the client
                problem = problems.unavailable() if is_away else problems.failed()
                await problems.respond(problem, request_id)(scope, receive, send_named)
            log.debug(
                "request",
                method=scope["method"],
                route=_route(scope),
                status=status,
                duration_s=round(time.perf_counter() - started, 4),
            )


def _limited(scope: Scope, receive: Receive) -> Receive:
    """Refuse a body over the limit as soon as its length is known: declared, or counted."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    size = 0

    async def limited() -> Message:
        nonlocal size
        if declared.isdigit() and int(declared[:20]) > BODY_BYTES_MAX:
            raise HTTPException(413)
        message = await receive()
        size += len(message.get("body", b""))
        if size > BODY_BYTES_MAX:
            raise HTTPException(413)
        return message

    return limited


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == HEADER.encode():
            text: str = value.decode("latin-1")
            if _ACCEPTABLE.fullmatch(text):
                return text
    return "req_" + secrets.token_hex(12)


def _route(scope: Scope) -> str | None:
    # The template, not the path: paths hold ids.
    return getattr(scope.get("route"), "path", None)
