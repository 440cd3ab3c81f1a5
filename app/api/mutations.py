"""Mutations: each is one transaction, and under an `Idempotency-Key` its answer is committed with it.

A repeat gets the first answer again. What was refused before the transaction began was never decided, and is
judged anew; so is what the service failed at.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Annotated, Final, Self

from fastapi import Depends, Header, Request, Response
from sqlalchemy.ext.asyncio import AsyncConnection

from app.api.bridge import Bridge
from app.api.problems import Problem, respond
from app.logs import logger
from app.store import idempotency
from app.store.database import is_unavailable
from app.store.idempotency import Answer, InFlightError, Place
from app.store.secrets import UnreadableSecretError

KEY: Final = "idempotency-key"
REPLAYED: Final = "idempotency-replayed"
REPLAY_HEADERS: Final = {REPLAYED: "`true` on an answer that was given before; otherwise absent."}
KEY_CODES: Final = ("idempotency_in_flight", "idempotency_unreadable", "idempotency_key_reused")
RETRY_AFTER_S: Final = 1
_KEPT_HEADERS: Final = ("content-type", "location")
_FORM: Final = r'^([!#-\[\]-~]{1,255}|"[!#-\[\]-~]{1,255}")$'

log = logger(__name__)


class ReplayError(Exception):
    """The request was answered before; `response` is that answer."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


class Mutation:
    """What a request changes, in one transaction, and the answer that is kept for its key if it has one."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._place: Place | None = None
        self._request = ""
        self._stack = contextlib.AsyncExitStack()
        self._connection: AsyncConnection | None = None
        self._has_begun = self._is_kept = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    @property
    def is_keyed(self) -> bool:
        return self._place is not None

    def name(self, place: Place, request: str) -> None:
        """Keep the answer for this key; `request` is the digest that a repeat must have."""
        self._place, self._request = place, request

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Open the transaction. It commits when the block ends, under a key once the answer is known.

        Raises:
            ReplayError: the key has an answer; let it pass.
            Problem: the key is in use now, or was used for another request.
        """
        if self._place is None:
            async with self._bridge.engine.begin() as connection:
                yield connection
            return
        if self._connection is None:
            self._connection = await self._stack.enter_async_context(self._bridge.engine.begin())
            await self._claim(self._connection, self._place)
        async with self._connection.begin_nested():
            yield self._connection

    @contextlib.asynccontextmanager
    async def begin_step(self) -> AsyncIterator[AsyncConnection]:
        """As `begin`, but it commits when the block ends, so that others see what the request waits for.

        Whoever changes anything in it keeps an answer in it.
        """
        async with self._bridge.engine.begin() as connection:
            if self._place is not None:
                await self._claim(connection, self._place)
            yield connection

    async def keep(self, connection: AsyncConnection, response: Response) -> None:
        """Keep an answer in a step: that of a repeat, until `finish` has a later one."""
        assert self._place is not None, "only asked for under a key"
        headers = {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}
        answer = Answer(self._request, response.status_code, headers, bytes(response.body))
        await idempotency.keep(connection, self._bridge.secrets, self._place, answer)
        self._is_kept = True

    async def finish(self, response: Response) -> None:
        """Keep the answer, with the effect or in the place of what its step kept."""
        if self._place is None or not self._has_begun:
            return
        if self._connection is not None:
            await self.keep(self._connection, response)
            return
        try:
            async with self._bridge.engine.begin() as connection:
                if not self._is_kept:
                    await self._claim(connection, self._place)
                await self.keep(connection, response)
        except (Problem, ReplayError):
            pass  # it changed nothing, and another one with its key was faster
        except Exception as error:
            if not is_unavailable(error):
                raise
            log.warning("answer_not_kept", error=type(error).__name__)

    async def _claim(self, connection: AsyncConnection, place: Place) -> None:
        try:
            answer = await idempotency.claim(connection, self._bridge.secrets, place)
        except InFlightError:
            raise Problem(
                "idempotency_in_flight",
                "Another request with this Idempotency-Key is being answered; repeat this one after the"
                " time in retry-after to get its answer.",
                headers={"retry-after": str(RETRY_AFTER_S)},
            ) from None
        except UnreadableSecretError as error:
            log.warning("answer_unreadable", key_id=error.missing_key_id)
            raise Problem(
                "idempotency_unreadable",
                "This Idempotency-Key was answered before, and that answer was encrypted with a key that"
                " BASCULE_SECRET_KEY does not hold any more. What was asked for may be done: look, before you"
                " ask again under another key.",
            ) from error
        if answer is None:
            self._has_begun = True
            return
        if answer.request != self._request:
            raise Problem(
                "idempotency_key_reused",
                "This Idempotency-Key was used for a request with another method, address or body; use a new"
                " key for a new request, and repeat one unchanged.",
            )
        raise ReplayError(Response(answer.body, answer.status, {**answer.headers, REPLAYED: "true"}))


async def answered(request: Request, handler: Callable[[Request], Awaitable[Response]]) -> Response:
    """Return the answer of a mutation's route, the first one if the request is a repeat."""
    mutation = request.state.mutation = Mutation(request.app.state.bridge)
    async with mutation:
        try:
            response = await handler(request)
        except ReplayError as replay:
            return replay.response
        except Problem as problem:
            if not mutation.is_keyed or problem.status >= 500:
                raise
            response = respond(problem, request.state.request_id)
        await mutation.finish(response)
        return response


async def _mutation(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            pattern=_FORM,
            description="Makes the request safe to repeat: for a day another one with this key, by the same"
            " API key, gets the first answer, with `idempotency-replayed: true`. 1 to 255 visible ASCII"
            " characters without quotes or backslashes, such as a UUID, in double quotes or without.",
        ),
    ] = None,
) -> Mutation:
    mutation: Mutation = request.state.mutation
    if idempotency_key is not None:
        caller = request.state.caller
        place = Place(caller.tenant, caller.id, idempotency_key.strip('"'))
        mutation.name(place, _digest(request, await request.body()))
    return mutation


def _digest(request: Request, body: bytes) -> str:
    head = f"{request.method}\0{request.url.path}\0{request.url.query}\0".encode()
    return hashlib.sha256(head + body).hexdigest()


Mutating = Annotated[Mutation, Depends(_mutation)]
"""An endpoint's parameter of this type receives the mutation that its route makes."""
