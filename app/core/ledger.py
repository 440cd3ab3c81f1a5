"""The calls of a session as held in memory, and the effects of the notice at hand.

Open calls are all here; of those that are over only the last ones are remembered, the store keeps the rest.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, TypeVar

from app.core.calls import STATES, Call, State
from app.core.posting import Post
from app.core.protocol import Effect, SaveCall, Withdraw

REMEMBERED_MAX: Final = 1_000
"""How many ended calls, stray answers, stray verdicts and MCP calls are remembered, each."""

_V = TypeVar("_V")


class Remembered(OrderedDict[str, _V]):
    """The last `REMEMBERED_MAX` values by id; older ones are forgotten."""

    def keep(self, id_: str, value: _V) -> None:
        self[id_] = value
        self.move_to_end(id_)
        if len(self) > REMEMBERED_MAX:
            self.popitem(last=False)


class Ledger:
    """Calls by id: `calls` are open, `over` have ended, `foreign` are in a state that this version lacks.

    `in_state` are the ids of open calls by state, in the order in which they came into it. `running` are
    deliveries under way here, `posts` the sends in the making. Foreign calls are never touched.
    """

    def __init__(self, open_: Iterable[Call], over: Iterable[Call]) -> None:
        self.calls: dict[str, Call] = {}
        self.in_state: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self.foreign: dict[str, Call] = {}
        self.over: Remembered[Call] = Remembered()
        for call in open_:
            if call.state in STATES:
                self.hold(call)
            else:
                self.foreign[call.id] = call
        self.running: set[str] = set()
        self.posts: dict[str, Post] = {}
        for call in over:
            self.remember(call)
        self.effects: list[Effect] = []
        self._number = 0

    def find(self, call_id: str) -> Call | None:
        """The call, open or over, or None."""
        return self.calls.get(call_id) or self.over.get(call_id) or self.foreign.get(call_id)

    def emit(self, *effects: Effect) -> None:
        self.effects.extend(effects)

    def next_number(self) -> int:
        """A number that no send or look of this run has had."""
        self._number += 1
        return self._number

    def take(self) -> list[Effect]:
        """The effects since this was last asked."""
        effects, self.effects = self.effects, []
        return effects

    def save(self, call: Call, state: State) -> Call:
        """Put the call in an open state."""
        call = call.step(state)
        self.hold(call)
        self.emit(SaveCall(call))
        return call

    def finish(self, call: Call, state: State) -> None:
        """Put the call in an end state; a send that waits is forgotten."""
        self._let_go(call.id)
        self.withdraw(call.id)
        self.amend(call.step(state))

    def amend(self, call: Call) -> None:
        """Store one more fact about a call that is over."""
        self.remember(call)
        self.emit(SaveCall(call))

    def hold(self, call: Call) -> None:
        """Keep an open call, under its state."""
        before = self.calls.get(call.id)
        if before is None or before.state != call.state:
            self._let_go(call.id)
            self.in_state[call.state][call.id] = None
        self.calls[call.id] = call

    def _let_go(self, call_id: str) -> None:
        call = self.calls.pop(call_id, None)
        if call is not None:
            del self.in_state[call.state][call_id]

    def remember(self, call: Call) -> None:
        """Keep a call that is over; what it said and came to is only needed if it can be revived."""
        is_needed = call.state == "interrupted" or call.id in self.running
        self.over.keep(
            call.id, call if is_needed else replace(call, input=b"", edited_input=None, result=None)
        )

    def withdraw(self, call_id: str) -> None:
        """Forget a send that is not needed any more."""
        if self.posts.pop(call_id, None) is not None:
            self.emit(Withdraw(call_id))
