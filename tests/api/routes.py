"""The routes of the application, those of the routers that it includes as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route


def every_route(app: FastAPI) -> Iterator[Route]:
    waiting: list[Any] = list(app.routes)
    while waiting:
        one = waiting.pop()
        if isinstance(one, Route):
            yield one
        else:
            waiting += one.original_router.routes
