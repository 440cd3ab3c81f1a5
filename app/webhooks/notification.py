"""One notification on its way to a subscriber: its body, its headers, and what the answer means."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from app.core.headers import is_refused_webhook, is_well_formed
from app.core.notifications import link
from app.core.traces import traceparent
from app.webhooks.attempt import STATUS_REPLY_BYTES_MAX, Answer, Door
from app.webhooks.delivery import retry_after_s
from app.webhooks.wire import CONTENT_TYPE, sign

SEND_LIMIT_S: Final = 10.0
"""One attempt, from the look-up to the end of the answer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of an attempt: `error` is None if the subscriber took it, `floor_s` what it asked for."""

    error: str | None = None
    is_gone: bool = False
    floor_s: float | None = None


def build_body(type_: str, at: datetime, data: str, age_s: float | None, base_url: str) -> bytes:
    """The body of each attempt: `data` is JSON as stored, and gets the call's age and the page to open."""
    told = json.loads(data)
    if age_s is not None:
        told["age_s"] = round(age_s, 3)
    told["url"] = link(base_url, told)
    moment = at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"type": type_, "timestamp": moment, "data": told}, separators=(",", ":")).encode()


async def send(
    door: Door,
    url: str,
    key: bytes,
    own_headers: Mapping[str, str],
    body: bytes,
    *,
    webhook_id: str,
    attempt: int,
    version: str,
    wall: Callable[[], float],
) -> Answered:
    """Make one attempt. Any 2xx takes the notification; redirects are not followed.

    `wall` is seconds since 1970. The subscription's own headers never replace ours.
    """
    now = int(wall())
    headers = {
        name: value
        for name, value in own_headers.items()
        if is_well_formed(name, value) and not is_refused_webhook(name)
    } | {
        "content-type": CONTENT_TYPE,
        "accept": "*/*",
        "accept-encoding": "identity",
        "user-agent": f"bascule/{version}",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(now),
        "webhook-signature": sign((key,), webhook_id, now, body),
        "bascule-attempt": str(attempt),
        "traceparent": traceparent(webhook_id, attempt),
    }
    came = await door.post(
        url, headers, body, timeout_s=SEND_LIMIT_S, reply_bytes_max=STATUS_REPLY_BYTES_MAX, reuse=False
    )
    if not isinstance(came, Answer):
        return Answered(came.code)
    if 200 <= came.status < 300:
        return Answered()
    floor_s = retry_after_s(came.headers.get("Retry-After"), now_s=wall())
    return Answered(f"http_status {came.status}", is_gone=came.status == 410, floor_s=floor_s)
