"""Cards: a call with all that a person needs to decide on it, or what was decided."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, cast

from sqlalchemy.ext.asyncio import AsyncConnection

from app.api.access import ADMIN
from app.api.deliveries import shown_url
from app.console import wording
from app.console.text import Input, editable, read_input
from app.core.calls import END_STATES, digest
from app.core.edits import is_editable
from app.core.events import Kind
from app.core.rules import VIA
from app.core.tools import CATCH_ALL, is_admitted, registration_of
from app.store import attachments, keys, messages, precedents, tools
from app.store.attachments import Settings
from app.store.calls import CallView, Decision
from app.store.messages import MessageView
from app.store.precedents import Precedent

MESSAGES_SHOWN: Final = 3
MESSAGE_CHARS_MAX: Final = 600

_OTHERS: Final = {
    "stream": "another client or the vendor's console",
    "policy": "the platform's policy",
    "expiry": "its time limit",
}


@dataclass(frozen=True, slots=True)
class Card:
    """What a card shows.

    `last` are the last decisions on calls of its tool, newest first, `same` the last one on its very input,
    with who decided in words. `version` changes with everything but these and the session's messages.
    `edited` is the input that a person put in the place of the agent's, if one did.
    """

    call: CallView
    input: Input
    edited: Input | None
    digest: str
    verb: str
    object: str
    reason: str
    destination: str
    needs: str
    state: str
    decided_by: str | None
    messages: Sequence[MessageView] = field(default=())
    last: Sequence[Precedent] = field(default=())
    same: Precedent | None = None

    @property
    def key(self) -> str:
        return key_of(self.call.session_id, self.call.id)

    @property
    def decision(self) -> Decision | None:
        """The decision that stands."""
        decision = self.call.decision
        return None if decision is None or decision.status == "refused" else decision

    @property
    def refused(self) -> Decision | None:
        """The last decision, where upstream refused it."""
        decision = self.call.decision
        return decision if decision is not None and decision.status == "refused" else None

    @property
    def is_waiting(self) -> bool:
        return self.call.state == "held" and self.decision is None

    @property
    def tally(self) -> str:
        return wording.tally([one.result for one in self.last])

    @property
    def deny_reason(self) -> str:
        return wording.deny_reason([one.deny_message for one in self.last])

    @property
    def digest_to_allow(self) -> str:
        """The digest of the input that an allow lets run."""
        return self.digest if self.edited is None else digest(self.edited.raw.encode())

    @property
    def can_be_edited(self) -> bool:
        gate = self.call.gate
        kind = cast("Kind", self.call.kind)
        return gate is not None and is_editable(kind, gate.by, gate.reason)

    @property
    def can_be_remembered(self) -> bool:
        """Whether an allow can make a rule for calls like it."""
        gate = self.call.gate
        is_known = self.input.is_whole and self.input.fields is not None
        return (
            is_known
            and self.edited is None
            and gate is not None
            and gate.reason != "outcome_unknown"
            and gate.rules.approvals_required == 1
        )

    @property
    def to_edit(self) -> str | None:
        """What a person begins to edit with; None if it is too long for a page."""
        begun = self.edited or self.input
        if self.refused is not None and self.refused.edited_input is not None:
            begun = read_input(self.refused.edited_input)
        return editable(begun.raw) if begun.is_whole else None

    @property
    def changed(self) -> frozenset[str]:
        """The members of the edited input that the agent's does not have so."""
        if self.edited is None:
            return frozenset()
        before = {(field.name, field.value, field.is_text) for field in self.input.fields or ()}
        after = self.edited.fields or ()
        return frozenset(
            field.name for field in after if (field.name, field.value, field.is_text) not in before
        )

    @property
    def dropped(self) -> tuple[str, ...]:
        """The members of the agent's input that the edited one has no more."""
        if self.edited is None or self.edited.fields is None:
            return ()
        kept = {field.name for field in self.edited.fields}
        return tuple(field.name for field in self.input.fields or () if field.name not in kept)

    @property
    def is_over(self) -> bool:
        """Whether nothing more becomes of it, or nothing that we would see."""
        return self.call.state in END_STATES or (self.call.state == "unowned" and self.decision is not None)

    @property
    def version(self) -> str:
        decision = self.call.decision
        parts = (self.call.state, self.call.updated_at, self.call.attempts, self.call.gate, decision)
        return hashlib.sha256(repr(parts).encode("utf-8", "replace")).hexdigest()[:12]


