"""What a failed request means: how far it got, what upstream said, and when to come back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from app.core.protocol import Failure

MESSAGE_CHARS_MAX: Final = 500

FAULTS: Final = (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError)
"""All that aiohttp raises when the network, TLS or the other side fails. Cancellation is not among it."""

_STATUS_OF_TYPE: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
_REDACTED: Final = "[redacted]"


class UpstreamError(Exception):
    """A request to upstream failed; `failure` says how. Neither it nor its causes hold a secret."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.reach}, status {failure.status}: {failure.message}")
        self.failure = failure


class CutBeforeAnswerError(aiohttp.ClientError):
    """The connection was lost between the request and the first byte of its answer."""


class Failures:
    """Read failures on behalf of one credential, so that no message repeats a secret.

    `secrets` are the texts to strike out; `clock` gives seconds since 1970, for dates in `Retry-After`.
    """

    def __init__(self, secrets: tuple[str, ...], clock: Callable[[], float]) -> None:
        self._secrets = tuple(sorted((text for text in secrets if text), key=len, reverse=True))
        self._clock = clock

    def of_answer(self, status: int, headers: Mapping[str, str], body: bytes) -> Failure:
        """The failure that a response with another status than 2xx means."""
        error = _error_in(body)
        message = error.get("message")
        text = message if isinstance(message, str) and message else body.decode("utf-8", "replace")
        return self._failure(status, text, retry_after_s=_retry_after_s(headers, self._clock))

    def of_frame(self, data: bytes) -> Failure:
        """The failure that an error frame inside a stream means. An unknown kind counts as 500."""
        error = _error_in(data)
        kind, message = error.get("type"), error.get("message")
        status = _STATUS_OF_TYPE.get(kind, 500) if isinstance(kind, str) else 500
        text = message if isinstance(message, str) and message else data.decode("utf-8", "replace")
        return self._failure(status, text)

    def of_fault(self, fault: BaseException, *, timeout_s: float | None = None) -> Failure:
        """The failure that one of `FAULTS` means: `unsent` only if no connection was ever had."""
        if isinstance(fault, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
            return Failure("unsent", message=self._clean(str(fault) or "cannot connect"))
        if isinstance(fault, TimeoutError):
            wait = "" if timeout_s is None else f" within {timeout_s:g} s"
            return Failure("unknown", message=f"no complete answer{wait}")
        return Failure("unknown", message=self._clean(str(fault) or type(fault).__name__))

    def of_reply(self, status: int, complaint: str) -> Failure:
        """The failure of a 2xx response that cannot be read."""
        return Failure("unknown", status=status, message=self._clean(complaint))

    def _failure(self, status: int, text: str, *, retry_after_s: float | None = None) -> Failure:
        return Failure(reach_of(status), status, self._clean(text), retry_after_s)

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _REDACTED)
        return _UNPRINTABLE.sub(" ", text).strip()[:MESSAGE_CHARS_MAX]


def reach_of(status: int) -> Literal["unsent", "refused", "unknown"]:
    """How far a request got that was answered with this status, which is not 2xx."""
    if status == 429:
        return "unsent"
    if 400 <= status < 500 and status not in (408, 409):
        return "refused"
    return "unknown"


def _error_in(body: bytes) -> dict[str, Any]:
    """The `error` object of an error body, or an empty one."""
    try:
        value = json.loads(body.decode("utf-8", "replace"))
    except (RecursionError, ValueError):
        return {}
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) else {}


def _retry_after_s(headers: Mapping[str, str], clock: Callable[[], float]) -> float | None:
    """How long upstream asks us to wait, in seconds; None if it does not say, or says nonsense."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    if (wait := _number(text)) is not None:
        return wait
    until = _date(text)
    if until is None:
        return None
    # Upstream's own clock tells better than ours how far off its date is.
    now = _date(headers.get("date"))
    return max(0.0, until - (clock() if now is None else now))


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _date(text: str | None) -> float | None:
    try:
        return parsedate_to_datetime(text or "").timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
