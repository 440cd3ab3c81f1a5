"""What the api is given when the service is put together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Annotated, Final

from fastapi import Depends, Request
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api.uses import KeyUses
from app.settings import Settings
from app.store.secrets import Secrets
from app.store.wakeups import Wakeups

STREAMS_MAX: Final = 5_000
"""Of one replica at a time."""


def _nothing() -> AbstractAsyncContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Bridge:
    """The parts of the service that requests use.

    `check_url` judges a webhook's URL by its text and returns the sentence that refuses it, or None.
    `running` is entered while the service runs, after the wake-ups and before the first request: the
    place for what works beside the api. `stopping` is set once the service was told to stop, and nothing
    waits any more. Each open stream holds one of `streams`.
    """

    settings: Settings
    engine: AsyncEngine
    secrets: Secrets
    wakeups: Wakeups
    check_url: Callable[[str], str | None]
    running: Callable[[], AbstractAsyncContextManager[object]] = _nothing
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    uses: KeyUses = field(default_factory=KeyUses)
    streams: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(STREAMS_MAX))


def _bridge(request: Request) -> Bridge:
    bridge: Bridge = request.app.state.bridge
    return bridge


Given = Annotated[Bridge, Depends(_bridge)]
"""An endpoint's parameter of this type receives the bridge."""
