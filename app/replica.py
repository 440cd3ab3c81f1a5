"""One replica's working side: the connections it calls out with, and the fleet that uses them."""

from __future__ import annotations

import contextlib
import secrets as chance
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from app import __version__
from app.runner.fleet import Fleet
from app.settings import Settings
from app.store.secrets import Secrets
from app.store.wakeups import Wakeups
from app.upstream.client import UpstreamClient
from app.upstream.headers import Credential
from app.upstream.transport import open_session
from app.webhooks.delivery import Deliverer
from app.webhooks.egress import Egress

STREAMS_MAX: Final = 10_000
"""How many sessions one replica streams at a time."""
REQUESTS_MAX: Final = 100
"""How many other requests to upstream are under way at a time."""
DEFAULT: Final = "default"


@contextlib.asynccontextmanager
async def replica(
    settings: Settings, engine: AsyncEngine, secrets: Secrets, wakeups: Wakeups, egress: Egress
) -> AsyncIterator[Fleet]:
    """Serve attachments until the block ends."""
    key = settings.anthropic_api_key
    credential = Credential("api_key", key.get_secret_value()) if key is not None else None
    async with open_session(STREAMS_MAX, for_streams=True) as streams, open_session(REQUESTS_MAX) as requests:

        def client_for(tenant: str, name: str, extra_headers: Mapping[str, str]) -> UpstreamClient | None:
            # Credentials of other tenants come with `PUT /credentials`; the environment's is this one's only.
            if credential is None or (tenant, name) != (DEFAULT, DEFAULT):
                return None
            return UpstreamClient(
                settings.upstream_url,
                credential,
                streams=streams,
                requests=requests,
                extra_headers=extra_headers,
            )

        deliverer = Deliverer(egress, version=__version__)
        replica_id = f"{socket.gethostname()}-{chance.token_hex(4)}"
        fleet = Fleet(replica_id, engine, secrets, wakeups, deliverer, client_for)
        try:
            async with fleet.running():
                yield fleet
        finally:
            await deliverer.close()
