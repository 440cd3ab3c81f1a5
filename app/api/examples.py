"""What the OpenAPI document shows of each object: one refund, from the registered tool to the audit.

The examples stand in the schemas, so that each operation shows those of what it takes and answers. Tests send
the bodies, and hold every example against its schema.
"""

from __future__ import annotations

from typing import Any, Final

_AT: Final = "2026-10-29T14:00:04.377000Z"
_LATER: Final = "2026-10-29T14:00:06.012000Z"
_SESSION: Final = "sesn_011CZkZAtmR3yMPDzynEDxu7"
_CALL: Final = "sevt_011CZkZCKWpQx3nB7yFhTuv2"
_KEY: Final = "key_4f1d2a9c0b7e4d3f8a6c5b12"
_RULE: Final = "rul_9c3e7a1b5d2f4e6a8b0c1d2e"
_TEST: Final = "test_0a1b2c3d4e5f60718293a4b5"
_DIGEST: Final = "sha256:85dda9d5ca7f2e9a1c3b5d7f9e0a2c4b6d8f0a1c3e5b7d9f1a3c5e7b9d0f2a4c"
_URL: Final = "https://tools.example/refund"
_SECRET: Final = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="  # noqa: S105 - an example

_TOOL_BODY: Final = {"url": _URL, "description": "Pays an order back.", "gate": "ask", "expires_in_s": 3600}
_POLICY: Final = {
    "timeout_s": 120.0,
    "attempt_timeout_s": None,
    "retry": "connect_only",
    "on_unknown": "answer",
    "gate": "ask",
    "approvers": None,
    "approvals_required": 1,
    "expires_in_s": 3600,
    "on_expiry": "deny",
    "remind_after_s": None,
    "callback_timeout_s": 3600,
    "callback_timeout_max_s": 86400,
    "when_unhealthy": "wait",
    "concurrency": 32,
    "enabled": True,
    "reply_bytes_max": 1048576,
    "result_chars_max": 100000,
    "input_schema": None,
}
_TOOL: Final = {
    **_POLICY,
    "name": "refund",
    "url": _URL,
    "description": "Pays an order back.",
    "header_names": [],
    "signing_secrets": [{"created_at": _AT, "expires_at": None}],
    "fault": None,
    "version": 1,
    "disabled_reason": None,
    "disabled_at": None,
    "health": {"state": "healthy", "since": None, "last_error": None, "failures": 0},
    "created_at": _AT,
    "updated_at": _AT,
}
_SETTINGS: Final = {
    "max_idle_s": 300.0,
    "max_reconnects": None,
    "tools": None,
    "concurrency": 8,
    "credential": "default",
    "environment": None,
    "labels": {"team": "orders"},
}
_SESSION_VIEW: Final[dict[str, Any]] = {
    "session_id": _SESSION,
    "status": "live",
    "end_reason": None,
    "end_detail": None,
    "settings": _SETTINGS,
    "cursor": _AT,
    "last_event_at": _AT,
    "last_event_age_s": 1.6,
    "idle_deadline": None,
    "calls": {"held": 1},
    "overdue": [],
    "flags": [],
    "missing": [],
    "environment": "self_hosted",
    "primary_thread_id": None,
    "reconnects": 0,
    "replica": "r-7f9c",
    "term": 1,
    "created_at": _AT,
    "updated_at": _AT,
}
_CALL_OBJECT: Final[dict[str, Any]] = {
    "id": _CALL,
    "session_id": _SESSION,
    "thread_id": None,
    "kind": "custom",
    "tool": "refund",
    "input": {"order_id": "A-1042", "amount": 49.90},
    "input_digest": _DIGEST,
    "edited_input": None,
    "state": "posted",
    "outcome_unknown": False,
    "awaits_callback": False,
    "gate": {
        "by": "tool",
        "permission": None,
        "reason": "tool_asks",
        "rule": None,
        "expires_at": "2026-10-29T15:00:04.377000Z",
        "on_expiry": "deny",
        "is_overdue": False,
        "approvers": None,
        "approvals_required": 1,
        "tool_version": 1,
        "approvals": [],
    },
    "decision": {
        "result": "allow",
        "status": "accepted",
        "by": _KEY,
        "via": "api",
        "at": _LATER,
        "deny_message": None,
        "edited_input_digest": None,
    },
    "attempts": 1,
    "result": {"content": [{"type": "text", "text": "paid back: 49.90 EUR"}], "is_error": False},
    "posted": True,
    "created_at": _AT,
    "updated_at": _LATER,
}
_DELIVERY: Final = {
    "session_id": _SESSION,
    "call_id": _CALL,
    "attempt": 1,
    "tool": "refund",
    "url": _URL,
    "replica": "r-7f9c",
    "started_at": _LATER,
    "finished_at": _LATER,
    "duration_ms": 38,
    "http_status": 200,
    "code": None,
    "reply_excerpt": '{"content": "paid back: 49.90 EUR"}',
}
_MESSAGE: Final = {
    "id": "sevt_011CZkZDf8Rb2mK4wLqVnXy9",
    "state": "final",
    "is_stale": False,
    "text": "I paid order A-1042 back.",
    "content": [{"type": "text", "text": "I paid order A-1042 back."}],
    "thread_id": None,
    "processed_at": _LATER,
    "updated_at": _LATER,
    "seq": 1,
}
_KEY_VIEW: Final = {
    "id": _KEY,
    "name": "order desk",
    "tenant": "default",
    "scopes": ["read", "confirm"],
    "created_at": _AT,
    "revoked_at": None,
    "expires_at": None,
    "last_used_at": _LATER,
    "requests_per_min": None,
}
_RULE_BODY: Final = {
    "effect": "allow",
    "tool": "refund",
    "tests": [{"argument": "/amount", "at_most": 50}],
    "note": "Small sums need nobody.",
}
_RULE_OBJECT: Final = {
    "id": _RULE,
    "effect": "allow",
    "tool": "refund",
    "kind": None,
    "session_id": None,
    "tests": [{"argument": "/amount", "at_most": 50}],
    "only": None,
    "deny_message": None,
    "note": "Small sums need nobody.",
    "is_live": True,
    "created_by": _KEY,
    "created_at": _AT,
    "expires_at": None,
    "revoked_at": None,
    "revoked_by": None,
    "uses": 3,
    "last_used_at": _LATER,
}
_SUBSCRIPTION: Final = {
    "name": "pager",
    "url": "https://pager.example/bascule",
    "events": ["confirmation.requested", "call.failed"],
    "header_names": [],
    "enabled": True,
    "disabled_reason": None,
    "disabled_at": None,
    "pending": 0,
    "dropped": 0,
    "failures": 0,
    "retry_at": None,
    "last_success_at": _LATER,
    "last_error": None,
    "last_error_at": None,
    "created_at": _AT,
    "updated_at": _AT,
}

