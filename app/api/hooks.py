"""The platform's own webhooks: hints that a session has something to do. Verified, taken once, no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response

from app.api.bridge import Bridge, Given
from app.api.problems import Problem, documented
from app.core.sightings import OVER_EVENTS, TELLING
from app.core.signatures import TOLERANCE_S, signer
from app.settings import signing_keys
from app.store import sightings
from app.store.attachments import SESSION_ID
from app.store.credentials import DEFAULT
from app.store.keys import DEFAULT_TENANT
from app.store.sightings import HookKey

HOOK_BYTES_MAX: Final = 16_384
"""The platform's are under 1 kB; every known key may have to be tried on what comes."""
KEYS_KEPT_S: Final = 5.0
"""How late a stored signing key may be known."""

router = APIRouter(tags=["operations"])


class HookKeys:
    """The keys that sign webhooks, of the environment and of stored credentials. `clock` is in seconds since
    1970."""

    def __init__(self, bridge: Bridge, clock: Callable[[], float] = time.time) -> None:
        self._bridge = bridge
        self._kept: Sequence[HookKey] = ()
        self._until = 0.0
        self.clock = clock

    async def get(self) -> Sequence[HookKey]:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._until:
            async with self._bridge.engine.connect() as connection:
                stored = await sightings.keys(connection, self._bridge.secrets)
            own = self._bridge.settings.anthropic_webhook_signing_key
            ours = [] if own is None else [HookKey(DEFAULT_TENANT, DEFAULT, key) for key in signing_keys(own)]
            self._kept, self._until = [*ours, *stored], loop.time() + KEYS_KEPT_S
        return self._kept


class _Data(msgspec.Struct):
    type: str = ""
    id: str = ""


class _Hook(msgspec.Struct):
    data: _Data = msgspec.field(default_factory=_Data)


@router.post(
    "/hooks/anthropic",
    status_code=204,
    response_class=Response,
    summary="Take a webhook of the platform, signed by Standard Webhooks",
    responses=documented("unverified_webhook", "body_too_large"),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"type": "object"},
                    "example": {
                        "type": "event",
                        "id": "whe_011CZkZH22B96iPBriX2rzSf",
                        "created_at": "2026-10-29T14:00:04.950000Z",
                        "data": {"type": "session.status_idled", "id": "sesn_011CZkZAtmR3yMPDzynEDxu7"},
                    },
                }
            },
        }
    },
)
async def take_hook(request: Request, bridge: Given) -> Response:
    body = await request.body()
    if len(body) > HOOK_BYTES_MAX:
        raise Problem("body_too_large", f"A webhook of the platform is at most {HOOK_BYTES_MAX} bytes long.")
    known: HookKeys = request.app.state.hook_keys
    keys = await known.get()
    place = signer([one.key for one in keys], request.headers, body, now=known.clock())
    if place is None:
        raise Problem("unverified_webhook", _NO_KEY if not keys else _UNVERIFIED)
    hook = _read(body)
    if hook is not None:
        by = keys[place]
        webhook_id = request.headers["webhook-id"]
        async with bridge.engine.begin() as connection:
            await sightings.heard(connection, by.tenant, by.credential, webhook_id, hook.id)
    return Response(status_code=204)


def _read(body: bytes) -> _Data | None:
    """What the webhook is about, if it is a session that may have something to do."""
    try:
        data = msgspec.json.decode(body, type=_Hook).data
    except (ValueError, RecursionError):
        return None
    is_telling = data.type.startswith(TELLING) and data.type not in OVER_EVENTS
    return data if is_telling and SESSION_ID.fullmatch(data.id) else None


_NO_KEY: Final = (
    "The service knows no key that signs the platform's webhooks: set ANTHROPIC_WEBHOOK_SIGNING_KEY, or"
    " webhook_signing_key of PUT /credentials/{name}."
)
_UNVERIFIED: Final = (
    f"No key that the service knows signed this body at a time within {TOLERANCE_S} s of now; compare the"
    " signing key of the endpoint in the platform's console, and the clocks."
)
