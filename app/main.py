"""Puts the service together: the one place that knows every part."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI

from app import __version__
from app.api import (
    attach_rules,
    audit,
    callbacks,
    calls,
    confirmations,
    credentials,
    deliveries,
    events,
    health,
    hooks,
    keys,
    messages,
    operations,
    redeliveries,
    rules,
    sends,
    sessions,
    subscriptions,
    tool_tests,
    tools,
)
from app.api.bridge import Bridge
from app.api.document import describe
from app.api.limits import Limits
from app.api.polls import Looks
from app.api.previews import Previews
from app.api.problems import add_handlers
from app.api.requests import Requests
from app.console.console import add_console
from app.replica import replica
from app.settings import Settings, secret_keys
from app.store.database import create_engine
from app.store.secrets import Secrets
from app.store.wakeups import Wakeups
from app.webhooks.egress import Egress, UrlRefused

RUN_CONNECTIONS_MAX = 5
"""Connections of a replica's runs, beside those of its requests."""
RUN_LOCK_LIMIT_S = 1.0
"""How long a run's write waits for somebody else's lock; then it is tried again, without its neighbours."""

__all__ = ["Bridge", "build_bridge", "create_app"]


def build_bridge(settings: Settings, database_url: str) -> Bridge:
    """Make the parts that the settings describe; nothing connects yet.

    `database_url` is the embedded server's, or `settings.database_url`.
    """
    assert settings.secret_key is not None, "serve generates or requires it"
    engine = create_engine(
        database_url,
        connections_max=settings.database_connections_max,
        is_behind_pooler=settings.is_behind_pooler,
    )
    direct_url = settings.database_direct_url
    egress = Egress(settings.webhook_allow)

    def check_url(url: str) -> str | None:
        try:
            egress.check_url(url)
        except UrlRefused as refused:
            return refused.sentence
        return None

    secrets = Secrets(secret_keys(settings.secret_key))
    wakeups = Wakeups(direct_url.get_secret_value() if direct_url else database_url, engine)

    @contextlib.asynccontextmanager
    async def running() -> AsyncIterator[None]:
        # Connections of their own: a run must not lose its lease because requests hold all others.
        own = create_engine(
            database_url,
            connections_max=RUN_CONNECTIONS_MAX,
            is_behind_pooler=settings.is_behind_pooler,
            lock_limit_s=RUN_LOCK_LIMIT_S,
        )
        try:
            async with replica(settings, own, secrets, wakeups, egress):
                yield
        finally:
            await own.dispose()

    return Bridge(settings, engine, secrets, wakeups, check_url, running)


def create_app(bridge: Bridge) -> FastAPI:
    """Return the service's ASGI application. Its lifespan runs the wake-ups and `bridge.running`."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(bridge.engine.dispose)
            await stack.enter_async_context(bridge.uses.running(bridge.engine))
            await stack.enter_async_context(bridge.wakeups.running())
            await stack.enter_async_context(Previews(bridge.engine, bridge.wakeups).running())
            await stack.enter_async_context(bridge.running())
            yield

    app = FastAPI(
        title="Bascule",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.bridge = bridge
    app.state.feeds = events.Feeds(bridge.engine)
    app.state.looks = Looks()
    app.state.limits = Limits(bridge.settings, time.monotonic)
    app.state.hook_keys = hooks.HookKeys(bridge)
    app.state.figures = operations.DatabaseFigures(bridge.engine)
    app.add_middleware(Requests)
    add_handlers(app)
    for module in (
        tools, tool_tests, deliveries, sessions, sends, confirmations, calls, callbacks, redeliveries,
        messages, events, keys, credentials, attach_rules, hooks, rules, subscriptions, audit, health,
        operations,
    ):  # fmt: skip
        app.include_router(module.router)
    add_console(app)
    describe(app)
    return app
