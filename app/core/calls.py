"""A call: its states, the steps between them, and what it came to.

`STEPS` is the whole life of a call; a step that is not in it is a defect and raises. States are text,
so that a version can leave alone the states of a later one.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from app.core.events import Kind

State = Literal[
    "held",
    "queued",
    "dispatched",
    "answered",
    "posting",
    "unowned",
    "posted",
    "answered_elsewhere",
    "denied",
    "expired",
    "interrupted",
    "thread_terminated",
    "session_ended",
    "rejected",
]

STATES: Final[frozenset[str]] = frozenset(get_args(State))

CALLBACK_PREFIX: Final = "cbt"
"""What a callback's token begins with; a key's id, the tenant and a MAC follow, a full stop before each."""

WEBHOOK_ID_CHARS: Final = 26
"""How much of the digest a `webhook-id` carries, in characters of base32."""

END_STATES: Final[frozenset[str]] = frozenset(
    {
        "posted",
        "answered_elsewhere",
        "denied",
        "expired",
        "interrupted",
        "thread_terminated",
        "session_ended",
        "rejected",
    }
)
"""A call in one of these is over; only `interrupted` can be revived, by upstream asking for it again."""

_SETTLED_BY_OTHERS: Final = frozenset(
    {"answered_elsewhere", "interrupted", "thread_terminated", "session_ended"}
)

STEPS: Final[dict[str, frozenset[str]]] = {
    # held: a person decides. `posting` is the refusal of a gate of ours, which upstream does not know.
    "held": frozenset(
        {"queued", "dispatched", "denied", "expired", "answered", "posting", "posted", "unowned"}
    )
    | _SETTLED_BY_OTHERS,
    # queued: ours and allowed, waiting for a slot. `posting`: the tool was disabled meanwhile.
    "queued": frozenset({"dispatched", "held", "denied", "unowned", "answered", "posting"})
    | _SETTLED_BY_OTHERS,
    # dispatched: a delivery may have left. `held`: its outcome is unknown and a person decides.
    "dispatched": frozenset({"answered", "posting", "held", "queued"}) | _SETTLED_BY_OTHERS,
    # answered: the result is stored, no send is under way. `posted`, `denied`: upstream shows an earlier one.
    "answered": frozenset({"posting", "posted", "denied"}) | _SETTLED_BY_OTHERS,
    # posting: a send may have left.
    "posting": frozenset({"answered", "posted", "denied", "expired", "rejected"}) | _SETTLED_BY_OTHERS,
    # unowned: no tool of that name is ours; looked at again whenever the registry changes.
    "unowned": frozenset({"held", "queued", "dispatched", "denied", "answered", "posting"})
    | _SETTLED_BY_OTHERS,
    # interrupted: revived when upstream names it in `requires_action` again.
    "interrupted": frozenset({"held", "queued", "dispatched", "answered", "posting", "unowned", "denied"}),
}


@dataclass(frozen=True, slots=True)
class Result:
    """What a call came to: a JSON array of content blocks, as bytes, and whether it is an error."""

    content: bytes
    is_error: bool


Reason = Literal[
    "ask",
    "unknown_permission",
    "unread_policy",
    "required_action",
    "tool_asks",
    "outcome_unknown",
    "rule_asks",
    "rule_denies",
    "rule_over",
    "tool_changed",
]
"""Why a call is held, as a code; a later version may have stored others."""


REOPENING: Final = ("outcome_unknown", "rule_over", "tool_changed")
"""The reasons for which a call is held on which somebody has decided before: that decision is spent."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Who holds a call, and why.

    `by` is `upstream` (it asks, or may have asked), `tool` (the registration says ask) or `rule`.
    `reason` is one of `Reason`. `rule` is the id of the standing rule that holds the call, or that is about
    to answer for a person. A call that comes to be held has `expires_in_s` from then on by the store's
    time, and then `on_expiry` happens; None waits for ever. After `remind_after_s` people are reminded of it
    for the first time; None: never. None of these is read back: the store keeps the moments.
    """

    by: Literal["upstream", "tool", "rule"]
    permission: str | None
    reason: str
    expires_in_s: float | None = None
    on_expiry: Literal["deny", "keep"] = "deny"
    remind_after_s: float | None = None
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Somebody's allow or deny. `by` is who, `via` how: `api`, `console`, `stream`, `policy`, `expiry`, or
    `rule`.

    `at` is in seconds since 1970; None where the deciding moment is upstream's and unknown. `edited_input` is
    the JSON object that an allow put in the place of the call's own input, as bytes. `tool_version` is that
    of the registration to which it led, 0 for none; None where it is not known.
    """

    result: Literal["allow", "deny"]
    status: Literal["accepted", "sending", "refused"]
    by: str
    via: str
    at: float | None = None
    deny_message: str | None = None
    id: str | None = None
    refusal: str | None = None
    edited_input: bytes | None = field(default=None, repr=False)
    tool_version: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of an agent, as known now.

    `asked_at` is when upstream asked again for a call that an interrupt had closed, in seconds since 1970; it
    is not stored. `detail` says in a sentence why a call ended so. `attempts` counts deliveries, `episodes`
    those whose outcome was never learnt, the one under way included; `served_by` is the registration that
    they belong to, None before the first. `awaits_callback` marks a `dispatched` call whose tool has answered
    202. Neither is stored, for the delivery says so. `edited_input` is what the decision that released the
    call put in the place of `input`, which stays as it came.
    """

    id: str
    kind: Kind
    tool: str
    input: bytes
    state: State
    thread_id: str | None = None
    processed_at: str | None = None
    permission: str | None = None
    gate: Gate | None = None
    decision: Decision | None = None
    attempts: int = 0
    episodes: int = 0
    served_by: str | None = None
    outcome_unknown: bool = False
    awaits_callback: bool = False
    result: Result | None = None
    posted: bool = False
    detail: str | None = None
    asked_at: float | None = None
    edited_input: bytes | None = None

    @property
    def is_over(self) -> bool:
        return self.state in END_STATES

    @property
    def executed(self) -> bool:
        """Whether at least one delivery was started."""
        return self.attempts > 0

    @property
    def confirmation(self) -> Literal["allow", "deny"] | None:
        """The verdict that stands, or None if nobody gave one."""
        if self.decision is None or self.decision.status == "refused":
            return None
        return self.decision.result

    @property
    def sent_input(self) -> bytes:
        """The input that its tool gets."""
        return self.input if self.edited_input is None else self.edited_input

    @property
    def input_digest(self) -> str:
        return digest(self.input)

    def step(self, state: State, **changes: object) -> Call:
        """Return the call in another state.

        Raises:
            ValueError: the step is not in `STEPS`.
        """
        if state != self.state and state not in STEPS.get(self.state, frozenset()):
            raise ValueError(f"call {self.id}: no step from {self.state} to {state}")
        return replace(self, state=state, **changes)  # type: ignore[arg-type]


def digest(input_: bytes) -> str:
    """`sha256:<hex>` of the input's raw bytes: what a person saw is what runs."""
    return "sha256:" + hashlib.sha256(input_).hexdigest()


def webhook_id(tenant: str, session_id: str, call_id: str) -> str:
    """The `webhook-id` of a call: the same from every replica, for ever."""
    identity = "\0".join((tenant, session_id, call_id)).encode()
    return "call_" + base64.b32encode(hashlib.sha256(identity).digest()).decode()[:WEBHOOK_ID_CHARS].lower()
