"""Polls: an unchanged answer costs a 304, and a poll may wait for the change.

The entity tag is a digest of the answer's bytes. A poll that waits holds no database connection: it sleeps
until a wake-up of its session (`app.api.previews` sees to those of previews), or until the clock says to look
again. Polls that wait for the same share their looks.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from app.api.access import Caller, GuardedRoute, Handler, requires
from app.api.bridge import Bridge
from app.api.problems import invalid
from app.api.sharing import Shared
from app.store.keys import Scope
from app.store.wakeups import session_key

WAIT_S_MAX: Final = 60
LOOK_EVERY_S: Final = 1.0
"""How often a poll that waits looks by the clock, where no wake-ups work or none comes for what it wants."""
BACKSTOP_S: Final = 60.0
"""How often it does where wake-ups work: that is proven every 20 s, and who was not reached is woken then."""
AGE: Final = "older_than_s"
"""A filter by which the clock alone changes an answer."""
PAUSE_S: Final = 0.1
"""A wake-up is followed by others at once; one look serves them all."""
TAG_CHARS: Final = 32
NOTHING: Final = b'{"data":[],'
"""How a list begins that holds nothing."""
POLLED: Final = "x-polled"
"""Marks a route; the document does not show it."""


def polls(scope: Scope, *, ageing: str | None = None) -> dict[str, Any]:
    """Return the arguments of a GET route of `PolledRoute` that takes keys with this scope.

    `ageing` names a number of the answer that grows by itself and is no change.
    """
    extra = requires(scope)["openapi_extra"]
    wait = {
        "name": "wait_s",
        "in": "query",
        "description": "Wait so long for an answer other than that of `if-none-match`, or for a list that"
        " holds something.",
        "schema": {"type": "number", "minimum": 0, "maximum": WAIT_S_MAX, "default": 0},
    }
    tag = {
        "name": "if-none-match",
        "in": "header",
        "description": "The `etag` of an earlier answer.",
        "schema": {"type": "string"},
    }
    return {
        "openapi_extra": {
            **extra,
            POLLED: ageing or "",
            "parameters": [wait, tag],
            "responses": {"304": {"description": "Nothing has changed"}},
        }
    }


class PolledRoute(GuardedRoute):
    """A guarded route whose answers have entity tags and can be waited for, where it was made by `polls`."""

    def answering(self, handler: Handler) -> Handler:
        extra = self.openapi_extra or {}
        if POLLED not in extra:
            return handler
        ageing = re.compile(rb'"%s":[0-9.e+-]+' % extra[POLLED].encode())

        async def polled(request: Request) -> Response:
            deadline = asyncio.get_running_loop().time() + _wait_s(request)
            bridge: Bridge = request.app.state.bridge
            known = request.headers.get("if-none-match")
            caller: Caller = request.state.caller
            session_id = _session_id(request)
            ages = AGE in request.query_params
            key = session_key(caller.tenant, session_id)
            looks: Looks = request.app.state.looks
            # Listening before the first look: what comes after that look is heard.
            with bridge.wakeups.listen(key) as signal:
                response = await handler(request)
                while not isinstance(response, StreamingResponse):
                    tag = _tag(ageing.sub(b"", bytes(response.body)))
                    response.headers["etag"] = tag
                    response.headers["cache-control"] = "no-cache"
                    is_same = known is not None and tag in _tags(known)
                    is_waited_for = is_same or (known is None and bytes(response.body).startswith(NOTHING))
                    left_s = deadline - asyncio.get_running_loop().time()
                    if not is_waited_for or left_s <= 0 or bridge.stopping.is_set():
                        return Response(status_code=304, headers=_kept(response)) if is_same else response
                    if await woken(
                        signal.wait(min(LOOK_EVERY_S if ages else look_s(bridge, session_id), left_s)),
                        bridge.stopping,
                    ):
                        await asyncio.sleep(PAUSE_S)
                    signal.take()
                    # Another one's answer is as good as one's own where the same key asks for the same.
                    same = (caller.tenant, caller.id, str(request.url))
                    shared = await looks.get(same, partial(handler, request))
                    response = Response(bytes(shared.body), shared.status_code, dict(shared.headers))
                return response

        return polled


async def woken(waiting: Coroutine[Any, Any, bool], stopping: asyncio.Event) -> bool:
    """Wait for a wake-up, its time, or the end of the service; return whether it was a wake-up."""
    tasks = [asyncio.create_task(waiting), asyncio.create_task(stopping.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done() and tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Looks = Shared[tuple[str, str, str], Response]
"""The looks of the polls of one replica, by tenant, key and address."""


def look_s(bridge: Bridge, session_id: str) -> float:
    """How often whoever waits for a session looks without a wake-up; an empty id means a whole tenant's."""
    return BACKSTOP_S if session_id and bridge.wakeups.works else LOOK_EVERY_S


def _session_id(request: Request) -> str:
    """What wakes the poll. No wake-up is for a whole tenant's sessions: those are looked at by the clock."""
    return request.path_params.get("session_id") or request.query_params.get("session", "")


def _wait_s(request: Request) -> float:
    text = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= WAIT_S_MAX:
        raise invalid("query.wait_s", f"must be a number from 0 to {WAIT_S_MAX}")
    return wait_s


def _tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:TAG_CHARS]}"'


def _tags(header: str) -> list[str]:
    return [tag.strip().removeprefix("W/") for tag in header.split(",")]


def _kept(response: Response) -> dict[str, str]:
    return {name: response.headers[name] for name in ("etag", "cache-control")}
