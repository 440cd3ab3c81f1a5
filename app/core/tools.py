"""A tool: a registered webhook and its policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Retry = Literal["never", "connect_only", "safe"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A webhook that serves calls of one name for one tenant.

    Times are in seconds, sizes in bytes or characters. `timeout_s` is one wall clock over all attempts
    of a call; `attempt_timeout_s` bounds one of them. A tool that answers 202 has `callback_timeout_s` from
    then on to report its result, and each word of progress grants as much again, up to
    `callback_timeout_max_s` in all; with 0 it may not answer so. `secrets` are raw signing keys, newest
    first; every one of them signs. `version` rises with each change of the registration. `disabled_reason` is
    why the service disabled it: `gone`, its endpoint answered 410.
    """

    name: str
    url: str
    secrets: tuple[bytes, ...] = field(default=(), repr=False)
    timeout_s: float = 120.0
    attempt_timeout_s: float | None = None
    retry: Retry = "connect_only"
    on_unknown: Literal["answer", "ask"] = "answer"
    gate: Literal["upstream", "ask"] = "upstream"
    when_unhealthy: Literal["wait", "answer"] = "wait"
    callback_timeout_s: float = 3600.0
    callback_timeout_max_s: float = 86_400.0
    concurrency: int = 32
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    enabled: bool = True
    disabled_reason: Literal["gone"] | None = None
    reply_bytes_max: int = 1_048_576
    result_chars_max: int = 100_000
    version: int = 1
