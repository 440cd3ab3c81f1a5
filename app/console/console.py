"""Mounts the pages on the application."""

from __future__ import annotations

from fastapi import FastAPI

from app.api.limits import ADDRESSES_MAX, Buckets
from app.console import audit, inbox, rules, sessions, sign_in, tools


def add_console(app: FastAPI) -> None:
    """Add every page, and what counts this replica's failed sign-ins."""
    app.state.sign_ins = Buckets(ADDRESSES_MAX)
    for module in (sign_in, inbox, sessions, tools, rules, audit):
        app.include_router(module.router)
