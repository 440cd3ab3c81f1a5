"""What a tool needs to report its result after a 202, and what comes of its report.

The address goes into the body when a call is first delivered and is stored with it. The token does not: it is
derived again for each delivery, from the key whose id the body's row keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote

from app.core import protocol as p
from app.core.calls import Call
from app.core.tools import Tool
from app.logs import logger
from app.store.callbacks import token_of
from app.store.leases import Lease
from app.store.runs import Callback
from app.store.secrets import Secrets
from app.webhooks.reply import read_reply
from app.webhooks.wire import build_body, has_callback, with_token

log = logger(__name__)


class Callbacks:
    """Builds the bodies of deliveries. `base_url` is where tools reach the service, without a slash."""

    def __init__(self, base_url: str, secrets: Secrets) -> None:
        self._base_url, self._secrets = base_url, secrets

    def body(self, call: Call, tool: Tool, lease: Lease) -> tuple[bytes, str | None]:
        """Make the body of the call's deliveries, to be stored, and the id of the key for its token."""
        if tool.callback_timeout_s <= 0:
            return build_body(call, lease.session_id), None
        url = f"{self._base_url}/sessions/{lease.session_id}/calls/{quote(call.id, safe='')}/result"
        return build_body(call, lease.session_id, callback_url=url), self._secrets.key_id

    def sent(self, body: bytes, key_id: str | None, call: Call, lease: Lease) -> bytes:
        """The body as it leaves, with the token of its callback if it offers one."""
        if key_id is None or not has_callback(body):
            return body
        token = token_of(self._secrets, key_id, lease.tenant, lease.session_id, call.id)
        if token is None:
            log.error(
                "callback_key_missing", session_id=lease.session_id, call_id=call.id, key_id=key_id,
                remedy="append that key to BASCULE_SECRET_KEY; until then the tool cannot report later",
            )  # fmt: skip
            return body
        return with_token(body, token)


def delivered(back: Callback, tools: Mapping[str, Tool]) -> p.Delivered:
    """What the tool reported, read as a reply of its webhook would be."""
    tool = replace(tools.get(back.served_by) or Tool(back.tool, ""), name=back.tool)
    result = read_reply(200, {"content-type": back.content_type}, back.body, tool).result
    assert result is not None, "only a 202 has none"
    return p.Delivered(back.call_id, result, back.attempts)
