"""A tool: a registered webhook and its policies, and which calls it serves."""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass, field
from typing import Final, Literal

from app.core.events import Kind

Retry = Literal["never", "connect_only", "safe"]

CATCH_ALL: Final = "*"
"""The name of a tool that serves the custom calls whose own name nobody registered."""
AGENT_SCHEMA: Final = "agent"
"""An `input_schema` that stands for the one with which the session's agent declares the tool."""


@dataclass(frozen=True, slots=True)
class SigningSecret:
    """A key that signs until `expires_at`, in seconds since 1970; the newest has no end."""

    key: bytes = field(repr=False)
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A webhook that serves calls of one name for one tenant, or as `*` those of every other name.

    Times are in seconds, sizes in bytes or characters. `timeout_s` is one wall clock over all attempts
    of a call; `attempt_timeout_s` bounds one of them. A tool that answers 202 has `callback_timeout_s` from
    then on to report its result, and each word of progress grants as much again, up to
    `callback_timeout_max_s` in all; with 0 it may not answer so. `secrets` are newest first; every one that
    is live signs. `input_schema` is the JSON text of a schema, or `agent`: a call whose input does not fit is
    answered with an error, undelivered. `version` rises with each change of the registration.
    `disabled_reason` is why the service disabled it: `gone`, its endpoint answered 410. `fault` says why the
    tool cannot be called although it is registered, with the remedy: its calls park, and no other tool takes
    them. A call that is held, by whichever gate, expires after `expires_in_s`; None: never. People are
    reminded of it after `remind_after_s`, and later again; None: never.
    """

    name: str
    url: str
    secrets: tuple[SigningSecret, ...] = ()
    timeout_s: float = 120.0
    attempt_timeout_s: float | None = None
    retry: Retry = "connect_only"
    on_unknown: Literal["answer", "ask"] = "answer"
    gate: Literal["upstream", "ask"] = "upstream"
    expires_in_s: float | None = None
    on_expiry: Literal["deny", "keep"] = "deny"
    remind_after_s: float | None = None
    when_unhealthy: Literal["wait", "answer"] = "wait"
    callback_timeout_s: float = 3600.0
    callback_timeout_max_s: float = 86_400.0
    concurrency: int = 32
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    enabled: bool = True
    disabled_reason: Literal["gone"] | None = None
    reply_bytes_max: int = 1_048_576
    result_chars_max: int = 100_000
    input_schema: str | None = None
    version: int = 1
    fault: str | None = None

    def keys_at(self, now: float) -> tuple[bytes, ...]:
        """The keys that sign what is sent at `now`, in seconds since 1970."""
        return tuple(one.key for one in self.secrets if one.expires_at is None or now < one.expires_at)


def registration_of(tools: Container[str], kind: Kind, name: str) -> str | None:
    """The name of the registration that calls of a name belong to, whether or not there is one.

    A name's own registration wins, also one that is disabled or cannot be read. Of the others, custom calls
    belong to `*`; built-in calls never do, and MCP calls to nobody.
    """
    if kind == "mcp" or (kind == "builtin" and name == CATCH_ALL):
        return None
    return CATCH_ALL if kind == "custom" and name not in tools else name


def gating(tools: Container[str], kind: Kind, name: str) -> str | None:
    """The name of the registration that rules calls while they are held, whether or not there is one.

    It is the one that the call belongs to. An MCP call too goes by one of its own name: that can only make it
    harder to allow.
    """
    is_mcp = kind == "mcp" and name != CATCH_ALL
    return name if is_mcp else registration_of(tools, kind, name)


def is_admitted(allowed: Collection[str] | None, registration: str, name: str) -> bool:
    """Whether an attachment's list of tools admits a call.

    The list names calls, whoever serves them; `*` in it stands for every name without a registration of its
    own. None admits all.
    """
    return allowed is None or name in allowed or (registration == CATCH_ALL and CATCH_ALL in allowed)
