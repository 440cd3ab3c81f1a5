"""Serves PyPI's open-managed-agents on a free port of loopback, and prints the port once it listens.

Runs in an environment of its own, as `python -I oma_server.py`; there, `app` is that server's module. The
wheel has no migrations, so the tables are made from its metadata. Its settings are environment variables.
"""

import asyncio
import socket

import uvicorn
from app.db.engine import get_engine
from app.db.models import Base

from app.main import app


async def create_tables() -> None:
    engine = get_engine()
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


async def main() -> None:
    await create_tables()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        await uvicorn.Server(config).serve(sockets=[listener])


asyncio.run(main())
