"""What a run says in the log: a line per turning point of a session or call, without inputs or results."""

from __future__ import annotations

from typing import Final

from app.logs import logger
from app.store.batches import Batch

log = logger(__name__)

_REMEDIES: Final = {
    "held": "POST /sessions/{session_id}/confirm decides",
}
_WARNED: Final = frozenset({"unowned", "rejected"})


def tell(session_id: str, batch: Batch) -> None:
    """Log what the batch, which is committed, says about the session and its calls."""
    for call in {call.id: call for call in batch.calls}.values():
        say = log.warning if call.state in _WARNED or call.outcome_unknown else log.info
        remedy = call.detail if call.state == "unowned" else _REMEDIES.get(call.state)
        extra = {} if remedy is None else {"remedy": remedy}
        say(f"call_{call.state}", session_id=session_id, call_id=call.id, tool=call.tool, **extra)
    for end in batch.ended:
        if end.code is not None:
            log.warning(
                "delivery_failed", session_id=session_id, call_id=end.call_id, attempt=end.attempt,
                code=end.code, status=end.http_status,
            )  # fmt: skip
    if batch.end is not None:
        is_expected = batch.end.reason in ("terminated", "deleted", "idle", "detached")
        say = log.info if is_expected else log.warning
        say("session_ended", session_id=session_id, reason=batch.end.reason, detail=batch.end.detail)