def key_of(session_id: str, call_id: str) -> str:
    """Return what names a card on a page."""
    return "card-" + hashlib.sha256(f"{session_id}/{call_id}".encode()).hexdigest()[:16]


async def make(connection: AsyncConnection, tenant: str, found: Sequence[CallView]) -> list[Card]:
    """Return the cards of some calls of the tenant."""
    urls = await tools.urls(connection, tenant, {call.tool for call in found} | {CATCH_ALL})
    sessions = {call.session_id for call in found}
    settings = await attachments.settings_of_all(connection, tenant, sessions)
    deciders = {call.decision.by for call in found if call.decision is not None}
    deciders |= {approval.by for call in found if call.gate is not None for approval in call.gate.approvals}
    names = await keys.names(connection, tenant, deciders)
    said = {}
    for session_id in sessions:
        after = await messages.place_of_newest(connection, tenant, session_id, MESSAGES_SHOWN)
        said[session_id] = (
            await messages.page(connection, tenant, session_id, after=after, limit=MESSAGES_SHOWN)
        ).items
    shown = [
        _card(
            call,
            _url(call, urls, *settings.get(call.session_id, (Settings(), None))),
            names,
            said[call.session_id],
        )
        for call in found
    ]
    return await _with_precedents(connection, tenant, shown)


async def _with_precedents(connection: AsyncConnection, tenant: str, shown: Sequence[Card]) -> list[Card]:
    waiting = [card for card in shown if card.is_waiting]
    last = await precedents.of_tools(connection, tenant, {card.call.tool for card in waiting})
    same = await precedents.of_inputs(connection, tenant, {(card.call.tool, card.digest) for card in waiting})
    found = [*chain.from_iterable(last.values()), *same.values()]
    names = await keys.names(connection, tenant, {one.by for one in found})

    def named(one: Precedent) -> Precedent:
        return replace(one, by=name_of(one.by, one.via, names))

    def with_them(card: Card) -> Card:
        own = same.get((card.call.tool, card.digest))
        return replace(
            card,
            last=[named(one) for one in last[card.call.tool]],
            same=None if own is None else named(own),
        )

    return [with_them(card) if card.is_waiting else card for card in shown]


def decider(decision: Decision | None, names: dict[str, str]) -> str | None:
    """Return who decided, in words."""
    return None if decision is None else name_of(decision.by, decision.via, names)


def name_of(by: str, via: str, names: Mapping[str, str]) -> str:
    """Return who did something, in words; `names` are those of keys."""
    if by == ADMIN:
        return wording.OPERATOR
    if via == VIA:
        return f"the standing rule {by}"
    return names.get(by) or _OTHERS.get(via, by)


def _url(call: CallView, urls: dict[str, str], settings: Settings, environment: str | None) -> str | None:
    """Return where the call goes if it is ours to deliver, as `core.routing` will decide."""
    name = registration_of(urls, cast("Kind", call.kind), call.tool)
    is_platforms = call.kind == "builtin" and environment == "cloud"
    if name is None or is_platforms or not is_admitted(settings.tools, name, call.tool):
        return None
    return urls.get(name)


def _card(call: CallView, url: str | None, names: dict[str, str], said: Sequence[MessageView]) -> Card:
    shown = read_input(call.input)
    verb, object_ = wording.sentence(call, shown)
    return Card(
        call=call,
        input=shown,
        edited=None if call.edited_input is None else read_input(call.edited_input),
        digest=digest(call.input.encode()),
        verb=verb,
        object=object_,
        reason=wording.reason(call.gate),
        destination=wording.destination(call, None if url is None else shown_url(url)),
        needs=wording.needs(call.gate, names),
        state=wording.state(call),
        decided_by=decider(call.decision, names),
        messages=said,
    )