EXAMPLES: Final[dict[str, Any]] = {
    "ToolBody": _TOOL_BODY,
    "ToolView": _TOOL,
    "NewToolView": {**_TOOL, "signing_secret": _SECRET},
    "RotateBody": {"overlap_s": 3600},
    "RotatedToolView": {**_TOOL, "signing_secret": _SECRET, "old_signs_until": "2026-10-29T15:00:04.377000Z"},
    "RemovedTool": {
        "name": "refund",
        "calls": [{"session_id": _SESSION, "id": _CALL, "state": "held"}],
        "calls_total": 1,
    },
    "ToolTestBody": {"input": {"order_id": "A-1042", "amount": 0}},
    "ToolTestView": {
        "id": _TEST,
        "tool": "refund",
        "status": "done",
        "replica": "r-7f9c",
        "requested_at": _AT,
        "finished_at": _LATER,
        "result": {"content": [{"type": "text", "text": "nothing to pay back"}], "is_error": False},
        "code": None,
        "http_status": 200,
        "duration_ms": 38,
        "url": _URL,
        "reply_excerpt": '{"content": "nothing to pay back"}',
    },
    "DeliveryView": _DELIVERY,
    "AttachBody": {"max_idle_s": 300, "tools": ["refund"], "labels": {"team": "orders"}},
    "ChangeBody": {"max_idle_s": None, "concurrency": 1},
    "SessionView": _SESSION_VIEW,
    "SendView": {
        "id": "send_7d2f9a1c3e5b4a6d8f0c1b2a",
        "session_id": _SESSION,
        "status": "sent",
        "events": [
            {"id": "sevt_011CZkZBq7Ea1jH3vKpUmWx8", "type": "user.message", "processed_at": None},
        ],
        "code": None,
        "message": None,
        "calls": [],
        "created_at": _AT,
        "finished_at": _LATER,
    },
    "ConfirmBody": {"tool_use_id": _CALL, "result": "deny", "deny_message": "Over the customer's limit."},
    "CallObject": _CALL_OBJECT,
    "Remembered": {**_CALL_OBJECT, "rule": _RULE_OBJECT},
    "HalfApproved": {
        **_CALL_OBJECT,
        "state": "held",
        "decision": None,
        "attempts": 0,
        "result": None,
        "posted": False,
        "code": "second_approval_needed",
    },
    "CallDetail": {**_CALL_OBJECT, "detail": None, "deliveries": [_DELIVERY]},
    "CallbackAnswer": {"call_id": _CALL, "is_progress": False, "deadline": "2026-10-29T15:00:06.012000Z"},
    "MessageObject": _MESSAGE,
    "TextList": {"data": [_MESSAGE], "next_after": 1},
    "KeyBody": {"name": "order desk", "scopes": ["read", "confirm"]},
    "KeyView": _KEY_VIEW,
    "NewKeyView": {**_KEY_VIEW, "last_used_at": None, "key": "bsk_…"},
    "CredentialBody": {"type": "api_key", "secret": "sk-ant-api03-example"},
    "CredentialObject": {
        "name": "orders",
        "type": "api_key",
        "upstream_url": None,
        "takes_webhooks": False,
        "source": "stored",
        "created_at": _AT,
        "updated_at": _AT,
    },
    "AttachRuleView": {
        "name": "order-desk",
        "agent_id": "agent_011CZkYpogX7uDKUyvBTophP",
        "environment_id": None,
        "settings": _SETTINGS,
        "enabled": True,
        "created_at": _AT,
        "updated_at": _AT,
    },
    "RuleBody": _RULE_BODY,
    "RuleObject": _RULE_OBJECT,
    "SubscriptionBody": {"url": _SUBSCRIPTION["url"], "events": _SUBSCRIPTION["events"]},
    "SubscriptionView": _SUBSCRIPTION,
    "NewSubscriptionView": {**_SUBSCRIPTION, "signing_secret": _SECRET},
    "AuditRow": {
        "sequence": 1,
        "at": _LATER,
        "kind": "decision.recorded",
        "actor": _KEY,
        "via": "api",
        "session_id": _SESSION,
        "call_id": _CALL,
        "subject": "refund",
        "input_digest": _DIGEST,
        "decision_id": "dec_1",
        "result": "allow",
        "detail": None,
        "shown_ms": 2100,
        "previous": "0" * 64,
        "hash": "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9",
    },
    "Health": {"status": "ok"},
    "Readiness": {"status": "ready", "database": "ok", "schema": "current", "wakeups": "working"},
    "ProblemBody": {
        "type": "urn:bascule:problem:session_not_found",
        "title": "The session is not attached",
        "status": 404,
        "detail": "No session of that id was attached; POST /sessions/{id}/attach attaches it.",
        "code": "session_not_found",
        "request_id": "req_7f3a9b1c5d2e4f6a8b0c1d2e",
    },
}
"""By the name of the schema."""


def add_examples(schemas: dict[str, Any]) -> None:
    """Give every schema that has one its example, and lists those of what they hold."""
    for name, schema in schemas.items():
        if name in EXAMPLES:
            schema.setdefault("examples", [EXAMPLES[name]])
        elif (held := name.removeprefix("ListOf_").removesuffix("_")) in EXAMPLES:
            schema["examples"] = [{"data": [EXAMPLES[held]], "next_cursor": None}]
