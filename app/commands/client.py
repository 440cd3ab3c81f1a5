"""Asks the service's API as one caller; what goes wrong becomes one sentence and an exit code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Final, NoReturn

import httpx
import msgspec
import typer

from app.commands.printing import Page, note

REQUEST_LIMIT_S: Final = 30.0
SLOW_LIMIT_S: Final = 630.0
"""For requests that wait for somebody else: the test of a tool may take its whole `timeout_s`."""
SILENCE_LIMIT_S: Final = 40.0
"""A stream says something every 15 s; one that is silent for so long is broken."""
PAGE_ITEMS: Final = 200
"""The most that the API gives at once."""
LIST_ITEMS_MAX: Final = 10_000
"""The most that a list prints."""

Params = Mapping[str, str]


class Exit(IntEnum):
    """How a command ends; `docs/command-line.md` says the same. 2 is wrong usage."""

    FAILED = 1
    USAGE = 2
    UNREACHED = 3
    NOT_FOUND = 4
    FORBIDDEN = 5
    INTERRUPTED = 130


_EXIT_OF_STATUS: Final = {
    401: Exit.FORBIDDEN,
    403: Exit.FORBIDDEN,
    404: Exit.NOT_FOUND,
    429: Exit.UNREACHED,
    503: Exit.UNREACHED,
}


def stop(sentence: str, code: Exit = Exit.FAILED) -> NoReturn:
    """End the command with a sentence for people on standard error."""
    note(sentence)
    raise typer.Exit(code)


class Client:
    """The service at `url`, asked with `key`. Every method ends the command if there is no good answer."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url.rstrip("/")
        if not (key.isascii() and key.isprintable()):
            stop("The key holds characters that no header may carry; copy it again.", Exit.USAGE)
        self._headers = {"authorization": f"Bearer {key}"}

    def get(self, path: str, params: Params | None = None) -> bytes:
        """Return the JSON of an answer."""
        return self.send("GET", path, params=params)

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Params | None = None,
        limit_s: float = REQUEST_LIMIT_S,
    ) -> bytes:
        """Make a request and return the JSON of its answer; `body` None sends none."""
        try:
            content = None if body is None else msgspec.json.encode(body)
        except UnicodeEncodeError:
            stop("An argument holds bytes that are no UTF-8; write it again.", Exit.USAGE)
        headers = self._headers | ({} if body is None else {"content-type": "application/json"})
        try:
            answer = httpx.request(
                method,
                self._url + path,
                content=content,
                headers=headers,
                params=params,
                timeout=limit_s,
                trust_env=False,  # the key is for the service alone, and for no proxy
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self.unreached(error)
        self._refuse(answer)
        return answer.content

    def pages(self, path: str, limit: int, params: Params | None = None) -> Page:
        """Return the first `limit` items of a list, page by page."""
        found = Page([], None)
        asked = dict(params or {})
        while True:
            asked["limit"] = str(min(PAGE_ITEMS, limit - len(found.data)))
            page = msgspec.json.decode(self.get(path, asked), type=Page)
            found = Page(found.data + page.data, page.next_cursor)
            if page.next_cursor is None or len(found.data) >= limit:
                return found
            asked["cursor"] = page.next_cursor

    @contextmanager
    def stream(self, path: str, headers: Mapping[str, str]) -> Iterator[Iterator[bytes]]:
        """Lend the bytes of a stream of events.

        Raises:
            httpx.TransportError: it cannot be opened, or was cut; also for a service that is overloaded.
        """
        limits = httpx.Timeout(REQUEST_LIMIT_S, read=SILENCE_LIMIT_S)
        asked = {"accept": "text/event-stream", **self._headers, **headers}
        with httpx.stream("GET", self._url + path, headers=asked, timeout=limits, trust_env=False) as answer:
            if answer.is_server_error:
                raise httpx.ReadError(f"status {answer.status_code}")
            if not answer.is_success:
                answer.read()
                self._refuse(answer)
            yield answer.iter_bytes()

    def unreached(self, error: Exception) -> NoReturn:
        """End the command because the service does not answer."""
        reason = str(error) or type(error).__name__
        stop(
            f"No answer from {self._url}: {reason}. Does `bascule serve` run there? BASCULE_URL, or --url,"
            " names another address.",
            Exit.UNREACHED,
        )

    def _refuse(self, answer: httpx.Response) -> None:
        try:
            body = answer.json()
        except ValueError:
            body = None
        if answer.is_success and body is not None:
            return
        if not isinstance(body, dict) or "code" not in body:
            stop(
                f"{self._url} answered {answer.status_code}, and not as the service does: BASCULE_URL, or"
                " --url, must name the service.",
                Exit.UNREACHED,
            )
        lines = [f"{body['code']}: {body.get('detail')}"]
        lines += [f"  {one.get('field')}: {one.get('message')}" for one in body.get("errors", ())]
        lines += [f"  upstream says: {body['message']}"] if body.get("message") else []
        stop("\n".join(lines), _EXIT_OF_STATUS.get(answer.status_code, Exit.FAILED))
