"""Every request's way: read, noted, checked, struck by a fault or not, served, answered."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.simulator.control import CONTROL_ROUTES
from app.simulator.endpoints import ROUTES, Asked, Handler, Reply, page_number
from app.simulator.journal import dump
from app.simulator.refusal import Refused, error_body
from app.simulator.requests import Request
from app.simulator.streaming import Streams
from app.simulator.switches import Fault
from app.simulator.world import World

BODY_BYTES_MAX = 32 * 1024 * 1024
BETA = "managed-agents-2026-04-01"

_TRANSPORT = "simulator.transport"
_SECRET_HEADERS = frozenset({"authorization", "x-api-key", "cookie"})
_BETA_NAME = re.compile(r"[a-z0-9-]+-\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True)
class Backend:
    """What requests are served from: a world, the clock that tells it the time, and the open streams."""

    world: World
    clock: Callable[[], float]
    streams: Streams = field(default_factory=Streams)


def application(backend: Backend) -> Starlette:
    """Return the ASGI application of a world."""
    routes = [
        Route(path, _Control(backend, handler), methods=[method]) for method, path, handler in CONTROL_ROUTES
    ]
    routes += [
        Route(path, _Endpoint(backend, name, handler), methods=[method])
        for method, path, name, handler in ROUTES
    ]
    routes.append(Route("/{path:path}", _Endpoint(backend, None, None)))
    return Starlette(routes=routes)


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with its transport in reach so that a fault can hang up."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_TRANSPORT: {"transport": self.transport}}


class _Endpoint:
    """What every request to the API goes through, whatever its endpoint."""

    def __init__(self, backend: Backend, name: str | None, handler: Handler | None) -> None:
        self._backend = backend
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        world = self._backend.world
        world.timeline.advance(self._backend.clock())
        http = HttpRequest(scope, receive)
        body = await _read(http)
        request = _record(world, http, self._name, body)
        fault: Fault | None = None
        try:
            self._check(world, http, request)
            if isinstance(body, _BadBody):
                raise Refused(body.status, body.message)
            asked = Asked(
                dict(http.path_params), http.query_params.multi_items(), body, self._backend.clock()
            )
            fault = request.fault = self._fault(world, request, asked)
            if fault is not None and not await _before(world, fault, request, scope, receive):
                return
            if self._handler is None:
                await self._stream(asked, request, scope, receive, send)
                return
            reply = self._handler(world, Asked(asked.params, asked.query, asked.body, self._backend.clock()))
            request.was_done = True
            if fault is not None and not await _after(world, fault, request, scope, receive):
                return
        except Refused as refused:
            await _refuse(request, refused, fault, send)
        else:
            request.status = reply.status
            await _answer(send, reply, _headers(request))
        finally:
            world.changed()

    def _check(self, world: World, http: HttpRequest, request: Request) -> None:
        if request.auth is None:
            raise Refused(401, "x-api-key or authorization header is required")
        if request.auth == "both":
            raise Refused(401, "x-api-key and authorization must not both be given")
        given = http.headers.get("x-api-key") or http.headers.get("authorization", "").removeprefix("Bearer ")
        if world.keys is not None and given not in world.keys:
            raise Refused(401, "invalid credentials")
        switches = world.switches
        betas = [
            name.strip()
            for name in ",".join(http.headers.getlist("anthropic-beta")).split(",")
            if name.strip()
        ]
        unknown = [name for name in betas if not _BETA_NAME.fullmatch(name)]
        if unknown:
            raise Refused(400, f"Unexpected value(s) {', '.join(unknown)} for the anthropic-beta header")
        if switches.require_beta and BETA not in betas:
            raise Refused(404, "Not found")
        if switches.require_version and not http.headers.get("anthropic-version"):
            raise Refused(400, "anthropic-version: header is required")
        if self._name is None:
            raise Refused(404, f"no such path: {request.path}")

    def _fault(self, world: World, request: Request, asked: Asked) -> Fault | None:
        sent = request.body.get("events") if isinstance(request.body, dict) else None
        types = frozenset(str(each.get("type")) for each in sent or [] if isinstance(each, dict))
        page = page_number(asked) if self._name in ("list", "thread_list") else 0
        return world.faults.take(self._name or "", request.session_id, page, types)

    async def _stream(
        self, asked: Asked, request: Request, scope: Scope, receive: Receive, send: Send
    ) -> None:
        request.status, request.was_done = 200, True
        try:
            await self._backend.streams.serve(
                self._backend.world,
                asked,
                fault=request.fault,
                headers=_headers(request),
                send=send,
                receive=receive,
                hang_up=lambda: _hang_up(scope),
            )
        except Refused:
            request.was_done = False
            raise


class _Control:
    """A request to the control surface, which needs no credentials: the server listens on loopback only."""

    def __init__(self, backend: Backend, handler: Handler) -> None:
        self._backend = backend
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        world = self._backend.world
        http = HttpRequest(scope, receive)
        body = await _read(http)
        world.timeline.advance(self._backend.clock())
        asked = Asked(dict(http.path_params), http.query_params.multi_items(), body, self._backend.clock())
        try:
            if isinstance(body, _BadBody):
                raise Refused(body.status, body.message)
            reply = self._handler(world, asked)
        except Refused as refused:
            reply = Reply(refused.status, dump(error_body(refused, "")))
        await _answer(send, reply, [])
        world.changed()


class _BadBody:
    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message


async def _read(http: HttpRequest) -> Any:
    """Return the JSON of a request, None when it has no body, or what is wrong with it."""
    if http.method in ("GET", "DELETE"):
        return None
    taken = bytearray()
    async for chunk in http.stream():
        taken += chunk
        if len(taken) > BODY_BYTES_MAX:
            return _BadBody(413, f"the body is over {BODY_BYTES_MAX} bytes")
    if not taken:
        return None
    try:
        return json.loads(taken)
    except ValueError as error:
        return _BadBody(400, f"the body is no JSON: {error}")


def _record(world: World, http: HttpRequest, name: str | None, body: Any) -> Request:
    has_key, has_bearer = "x-api-key" in http.headers, "authorization" in http.headers
    auth = {(True, True): "both", (True, False): "x-api-key", (False, True): "bearer"}.get(
        (has_key, has_bearer)
    )
    request = Request(
        at_us=world.timeline.now_us,
        method=http.method,
        path=http.url.path,
        query=http.query_params.multi_items(),
        headers={key: value for key, value in http.headers.items() if key not in _SECRET_HEADERS},
        body=None if isinstance(body, _BadBody) else body,
        endpoint=name,
        session_id=http.path_params.get("session_id"),
        auth=auth,
        request_id=world.ids.next("req"),
    )
    world.requests.append(request)
    return request


async def _before(world: World, fault: Fault, request: Request, scope: Scope, receive: Receive) -> bool:
    """Do what a fault does before the work, and say whether the work is to be done."""
    match fault.kind:
        case "refuse":
            raise _refusal(fault, request)
        case "drop":
            world.changed()
            _hang_up(scope)
            await _gone(receive)
            return False
        case "delay":
            await asyncio.sleep(fault.delay_s)
    return True


async def _after(world: World, fault: Fault, request: Request, scope: Scope, receive: Receive) -> bool:
    """Do what a fault does after the work, and say whether it is to be answered."""
    match fault.kind:
        case "refuse_after":
            raise _refusal(fault, request)
        case "drop_after":
            world.changed()
            _hang_up(scope)
            await _gone(receive)
            return False
        case "delay_after":
            world.changed()
            await asyncio.sleep(fault.delay_s)
    return True


def _refusal(fault: Fault, request: Request) -> Refused:
    message = fault.message or f"simulated failure {fault.status}"
    sent = request.body.get("events") if isinstance(request.body, dict) else None
    first = sent[0] if isinstance(sent, list) and sent and isinstance(sent[0], dict) else {}
    named = first.get("custom_tool_use_id") or first.get("tool_use_id") or ""
    return Refused(
        fault.status, message.replace("{id}", str(named)), error_type=fault.error_type, code=fault.code
    )


async def _refuse(request: Request, refused: Refused, fault: Fault | None, send: Send) -> None:
    request.status = refused.status
    headers = _headers(request)
    if fault is not None:
        headers += [(key.lower().encode(), value.encode()) for key, value in fault.headers.items()]
        if fault.retry_after_s is not None:
            headers.append((b"retry-after", str(fault.retry_after_s).encode()))
    await _answer(send, Reply(refused.status, dump(error_body(refused, request.request_id))), headers)


async def _answer(send: Send, reply: Reply, headers: list[tuple[bytes, bytes]]) -> None:
    kind = [(b"content-type", b"application/json")] if reply.body else []
    length = [(b"content-length", str(len(reply.body)).encode())]
    await send({"type": "http.response.start", "status": reply.status, "headers": [*kind, *length, *headers]})
    await send({"type": "http.response.body", "body": reply.body})


def _headers(request: Request) -> list[tuple[bytes, bytes]]:
    return [(b"request-id", request.request_id.encode())]


def _hang_up(scope: Scope) -> None:
    scope["extensions"][_TRANSPORT]["transport"].close()


async def _gone(receive: Receive) -> None:
    """Wait until the connection is down, so that the server has nobody left to answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
