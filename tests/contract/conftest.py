from __future__ import annotations

from tests.store.conftest import anyio_backend, engine, migrated_url

__all__ = ["anyio_backend", "engine", "migrated_url"]
