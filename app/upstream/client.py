"""The Managed Agents API as the runner uses it: retrieve, list, send, stream."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final, Literal, cast

import aiohttp

from app.core.events import AnyEvent, Malformed, parse, seconds
from app.core.protocol import Failure, SessionFacts
from app.core.sightings import Sighted
from app.upstream.exchange import Answer, Exchange, Query, segment
from app.upstream.failures import Failures, UpstreamError
from app.upstream.headers import Credential, request_headers
from app.upstream.pages import UnreadablePageError, read_page
from app.upstream.sse import FRAME_BYTES_MAX, Decoder
from app.upstream.stream import EventStream, Tap
from app.upstream.transport import Timeouts

PAGE_LIMIT: Final = 1000
PAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""A longer page is asked for again with a tenth of its entries, down to one."""
PAGES_MAX: Final = 10_000
PAGES_EMPTY_MAX: Final = 20
"""More empty pages in a row, each with a cursor, go nowhere."""
SEND_BYTES_MAX: Final = 32_000_000
"""Upstream refuses longer requests; they are not sent."""
REPLY_BYTES_MAX: Final = 4 * 1024 * 1024
"""A longer reply to a send is not read to its end."""
OBJECT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Longer session and environment objects count as unreadable."""
SESSIONS_LIMIT: Final = 100
SESSION_PAGES_MAX: Final = 20
"""The list is walked so far; older sessions that move tell of it by webhook, or by their clients."""
REDACTED_CHARS_MIN: Final = 8
"""Shorter values of pass-through headers are no secrets, and striking them out would garble messages."""


class UpstreamClient:
    """Talks to one upstream with one credential. Nothing is ever tried twice behind the caller's back.

    Args:
        base_url: scheme, host and perhaps a path; no credentials, query or fragment.
        streams: the session that holds event streams and nothing else; `open_session(…, for_streams=True)`.
        requests: the session for all other requests; `open_session(…)`. Both belong to the caller, who may
            share them among clients.
        sends: one for sends alone, so that they never wait behind long reads; by default `requests`.
        extra_headers: pass-through headers, sent with every request.
        clock: seconds since 1970, for dates in `Retry-After`.

    Attributes:
        base_url: as given.
        entries_skipped: how many entries of history pages were no events.

    Raises:
        ValueError: `base_url` or a header is unusable, or a session takes its settings from the environment.
    """

    def __init__(
        self,
        base_url: str,
        credential: Credential,
        *,
        streams: aiohttp.ClientSession,
        requests: aiohttp.ClientSession,
        sends: aiohttp.ClientSession | None = None,
        extra_headers: Mapping[str, str] | None = None,
        timeouts: Timeouts | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        page_bytes_max: int = PAGE_BYTES_MAX,
        clock: Callable[[], float] = time.time,
    ) -> None:
        extra = dict(extra_headers or {})
        hidden = [value for value in extra.values() if len(value) >= REDACTED_CHARS_MIN]
        self.base_url = base_url
        self.entries_skipped = 0
        self._timeouts = timeouts or Timeouts()
        self._frame_bytes_max = frame_bytes_max
        self._page_bytes_max = page_bytes_max
        self._failures = Failures((credential.secret, *hidden), clock)
        self._exchange, self._sends = (
            Exchange(
                base_url,
                request_headers(credential, extra),
                streams=streams,
                requests=pool,
                timeouts=self._timeouts,
                failures=self._failures,
            )
            for pool in (requests, sends or requests)
        )

    async def retrieve(self, session_id: str) -> SessionFacts:
        """Read the session object, and from its environment where built-in calls run.

        An environment that cannot be read, or is of an unknown type, is None.

        Raises:
            UpstreamError: the session could not be read.
        """
        session = await self._get_object(f"/v1/sessions/{segment(session_id)}")
        agent = session.get("agent")
        tools = agent.get("tools") if isinstance(agent, dict) else None
        created_at = session.get("created_at")
        return SessionFacts(
            is_over=session.get("status") == "terminated" or session.get("archived_at") is not None,
            agent_tools=tools if isinstance(tools, list) else None,
            environment=await self._environment(session.get("environment_id")),
            created_at=seconds(created_at) if isinstance(created_at, str) else None,
        )

    async def sighted(self, session_id: str) -> Sighted:
        """What the session object says: who it is, and how it stands.

        Raises:
            UpstreamError: it could not be read, or is no session.
        """
        found = _sighted(await self._get_object(f"/v1/sessions/{segment(session_id)}"))
        if found is None:
            raise UpstreamError(self._failures.of_reply(200, "the answer is not a session"))
        return found

    async def sessions(self) -> AsyncGenerator[list[Sighted], None]:
        """List the sessions that are not archived, newest first, at most `SESSION_PAGES_MAX` pages.

        Raises:
            UpstreamError: a page could not be read.
        """
        cursor: str | None = None
        for _ in range(SESSION_PAGES_MAX):
            answer = await self._get_page("/v1/sessions", [("order", "desc")], cursor, SESSIONS_LIMIT)
            try:
                page = read_page(self._body_of(answer))
            except UnreadablePageError as error:
                raise UpstreamError(self._failures.of_reply(answer.status, str(error))) from None
            found = (_sighted(_object(entry)) for entry in page.entries)
            yield [one for one in found if one is not None]
            if page.next_page is None or page.next_page == cursor:
                return
            cursor = page.next_page

    async def pages(
        self, session_id: str, since: float | None, types: Sequence[str] = ()
    ) -> AsyncGenerator[list[AnyEvent], None]:
        """Walk the history, oldest first, one page at a time, to its end.

        `since` is in seconds since 1970 and inclusive; None begins at the first event. `types` limits the
        walk to these event types. Entries that are no events are skipped and counted.

        Raises:
            UpstreamError: a page could not be read, or the walk goes nowhere (`is_paging_loop`). What was
                yielded before stands; that the history ended there does not follow.
        """
        path = f"/v1/sessions/{segment(session_id)}/events"
        query = [("order", "asc"), *(("types[]", type_) for type_ in types)]
        if since is not None:
            moment = datetime.fromtimestamp(since, UTC).isoformat(timespec="microseconds")
            query.append(("created_at[gte]", moment.replace("+00:00", "Z")))
        cursors: set[str] = set()
        cursor: str | None = None
        ids: list[str] = []
        empty, limit = 0, PAGE_LIMIT
        for _ in range(PAGES_MAX):
            answer = await self._get_page(path, query, cursor, limit)
            while answer.is_too_long and limit > 1:
                limit //= 10
                answer = await self._get_page(path, query, cursor, limit)
            try:
                page = read_page(self._body_of(answer))
            except UnreadablePageError as error:
                raise UpstreamError(self._failures.of_reply(answer.status, str(error))) from None
            events = self._events_of(page.entries)
            last_ids, ids = ids, [event.id for event in events if event.id]
            if ids and ids == last_ids:
                raise _paging_loop("the same page was given twice")
            if events:
                yield events
            cursor = page.next_page
            if cursor is None:
                return
            if cursor in cursors:
                raise _paging_loop("the same cursor was given twice")
            cursors.add(cursor)
            empty = 0 if page.entries else empty + 1
            if empty > PAGES_EMPTY_MAX:
                raise _paging_loop(f"more than {PAGES_EMPTY_MAX} empty pages in a row")
        raise _paging_loop(f"more than {PAGES_MAX} pages")

    async def send(self, session_id: str, event: bytes) -> bytes | None:
        """Send one client event, given as JSON; its bytes travel unchanged. One request, whatever happens.

        Every 2xx means accepted, with whatever body: it is returned, or None if it could not be read whole.

        Raises:
            UpstreamError: `failure.reach` says whether upstream can have accepted the event.
        """
        body = b'{"events":[' + event + b"]}"
        if len(body) > SEND_BYTES_MAX:
            message = f"the request is over {SEND_BYTES_MAX} bytes and was not sent; send less"
            raise UpstreamError(Failure("refused", status=413, message=message))
        answer = await self._sends.request(
            "POST",
            f"/v1/sessions/{segment(session_id)}/events",
            total_s=self._timeouts.send_s,
            bytes_max=REPLY_BYTES_MAX,
            data=body,
        )
        if not answer.is_ok:
            raise UpstreamError(self._failures.of_answer(answer.status, answer.headers, answer.body))
        return answer.body if answer.complaint is None else None

    @asynccontextmanager
    async def stream(
        self, session_id: str, previews: bool, tap: Tap | None = None
    ) -> AsyncIterator[EventStream]:
        """Open the session's event stream; it is established on entry and closed on exit.

        Only events after the opening come. `previews` asks for agent messages while they are written.
        `tap` sees every event as it came.

        Raises:
            UpstreamError: on entry. The stream was refused or could not be opened.
        """
        response = await self._exchange.open(
            f"/v1/sessions/{segment(session_id)}/events/stream",
            [("event_deltas[]", "agent.message")] if previews else [],
        )
        try:
            decoder = Decoder(self._frame_bytes_max)
            yield EventStream(response, self._failures, self._timeouts, decoder, tap)
        finally:
            response.close()

    async def _get_page(self, path: str, query: Query, cursor: str | None, limit: int) -> Answer:
        page = [] if cursor is None else [("page", cursor)]
        return await self._exchange.request(
            "GET",
            path,
            query=[*query, ("limit", str(limit)), *page],
            total_s=self._timeouts.page_s,
            bytes_max=self._page_bytes_max,
        )

    def _events_of(self, entries: list[bytes]) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        for entry in entries:
            event = parse(entry)
            if isinstance(event, Malformed):
                self.entries_skipped += 1
            else:
                events.append(event)
        return events

    async def _environment(self, environment_id: object) -> Literal["cloud", "self_hosted"] | None:
        if not isinstance(environment_id, str):
            return None
        try:
            environment = await self._get_object(f"/v1/environments/{segment(environment_id)}")
        except (UpstreamError, ValueError):
            return None
        config = environment.get("config")
        kind = config.get("type") if isinstance(config, dict) else None
        return cast("Literal['cloud', 'self_hosted']", kind) if kind in ("cloud", "self_hosted") else None

    async def _get_object(self, path: str) -> dict[str, Any]:
        answer = await self._exchange.request(
            "GET", path, total_s=self._timeouts.retrieve_s, bytes_max=OBJECT_BYTES_MAX
        )
        try:
            value = json.loads(self._body_of(answer).decode("utf-8", "replace"))
        except (RecursionError, ValueError):
            value = None
        if not isinstance(value, dict):
            raise UpstreamError(self._failures.of_reply(answer.status, "the answer is not a JSON object"))
        return value

    def _body_of(self, answer: Answer) -> bytes:
        """The whole body of a 2xx answer.

        Raises:
            UpstreamError: it is another answer, or not whole.
        """
        if not answer.is_ok:
            raise UpstreamError(self._failures.of_answer(answer.status, answer.headers, answer.body))
        if answer.complaint is not None:
            raise UpstreamError(answer.complaint)
        return answer.body


def _paging_loop(message: str) -> UpstreamError:
    return UpstreamError(Failure("refused", message=message, is_paging_loop=True))


def _object(entry: bytes) -> object:
    try:
        return json.loads(entry.decode("utf-8", "replace"))
    except (RecursionError, ValueError):
        return None


def _sighted(value: object) -> Sighted | None:
    """Read a session object; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("id"), str):
        return None
    agent = value.get("agent")
    updated_at = _text(value.get("updated_at"))
    return Sighted(
        session_id=value["id"],
        status=_text(value.get("status")) or "",
        agent_id=_text(agent.get("id")) if isinstance(agent, dict) else None,
        environment_id=_text(value.get("environment_id")),
        is_archived=value.get("archived_at") is not None,
        updated_at=updated_at,
        updated_s=None if updated_at is None else seconds(updated_at),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
