"""What a replica counts and measures, for `GET /metrics`. No label names a tenant, a session or a tool.

Whoever does something counts it here, as it writes its log lines. What is true of the database as a whole is
read when somebody asks (`app.store.figures`), and every replica tells the same.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

_LATENCIES_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

DELIVERIES: Final = Histogram(
    "bascule_delivery_seconds",
    "Attempts to deliver calls to webhooks, by what came of them: `ok`, or a delivery's code.",
    ["outcome"],
    buckets=_LATENCIES_S,
)
POSTS: Final = Histogram(
    "bascule_post_seconds",
    "Sends of results and verdicts, by what came of them: `accepted`, `refused`, `unknown` or `unsent`.",
    ["outcome"],
    buckets=_LATENCIES_S,
)
COMMITS: Final = Histogram(
    "bascule_commit_seconds", "Group commits of what runs write.", buckets=_LATENCIES_S
)
CLAIMED: Final = Counter("bascule_leases_claimed", "Attachments that this replica took up.")
LOST: Final = Counter("bascule_leases_lost", "Times that this replica gave up all its runs, unsure of them.")
RUNS: Final = Gauge("bascule_runs", "Sessions that this replica runs.")
STREAMS: Final = Gauge("bascule_streams", "Streams of events that are open at this replica.")
WAKEUPS: Final = Gauge("bascule_wakeups_working", "1 if wake-ups work, 0 if the replica polls.")
POOL: Final = Gauge(
    "bascule_pool_connections", "Database connections for requests: in use, and at most.", ["which"]
)
SPANS: Final = Counter(
    "bascule_spans",
    "Spans of traces: `exported`, `failed`, or `dropped` because the collector is slower than they come.",
    ["outcome"],
)

SESSIONS: Final = Gauge("bascule_sessions", "Served attachments by status.", ["status"])
CALLS: Final = Gauge("bascule_calls_open", "Calls that are not over, by state.", ["state"])
WAITING: Final = Gauge("bascule_confirmations_waiting", "Calls that wait for a person.")
WAITING_AGE: Final = Gauge(
    "bascule_confirmation_oldest_seconds", "Since when the longest waiting call was first seen."
)
EVENT_AGE: Final = Gauge(
    "bascule_event_oldest_seconds", "The longest silence of a session whose calls or messages are open."
)
STUCK: Final = Gauge("bascule_sessions_flagged", "Served sessions by flag.", ["flag"])
NOTIFICATIONS: Final = Gauge("bascule_notifications_pending", "Notifications that wait to be sent.")
BUDGET: Final = Gauge(
    "bascule_budget_left_ratio", "What is left of the tightest upstream budget, of its capacity: 0 to 1."
)
